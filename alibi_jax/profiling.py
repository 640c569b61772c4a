"""A trace of a few steps, for TensorBoard's profiler or Perfetto."""

import pathlib
import re

import jax

from alibi_jax.config import ConfigError


class Profiler:
    """Traces steps FIRST to LAST, given as "FIRST:LAST"; a context manager. Empty: none.

    The trace of process 0 is written to `<workdir>/profile`.
    """

    def __init__(self, steps: str, workdir: pathlib.Path, start: int, end: int):
        """For a run from step `start` to `end`. Raises ConfigError for steps it has not."""
        self.first, self.last = _window(steps, start, end) if steps else (0, 0)
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


def _window(steps: str, start: int, end: int) -> tuple[int, int]:
    """(FIRST, LAST) of "FIRST:LAST". Raises ConfigError."""
    given = re.fullmatch(r"(\d+):(\d+)", steps)
    if given is None:
        raise ConfigError(f"--profile={steps}: give FIRST:LAST, as 10:15")
    first, last = map(int, given.groups())
    if not start < first <= last <= end:
        raise ConfigError(
            f"--profile={steps}: this run goes from step {start + 1} to {end}; give two of those, "
            "the first not after the last"
        )
    return first, last
