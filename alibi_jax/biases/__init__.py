"""Biases that are added to attention scores: one file a method.

Pure functions, arrays in and arrays out, for a model of any make. A bias is added after the
scores are divided by sqrt(H) and before the mask. Each comes in two forms: by length, for one
run of queries and keys, and `_at` positions given as arrays, for packed, padded, cached or
sharded ones; the forget gate's comes from the inputs instead. Where heads are sharded, slice
what is given by head out of the global arrays: slopes of a shard's own number of heads are
others. Keys after their query are treated by their distance, as those before it, unless a
function says otherwise.
"""

from alibi_jax.biases._positions import Bias
from alibi_jax.biases.alibi import LinearBias, alibi_bias, alibi_bias_at, alibi_slopes
from alibi_jax.biases.fire import FireWeights, fire_bias, fire_bias_at
from alibi_jax.biases.forget import Decay, forget_bias_at, forget_decay
from alibi_jax.biases.kerple import (
    kerple_log_bias,
    kerple_log_bias_at,
    kerple_power_bias,
    kerple_power_bias_at,
)
from alibi_jax.biases.sandwich import sandwich_bias, sandwich_bias_at, sandwich_ratios
from alibi_jax.biases.t5 import t5_bias, t5_bias_at, t5_buckets

__all__ = [
    "Bias",
    "Decay",
    "FireWeights",
    "LinearBias",
    "alibi_bias",
    "alibi_bias_at",
    "alibi_slopes",
    "fire_bias",
    "fire_bias_at",
    "forget_bias_at",
    "forget_decay",
    "kerple_log_bias",
    "kerple_log_bias_at",
    "kerple_power_bias",
    "kerple_power_bias_at",
    "sandwich_bias",
    "sandwich_bias_at",
    "sandwich_ratios",
    "t5_bias",
    "t5_bias_at",
    "t5_buckets",
]
