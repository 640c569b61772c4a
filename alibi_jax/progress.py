"""Progress of long work on standard error: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any

from tqdm import tqdm

# Seconds between two plain lines while nothing calls `note`.
_LINE_EVERY = 30.0


def on_terminal() -> bool:
    """Whether standard error is a terminal, on which a line can be redrawn."""
    return sys.stderr is not None and sys.stderr.isatty()


class Progress:
    """Counts finished units of work; a context manager.

    On a terminal it is a bar that redraws itself. Elsewhere (a pod's log, SLURM, CI) it prints
    whole lines: one for each note, one every half minute without a note, and one at the end.
    It prints nothing if `shown` is false, as in all processes but one.
    """

    def __init__(
        self,
        total: int | None,
        description: str,
        *,
        unit: str,
        initial: int = 0,
        unit_scale: bool = False,
        leave: bool = True,
        shown: bool = True,
    ):
        self._prints_lines = shown and sys.stderr is not None and not on_terminal()
        self._total, self._description, self._unit = total, description, unit
        self._count, self._printed_count = initial, initial
        self._last_line = time.monotonic()
        self._bar = tqdm(
            total=total,
            desc=description,
            initial=initial,
            unit=unit,
            unit_scale=unit_scale,
            leave=leave,
            dynamic_ncols=True,
            disable=not (shown and on_terminal()),
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.close()
        if self._prints_lines and self._count > self._printed_count:
            self._print_line("")

    def update(self, count: int = 1) -> None:
        """Counts `count` more finished units."""
        self._count += count
        self._bar.update(count)
        if self._prints_lines and time.monotonic() - self._last_line > _LINE_EVERY:
            self._print_line("")

    def note(self, text: str) -> None:
        """Shows `text` beside the count: on the bar, or in a line of its own."""
        self._bar.set_postfix_str(text)
        if self._prints_lines:
            self._print_line(f", {text}")

    def _print_line(self, text: str) -> None:
        of_total = "" if self._total is None else f" of {self._total:,}"
        line = f"{self._description}: {self._unit} {self._count:,}{of_total}{text}"
        print(line, file=sys.stderr, flush=True)
        self._printed_count = self._count
        self._last_line = time.monotonic()
