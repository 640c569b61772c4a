"""How fast a run goes, and on what its time and memory went."""

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax

from alibi_jax.config import Config
from alibi_jax.distributed import memory
from alibi_jax.flops import peak_flops, step_flops

# What differs from one run to another that is otherwise the same.
MEASURED = (
    "tokens_per_second",
    "step_seconds",
    "slowest_step_seconds",
    "mfu",
    "compile_seconds",
    "peak_memory_bytes",
)


class ThroughputMeter:
    """Times the steps of a run between two logged ones; a context manager.

    A step's time runs from when the one before it was done to when it is, so steps that wait for
    data, or for anything else, are as long as they are felt.
    """

    def __init__(self, config: Config, vocab_size: int, mesh: jax.sharding.Mesh):
        self._tokens = config.train.batch_size * config.train.length
        peak = peak_flops(mesh.devices.flat[0].device_kind)
        flops = step_flops(config, vocab_size).model
        # Seconds that a step would take at the peak; None where that is not known.
        self._least = None if peak is None else flops / peak / mesh.size
        self._compiling = 0.0
        self.restart()

    def __enter__(self) -> "ThroughputMeter":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def restart(self) -> None:
        """Forgets the steps so far: what comes next is not theirs."""
        self._steps: list[float] = []
        self._begun = self._last = time.perf_counter()

    def step(self) -> None:
        """A step is done."""
        now = time.perf_counter()
        self._steps.append(now - self._last)
        self._last = now

    def pause(self) -> None:
        """What was done since the last step, as a save, is not the next one's, but takes time."""
        self._last = time.perf_counter()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What is done within takes no time."""
        begun = time.perf_counter()
        yield
        took = time.perf_counter() - begun
        self._begun += took
        self._last += took

    def measured(self) -> dict[str, float]:
        """Of the steps since the last call, or since the start.

        `tokens_per_second` and `mfu` (model FLOPs by the devices' peak in bfloat16, where it is
        known) are of all the time since; `step_seconds` is the median; `compile_seconds` went to
        the compiler; `peak_memory_bytes` is the most so far, of one device.
        """
        elapsed = time.perf_counter() - self._begun
        values = {
            "tokens_per_second": self._tokens * len(self._steps) / elapsed,
            "step_seconds": statistics.median(self._steps),
            "slowest_step_seconds": max(self._steps),
            "compile_seconds": self._compiling,
            "peak_memory_bytes": memory.peak(),
        }
        if self._least is not None:
            values["mfu"] = self._least * len(self._steps) / elapsed
        self._compiling = 0.0
        return values

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self._compiling += duration_secs
