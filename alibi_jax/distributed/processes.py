"""Several processes that are one run: how they join, wait for each other, and stop together."""

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

Prepared = TypeVar("Prepared")

# Preparing may take long; a process that has died is noticed by its heartbeat long before.
_PATIENCE_MS = 24 * 60 * 60 * 1000
# This process's, once it has joined others.
_lifelines: list[Watchdog] = []


def join(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: int = 300,
) -> None:
    """Joins the other processes of this run, if there are any; before any device is used.

    Without the first three, JAX looks for the launcher that started them (Cloud TPU, GKE, SLURM,
    Open MPI); where it finds none, this process is alone. Raises LaunchError where after `timeout`
    seconds not all of them are there.
    """
    given = (coordinator, num_processes, process_id)
    if given == (None, None, None):
        # What JAX would find, too; it has no public name.
        coordinator, num_processes, process_id, _ = (
            clusters.ClusterEnv.auto_detect_unset_distributed_params(
                os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None, timeout
            )
        )
        if coordinator is None:
            return
    if coordinator is None or num_processes is None or process_id is None:
        raise LaunchError("--coordinator, --num_processes and --process_id go together")
    if not 0 <= process_id < num_processes:
        raise LaunchError(
            f"--process_id={process_id} must be from 0 to {num_processes - 1}, one less than "
            f"--num_processes={num_processes}"
        )
    if not coordinator.rpartition(":")[2].isdigit():
        raise LaunchError(f"--coordinator={coordinator} must be host:port of process 0")
    peers = rendezvous(coordinator, num_processes, process_id, timeout)
    _lifelines.append(Watchdog(process_id, num_processes, peers))
    jax.distributed.initialize(
        coordinator, num_processes, process_id, initialization_timeout=timeout
    )


def leave() -> None:
    """Tells the others that this process ends as it should."""
    if _lifelines:
        _lifelines[0].leave()


def fail(message: str, code: int, *, through_others: bool = False) -> NoReturn:
    """Ends this process with one line, and the others soon after.

    `through_others`: for an error that may come of another's end, which is said then.
    """
    if _lifelines:
        _lifelines[0].fail(message, code, through_others=through_others)
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def say(text: str) -> None:
    """Prints, once for all processes."""
    if jax.process_index() == 0:
        print(text, flush=True)


def on_any(flag: bool) -> bool:
    """Whether it is true in any process: what one of them can't do, none of them begins."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def first_then_all(name: str, prepare: Callable[[], Prepared]) -> Prepared:
    """Process 0 prepares; the others then find it done or, where disks are not shared, do it.

    What process 0 cannot do is raised by all of them, as ValueError with its message.
    """
    if jax.process_count() == 1:
        return prepare()
    # A collective would time out meanwhile, and could not carry a message; the coordination
    # service has no public interface.
    service: Any = distributed.global_state.client
    if jax.process_index() == 0:
        try:
            prepared = prepare()
        except Exception as error:
            service.key_value_set(name, f"failed {error}")
            raise
        service.key_value_set(name, "done")
        return prepared
    outcome = service.blocking_key_value_get(name, _PATIENCE_MS)
    if outcome != "done":
        raise ValueError(outcome.removeprefix("failed "))
    return prepare()


class StopRequest:
    """Whether someone asked the run to end, agreed on by all processes; a context manager.

    A single process listens for SIGTERM and Ctrl-C itself; a second signal is not held back.
    Several ask the coordination service, which hears SIGTERM and names one step to all.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if jax.process_count() == 1:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _ask(self, number: int, frame: Any) -> None:
        self._asked = True
        self.__exit__()

    def at(self, step: int) -> bool:
        """Whether to stop after this step."""
        if jax.process_count() > 1:
            return bool(multihost_utils.reached_preemption_sync_point(step))
        return self._asked
