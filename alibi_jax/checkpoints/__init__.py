"""Orbax checkpoints, and the conversion of checkpoints that earlier versions wrote."""

from alibi_jax.checkpoints.arrays import all_finite
from alibi_jax.checkpoints.errors import CheckpointError
from alibi_jax.checkpoints.migrations import FORMAT
from alibi_jax.checkpoints.paths import check_path
from alibi_jax.checkpoints.store import Checkpoints, Metadata

__all__ = ["FORMAT", "CheckpointError", "Checkpoints", "Metadata", "all_finite", "check_path"]
