"""Losses of an interrupted evaluation, saved so that the same command continues from them."""

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
        if jax.process_index() == 0 and path.is_file():
            # A damaged file counts as missing.
            with contextlib.suppress(OSError, ValueError, EOFError):
                saved = np.load(path)
                if saved.shape == losses.shape:
                    losses = saved
        if jax.process_count() > 1:
            losses = np.asarray(multihost_utils.broadcast_one_to_all(losses))
        return losses

    def save(self, identity: dict[str, Any], losses: Float32[np.ndarray, "M"]) -> None:
        """Saves losses atomically."""
        if jax.process_index() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self._path(identity)
            temporary = path.with_suffix(".new")
            with temporary.open("wb") as file:
                np.save(file, losses)
            os.replace(temporary, path)

    def discard(self) -> None:
        """Deletes the losses of this evaluation, which has finished."""
        if jax.process_index() == 0:
            for path in self._paths:
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.folder.rmdir()

    def _path(self, identity: dict[str, Any]) -> pathlib.Path:
        text = json.dumps(identity | {"code": _source_digest()}, sort_keys=True)
        path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.npy"
        self._paths.add(path)
        return path


@functools.cache
def _source_digest() -> str:
    """A hash of JAX's version and of every source file of the package.

    Changed code may give other losses. The hash covers uncommitted changes too, which the commit of
    the checkout does not.
    """
    digest = hashlib.sha256(jax.__version__.encode())
    root = pathlib.Path(alibi_jax.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
