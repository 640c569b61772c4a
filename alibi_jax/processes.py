"""Several processes that are one run: how they join, wait for each other, and stop together."""

import signal
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

Prepared = TypeVar("Prepared")

# Preparing may take long; a process that has died is noticed by its heartbeat long before.
_PATIENCE_MS = 24 * 60 * 60 * 1000


def join(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Joins the other processes of this run, if there are any; before any device is used.

    Without arguments, JAX looks for the launcher that started them (Cloud TPU, GKE, SLURM, Open
    MPI); where it finds none, this process is alone.
    """
    given = (coordinator, num_processes, process_id)
    if None not in given:
        jax.distributed.initialize(*given)
    elif given != (None, None, None):
        raise ValueError("--coordinator, --num_processes and --process_id go together")
    else:
        try:
            jax.distributed.initialize()
        except ValueError as error:
            # What JAX says where no launcher names a coordinator; anything else is a launch
            # gone wrong, which must not go on as many runs of one process each.
            if "coordinator_address should be defined" not in str(error):
                raise


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
