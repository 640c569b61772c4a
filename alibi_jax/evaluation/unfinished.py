"""Losses of an interrupted evaluation, saved so that the same command continues from them."""

import contextlib
import hashlib
import io
import json
import pathlib
import zlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Float32

from alibi_jax.data.atomic import atomic_file, remove_abandoned
from alibi_jax.distributed import processes
from alibi_jax.provenance import source_digest

_CRC_BYTES = 4


class UnfinishedLosses:
    """A folder with one file of losses per scoring; process 0 alone reads and writes it.

    The name of a file is a hash of everything that determines the losses: the `identity` that the
    caller gives, the source code of the package, and JAX's version. Losses are used again only if
    all three are the same.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        # The files of this evaluation; the folder may hold those of other evaluations too.
        self._paths: set[pathlib.Path] = set()

    def load(self, identity: dict[str, Any], count: int) -> Float32[np.ndarray, "M"]:
        """The saved losses, the same in all processes; a loss that is still missing is NaN."""
        losses = np.full(count, np.nan, np.float32)
        path = self._path(identity)
        if jax.process_index() == 0:
            remove_abandoned(self.folder)
            if path.exists():
                try:
                    losses = _read(path, count)
                except (OSError, ValueError) as error:
                    processes.say(f"{path}: {error}; these losses are computed again")
        if jax.process_count() > 1:
            losses = np.asarray(multihost_utils.broadcast_one_to_all(losses))
        return losses

    def save(self, identity: dict[str, Any], losses: Float32[np.ndarray, "M"]) -> None:
        """Saves losses atomically, followed by their CRC-32. Raises OSError if the disk is full."""
        if jax.process_index() == 0:
            content = io.BytesIO()
            np.save(content, losses)
            content.write(_crc32(content.getvalue()))
            with atomic_file(self._path(identity)) as staging:
                staging.write_bytes(content.getvalue())

    def discard(self) -> None:
        """Deletes the losses of this evaluation, which has finished."""
        if jax.process_index() == 0:
            for path in self._paths:
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.folder.rmdir()

    def _path(self, identity: dict[str, Any]) -> pathlib.Path:
        text = json.dumps(identity | {"code": source_digest()}, sort_keys=True)
        path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.npy"
        self._paths.add(path)
        return path


def _read(path: pathlib.Path, count: int) -> Float32[np.ndarray, "M"]:
    """The `count` losses of a file. Raises ValueError if it is damaged."""
    content = path.read_bytes()
    if _crc32(content[:-_CRC_BYTES]) != content[-_CRC_BYTES:]:
        raise ValueError("its checksum is wrong")
    losses = np.load(io.BytesIO(content))
    if losses.shape != (count,):
        raise ValueError(f"it has shape {losses.shape} in place of ({count},)")
    return losses


def _crc32(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(_CRC_BYTES, "little")
