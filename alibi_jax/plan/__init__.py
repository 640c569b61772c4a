"""Plans a run, by compiling it ahead of time for devices that need not be attached."""

from alibi_jax.plan.planner import plan

__all__ = ["plan"]
