"""Position methods for Flax's own attention modules: functions to give as their `attention_fn`.

`nnx.MultiHeadAttention` and `linen.MultiHeadDotProductAttention` take them as they are, for
self-attention: in training, padded or packed by the module's mask, and decoding with the
module's own cache. Where there are as many queries as keys, both stand at 0, 1, 2, ..., which is
as good as any count for methods that see distances alone, or at the `input_positions` that the
newer NNX modules can be called with; a lone query over more keys is the last key that its mask
lets it see. Other numbers of queries are refused: in cross attention there is no distance to
assume.

Scores and softmax are float32 whatever the module computes in, a fully masked row gives zeros,
also among weights that are sown, and dropout draws for every score (`broadcast_dropout` is for
Flax's own function).
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from alibi_jax.attention import Bias, attention
from alibi_jax.biases import LinearBias, alibi_slopes, t5_bias_at
from alibi_jax.biases.alibi import Slopes
from alibi_jax.rotations import rotary

AttentionFn = Callable[..., Array]


def alibi_attention_fn(
    num_heads_or_slopes: int | np.integer | Slopes, *, future_slopes: Slopes | None = None
) -> AttentionFn:
    """ALiBi (Press et al. 2021, section 3) as an `attention_fn` of Flax's attention modules.

    Takes the number of query heads, or their slopes, `[N]`. Encoders are right as they are;
    `future_slopes`, `[N]`, lets them tell the keys after a query from those before.
    """
    given = num_heads_or_slopes

    def bias() -> Bias:
        # Made when called: a module may be made under `jit` and called outside of it.
        slopes = alibi_slopes(int(given)) if isinstance(given, int | np.integer) else given
        return LinearBias(slopes, future_slopes)

    num_heads = int(given) if isinstance(given, int | np.integer) else len(given)
    return _attention_fn(bias, num_heads)


def t5_attention_fn(
    table: Float[Array, "buckets N"], *, bidirectional: bool = False, max_distance: int = 128
) -> AttentionFn:
    """T5's relative bias (Raffel et al. 2020, section 2.1) as an `attention_fn`.

    The table is a parameter of the module that calls this, in each forward pass anew: in Linen
    where it makes the attention module, in NNX from the `__call__` of a module that is given as
    the `attention_fn`. Otherwise it is a constant.
    """
    bias = functools.partial(
        t5_bias_at, table, bidirectional=bidirectional, max_distance=max_distance
    )
    return _attention_fn(lambda: bias, table.shape[1])


def rotary_attention_fn(*, frequencies: Float[Array, "F"] | None = None) -> AttentionFn:
    """Rotary positions (Su et al. 2021) as an `attention_fn`, with `frequencies` as in `rotary`.

    The module's cache holds its keys unrotated, so that rescaled frequencies are right too.
    """
    return _attention_fn(rotate=functools.partial(rotary, frequencies=frequencies))


def _attention_fn(
    position_bias: Callable[[], Bias] | None = None,
    num_heads: int | None = None,
    *,
    rotate: Callable[[Array, Array], Array] | None = None,
) -> AttentionFn:
    """The function for Flax; a closure, so that no argument can displace the positions' part."""

    def attention_fn(
        query: Float[Array, "... T N H"],
        key: Float[Array, "... S K H"],
        value: Float[Array, "... S K V"],
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
        input_positions: Int[Array, "... T"] | None = None,
    ) -> Float[Array, "... T N V"]:
        """Attention as `flax.nnx.dot_product_attention` has it, with the positions' part."""
        if bias is not None:
            raise ValueError(
                "a bias besides that of the positions: give what is to be hidden as mask"
            )
        if num_heads is not None and num_heads != query.shape[-2]:
            raise ValueError(f"biases of {num_heads} heads for {query.shape[-2]} query heads")
        batch, length, key_length = query.shape[:-3], query.shape[-3], key.shape[-3]
        if length not in (1, key_length):
            raise ValueError(
                f"{length} queries over {key_length} keys: for self-attention give as many of "
                "both, or one query and a cache; across sequences there is no distance to bias by"
            )
        if not 0.0 <= dropout_rate < 1.0:
            raise ValueError(f"dropout_rate={dropout_rate} must be at least 0 and below 1")
        dropout_key = None
        if dropout_rate > 0.0 and not deterministic:
            if dropout_rng is None:
                raise ValueError(f"dropout_rate={dropout_rate} without a dropout_rng")
            dropout_key = _typed(dropout_rng)
        # Any number of batch axes, as one.
        query, key, value = (
            x.astype(dtype or x.dtype).reshape(-1, *x.shape[-3:]) for x in (query, key, value)
        )
        if mask is not None:
            heads = mask.shape[-3] if mask.ndim > 2 else 1
            mask = jnp.broadcast_to(mask, (*batch, heads, length, key_length)).astype(bool)
            mask = mask.reshape(-1, heads, length, key_length)
        if input_positions is None:
            query_positions, key_positions = _positions(length, key_length, mask)
        elif length == key_length:
            query_positions = jnp.broadcast_to(input_positions, (*batch, length)).reshape(
                -1, length
            )
            key_positions = query_positions
        else:
            raise ValueError(
                f"input_positions with a cache of {key_length} keys, which does not hold theirs: "
                "decode without, which is right for positions that count up by one"
            )
        if rotate is not None:
            query, key = rotate(query, query_positions), rotate(key, key_positions)
        attend = functools.partial(
            attention,
            query,
            key,
            bias=None if position_bias is None else position_bias(),
            # A lone query counts as the last of the keys here, so that it may see all.
            causal=is_causal,
            query_positions=query_positions,
            key_positions=key_positions,
            mask=mask,
        )
        if isinstance(precision, jax.lax.Precision):
            precision = precision.name.lower()
        with jax.default_matmul_precision(precision) if precision else contextlib.nullcontext():
            out = attend(value, dropout_rate=dropout_rate, dropout_key=dropout_key)
            if module is not None:
                # What attention makes of values that are 1 at one key each: its weights.
                each = jnp.eye(key_length, dtype=value.dtype)[:, None]
                weights = attend(jnp.broadcast_to(each, (*value.shape[:-1], key_length)))
                weights = jnp.swapaxes(weights, 1, 2)
                module.sow(
                    nnx.Intermediate if isinstance(module, nnx.Module) else "intermediates",
                    "attention_weights",
                    weights.reshape(*batch, *weights.shape[1:]),
                )
        return out.reshape(*batch, *out.shape[1:])

    return attention_fn


def _positions(
    length: int, key_length: int, mask: Bool[Array, "B #N T S"] | None
) -> tuple[Int[Array, "*#B T"], Int[Array, "S"]]:
    keys = jnp.arange(key_length, dtype=jnp.int32)
    if length == key_length:
        return keys, keys
    if mask is None:
        return keys[-1:], keys
    return jnp.where(mask.any(axis=1), keys, 0).max(axis=-1), keys


def _typed(key: Array) -> Array:
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
