"""Train short, test long: ALiBi and the position methods it is compared with.

The bias functions are what other models import; they need JAX alone.
"""

from alibi_jax.biases import (
    Bias,
    Decay,
    FireWeights,
    LinearBias,
    alibi_bias,
    alibi_bias_at,
    alibi_slopes,
    fire_bias,
    fire_bias_at,
    forget_bias_at,
    forget_decay,
    kerple_log_bias,
    kerple_log_bias_at,
    kerple_power_bias,
    kerple_power_bias_at,
    sandwich_bias,
    sandwich_bias_at,
    sandwich_ratios,
    t5_bias,
    t5_bias_at,
    t5_buckets,
)

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
