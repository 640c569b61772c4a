"""Trained runs, loaded for evaluation."""

import dataclasses
import glob
import os
import pathlib
from typing import Any

import jax

from alibi_jax.checkpoints import Checkpoints, Metadata
from alibi_jax.config import FROM_PATH, Config, Data, Mesh, flatten, from_dict, local_path
from alibi_jax.data import tokenizers
from alibi_jax.data.errors import DataError
from alibi_jax.distributed import sharding
from alibi_jax.distributed.agreement import agree, digest, from_process_zero, process_zero_first
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

    A pattern stands for all folders that match it and hold checkpoints; a leading `~` is the home
    folder. Raises ValueError where no folder matches a pattern and holds checkpoints, where
    `patterns` is empty, and for an address instead of a folder.
    """
    if not patterns:
        raise ValueError("--workdir is missing: name the folder that train.py wrote")
    found: list[pathlib.Path] = []
    for pattern in (str(local_path("--workdir", given)) for given in patterns):
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


def load_run(
    workdir: pathlib.Path,
    step: int | None = None,
    mesh: Mesh | None = None,
    *,
    data_path: str | None = None,
    data_dir: str | None = None,
) -> Run:
    """Loads the parameters of a checkpoint (default: the latest) and no other state.

    By default each device holds all parameters and scores its share of the windows. `data_path` and
    `data_dir` replace the run's own `data.path` and `data.data_dir`. Text that is no longer at
    `data.path` is not needed where it is prepared.

    Raises:
        CheckpointError: where the checkpoint does not exist or does not fit its configuration.
        ConfigError: where the model does not divide evenly over the mesh.
        ValueError: where the training text is missing or has changed since training.
        LaunchError: where the processes find different checkpoints.
    """
    with Checkpoints(workdir) as checkpoints:
        # A run that is still in training may save a checkpoint between two processes' looks.
        step = checkpoints.check_step(from_process_zero(checkpoints.check_step(step)))
        metadata = checkpoints.metadata(step)
        config = from_dict(metadata.config)
        tokenizer = tokenizers.from_dict(metadata.tokenizer)
        agree(
            lambda: (
                {
                    "step of the checkpoint": step,
                    "digest of the tokenizer": digest(tokenizer.fingerprint),
                }
                | flatten(config)
                | {name: metadata.provenance.get(name) for name in ("command", "commit")}
            ),
            f"let all processes read the same checkpoint in {workdir}",
        )
        device_mesh = sharding.make_mesh(mesh)
        check_model_fits(config.model, device_mesh)
        graphdef, abstract = abstract_model(config, metadata.vocab_size, device_mesh)
        params = checkpoints.restore(step, params=abstract)["params"]
    config.data = _recorded_data(workdir, config.data, metadata.text, data_path, data_dir)
    saved_ns = (workdir / "checkpoints" / str(step)).stat().st_mtime_ns
    return Run(workdir, metadata, config, tokenizer, graphdef, params, device_mesh, saved_ns)


def _recorded_data(
    workdir: pathlib.Path, data: Data, text: str, data_path: str | None, data_dir: str | None
) -> Data:
    """Where the training text with the fingerprint `text` is now. Raises ValueError as `load_run`.

    A changed folder of text may have moved documents from one split to another, so it is refused.
    """
    # Imported here: TFDS takes a second, which --help and a wrong flag need not wait for.
    from alibi_jax.data.builders import open_documents, recorded_data

    if data_path is not None and data.dataset not in FROM_PATH:
        raise ValueError(
            f"--data_path={data_path}: {workdir} was trained on data.dataset={data.dataset!r}, "
            "which has no path: leave --data_path out"
        )
    if data_dir is not None:
        data.data_dir = str(local_path("--data_dir", data_dir))
    if data_path is not None:
        data.path = str(local_path("--data_path", data_path))
        if not pathlib.Path(data.path).exists():
            raise ValueError(f"--data_path={data_path} does not exist: name the training text")
    try:
        data = recorded_data(data, text)
        documents = process_zero_first("training text", lambda: open_documents(data, "train"))
    except (DataError, OSError) as error:
        raise ValueError(
            f"{workdir}: {error}, or name another place by --data_path or --data_dir"
        ) from error
    if documents.fingerprint != text:
        raise ValueError(
            f"{workdir} was trained on another text than data.dataset={data.dataset!r} now gives: "
            "restore the training text"
        )
    return data
