"""Trained runs, loaded to be evaluated."""

import dataclasses
import glob
import os
import pathlib
from typing import Any

import jax

from alibi_jax.checkpoints import Checkpoints, Metadata
from alibi_jax.config import Config, Mesh, from_dict
from alibi_jax.data import tokenizers
from alibi_jax.data.builders import open_documents
from alibi_jax.distributed import sharding
from alibi_jax.model import abstract_model, check_model_fits


@dataclasses.dataclass
class Run:
    """A trained model ready to be scored."""

    workdir: pathlib.Path
    metadata: Metadata
    config: Config
    tokenizer: tokenizers.Tokenizer
    graphdef: Any
    params: Any
    mesh: jax.sharding.Mesh
    # When its checkpoint was written, in ns: another in its place is another run.
    saved: int


def find_workdirs(patterns: list[str]) -> list[pathlib.Path]:
    """The folders named, each once; of a pattern as runs/* those that hold checkpoints.

    Raises ValueError where there is none.
    """
    if not patterns:
        raise ValueError("--workdir is missing: name the folder that train.py wrote")
    found: list[pathlib.Path] = []
    for pattern in patterns:
        if not glob.has_magic(pattern) or pathlib.Path(pattern).exists():
            found.append(pathlib.Path(pattern))
            continue
        paths = sorted(map(pathlib.Path, glob.glob(pattern)))
        runs = [path for path in paths if (path / "checkpoints").is_dir()]
        if not runs:
            raise ValueError(
                f"--workdir={pattern}: no folder of that pattern holds checkpoints: name folders "
                "that train.py wrote"
            )
        found += runs
    return list({os.path.abspath(path): path for path in reversed(found)}.values())[::-1]


def load_run(workdir: pathlib.Path, step: int | None = None, mesh: Mesh | None = None) -> Run:
    """The parameters of a checkpoint (default: the latest) on all devices; nothing else of it.

    By default each device has all of them, and its share of the windows.

    Raises:
        CheckpointError: where there is no such checkpoint, or it does not fit its configuration.
        ConfigError: where the model does not split evenly over the mesh.
        ValueError: where the text is no longer the one that it was trained on.
    """
    with Checkpoints(workdir) as checkpoints:
        step = checkpoints.check_step(step)
        metadata = checkpoints.metadata(step)
        config = from_dict(metadata.config)
        tokenizer = tokenizers.from_dict(metadata.tokenizer)
        placed = sharding.make_mesh(**dataclasses.asdict(mesh or Mesh()))
        check_model_fits(config.model, placed)
        graphdef, abstract = abstract_model(config, metadata.vocab_size, placed)
        params = checkpoints.restore(step, params=abstract)["params"]
    # A folder that has changed may have moved documents from one split to another.
    if open_documents(config.data, "train").fingerprint != metadata.text:
        raise ValueError(
            f"{workdir} was trained on another text than data.dataset="
            f"{config.data.dataset!r} now gives: restore that text"
        )
    saved = (workdir / "checkpoints" / str(step)).stat().st_mtime_ns
    return Run(workdir, metadata, config, tokenizer, graphdef, params, placed, saved)
