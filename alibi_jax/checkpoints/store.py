"""Orbax checkpoints: parameters, optimizer state and metadata, each readable by itself."""

import dataclasses
import pathlib
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from alibi_jax.checkpoints.migrations import (
    FORMAT,
    dotted_name,
    format_2_tree,
    from_format_2,
    upgraded_config,
)
from alibi_jax.checkpoints.paths import check_path
from alibi_jax.config import Checkpoint


class CheckpointError(ValueError):
    """A checkpoint that is missing or does not fit: the message names the path and the remedy."""


@dataclasses.dataclass(frozen=True)
class Metadata:
    """The JSON values that a checkpoint holds beside its arrays (docs/formats.md)."""

    step: int
    config: dict[str, Any]
    text: str  # Fingerprint of the training split.
    tokenizer: dict[str, Any]
    vocab_size: int
    provenance: dict[str, Any]
    format: int = FORMAT


class Checkpoints:
    """The checkpoints of one run, under `<workdir>/checkpoints`; a context manager.

    Saves are asynchronous, and a checkpoint appears only when it is complete. Leaving the context
    waits for the last save. Every process must make the same calls.
    """

    def __init__(self, workdir: pathlib.Path, config: Checkpoint | None = None):
        """Opens a run's checkpoints: for saving if `config` is given, else for reading.

        Opening for reading creates no folder, and raises CheckpointError if there is none.
        """
        check_path(workdir, saving=config is not None)
        self.path = workdir.absolute() / "checkpoints"
        if config is None and not self.path.is_dir():
            raise CheckpointError(
                f"{workdir}: no checkpoints here; run train.py --workdir={workdir}"
            )
        preservation = ocp.training.preservation_policies
        policies: list[Any] = [
            preservation.LatestN(config.keep) if config else preservation.PreserveAll()
        ]
        if config and config.keep_every:
            policies.append(preservation.EveryNSteps(config.keep_every))
        self._checkpointer = ocp.training.Checkpointer(
            self.path,
            # The training loop decides when to save, so every call to `save` saves.
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=preservation.AnyPreservationPolicy(policies),
        )
        self._saving: Any = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    def latest_step(self) -> int | None:
        """The step of the latest complete checkpoint; None if there is none yet."""
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order."""
        return sorted(checkpoint.step for checkpoint in self._checkpointer.checkpoints)

    def check_step(self, step: int | None) -> int:
        """Returns `step`, or the latest step if `step` is None.

        Raises CheckpointError if there is no complete checkpoint, or none of this step.
        """
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"{self.path}: no complete checkpoint yet; train first")
        if step is not None and step not in steps:
            raise CheckpointError(f"--step={step}: {self.path} has steps {steps}")
        return max(steps) if step is None else step

    def save(self, params: Any, optimizer: Any, metadata: Metadata) -> None:
        """Starts a save. Raises the error of the previous save, if that failed."""
        self.wait()
        self._saving = self._checkpointer.save_checkpointables_async(
            metadata.step,
            {"params": params, "optimizer": optimizer},
            custom_metadata=dataclasses.asdict(metadata),
        )

    def remove_after(self, step: int) -> None:
        """Removes the checkpoints of later steps, the latest first."""
        for later in reversed(self.steps()):
            if later > step:
                self._checkpointer.delete(later)

    def wait(self) -> None:
        """Waits until the running save is complete."""
        if self._saving is not None:
            self._saving.result()
            self._saving = None

    def metadata(self, step: int) -> Metadata:
        """The metadata of the checkpoint of `step`, with the current configuration keys.

        Raises:
            CheckpointError: for a format that this version cannot read.
        """
        values = self._checkpointer.metadata(step).custom_metadata
        if not values or values.get("format", FORMAT + 1) > FORMAT:
            raise CheckpointError(
                f"{self.path}/{step} was not written by this version or an earlier one: "
                "update alibi_jax"
            )
        if values["format"] == 1 and values["config"]["model"]["position"] in ("learned", "t5"):
            raise CheckpointError(
                f"{self.path}/{step} was written by an earlier version, which stored the table of "
                "positions elsewhere: read it with that version, or train anew"
            )
        return Metadata(**values | {"config": upgraded_config(values["config"], values["format"])})

    def restore(self, step: int, **abstract: Any) -> dict[str, Any]:
        """Reads items (`params`, `optimizer`) of a step, with the shardings of the abstract trees.

        Raises:
            CheckpointError: if the step lacks an item, or if saved names or shapes differ from
                those of the abstract trees; the message names the first parameter that differs.
        """
        saved = self._checkpointer.checkpointables_metadata(step).metadata
        for item in abstract:
            if item not in saved:
                raise CheckpointError(
                    f"{self.path}/{step} has no {item}: it is damaged; take an earlier step, or "
                    "train anew"
                )
        metadata, trees = self.metadata(step), abstract
        if metadata.format < 3:
            num_layers = metadata.config["model"]["num_layers"]
            trees = {
                item: format_2_tree(tree, _shapes(saved[item]), num_layers)
                for item, tree in abstract.items()
            }
        for item, tree in trees.items():
            self._check_shapes(f"{self.path}/{step}/{item}", saved[item], tree)
        loaded = self._checkpointer.load_checkpointables(step, trees)
        return loaded if trees is abstract else from_format_2(loaded, abstract)

    @staticmethod
    def _check_shapes(path: str, saved: Any, wanted: Any) -> None:
        # Orbax's own message for this names every handler but not the parameter.
        saved_shapes, wanted_shapes = _shapes(saved), _shapes(wanted)
        for name in [*saved_shapes, *wanted_shapes]:
            if saved_shapes.get(name) != wanted_shapes.get(name):
                raise CheckpointError(
                    f"{path}: {name} has shape {saved_shapes.get(name, 'none')}, and this "
                    f"configuration needs {wanted_shapes.get(name, 'none')}: use the configuration "
                    "that the run was trained with, or another workdir"
                )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a tree's leaves by their dotted names."""
    leaves, _ = jax.tree.flatten_with_path(tree, is_leaf=lambda leaf: hasattr(leaf, "shape"))
    return {dotted_name(path): tuple(leaf.shape) for path, leaf in leaves}
