"""Train short, test long: ALiBi and the position methods it is compared with.

The bias functions are what other models import; they need JAX alone.
"""

from alibi_jax.biases import (
    alibi_bias,
    alibi_bias_at,
    alibi_slopes,
    t5_bias,
    t5_bias_at,
    t5_buckets,
)

__all__ = ["alibi_bias", "alibi_bias_at", "alibi_slopes", "t5_bias", "t5_bias_at", "t5_buckets"]
