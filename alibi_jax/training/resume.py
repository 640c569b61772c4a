"""The checkpoint from which a run goes on, and whether the run is still the same."""

import pathlib

from alibi_jax.checkpoints import CheckpointError, Checkpoints, Metadata
from alibi_jax.config import SCHEDULES, Config, ConfigError, flatten, from_dict
from alibi_jax.data.tokenizers import Tokenizer

# Keys that may differ when a run is resumed. All other keys change the numbers of the run.
_CHANGEABLE_KEYS = (
    "checkpoint.",
    "mesh.",
    "data.data_dir",
    "data.path",
    "train.log_every",
    # It matters only in a step at which the run would otherwise have ended.
    "train.max_skipped_steps",
    "train.validation_",
)


def check_same_config(saved: Metadata, config: Config, workdir: pathlib.Path) -> None:
    """Raises ConfigError if the run in `workdir` has another configuration than this one."""
    before, now = flatten(from_dict(saved.config)), flatten(config)
    # Only a decaying schedule depends on its last step.
    decays = SCHEDULES[now["optimizer.schedule"]].decays
    changeable = _CHANGEABLE_KEYS + (() if decays else ("train.steps",))
    for key, value in now.items():
        if before[key] != value and not key.startswith(changeable):
            raise ConfigError(
                f"{key}={value!r}, but the run in {workdir} has {before[key]!r}: give that value "
                "to resume the run, or another --workdir to start a new one"
            )


def check_same_text(
    saved: Metadata, text: str, tokenizer: Tokenizer, workdir: pathlib.Path
) -> None:
    """Raises ConfigError if the run in `workdir` was trained on another text or vocabulary."""
    if (saved.text, saved.tokenizer) != (text, tokenizer.to_dict()):
        raise ConfigError(
            f"the run in {workdir} was trained on another text or vocabulary than data.dataset and "
            "data.tokenizer give now: restore them to resume the run, or give another --workdir to "
            "start a new one"
        )


def saved_metadata(workdir: pathlib.Path, step: int | None) -> Metadata | None:
    """The metadata of a step, or of the latest step; None for a run without checkpoints."""
    if not (workdir / "checkpoints").is_dir():
        if step is None:
            return None
        raise CheckpointError(
            f"--step={step}: {workdir} has no checkpoints: leave --step out to start a run"
        )
    with Checkpoints(workdir) as checkpoints:
        if step is None and checkpoints.latest_step() is None:
            return None
        return checkpoints.metadata(checkpoints.check_step(step))
