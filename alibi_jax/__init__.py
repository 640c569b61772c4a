"""Train short, test long: ALiBi and the position methods it is compared with.

These names are what other models import. All but `alibi_attention_fn`, which is for Flax's
attention modules, need only JAX, NumPy and jaxtyping.
"""

from typing import TYPE_CHECKING, Any

from alibi_jax.attention import alibi_attention
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

if TYPE_CHECKING:
    from alibi_jax.flax_attention import alibi_attention_fn as alibi_attention_fn

__version__ = "0.2.0"

__all__ = [
    "Bias",
    "Decay",
    "FireWeights",
    "LinearBias",
    "__version__",
    "alibi_attention",
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


def __getattr__(name: str) -> Any:
    # `alibi_attention_fn` is not in `__all__` and is imported only on request, because the core can
    # be installed without Flax.
    if name == "alibi_attention_fn":
        try:
            from alibi_jax.flax_attention import alibi_attention_fn
        except ModuleNotFoundError as error:
            raise ImportError(
                "alibi_jax.alibi_attention_fn is for Flax's attention modules: pip install flax"
            ) from error
        return alibi_attention_fn
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
