"""Directories that are complete whenever they exist."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_directory(final: Path) -> Iterator[Path]:
    """Yields a new directory beside `final` and renames it to `final` when the block succeeds.

    If another process has created `final` first, that directory stays and the new one is deleted.
    After an error the new one is deleted too. A killed process leaves a hidden directory beside
    `final`, which nothing reads.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = _hidden_sibling(final)
    # tempfile is not used: other users of a shared `data_dir` could not read its directories.
    staging.mkdir()
    try:
        yield staging
        try:
            staging.rename(final)
        except OSError:
            # POSIX renames a directory over an empty one, but never over a full one.
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def discard(directory: Path) -> None:
    """Renames a directory, then deletes it: under its name it is never half deleted."""
    doomed = _hidden_sibling(directory)
    # Another process may have removed it first.
    with contextlib.suppress(FileNotFoundError):
        directory.rename(doomed)
        shutil.rmtree(doomed)


def _hidden_sibling(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
