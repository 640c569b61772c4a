"""Training metrics by step, as JSON lines and for TensorBoard. Only process 0 writes."""

import json
import math
import pathlib
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

import jax
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from alibi_jax.data.atomic import atomic_file, remove_abandoned


class MetricsWriter:
    """Writes `<workdir>/metrics.jsonl` and `<workdir>/tensorboard`; a context manager.

    A run that resumes after step `resume_step` first drops the lines of later steps and tells
    TensorBoard to ignore its points of later steps. So each step is shown once, as in a run without
    interruption. Damaged lines are dropped too. `notes` names them, and says whether the file ends
    before the step `last_logged`, for which it must have a line.
    """

    def __init__(self, workdir: pathlib.Path, resume_step: int, last_logged: int = 0):
        self.notes: list[str] = []
        # Steps up to `resume_step` that the run skipped; 0 except in process 0.
        self.skipped_steps = 0
        self._lines: _AppendedFile | None = None
        self._board: _TensorBoardFile | None = None
        if jax.process_index() != 0:
            return
        path = workdir / "metrics.jsonl"
        kept_lines = [line for line in self._read(path) if line["step"] <= resume_step]
        for line in kept_lines:
            self.skipped_steps = line.get("skipped_steps", self.skipped_steps)
        last_kept = kept_lines[-1]["step"] if kept_lines else 0
        if last_kept < last_logged:
            self.notes.append(
                f"{path} ends at step {last_kept}, and the run resumes after step {resume_step}: "
                f"the metrics of the steps up to {last_logged} are lost"
            )
        remove_abandoned(workdir)
        with atomic_file(path) as new_path:
            new_path.write_text("".join(map(_as_line, kept_lines)))
        self._lines = _AppendedFile(path)
        self._board = _TensorBoardFile(workdir / "tensorboard", resume_step)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        for file in (self._lines, self._board):
            if file is not None:
                file.close()

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Writes one JSON line, and one TensorBoard point for each value.

        JSON has no number for a value that is not finite: it is null in the line, and has no point.
        Raises OSError, with the name of the file, where the disk is full.
        """
        if self._lines is None or self._board is None:
            return
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        line = {"step": step} | {name: finite.get(name) for name in values}
        self._lines.append(_as_line(line).encode())
        self._board.write(step, finite)

    def _read(self, path: pathlib.Path) -> list[dict[str, Any]]:
        """The undamaged lines of the file; notes the damaged lines."""
        if not path.exists():
            return []
        # A kill may have cut the last line short. Its step is after the last checkpoint.
        complete_lines = path.read_bytes().split(b"\n")[:-1]
        undamaged = []
        for number, line in enumerate(complete_lines, start=1):
            try:
                undamaged.append(_parse(line))
            except ValueError:
                self.notes.append(f"{path}, line {number} is damaged and left out: {line[:40]!r}")
        return undamaged


class _TensorBoardFile:
    """A new file of TensorBoard events in `folder`.

    TensorBoardX's SummaryWriter has a thread that writes. A full disk ends that thread, and the
    training loop would then wait for it for ever.
    """

    def __init__(self, folder: pathlib.Path, resume_step: int):
        """Opens the file, and tells TensorBoard to ignore earlier files after `resume_step`."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._file = _AppendedFile(folder / name)
        self._append(file_version="brain.Event:2")
        start = SessionLog(status=SessionLog.START)
        self._append(step=resume_step + 1, session_log=start)

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Writes one point for each value."""
        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._append(step=step, summary=Summary(value=points))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _append(self, **fields: Any) -> None:
        """Appends an event as a TFRecord: size, checksum of the size, event, checksum of it."""
        event = Event(wall_time=time.time(), **fields).SerializeToString()
        size = struct.pack("<Q", len(event))
        record = b"".join(part + struct.pack("<I", masked_crc32c(part)) for part in (size, event))
        self._file.append(record)


class _AppendedFile:
    """A file to append to, without a buffer: an error is raised by the write that it concerns."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._file = path.open("ab", buffering=0)

    def append(self, data: bytes) -> None:
        """Writes all of `data`. Raises OSError, with the path, where that fails."""
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _parse(line: bytes) -> dict[str, Any]:
    """The values of a line. Raises ValueError unless the line is a JSON object with a step."""
    # Earlier versions wrote NaN, which is no JSON.
    try:
        values = json.loads(line, parse_constant=lambda _: None)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(values, dict) or type(values.get("step")) is not int:
        raise ValueError("no step")
    if type(values.get("skipped_steps", 0)) is not int:
        raise ValueError("no number of skipped steps")
    # A number such as 1e999 is read as infinity.
    _as_line(values)
    return values


def _as_line(values: dict[str, Any]) -> str:
    return json.dumps(values, allow_nan=False) + "\n"
