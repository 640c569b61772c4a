"""Position methods for Flax's own attention modules, as functions for their `attention_fn`.

`nnx.MultiHeadAttention` and `linen.MultiHeadDotProductAttention` take these functions unchanged,
for self-attention: in training, with padding or packing by the module's mask, and for decoding
with the module's own cache. With as many queries as keys, queries and keys have the positions 0, 1,
2, ..., or the `input_positions` that a call of the newer NNX modules may give. Counting from 0 is
sufficient, because these methods depend on distances only. A single query over more keys has the
position of the last key that its mask lets it see. Other numbers of queries raise an error: cross
attention has no distances.

Scores and softmax are float32 in modules of any dtype. A fully masked row is zero, also in the sown
weights. Dropout draws for every score: `broadcast_dropout` is ignored.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Real

from alibi_jax.attention import Bias, attention
from alibi_jax.biases import LinearBias, alibi_slopes, t5_bias_at
from alibi_jax.biases.alibi import Slopes
from alibi_jax.rotations import rotary

AttentionFn = Callable[..., Array]


def alibi_attention_fn(
    num_heads_or_slopes: int | np.integer | Slopes, *, future_slopes: Slopes | None = None
) -> AttentionFn:
    """ALiBi (Press et al. 2021, section 3) as an `attention_fn` of Flax's attention modules.

    The argument is the number of query heads, or their slopes, `[N]`. Encoders can use ALiBi too.
    If `future_slopes`, `[N]`, are given, the keys after a query use them, so that an encoder
    distinguishes these keys from the keys before the query.
    """
    if isinstance(num_heads_or_slopes, int | np.integer):
        num_heads, slopes = int(num_heads_or_slopes), None
    else:
        num_heads, slopes = len(num_heads_or_slopes), num_heads_or_slopes

    def make_bias() -> Bias:
        # The bias is made in each call: a module may be made under `jit` and called outside of it.
        return LinearBias(alibi_slopes(num_heads) if slopes is None else slopes, future_slopes)

    return _attention_fn(make_bias, num_heads)


def t5_attention_fn(
    table: Float[Array, "buckets N"], *, bidirectional: bool = False, max_distance: int = 128
) -> AttentionFn:
    """T5's relative bias (Raffel et al. 2020, section 2.1) as an `attention_fn`.

    To train the table, make it a parameter of a module, and call this function in each forward
    pass. In Linen, call it where the module with the table makes the attention module. In NNX, give
    the module with the table as the `attention_fn`, and call this function in its `__call__`.
    Otherwise the table is a constant.
    """
    bias = functools.partial(
        t5_bias_at, table, bidirectional=bidirectional, max_distance=max_distance
    )
    return _attention_fn(lambda: bias, table.shape[1])


def rotary_attention_fn(*, frequencies: Float[Array, "F"] | None = None) -> AttentionFn:
    """Rotary positions (Su et al. 2021) as an `attention_fn`, with `frequencies` as in `rotary`.

    The module's cache holds unrotated keys, so that rescaled frequencies apply to them too.
    """
    return _attention_fn(rotate=functools.partial(rotary, frequencies=frequencies))


def _attention_fn(
    make_bias: Callable[[], Bias] | None = None,
    num_heads: int | None = None,
    *,
    rotate: Callable[[Array, Array], Array] | None = None,
) -> AttentionFn:
    """Makes an `attention_fn`.

    It is a closure, so that no argument that Flax passes can replace the position method.
    """

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
        input_positions: Real[Array, "... T"] | None = None,
    ) -> Float[Array, "... T N V"]:
        """`flax.nnx.dot_product_attention` with the position method."""
        if bias is not None:
            raise ValueError(
                "bias must be None: the position method sets the bias; hide keys with a mask"
            )
        if num_heads is not None and num_heads != query.shape[-2]:
            raise ValueError(
                f"the biases of {num_heads} heads do not fit {query.shape[-2]} query heads: "
                "make the attention_fn with one bias for each query head"
            )
        batch, length, key_length = query.shape[:-3], query.shape[-3], key.shape[-3]
        if length not in (1, key_length):
            raise ValueError(
                f"{length} queries over {key_length} keys: for self-attention give as many "
                "queries as keys, or one query and a cache; cross attention has no distances"
            )
        if not 0.0 <= dropout_rate < 1.0:
            raise ValueError(f"dropout_rate={dropout_rate} must be at least 0 and below 1")
        dropout_key = None
        if dropout_rate > 0.0 and not deterministic:
            if dropout_rng is None:
                raise ValueError(f"dropout_rate={dropout_rate} needs a dropout_rng")
            dropout_key = _as_typed_key(dropout_rng)
        # All batch axes become one.
        query, key, value = (
            x.astype(dtype or x.dtype).reshape(-1, *x.shape[-3:]) for x in (query, key, value)
        )
        if mask is not None:
            mask_heads = mask.shape[-3] if mask.ndim > 2 else 1
            mask = jnp.broadcast_to(mask, (*batch, mask_heads, length, key_length)).astype(bool)
            mask = mask.reshape(-1, mask_heads, length, key_length)
        if input_positions is None:
            query_positions, key_positions = _positions(length, key_length, mask)
        elif length == key_length:
            query_positions = jnp.broadcast_to(input_positions, (*batch, length)).reshape(
                -1, length
            )
            key_positions = query_positions
        else:
            raise ValueError(
                f"input_positions do not give the positions of the {key_length} keys in the cache: "
                "decode without input_positions; the result is right for consecutive positions"
            )
        if rotate is not None:
            query, key = rotate(query, query_positions), rotate(key, key_positions)
        attend = functools.partial(
            attention,
            query,
            key,
            bias=None if make_bias is None else make_bias(),
            # A single query is the last of the keys here, so that it may see all of them.
            causal=is_causal,
            query_positions=query_positions,
            key_positions=key_positions,
            mask=mask,
        )
        name = _precision_name(precision)
        with jax.default_matmul_precision(name) if name else contextlib.nullcontext():
            out = attend(value, dropout_rate=dropout_rate, dropout_key=dropout_key)
            if module is not None:
                # With one-hot values the output of attention is its weights.
                one_hot = jnp.eye(key_length, dtype=value.dtype)[:, None]
                weights = attend(jnp.broadcast_to(one_hot, (*value.shape[:-1], key_length)))
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
    """Positions of the queries and of the keys."""
    key_positions = jnp.arange(key_length, dtype=jnp.int32)
    if length == key_length:
        return key_positions, key_positions
    if mask is None:
        return key_positions[-1:], key_positions
    return jnp.where(mask.any(axis=1), key_positions, 0).max(axis=-1), key_positions


def _precision_name(precision: Any) -> str | None:
    """The name by which `jax.default_matmul_precision` knows a module's precision.

    It knows no pair of precisions, one for each operand: the higher of the two applies to both.
    """
    presets = jax.lax.DotAlgorithmPreset
    if isinstance(precision, str) and precision in presets.__members__:
        precision = presets[precision]
    if precision in (None, presets.DEFAULT):
        return None
    if isinstance(precision, presets):
        return precision.name
    if isinstance(precision, jax.lax.DotAlgorithm):
        raise ValueError(
            f"precision={precision} has no name: give one of the presets of "
            "jax.lax.DotAlgorithmPreset"
        )
    pair = precision if isinstance(precision, tuple | list) else (precision,)
    if len(pair) > 2 or not all(isinstance(level, str | jax.lax.Precision) for level in pair):
        raise ValueError(
            f"precision={precision!r}: give None, a name, a jax.lax.Precision, or a pair of them"
        )
    levels = [jax.lax.Precision(level) for level in pair]
    return max(levels, key=lambda level: level.value).name.lower()


def _as_typed_key(key: Array) -> Array:
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
