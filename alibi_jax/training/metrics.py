"""Training metrics by step, as JSON lines and for TensorBoard. Only process 0 writes."""

import json
import os
import pathlib
from typing import Any

import jax


class MetricsWriter:
    """Writes `<workdir>/metrics.jsonl` and `<workdir>/tensorboard`; a context manager.

    A run that resumes after step `resume_step` first drops the lines of later steps and tells
    TensorBoard to ignore its points of later steps. So each step is shown once, as in a run without
    interruption.
    """

    def __init__(self, workdir: pathlib.Path, resume_step: int):
        self._file: Any = None
        self._board: Any = None
        if jax.process_index() != 0:
            return
        from tensorboardX import SummaryWriter

        path = workdir / "metrics.jsonl"
        kept_lines = [line for line in _lines(path) if json.loads(line)["step"] <= resume_step]
        new_path = path.with_suffix(".jsonl.new")
        new_path.write_text("".join(f"{line}\n" for line in kept_lines))
        os.replace(new_path, path)
        self._file = path.open("a")
        self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=resume_step + 1)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._board.close()

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes one JSON line, and one TensorBoard point for each value."""
        if self._file is None:
            return
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)


def _lines(path: pathlib.Path) -> list[str]:
    """The complete lines of a file, without a last line that a kill cut short."""
    if not path.exists():
        return []
    text = path.read_text()
    return text[: text.rfind("\n") + 1].splitlines()
