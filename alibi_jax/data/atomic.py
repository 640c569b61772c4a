"""Files and directories that exist only when they are complete and on the disk."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from alibi_jax.config.paths import NO_ROOM

# The name of a file or directory that is not complete yet, as `_hidden_sibling` makes it.
_HIDDEN = re.compile(r"\..+\.unfinished-(?P<host>.+)-\d+-[0-9a-f]{8}(\.\w+)?")
# Errors of reading that say nothing about what is in a file.
NOT_DAMAGE = (
    *(errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE),
    *(errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT),
)


@contextlib.contextmanager
def atomic_directory(final: Path) -> Iterator[Path]:
    """Yields a new directory beside `final` and renames it to `final` when the block succeeds.

    If another process has created `final` first, that directory stays and the new one is deleted.
    After an error the new one is deleted too. A killed process leaves a hidden directory beside
    `final`, which nothing reads and `remove_abandoned` deletes. Raises OSError in one line if the
    disk is full.
    """
    with _staging(final, Path.mkdir) as staging:
        yield staging
        sync(staging)
        try:
            staging.rename(final)
        except OSError:
            # POSIX renames a directory over an empty one, but never over a full one.
            if not final.is_dir():
                raise


@contextlib.contextmanager
def atomic_file(final: Path) -> Iterator[Path]:
    """Yields a new file beside `final` and moves it to `final` when the block succeeds.

    The new file has the suffix of `final`, which it replaces. After an error it is deleted, and an
    earlier `final` stays. Raises OSError in one line if the disk is full.
    """
    with _staging(final, Path.touch) as staging:
        yield staging
        sync(staging)
        staging.replace(final)


def sync(path: Path, *, within: bool = True) -> None:
    """Waits until a file or a directory is on the disk, by default with all that is in it."""
    if within and path.is_dir():
        for child in path.iterdir():
            sync(child)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Not every file system can be asked this for a directory.
        if not path.is_dir() or error.errno not in (errno.EBADF, errno.EINVAL):
            raise
    finally:
        os.close(descriptor)


def discard(directory: Path) -> None:
    """Renames a directory, then deletes it: under its name it is never half deleted."""
    doomed = _hidden_sibling(directory)
    # Another process may have removed it first.
    with contextlib.suppress(FileNotFoundError):
        directory.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def remove_abandoned(folder: Path) -> None:
    """Deletes what killed processes have left incomplete in a folder.

    Only what this machine has left is deleted, since a lock need not reach other machines. A
    process that is still writing holds a lock on what it writes. On a file system without locks on
    directories (NFS), nothing is deleted.
    """
    for path in folder.glob(".*"):
        name = _HIDDEN.fullmatch(path.name)
        if name is not None and name["host"] == socket.gethostname():
            with contextlib.suppress(OSError), _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
                _delete(path)


@contextlib.contextmanager
def _staging(final: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """Yields a hidden sibling of `final`, which is locked and is deleted if the block leaves it.

    The rename to `final` is on the disk when the block has ended.
    """
    with _full_disk_named(final), contextlib.ExitStack() as stack:
        final.parent.mkdir(parents=True, exist_ok=True)
        while True:
            staging = _hidden_sibling(final)
            # tempfile is not used: others who share the folder could not read what it makes.
            make(staging)
            stack.callback(_delete, staging)
            with contextlib.suppress(OSError):
                stack.enter_context(_lock(staging, fcntl.LOCK_EX))
            # `remove_abandoned` may have come between the two lines above.
            if staging.exists():
                break
        yield staging
        sync(final.parent, within=False)


@contextlib.contextmanager
def _lock(path: Path, operation: int) -> Iterator[None]:
    """Holds a lock on a file or directory. The lock of a killed process is gone.

    Raises OSError if another process holds the lock, or if the file system has none.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _full_disk_named(final: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # TFDS raises the error of the system as the text of another error.
        for full in map(os.strerror, NO_ROOM):
            if full in str(error):
                raise OSError(
                    f"{final}: {full} while it was written: make room there, and give the same "
                    "command again"
                ) from error
        raise


def _hidden_sibling(path: Path) -> Path:
    writer = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    return path.with_name(f".{path.name}.unfinished-{writer}{path.suffix}")


def _delete(path: Path) -> None:
    """Deletes a file or a directory, if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
