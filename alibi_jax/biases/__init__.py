"""Biases that are added to attention scores: one file for each method.

All functions are pure, take and return arrays, and work in any JAX model. Add a bias after the
scores are divided by sqrt(H) and before the mask.

Each bias comes in two forms. The first form takes lengths, for one contiguous run of queries and
keys. The second form, with `_at` in its name, takes arrays of positions, for packed, padded,
cached or sharded inputs. The forget gate's bias has only the second form. It takes the summed gates
instead of positions.

Where heads are sharded, slice the parameters of a shard's heads out of the global arrays: the
slopes for a smaller number of heads have other values. A key after its query gets the bias of
its distance, as a key before its query does, unless a function says otherwise.
"""

from alibi_jax.biases.alibi import LinearBias, alibi_bias, alibi_bias_at, alibi_slopes
from alibi_jax.biases.distances import Bias
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
