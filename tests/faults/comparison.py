"""Whether a folder that faults have struck holds what a run without a fault left."""

import csv
import functools
import json
import re

import jax
import numpy as np
from cases import EVERY, KEEP, STEPS

from alibi_jax.checkpoints import CheckpointError, Checkpoints
from alibi_jax.config import Mesh, from_dict
from alibi_jax.distributed.sharding import make_mesh
from alibi_jax.training.step import Trainer
from alibi_jax.training.throughput import THROUGHPUT_METRICS

# Entries of results.json and results.csv that differ from run to run.
_OF_A_RUN = ("seconds", "compile_seconds", "command", "commit", "trained_by")


def differences(folder, undisturbed, every_step, regular=True):
    """The differences in one line each: files, checkpoints, metrics, results.

    `every_step` holds the checkpoint of every step. With `regular` false, a run was asked to stop,
    and may keep checkpoints of other steps.
    """
    found = _different_names(folder, undisturbed)
    if _lines(folder) != _lines(undisturbed):
        found.append(f"metrics: {_lines(folder)} instead of {_lines(undisturbed)}")
    steps = _steps(folder)
    if regular and steps != [STEPS - EVERY, STEPS]:
        found.append(f"checkpoints of steps {steps}")
    if len(steps) != KEEP or max(steps, default=0) != STEPS:
        found.append(f"checkpoints of steps {steps}")
    for step in steps:
        found += _different_checkpoint(folder, every_step, step)
    for name in ("data", "run/eval"):
        found += _different_contents(folder / name, undisturbed / name)
    return found


def _different_names(folder, undisturbed):
    here, there = _names(folder), _names(undisturbed)
    return [f"litter: {name}" for name in sorted(here - there)] + [
        f"missing: {name}" for name in sorted(there - here)
    ]


def _names(folder):
    """The paths of all files and folders, without the steps and the random names of Orbax."""
    names = set()
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        name = re.sub(r"^run/checkpoints/\d+(?=/|$)", "run/checkpoints/STEP", name)
        name = re.sub(r"(?<=/d/)[0-9a-f]{32}$", "ARRAYS", name)
        # A run that resumes writes a new file for TensorBoard.
        names.add(re.sub(r"(?<=events\.out\.tfevents\.).*", "TIME", name))
    return names


def _lines(folder):
    """The lines of metrics.jsonl without the throughput."""
    return [
        {key: value for key, value in json.loads(line).items() if key not in THROUGHPUT_METRICS}
        for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]


def _steps(folder):
    with Checkpoints(folder / "run") as checkpoints:
        return checkpoints.steps()


def _different_checkpoint(folder, reference, step):
    there, expected = _checkpoint(reference, step)
    try:
        here, arrays = _checkpoint(folder, step)
    except CheckpointError as error:
        return [f"step {step}: {error}"]
    found = [f"step {step}: {key} differs" for key in here if here[key] != there[key]]
    if jax.tree.structure(arrays) != jax.tree.structure(expected):
        return [*found, f"step {step}: other arrays"]
    for (path, a), b in zip(jax.tree.leaves_with_path(arrays), jax.tree.leaves(expected)):
        if np.asarray(a).tobytes() != np.asarray(b).tobytes():
            return [*found, f"step {step}: {jax.tree_util.keystr(path)} differs"]
    return found


def _checkpoint(folder, step):
    """(metadata without provenance and the section `checkpoint`, arrays) of a step."""
    with Checkpoints(folder / "run") as checkpoints:
        metadata = checkpoints.metadata(step)
        abstract = _abstract_state(json.dumps(metadata.config), metadata.vocab_size)
        arrays = checkpoints.restore(step, **abstract)
    sections = {key: value for key, value in metadata.config.items() if key != "checkpoint"}
    return vars(metadata) | {"config": sections, "provenance": None}, arrays


@functools.cache
def _abstract_state(config, vocab_size):
    mesh = make_mesh(Mesh(), devices=jax.devices()[:1])
    return Trainer(from_dict(json.loads(config)), vocab_size, mesh).abstract_state._asdict()


def _different_contents(folder, undisturbed):
    """The names of files with other contents, apart from what differs from run to run."""
    found = []
    for path in sorted(folder.rglob("*")):
        other = undisturbed / path.relative_to(folder)
        if not path.is_file() or not other.is_file():
            continue
        if _contents(path) != _contents(other):
            found.append(f"contents of {path.relative_to(folder.parent)} differ")
    return found


def _contents(path):
    """The contents of a file without what differs from run to run."""
    if path.name == "results.json":
        return _without_times(json.loads(path.read_text()))
    if path.name == "results.csv":
        with path.open(newline="") as file:
            return [row for row in csv.DictReader(file) if row["quantity"] not in _OF_A_RUN]
    if path.suffix == ".html":
        # The command of a run of several processes names a free port.
        return re.sub(rb"localhost:\d+", b"localhost:PORT", path.read_bytes())
    # Matplotlib draws names and dates for the parts of an SVG file; the PNG file has the picture.
    return path.read_bytes()[-8:] if path.suffix == ".svg" else path.read_bytes()


def _without_times(node):
    if isinstance(node, dict):
        return {key: _without_times(x) for key, x in node.items() if key not in _OF_A_RUN}
    return [_without_times(x) for x in node] if isinstance(node, list) else node
