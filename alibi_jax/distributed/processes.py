"""One run in several processes: how they join, wait for each other, and stop together."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax._src import clusters, distributed
from jax.experimental import multihost_utils

from alibi_jax.distributed.rendezvous import LaunchError, rendezvous
from alibi_jax.distributed.watchdog import Watchdog

Result = TypeVar("Result")

# Preparing data may take long. Heartbeats detect a dead process long before this timeout.
_PREPARE_TIMEOUT_MS = 24 * 60 * 60 * 1000
# The watchdog of this process, once it has joined other processes.
_watchdogs: list[Watchdog] = []


def join(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: int = 300,
) -> None:
    """Joins the other processes of this run, if there are any. Call it before using a device.

    Without the first three arguments, JAX detects the launcher (Cloud TPU, GKE, SLURM, Open MPI);
    if there is none, this process is the whole run. Raises LaunchError if not all processes have
    started after `timeout` seconds.
    """
    given = (coordinator, num_processes, process_id)
    if given == (None, None, None):
        # The detection that `jax.distributed.initialize` uses; it has no public name.
        coordinator, num_processes, process_id, _ = (
            clusters.ClusterEnv.auto_detect_unset_distributed_params(
                os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None, timeout
            )
        )
        if coordinator is None:
            return
    if coordinator is None or num_processes is None or process_id is None:
        raise LaunchError("give --coordinator, --num_processes and --process_id together")
    if not 0 <= process_id < num_processes:
        raise LaunchError(
            f"--process_id={process_id} must be between 0 and {num_processes - 1}, one less than "
            f"--num_processes={num_processes}"
        )
    if not coordinator.rpartition(":")[2].isdigit():
        raise LaunchError(f"--coordinator={coordinator} must be the host:port of process 0")
    connections = rendezvous(coordinator, num_processes, process_id, timeout)
    _watchdogs.append(Watchdog(process_id, num_processes, connections))
    jax.distributed.initialize(
        coordinator, num_processes, process_id, initialization_timeout=timeout
    )


def announce_normal_exit() -> None:
    """Tells the other processes that this process is about to exit without an error."""
    if _watchdogs:
        _watchdogs[0].announce_normal_exit()


def exit_with_error(message: str, code: int, *, maybe_peer_failure: bool = False) -> NoReturn:
    """Prints `message`, exits with `code`, and makes the other processes exit soon after.

    With `maybe_peer_failure`, the error may be only the consequence of another process's exit.
    If another process has exited, the message then says so instead.
    """
    if _watchdogs:
        _watchdogs[0].exit_with_error(message, code, maybe_peer_failure=maybe_peer_failure)
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def say(text: str) -> None:
    """Prints `text` in process 0 only."""
    if jax.process_index() == 0:
        print(text, flush=True)


def any_process(flag: bool) -> bool:
    """Whether `flag` is true in at least one process. All processes must call it."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def process_zero_first(name: str, prepare: Callable[[], Result]) -> Result:
    """Calls `prepare` in process 0, then in all other processes, and returns its result.

    On a shared disk, the other processes find the files that process 0 has prepared. An error in
    process 0 is raised in the other processes too, as a ValueError with the same message. `name`
    is a unique key for this call.
    """
    if jax.process_count() == 1:
        return prepare()
    # A collective could time out, and it could not carry a message. The coordination service waits
    # long enough and carries messages, but it has no public interface.
    service: Any = distributed.global_state.client
    if jax.process_index() == 0:
        try:
            result = prepare()
        except Exception as error:
            service.key_value_set(name, f"failed {error}")
            raise
        service.key_value_set(name, "done")
        return result
    status = service.blocking_key_value_get(name, _PREPARE_TIMEOUT_MS)
    if status != "done":
        raise ValueError(status.removeprefix("failed "))
    return prepare()


class StopRequest:
    """A request to stop the run (SIGTERM, or Ctrl-C in a single process); a context manager.

    A single process handles the first signal itself; a second one has its usual effect. Several
    processes query JAX's coordination service, which receives SIGTERM and tells all processes the
    same step at which to stop.
    """

    def __init__(self) -> None:
        self._requested = False
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if jax.process_count() == 1:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers.clear()

    def _on_signal(self, number: int, frame: Any) -> None:
        self._requested = True
        self.__exit__()

    def at(self, step: int) -> bool:
        """Whether to stop after `step`. Processes must call it for the same steps."""
        if jax.process_count() > 1:
            return bool(multihost_utils.reached_preemption_sync_point(step))
        return self._requested
