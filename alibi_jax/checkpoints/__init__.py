"""Orbax checkpoints, and how those of earlier versions are read."""

from alibi_jax.checkpoints.migrations import FORMAT
from alibi_jax.checkpoints.store import CheckpointError, Checkpoints, Metadata

__all__ = ["FORMAT", "CheckpointError", "Checkpoints", "Metadata"]
