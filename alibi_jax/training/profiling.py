"""A trace of a few steps, for TensorBoard's profiler or Perfetto."""

import pathlib
import re

import jax

from alibi_jax.config import ConfigError
from alibi_jax.distributed.processes import say


def parse_steps(text: str) -> tuple[int, int] | None:
    """(FIRST, LAST) of "FIRST:LAST", None of nothing. Raises ConfigError."""
    if not text:
        return None
    given = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    first, last = map(int, given.groups()) if given else (0, 0)
    if not 1 <= first <= last:
        raise ConfigError(
            f"--profile={text}: give the first and the last step to trace, counted from 1, as 10:15"
        )
    return first, last


class Profiler:
    """Traces steps, the first and the last given, into `<workdir>/profile`; a context manager.

    Of a run that goes on from step `start`, those that are still to come. Process 0 alone traces.
    Raises ConfigError for steps after `end`, the last.
    """

    def __init__(self, steps: tuple[int, int] | None, workdir: pathlib.Path, start: int, end: int):
        first, self.last = steps or (0, 0)
        if self.last > end:
            raise ConfigError(f"--profile={first}:{self.last}: the run ends with step {end}")
        if steps and self.last <= start:
            say(f"--profile={first}:{self.last}: these steps are done, and not traced")
            self.last = 0
        self.first = max(first, start + 1)
        self._folder = workdir / "profile"
        self._tracing = False

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *_: object) -> None:
        if self._tracing:
            jax.profiler.stop_trace()

    def waits(self, step: int) -> bool:
        """Whether the step must be done before the next one begins."""
        return bool(self.last) and step in (self.first - 1, self.last)

    def done(self, step: int) -> None:
        """Begins or ends the trace after a step that was waited for, or before the first."""
        if not self.waits(step) or jax.process_index() != 0:
            return
        if step == self.last:
            jax.profiler.stop_trace()
        else:
            jax.profiler.start_trace(self._folder)
        self._tracing = step != self.last
