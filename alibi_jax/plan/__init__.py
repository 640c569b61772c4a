"""A run compiled ahead of time for devices that are not here."""

from alibi_jax.plan.planner import plan

__all__ = ["plan"]
