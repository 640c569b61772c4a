"""Orbax checkpoints: parameters, optimizer state and metadata, each readable alone."""

import dataclasses
import pathlib
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from alibi_jax.checkpoints.migrations import (
    FORMAT,
    dotted,
    format_2_tree,
    from_format_2,
    upgraded_config,
)
from alibi_jax.config import Checkpoint


class CheckpointError(ValueError):
    """A checkpoint that is missing or does not fit: names the place and the remedy."""


@dataclasses.dataclass(frozen=True)
class Metadata:
    """What a checkpoint says of itself besides its arrays, all of it JSON."""

    step: int
    config: dict[str, Any]
    text: str  # The fingerprint of the training split.
    tokenizer: dict[str, Any]
    vocab_size: int
    provenance: dict[str, Any]
    format: int = FORMAT


class Checkpoints:
    """The checkpoints of one run, under `<workdir>/checkpoints`; a context manager.

    Saves are asynchronous and appear whole or not at all. Leaving the context waits for the
    last one. All processes make all calls.
    """

    def __init__(self, workdir: pathlib.Path, rules: Checkpoint | None = None):
        """With `rules` for saving; without, for reading, which makes no folder."""
        self.path = workdir.absolute() / "checkpoints"
        if rules is None and not self.path.is_dir():
            raise CheckpointError(f"{workdir}: no checkpoints here; train.py --workdir={workdir}")
        keep = ocp.training.preservation_policies
        policies: list[Any] = [keep.LatestN(rules.keep)] if rules else [keep.PreserveAll()]
        if rules and rules.keep_every:
            policies.append(keep.EveryNSteps(rules.keep_every))
        self._checkpointer = ocp.training.Checkpointer(
            self.path,
            # When to save is the training loop's to say, each time it asks.
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=keep.AnyPreservationPolicy(policies),
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
        """The last whole checkpoint's step; None where there is none yet."""
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    def check_step(self, step: int | None) -> int:
        """That step, or the latest. Raises CheckpointError where it is not there."""
        steps = [checkpoint.step for checkpoint in self._checkpointer.checkpoints]
        if not steps:
            raise CheckpointError(f"{self.path}: no whole checkpoint yet; train first")
        if step is not None and step not in steps:
            raise CheckpointError(f"--step={step}: {self.path} has steps {sorted(steps)}")
        return max(steps) if step is None else step

    def save(self, params: Any, optimizer: Any, metadata: Metadata) -> None:
        """Begins to save; raises here if the save before it failed."""
        self.wait()
        self._saving = self._checkpointer.save_checkpointables_async(
            metadata.step,
            {"params": params, "optimizer": optimizer},
            custom_metadata=dataclasses.asdict(metadata),
        )

    def wait(self) -> None:
        """Until the save under way is whole."""
        if self._saving is not None:
            self._saving.result()
            self._saving = None

    def metadata(self, step: int) -> Metadata:
        """What the checkpoint of that step says of itself."""
        values = self._checkpointer.metadata(step).custom_metadata
        if not values or values.get("format", FORMAT + 1) > FORMAT:
            raise CheckpointError(
                f"{self.path}/{step} was not written by this version or an earlier one: "
                "update alibi_jax"
            )
        if values["format"] == 1 and values["config"]["model"]["position"] in ("learned", "t5"):
            raise CheckpointError(
                f"{self.path}/{step} was written by an earlier version, which kept its table of "
                "positions elsewhere: read it with that version, or train anew"
            )
        return Metadata(**values | {"config": upgraded_config(values["config"], values["format"])})

    def restore(self, step: int, **abstract: Any) -> dict[str, Any]:
        """The named items (`params`, `optimizer`) of that step, placed as the abstract trees say.

        Raises:
            CheckpointError: where the saved shapes or names differ, naming the first.
        """
        saved = self._checkpointer.checkpointables_metadata(step).metadata
        for item in abstract:
            if item not in saved:
                raise CheckpointError(
                    f"{self.path}/{step} has no {item}: it is damaged; take an earlier step, or "
                    "train anew"
                )
        written, trees = self.metadata(step), abstract
        if written.format < 3:
            num_layers = written.config["model"]["num_layers"]
            trees = {
                item: format_2_tree(tree, _shapes(saved[item]), num_layers)
                for item, tree in abstract.items()
            }
        for item, tree in trees.items():
            self._check_same(f"{self.path}/{step}/{item}", saved[item], tree)
        loaded = self._checkpointer.load_checkpointables(step, trees)
        return loaded if trees is abstract else from_format_2(loaded, abstract)

    @staticmethod
    def _check_same(where: str, saved: Any, wanted: Any) -> None:
        # Orbax's own message for this names every handler but not the parameter.
        there, here = _shapes(saved), _shapes(wanted)
        for name in [*there, *here]:
            if there.get(name) != here.get(name):
                raise CheckpointError(
                    f"{where}: {name} has shape {there.get(name, 'none')}, and this "
                    f"configuration needs {here.get(name, 'none')}: use the configuration it was "
                    "trained with, or another workdir"
                )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves, _ = jax.tree.flatten_with_path(tree, is_leaf=lambda leaf: hasattr(leaf, "shape"))
    return {dotted(path): tuple(leaf.shape) for path, leaf in leaves}
