"""Numbers by step, as JSON lines and for TensorBoard. Process 0 writes, the others do not."""

import json
import os
import pathlib
from typing import Any

import jax


class MetricsWriter:
    """Writes `<workdir>/metrics.jsonl` and `<workdir>/tensorboard`; a context manager.

    A run that goes on from step `resume_step` first drops what was written past it, so that
    the files are those of a run that was never stopped.
    """

    def __init__(self, workdir: pathlib.Path, resume_step: int):
        self._file: Any = None
        self._board: Any = None
        if jax.process_index() != 0:
            return
        from tensorboardX import SummaryWriter

        path = workdir / "metrics.jsonl"
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= resume_step]
        fresh = path.with_suffix(".jsonl.new")
        fresh.write_text("".join(f"{line}\n" for line in kept))
        os.replace(fresh, path)
        self._file = path.open("a")
        self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=resume_step + 1)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._board.close()

    def write(self, step: int, values: dict[str, float]) -> None:
        """One line, and one point a value."""
        if self._file is None:
            return
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)


def _lines(path: pathlib.Path) -> list[str]:
    """The whole lines; a last one that a kill cut short is not."""
    if not path.exists():
        return []
    text = path.read_text()
    return text[: text.rfind("\n") + 1].splitlines()
