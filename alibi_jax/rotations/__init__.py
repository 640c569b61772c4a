"""Position methods that transform queries and keys: rotary, its rescalings, xPos, Transformer-XL.

All functions are pure, take and return arrays, and work in any JAX model. Apply them to queries
and keys, not to values.
"""

from alibi_jax.angles import rotary_angles
from alibi_jax.rotations.frequencies import (
    dynamic_ntk_factor,
    interpolated_frequencies,
    ntk_frequencies,
    rotary_frequencies,
    truncated_frequencies,
    yarn_frequencies,
    yarn_temperature,
)
from alibi_jax.rotations.rotary import rotary
from alibi_jax.rotations.transformer_xl import transformer_xl
from alibi_jax.rotations.xpos import xpos

__all__ = [
    "dynamic_ntk_factor",
    "interpolated_frequencies",
    "ntk_frequencies",
    "rotary",
    "rotary_angles",
    "rotary_frequencies",
    "transformer_xl",
    "truncated_frequencies",
    "xpos",
    "yarn_frequencies",
    "yarn_temperature",
]
