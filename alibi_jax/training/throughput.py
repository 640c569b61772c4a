"""Speed of training, compile time and peak memory."""

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax

from alibi_jax.config import Config
from alibi_jax.distributed import memory
from alibi_jax.flops import peak_flops, step_flops

# The logged metrics that differ between two runs of the same configuration.
THROUGHPUT_METRICS = (
    "tokens_per_second",
    "step_seconds",
    "slowest_step_seconds",
    "mfu",
    "compile_seconds",
    "peak_memory_bytes",
)


class ThroughputMeter:
    """Times training steps and averages over an interval between two logs; a context manager.

    The time of a step runs from the end of the previous step to its own end, so it includes
    waiting for data. It leaves out work before `begin_step`, such as a save, and work in `untimed`.
    """

    def __init__(self, config: Config, vocab_size: int, mesh: jax.sharding.Mesh):
        self._tokens = config.train.batch_size * config.train.length
        peak = peak_flops(mesh.devices.flat[0].device_kind)
        flops = step_flops(config, vocab_size).model
        # Seconds of a step at the peak FLOP/s of the devices; None if the peak is not known.
        self._seconds_at_peak = None if peak is None else flops / peak / mesh.size
        self._compile_seconds = 0.0
        self.begin_interval()

    def __enter__(self) -> "ThroughputMeter":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def begin_interval(self) -> None:
        """Starts a new interval, without the steps so far."""
        self._step_seconds: list[float] = []
        self._interval_start = self._step_start = time.perf_counter()

    def begin_step(self) -> None:
        """Starts the next step now, after other work such as a save.

        That work belongs to the interval and not to a step.
        """
        self._step_start = time.perf_counter()

    def end_step(self) -> None:
        """Ends a step; the next one starts at the same time."""
        now = time.perf_counter()
        self._step_seconds.append(now - self._step_start)
        self._step_start = now

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """Work in this context counts neither for the step nor for the interval."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._interval_start += seconds
        self._step_start += seconds

    def metrics(self) -> dict[str, float]:
        """The metrics of the interval so far, named in THROUGHPUT_METRICS.

        `tokens_per_second` and `mfu` are over the whole interval. `mfu` is the model FLOP/s divided
        by the peak FLOP/s of the devices in bfloat16; it is absent if the peak is not known.
        `step_seconds` is the median. `compile_seconds` is the compile time since the last call.
        `peak_memory_bytes` is the peak of one device since the start of the process.
        """
        elapsed = time.perf_counter() - self._interval_start
        steps = self._step_seconds
        values = {
            "tokens_per_second": self._tokens * len(steps) / elapsed,
            "step_seconds": statistics.median(steps),
            "slowest_step_seconds": max(steps),
            "compile_seconds": self._compile_seconds,
            "peak_memory_bytes": memory.peak_bytes(),
        }
        if self._seconds_at_peak is not None:
            values["mfu"] = self._seconds_at_peak * len(steps) / elapsed
        self._compile_seconds = 0.0
        return values

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self._compile_seconds += duration_secs
