"""Folders of prepared data, whose damage is noticed and mended."""

import hashlib
import json
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from alibi_jax.data.atomic import NOT_DAMAGE, atomic_directory, discard, remove_abandoned
from alibi_jax.data.errors import DataError

Content = TypeVar("Content")

# How often a folder is made before its disk counts as broken. More than one attempt is needed where
# other programs find the same damage and discard the folder at the same time.
_ATTEMPTS = 3
_CHUNK_BYTES = 2**24
_DIGEST = "digest"


def prepared(
    folder: Path, load: Callable[[Path], Content], make: Callable[[Path], None]
) -> Content:
    """What `load` reads from a folder that `make` has written.

    `make` writes the folder if there is none, and again if `load` raises an error, which a line on
    standard error then says. Raises DataError if the folder stays damaged.
    """
    remove_abandoned(folder.parent)
    for _ in range(_ATTEMPTS):
        if not folder.exists():
            with atomic_directory(folder) as staging:
                make(staging)
        try:
            return load(folder)
        except (MemoryError, ImportError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in NOT_DAMAGE:
                raise
            print(f"{folder} is damaged and is made again: {error}", file=sys.stderr, flush=True)
            discard(folder)
    raise DataError(
        f"{folder} was made {_ATTEMPTS} times and was damaged each time: give a data.data_dir on "
        "another disk"
    )


def crc32(file: BinaryIO) -> int:
    """The CRC-32 of a file from its position on, which the change of any bit changes."""
    checksum = 0
    while chunk := file.read(_CHUNK_BYTES):
        checksum = zlib.crc32(chunk, checksum)
    return checksum


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """JSON values with a digest of all of them under the key "digest"."""
    return values | {_DIGEST: _digest(values)}


def unsealed(values: dict[str, Any]) -> dict[str, Any]:
    """The values that `sealed` was given. Raises ValueError if they have been changed since."""
    rest = dict(values)
    if rest.pop(_DIGEST, None) != _digest(rest):
        raise ValueError("its values differ from those that were written")
    return rest


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
