"""The files of a prepared dataset, and the one line that says that they are damaged."""

import contextlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from alibi_jax.data.atomic import NOT_DAMAGE
from alibi_jax.data.errors import DataError

_NAME = "checksums.json"


def write_checksums(folder: Path) -> None:
    """Writes the sizes of all files of a dataset, and the CRC-32 of each JSON file."""
    found = {path.name: _size_and_checksum(path) for path in sorted(folder.iterdir())}
    (folder / _NAME).write_text(json.dumps(found, indent=1))


def check_files(folder: Path) -> None:
    """Raises ValueError or OSError unless the files are as they were written.

    Records have checksums of their own, which are verified when they are read. Datasets of earlier
    versions and of other programs pass, as nothing was written about their files.
    """
    if (folder / _NAME).exists():
        for name, written in json.loads((folder / _NAME).read_text()).items():
            if _size_and_checksum(folder / name) != written:
                raise ValueError(f"{name} has other bytes than were written")


@contextlib.contextmanager
def dataset_damage_named(folder: Path) -> Iterator[None]:
    """Raises DataError, which names the folder of a dataset, for an error in the block."""
    try:
        yield
    except (NotImplementedError, MemoryError):
        # TFDS cannot read this format, or there is no memory: the files may well be whole.
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NOT_DAMAGE:
            raise
        raise DataError(
            f"{folder} is damaged ({' '.join(str(error).split())}): delete that folder, and give "
            "the same command again"
        ) from error


def _size_and_checksum(path: Path) -> list[int | None]:
    checksum = zlib.crc32(path.read_bytes()) if path.suffix == ".json" else None
    return [path.stat().st_size, checksum]
