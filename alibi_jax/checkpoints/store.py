"""Orbax checkpoints: parameters, optimizer state and metadata, each readable by itself."""

import dataclasses
import pathlib
import time
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from alibi_jax.checkpoints.arrays import all_finite, described, shapes_of
from alibi_jax.checkpoints.errors import (
    CheckpointError,
    FailedSaves,
    damage_named,
    failed_save_named,
)
from alibi_jax.checkpoints.migrations import (
    FORMAT,
    format_2_tree,
    from_format_2,
    upgraded_config,
)
from alibi_jax.checkpoints.paths import check_path
from alibi_jax.config import Checkpoint
from alibi_jax.data.atomic import sync
from alibi_jax.data.prepared import sealed, unsealed

# How often a wait for a save looks whether it has ended.
_POLL_SECONDS = 0.01


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
    # The shape and the checksum of each array by item and dotted name. `Checkpoints.save` fills it;
    # before format 4 it is empty.
    arrays: dict[str, Any] = dataclasses.field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run, under `<workdir>/checkpoints`; a context manager.

    Saves are asynchronous, and a checkpoint appears only when it is complete. Leaving the context
    waits for the last save. Every process must make the same calls.
    """

    def __init__(self, workdir: pathlib.Path, config: Checkpoint | None = None):
        """Opens a run's checkpoints: for saving if `config` is given, else for reading.

        Opening for reading creates no folder, and raises CheckpointError if there is none. Opening
        for saving deletes what a killed process has left of an unfinished save.
        """
        check_path(workdir, saving=config is not None)
        self.path = workdir.absolute() / "checkpoints"
        if config is None and not self.path.is_dir():
            raise CheckpointError(
                f"{workdir}: no checkpoints here; run train.py --workdir={workdir}"
            )
        self._preservation = _preservation_policy(config)
        context = ocp.Context()
        context.asynchronous.post_finalization_callback = self._sync
        self._checkpointer = ocp.training.Checkpointer(
            self.path,
            context=context,
            # The training loop decides when to save, so every call to `save` saves.
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=self._preservation,
            cleanup_tmp_directories=config is not None,
        )
        # The running save and its step.
        self._saving: tuple[Any, int] | None = None
        self._failed_saves = FailedSaves()

    def __enter__(self) -> "Checkpoints":
        self._failed_saves.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        with self._failed_saves:
            self.wait()
            # After a failed save, this would wait for other processes and raise its error again.
            if self._failed_saves.error is None:
                self._checkpointer.close()

    def latest_step(self) -> int | None:
        """The step of the latest complete checkpoint; None if there is none yet."""
        return max(self.steps(), default=None)

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
        """Starts a save. Raises CheckpointError if it can't start, or if the previous one failed.

        A save that fails leaves the earlier checkpoints as they are.
        """
        self.wait()
        items, step = {"params": params, "optimizer": optimizer}, metadata.step
        arrays = {item: described(tree) for item, tree in items.items()}
        values = dataclasses.asdict(dataclasses.replace(metadata, arrays=arrays))
        with failed_save_named(self.path / str(step)):
            saving = self._checkpointer.save_checkpointables_async(
                step, items, custom_metadata=sealed(values)
            )
        self._saving = saving, step

    def remove_after(self, step: int) -> None:
        """Removes the checkpoints of later steps, the latest first."""
        for later in reversed(self.steps()):
            if later > step:
                self._checkpointer.delete(later)

    def wait(self) -> None:
        """Waits until the running save is complete. Raises CheckpointError if it fails."""
        while self._saving is not None:
            self.check_save()
            time.sleep(_POLL_SECONDS)

    def check_save(self) -> None:
        """Raises CheckpointError if the running save has failed. It does not wait for the save."""
        running = self._checkpointer.is_saving_in_progress() and self._failed_saves.error is None
        if self._saving is None or running:
            return
        (saving, step), self._saving = self._saving, None
        with failed_save_named(self.path / str(step)):
            if self._failed_saves.error is not None:
                raise self._failed_saves.error
            try:
                saving.result()
            except Exception as error:
                # Orbax may write its log later.
                self._failed_saves.error = error
                raise
            # Orbax notes the time of the rename, and renames, after it has called `_sync`.
            sync(self.path / str(step))
            sync(self.path, within=False)

    def remove_surplus(self) -> None:
        """Deletes the checkpoints that are not to be kept, as every save does.

        A process that was killed after a save may have left them behind.
        """
        checkpoints = self._checkpointer.checkpoints
        preserved = self._preservation.should_preserve(
            checkpoints, context=ocp.training.preservation_policies.PreservationContext()
        )
        for checkpoint, preserve in zip(checkpoints, preserved):
            if not preserve:
                self._checkpointer.delete(checkpoint.step)

    def metadata(self, step: int) -> Metadata:
        """The metadata of the checkpoint of `step`, with the current configuration keys.

        Raises:
            CheckpointError: for damaged metadata, and for a format that this version cannot read.
        """
        path = self.path / str(step)
        with damage_named(path, "metadata"):
            if not (path / "_CHECKPOINT_METADATA").is_file():
                raise ValueError("their file is missing")
            values = self._checkpointer.metadata(step).custom_metadata
            if not values:
                raise ValueError("their file can't be read")
            version = values["format"]
            if version >= 4 or "digest" in values:
                values = unsealed(values)
            if values["step"] != step:
                raise ValueError(f"they are those of step {values['step']}")
            if version > FORMAT:
                raise CheckpointError(
                    f"{path} was not written by this version or an earlier one: update alibi_jax"
                )
            if version == 1 and values["config"]["model"]["position"] in ("learned", "t5"):
                raise CheckpointError(
                    f"{path} was written by an earlier version, which stored the table of "
                    "positions elsewhere: read it with that version, or train anew"
                )
            config = upgraded_config(values["config"], version)
            return Metadata(**values | {"config": config})

    def restore(self, step: int, **abstract: Any) -> dict[str, Any]:
        """Reads items (`params`, `optimizer`) of a step, with the shardings of the abstract trees.

        From format 4 on, checksums prove that the values are those that were saved. Training saves
        finite numbers only, but earlier versions did not check that.

        Raises:
            CheckpointError: if the checkpoint is damaged, or if saved names or shapes differ from
                those of the abstract trees; the message names the first parameter that differs.
        """
        path, metadata = self.path / str(step), self.metadata(step)
        loaded: dict[str, Any] = {}
        trees = abstract
        shapes = self._saved_shapes(metadata, list(abstract))
        if metadata.format < 3:
            num_layers = metadata.config["model"]["num_layers"]
            trees = {
                item: format_2_tree(tree, shapes[item], num_layers)
                for item, tree in abstract.items()
            }
        for item, tree in trees.items():
            _check_shapes(path / item, shapes[item], shapes_of(tree))
        for item, tree in trees.items():
            with damage_named(path, item):
                if not (path / item).is_dir():
                    raise ValueError("its folder is missing")
                loaded |= self._checkpointer.load_checkpointables(step, {item: tree})
                if metadata.arrays and metadata.arrays[item] != described(loaded[item]):
                    raise ValueError("its values are not those that were saved")
                if not jax.jit(all_finite)(loaded[item]):
                    raise ValueError("not all of its numbers are finite")
        return loaded if metadata.format >= 3 else from_format_2(loaded, abstract)

    def _sync(self) -> None:
        """Waits until the running save is on the disk, before Orbax renames it."""
        for unfinished in self.path.glob("*.orbax-checkpoint-tmp"):
            sync(unfinished)

    def _saved_shapes(
        self, metadata: Metadata, items: list[str]
    ) -> dict[str, dict[str, tuple[int, ...]]]:
        """The shape of each array of these items by dotted name."""
        with damage_named(self.path / str(metadata.step), "list of arrays"):
            if metadata.arrays:
                return {
                    item: {
                        name: tuple(array["shape"]) for name, array in metadata.arrays[item].items()
                    }
                    for item in items
                }
            saved = self._checkpointer.checkpointables_metadata(metadata.step).metadata
            shapes = {item: shapes_of(saved[item]) for item in items}
            if not all(shapes.values()):
                raise ValueError("it can't be read")
            return shapes


def _preservation_policy(config: Checkpoint | None) -> Any:
    """Which checkpoints stay. Without a configuration, all of them do."""
    policies = ocp.training.preservation_policies
    if config is None:
        return policies.PreserveAll()
    kept: list[Any] = [policies.LatestN(config.keep)]
    if config.keep_every:
        kept.append(policies.EveryNSteps(config.keep_every))
    return policies.AnyPreservationPolicy(kept)


def _check_shapes(
    path: pathlib.Path, saved: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]
) -> None:
    # Orbax's own message for this names every handler but not the parameter.
    for name in [*saved, *wanted]:
        if saved.get(name) != wanted.get(name):
            raise CheckpointError(
                f"{path}: {name} has shape {saved.get(name, 'none')}, and this configuration needs "
                f"{wanted.get(name, 'none')}: use the configuration that the run was trained with, "
                "or another workdir"
            )
