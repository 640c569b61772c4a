"""Errors of reading and saving checkpoints, each in one line."""

import contextlib
import json
import logging
import os
import pathlib
import re
import textwrap
from collections.abc import Iterator

import jax

from alibi_jax.config.paths import NO_ROOM
from alibi_jax.data.atomic import NOT_DAMAGE


class CheckpointError(ValueError):
    """A checkpoint that is missing, is damaged, does not fit or could not be saved.

    The message is one line that names the path and the remedy.
    """


@contextlib.contextmanager
def damage_named(path: pathlib.Path, part: str) -> Iterator[None]:
    """Raises every error of reading a part of the checkpoint at `path` as CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        cause = _root_cause(error)
        if isinstance(cause, MemoryError | jax.errors.JaxRuntimeError):
            # The checkpoint is whole, and the devices have too little memory for it.
            raise cause from error
        if _system_error(cause) in NOT_DAMAGE:
            raise CheckpointError(
                f"{path} could not be read ({_reason(cause)}): mend this, and give the same "
                "command again"
            ) from error
        raise CheckpointError(
            f"{path} is damaged ({part}: {_reason(cause)}): {_other_checkpoint(path)}"
        ) from error


@contextlib.contextmanager
def failed_save_named(path: pathlib.Path) -> Iterator[None]:
    """Raises every error of saving the checkpoint at `path` as CheckpointError."""
    try:
        yield
    except Exception as error:
        reason = _reason(_root_cause(error))
        remedy = "make room there" if reason in map(os.strerror, NO_ROOM) else "mend this"
        earlier = [step for step in _steps_beside(path) if step < int(path.name)]
        start = f"goes on from step {max(earlier)}" if earlier else "starts anew"
        raise CheckpointError(
            f"{path} could not be saved ({reason}): {remedy}, and give the same command again, "
            f"which {start}"
        ) from error


class FailedSaves(logging.Handler):
    """Notices at once that a save has failed in this process; a context manager.

    Where several processes save, Orbax raises the error only when the others have waited 20 minutes
    for this process. Until then, the line in its log is the only sign.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.error: BaseException | None = None

    def __enter__(self) -> "FailedSaves":
        logging.getLogger("absl").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("absl").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the error of the thread in which Orbax saves."""
        if record.filename == "async_checkpointer.py" and record.exc_info:
            self.error = record.exc_info[1]


def _other_checkpoint(path: pathlib.Path) -> str:
    """Which checkpoint to use in place of a damaged one: the one before it, if there is one."""
    step, steps = int(path.name), _steps_beside(path)
    earlier = [other for other in steps if other < step]
    later = [other for other in steps if other > step]
    if earlier:
        return f"give --step={max(earlier)} to use the checkpoint before it"
    if later:
        return f"give --step={min(later)} to use the checkpoint after it"
    return "there is no other one, so train anew in another --workdir"


def _steps_beside(path: pathlib.Path) -> list[int]:
    # Orbax's own list already lacks the checkpoints that it deletes when the running save is done.
    return [int(other.name) for other in path.parent.iterdir() if other.name.isdecimal()]


def _root_cause(error: BaseException) -> BaseException:
    """The error that led to this one, as a traceback shows it."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error if cause is None else _root_cause(cause)


def _system_error(error: BaseException) -> int | None:
    """The number of the system's error, if it is one; tensorstore gives it in its text."""
    if isinstance(error, OSError):
        return error.errno
    number = re.search(r"os_error_code='(\d+)'", str(error))
    return None if number is None else int(number[1])


def _reason(error: BaseException) -> str:
    """The text of an error in a few words."""
    text = " ".join(str(error).split())
    if (number := _system_error(error)) is not None:
        return os.strerror(number)
    if isinstance(error, json.JSONDecodeError):
        return "a file is not JSON"
    # Tensorstore's texts are long: a status, the path of a temporary file, an error of the system.
    if status := re.match(r"[A-Z_]+(?=: )", text):
        return f"{status[0]} in its files"
    return textwrap.shorten(text, 120, placeholder=" ...")
