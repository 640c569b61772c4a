"""Losses of an evaluation that was broken off, kept so that the same command goes on from there."""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Float32


class Unfinished:
    """A folder of losses, each file under what determines them; process 0 reads and writes it."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

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
        """Forgets everything: the evaluation is done."""
        if jax.process_index() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, identity: dict[str, Any]) -> pathlib.Path:
        text = json.dumps(identity, sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.npy"
