"""The folder that a run writes to: one run at a time, and the same folder for all processes."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from typing import IO

import jax

from alibi_jax.config.paths import NO_ROOM
from alibi_jax.distributed.agreement import (
    decide,
    from_process_zero,
    num_processes,
    process_list,
    process_zero_first,
)

_LOCK = "lock"
_MARKER = ".shared-"
# Seconds within which a file of process 0 must appear in the other processes. A network file system
# may show an earlier state of a folder for some seconds.
_PATIENCE = 10.0
# The errors of file systems that have no locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


class FolderError(ValueError):
    """A run can't write to a folder; the message names the flag, the folder and the remedy."""


@contextlib.contextmanager
def locked_folder(flag: str, folder: pathlib.Path) -> Iterator[None]:
    """Holds the lock of a folder, which process 0 creates if there is none; a context manager.

    The lock is an advisory lock (flock) on the file `<folder>/lock`, held by process 0. The system
    releases it when that process ends, however it ends, so a file that a kill leaves does not
    block the next run. The file names the process for the message of a second run. On leaving, the
    file is removed, and so is a folder that was created here and is still empty. `flag` is the
    flag that names the folder. All processes must call it.

    Raises:
        FolderError: in process 0, if another run holds the lock or if the folder can't be written
            to. The other processes raise a ValueError with the same message.
    """
    is_first = jax.process_index() == 0
    created = is_first and not folder.exists()
    lock = process_zero_first("lock", lambda: _acquire(flag, folder) if is_first else None)
    try:
        yield
    finally:
        if lock is not None:
            # Removed while the lock is still held: a run that opened the file before notices that
            # it holds the lock of a removed file.
            with contextlib.suppress(OSError):
                (folder / _LOCK).unlink()
            lock.close()
            if created:
                with contextlib.suppress(OSError):
                    folder.rmdir()


def check_shared(flag: str, folder: pathlib.Path) -> None:
    """Raises LaunchError in every process unless all processes see the same folder.

    Process 0 writes a file with a new name, which the others must see. All processes must call it
    while process 0 holds the lock of the folder.
    """
    is_first = jax.process_index() == 0
    if is_first:
        for left_by_a_kill in folder.glob(f"{_MARKER}*"):
            left_by_a_kill.unlink(missing_ok=True)
    if num_processes() == 1:
        return
    marker = f"{_MARKER}{secrets.token_hex(8)}"
    if is_first:
        (folder / marker).touch()
    try:
        marker = from_process_zero(marker)
        report = {"folder": str(folder.absolute()), "sees": is_first or _appears(folder, marker)}
        decide(report, lambda reports: _blind_processes(flag, reports))
    finally:
        if is_first:
            (folder / marker).unlink(missing_ok=True)


def _acquire(flag: str, folder: pathlib.Path) -> IO[str]:
    """The open file that holds the lock of a folder."""
    path = folder / _LOCK
    try:
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            # Programs that this process starts do not inherit the file, and so not the lock.
            file = path.open("a+")
            try:
                _flock(file, folder)
            except BlockingIOError:
                file.close()
                raise FolderError(
                    f"--{flag}={folder} is in use by {_holder(path)}: wait until it ends, stop it, "
                    f"or give another --{flag}"
                ) from None
            if _is_at(path, file):
                break
            file.close()
        holder = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        }
        try:
            file.truncate(0)
            file.write(json.dumps(holder))
            file.flush()
            os.fsync(file)
        except OSError:
            path.unlink()
            with contextlib.suppress(OSError):
                # Closing writes what is left to write.
                file.close()
            raise
    except OSError as error:
        remedy = "give another folder"
        if error.errno in NO_ROOM:
            remedy = "make room there, and give the same command again"
        raise FolderError(
            f"--{flag}={folder} can't be written to ({error.strerror}): {remedy}"
        ) from None
    return file


def _flock(file: IO[str], folder: pathlib.Path) -> None:
    """Locks an open file. Raises BlockingIOError if another process has locked it.

    Prints a warning if the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        print(
            f"warning: {folder} is on a file system without locks ({error.strerror}): make sure "
            "that no other run writes to this folder",
            file=sys.stderr,
            flush=True,
        )


def _is_at(path: pathlib.Path, file: IO[str]) -> bool:
    """Whether an open file is still the file at `path`: the run before may have removed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _holder(path: pathlib.Path) -> str:
    try:
        holder = json.loads(path.read_text())
        return f"process {holder['process']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        # The other run has just created the file, or just removed it.
        return "another run"


def _appears(folder: pathlib.Path, name: str) -> bool:
    """Whether a file appears in a folder in time."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        # Listing a folder makes NFS ask its server, unlike a look at a single name.
        with contextlib.suppress(OSError):
            if name in os.listdir(folder):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def _blind_processes(flag: str, reports: list[tuple[str, dict[str, str | bool]]]) -> str:
    """The problem if some processes do not see what process 0 has written."""
    hosts = [host for host, _ in reports]
    blind = [number for number, (_, report) in enumerate(reports) if not report["sees"]]
    if not blind:
        return ""
    verb = "does" if len(blind) == 1 else "do"
    return (
        f"{process_list(blind, hosts)} {verb} not see in --{flag}={reports[blind[0]][1]['folder']} "
        f"the file that {process_list([0], hosts)} wrote in --{flag}={reports[0][1]['folder']}: "
        f"give all processes the same --{flag}, on a disk that they share"
    )
