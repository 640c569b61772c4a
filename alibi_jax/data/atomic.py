"""Directories that exist whole or not at all."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_directory(final: Path) -> Iterator[Path]:
    """Yields a fresh directory beside `final` that takes its place when the block succeeds.

    Where another process was first, its directory stays and ours is dropped; after an
    error ours is dropped too. A killed process leaves a hidden sibling that nobody reads.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = _sibling(final)
    # Not tempfile: its directories are closed to the other users of a shared `data_dir`.
    staging.mkdir()
    try:
        yield staging
        try:
            staging.rename(final)
        except OSError:
            # POSIX renames over nothing or over an empty directory, never over a full one.
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def discard(directory: Path) -> None:
    """Removes a directory so that at no moment half of it stands under its name."""
    doomed = _sibling(directory)
    # Another process may have been first.
    with contextlib.suppress(FileNotFoundError):
        directory.rename(doomed)
        shutil.rmtree(doomed)


def _sibling(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
