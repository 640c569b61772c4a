"""A profiler trace of a few steps, for TensorBoard's profiler or Perfetto."""

import pathlib
import re

import jax

from alibi_jax.config import ConfigError
from alibi_jax.distributed.processes import say


def parse_steps(text: str) -> tuple[int, int] | None:
    """Parses "FIRST:LAST" to (FIRST, LAST) and "" to None. Raises ConfigError otherwise."""
    if not text:
        return None
    match = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= last:
        raise ConfigError(
            f"--profile={text}: give the first and the last step to trace, counted from 1, such as "
            "10:15"
        )
    return first, last


class Profiler:
    """Traces the steps from the first to the last of `steps`; a context manager.

    Only process 0 traces, into `<workdir>/profile`. A run that resumes after step `start` traces
    only the steps after `start`. Raises ConfigError for steps after `end`, the last step of the
    run.
    """

    def __init__(self, steps: tuple[int, int] | None, workdir: pathlib.Path, start: int, end: int):
        first, self.last = steps or (0, 0)
        if self.last > end:
            raise ConfigError(f"--profile={first}:{self.last}: the run ends at step {end}")
        if steps and self.last <= start:
            say(f"--profile={first}:{self.last}: nothing to trace, these steps are already done")
            self.last = 0
        self.first = max(first, start + 1)
        self._folder = workdir / "profile"
        self._tracing = False

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *_: object) -> None:
        if self._tracing:
            jax.profiler.stop_trace()

    def must_wait_for(self, step: int) -> bool:
        """Whether `step` must be finished before the next step begins."""
        return bool(self.last) and step in (self.first - 1, self.last)

    def after_step(self, step: int) -> None:
        """Starts or stops the trace where that is due after `step`, which must be finished."""
        if not self.must_wait_for(step) or jax.process_index() != 0:
            return
        if step == self.last:
            jax.profiler.stop_trace()
        else:
            jax.profiler.start_trace(self._folder)
        self._tracing = step != self.last
