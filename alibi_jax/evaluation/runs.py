"""Trained runs, loaded for evaluation."""

import dataclasses
import glob
import os
import pathlib
from typing import Any

import jax

from alibi_jax.checkpoints import Checkpoints, Metadata
from alibi_jax.config import Config, Mesh, from_dict
from alibi_jax.data import tokenizers
from alibi_jax.distributed import sharding
from alibi_jax.model import abstract_model, check_model_fits


@dataclasses.dataclass
class Run:
    """A trained model, with its parameters on the devices."""

    workdir: pathlib.Path
    metadata: Metadata
    config: Config
    tokenizer: tokenizers.Tokenizer
    graphdef: Any
    params: Any
    mesh: jax.sharding.Mesh
    # Time at which the checkpoint was written, in ns. A checkpoint that is written in its place has
    # another time.
    saved_ns: int


def find_workdirs(patterns: list[str]) -> list[pathlib.Path]:
    """Finds the folders for the given names and patterns (such as runs/*), each folder once.

    A pattern stands for all folders that match it and hold checkpoints. Raises ValueError where no
    folder matches a pattern and holds checkpoints, or where `patterns` is empty.
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
    """Loads the parameters of a checkpoint (default: the latest) and no other state.

    By default each device holds all parameters and scores its share of the windows.

    Raises:
        CheckpointError: where the checkpoint does not exist or does not fit its configuration.
        ConfigError: where the model does not divide evenly over the mesh.
        ValueError: where the training text has changed since training.
    """
    with Checkpoints(workdir) as checkpoints:
        step = checkpoints.check_step(step)
        metadata = checkpoints.metadata(step)
        config = from_dict(metadata.config)
        tokenizer = tokenizers.from_dict(metadata.tokenizer)
        device_mesh = sharding.make_mesh(mesh)
        check_model_fits(config.model, device_mesh)
        graphdef, abstract = abstract_model(config, metadata.vocab_size, device_mesh)
        params = checkpoints.restore(step, params=abstract)["params"]
    # Imported here: TFDS takes a second, which --help and a wrong flag need not wait for.
    from alibi_jax.data.builders import open_documents

    # A changed folder of text may have moved documents from one split to another.
    if open_documents(config.data, "train").fingerprint != metadata.text:
        raise ValueError(
            f"{workdir} was trained on another text than data.dataset="
            f"{config.data.dataset!r} now gives: restore the training text"
        )
    saved_ns = (workdir / "checkpoints" / str(step)).stat().st_mtime_ns
    return Run(workdir, metadata, config, tokenizer, graphdef, params, device_mesh, saved_ns)
