"""Losses of an evaluation that was broken off, kept so that the same command goes on from there."""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Float32

import alibi_jax


class Unfinished:
    """A folder of losses, each file under what determines them; process 0 reads and writes it."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        # Those of this evaluation: another one's may lie beside them.
        self._own: set[pathlib.Path] = set()

    def load(self, identity: dict[str, Any], count: int) -> Float32[np.ndarray, "M"]:
        """The losses so far, the same in all processes, NaN where there is none yet."""
        losses = np.full(count, np.nan, np.float32)
        path = self._path(identity)
        if jax.process_index() == 0 and path.is_file():
            # One that can't be read is as good as none.
            with contextlib.suppress(OSError, ValueError, EOFError):
                kept = np.load(path)
                if kept.shape == losses.shape:
                    losses = kept
        if jax.process_count() > 1:
            losses = np.asarray(multihost_utils.broadcast_one_to_all(losses))
        return losses

    def save(self, identity: dict[str, Any], losses: Float32[np.ndarray, "M"]) -> None:
        """Keeps losses; the file appears whole."""
        if jax.process_index() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self._path(identity)
            fresh = path.with_suffix(".new")
            with fresh.open("wb") as file:
                np.save(file, losses)
            os.replace(fresh, path)

    def discard(self) -> None:
        """Forgets the losses of this evaluation: it is done."""
        if jax.process_index() == 0:
            for path in self._own:
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.folder.rmdir()

    def _path(self, identity: dict[str, Any]) -> pathlib.Path:
        text = json.dumps(identity | {"code": _code()}, sort_keys=True)
        path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.npy"
        self._own.add(path)
        return path


@functools.cache
def _code() -> str:
    """Of the package's source, whether it is committed or not: other code may give other losses."""
    digest = hashlib.sha256(jax.__version__.encode())
    root = pathlib.Path(alibi_jax.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
