"""One run in several processes: how they join, wait for each other, and stop together."""

import os

import jax
import numpy as np
from jax._src import clusters
from jax.experimental import multihost_utils

from alibi_jax.distributed.rendezvous import LaunchError, rendezvous
from alibi_jax.distributed.stopping import StopRequest
from alibi_jax.distributed.watchdog import announce_normal_exit, exit_with_error, watch

__all__ = ["StopRequest", "announce_normal_exit", "any_process", "exit_with_error", "join", "say"]


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
    port = coordinator.rpartition(":")[2]
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise LaunchError(
            f"--coordinator={coordinator} must be the host:port of process 0, with a port from 1 "
            "to 65535"
        )
    connections = rendezvous(coordinator, num_processes, process_id, timeout)
    watch(process_id, num_processes, connections)
    # JAX's own way to stop takes SIGTERM for the whole program, and answers it only after a step.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator, num_processes, process_id, initialization_timeout=timeout
    )


def say(text: str) -> None:
    """Prints `text` in process 0 only."""
    if jax.process_index() == 0:
        print(text, flush=True)


def any_process(flag: bool) -> bool:
    """Whether `flag` is true in at least one process. All processes must call it."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())
