"""Text from a model: prompts of any lengths, one cache, greedy or sampled."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Integer, Key

from alibi_jax.model import Transformer
from alibi_jax.model.kv_cache import BoundedKVCache, KVCache

Prompt = Sequence[int] | Integer[np.ndarray, "T"]


def generate(
    model: Transformer,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    key: Key[Array, ""] | Key[Array, "B"] | None = None,
    stop_token: int | None = None,
    cache_tolerance: float | None = None,
    cache_gap: float = 16.0,
) -> list[list[int]]:
    """The tokens that follow each prompt, up to and without `stop_token`.

    At temperature 0 the likeliest token each time; above, a draw from softmax(logits /
    temperature) over the likeliest tokens that together have a probability of at least `top_p`
    (Holtzman et al. 2020, section 3.1). A prompt's tokens do not depend on the others': shorter
    ones are padded on the left, unseen, and each row draws from a key of its own (`key` split,
    or given as one a row).

    With a `cache_tolerance`, for models of linear biases, each head keeps only its last keys, all
    others having at most that share of a token's attention wherever scores spread no wider than
    `cache_gap` (`Transformer.init_cache`).

    One pass over the prompts and one loop over the new tokens are compiled, for each model,
    number of prompts, greatest prompt length and `max_new_tokens`; with a `cache_tolerance`, also
    for the numbers of keys that the slopes ask for.

    Raises:
        ValueError: for prompts that are empty or not of the vocabulary, options out of range,
            a length that a learned table does not reach, or, after decoding, a greater share
            left out of some token's attention than `cache_tolerance`.
    """
    tokens, real = _padded(prompts, model.vocabulary.vocab_size)
    batch_size, length = tokens.shape
    if not isinstance(max_new_tokens, int | np.integer) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be a whole number of at least 1")
    max_new_tokens = int(max_new_tokens)
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be at least 0")
    # Below, float32 would have 0, by which nothing can be divided.
    sampled = temperature >= float(np.finfo(np.float32).tiny)
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1")
    # The last token is given out, but not taken in.
    total = int(real.sum(axis=1).max()) + max_new_tokens - 1
    if model.max_length is not None and total > model.max_length:
        raise ValueError(
            f"a prompt of {total - max_new_tokens + 1} tokens and {max_new_tokens} new ones pass "
            f"position {model.max_length}, where the learned positions end"
        )
    if temperature > 0.0 and key is None:
        raise ValueError(f"temperature={temperature} draws at random: give a key")
    keys = jax.random.key(0) if key is None else key
    if not isinstance(keys, jax.Array) or not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
        raise ValueError("key must be made by jax.random.key, and may be split, one a prompt")
    keys = jax.random.split(keys, batch_size) if keys.ndim == 0 else keys
    if keys.shape != (batch_size,):
        raise ValueError(f"{keys.shape[0]} keys for {batch_size} prompts: give one, or one each")
    graphdef, state = nnx.split(model)
    cache = model.init_cache(
        batch_size,
        length + max_new_tokens - 1,
        tolerance=cache_tolerance,
        gap=None if cache_tolerance is None else cache_gap,
    )
    logits, cache = prefill(graphdef, state, tokens, real, cache)
    new, cache = decode(
        graphdef,
        state,
        cache,
        logits,
        keys,
        jnp.float32(temperature),
        jnp.float32(top_p),
        jnp.int32(-1 if stop_token is None else stop_token),
        max_new_tokens,
        sampled,
    )
    if cache_tolerance is not None and isinstance(cache, BoundedKVCache):
        share = float(cache.omitted_share.max())
        # Also where it is no number.
        if not share <= cache_tolerance:
            raise ValueError(
                f"up to {share:.2g} of a token's attention was left out, more than "
                f"cache_tolerance={cache_tolerance:g}: give a cache_gap above {cache_gap:g}"
            )
    return [_until(row, stop_token) for row in np.asarray(new).tolist()]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def prefill(
    graphdef: Any,
    state: Any,
    tokens: Int[Array, "B T"],
    real: Bool[Array, "B T"],
    cache: KVCache | BoundedKVCache,
) -> tuple[Float[Array, "B V"], KVCache | BoundedKVCache]:
    """The logits after the prompts, and the cache, which was empty, with the prompts in it."""
    model = nnx.merge(graphdef, state)
    hidden, cache = model.hidden_states_with_cache(tokens, cache, real=real)
    return model.logits(hidden[:, -1:])[:, 0], cache


@functools.partial(jax.jit, static_argnums=(0, 8, 9), donate_argnums=2)
def decode(
    graphdef: Any,
    state: Any,
    cache: KVCache | BoundedKVCache,
    logits: Float[Array, "B V"],
    keys: Key[Array, "B"],
    temperature: Float[Array, ""],
    top_p: Float[Array, ""],
    stop_token: Int[Array, ""],
    max_new_tokens: int,
    sampled: bool,
) -> tuple[Int[Array, "B {max_new_tokens}"], KVCache | BoundedKVCache]:
    """The new tokens, one after another, and the cache, which takes the place of the one given.

    After a row's stop token come only more of it; ends before `max_new_tokens` once all rows have
    stopped.
    """
    model = nnx.merge(graphdef, state)
    layers = model.unstacked_layers()

    def choose(step: Int[Array, ""], logits: Float[Array, "B V"]) -> Int[Array, "B"]:
        if not sampled:
            return logits.argmax(axis=-1).astype(jnp.int32)
        step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, step)
        # Less the greatest, so that no temperature makes an infinity of two.
        scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature
        drawn = jax.vmap(jax.random.categorical)(step_keys, nucleus(scaled, top_p))
        return drawn.astype(jnp.int32)

    def put(tokens: Array, step: Array, chosen: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(tokens, chosen[:, None], step, axis=1)

    def going_on(carry: tuple[Any, ...]) -> Bool[Array, ""]:
        step, chosen, *_ = carry
        return (step < max_new_tokens) & (chosen != stop_token).any()

    def one_more(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        step, last, tokens, cache = carry
        # What comes after a row's stop token is not given out, and should not count.
        real = (last != stop_token)[:, None]
        hidden, cache = model.hidden_states_with_cache(
            last[:, None], cache, real=real, layers=layers
        )
        chosen = choose(step, model.logits(hidden)[:, 0])
        chosen = jnp.where(last == stop_token, stop_token, chosen)
        return step + 1, chosen, put(tokens, step, chosen), cache

    first = choose(jnp.int32(0), logits)
    tokens = jnp.full((logits.shape[0], max_new_tokens), stop_token)
    carry = (jnp.int32(1), first, put(tokens, jnp.int32(0), first), cache)
    _, _, tokens, cache = jax.lax.while_loop(going_on, one_more, carry)
    return tokens, cache


def nucleus(logits: Float[Array, "B V"], top_p: float | Float[Array, ""]) -> Float[Array, "B V"]:
    """Logits with -inf for all but the likeliest tokens of together at least `top_p`."""
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    # What the likelier tokens have together.
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # At 1 all are kept, whatever their sum is rounded to; and the likeliest always.
    kept = (before < top_p) | (jnp.asarray(top_p) >= 1.0)
    kept = kept.at[..., 0].set(True)
    least = jnp.where(kept, ordered, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(logits >= least, logits, -jnp.inf)


def _padded(
    prompts: Sequence[Prompt], vocab_size: int
) -> tuple[Int[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """The prompts padded on the left, and where they are real."""
    if not len(prompts):
        raise ValueError("there is no prompt: give at least one")
    rows = [np.asarray(prompt) for prompt in prompts]
    for number, row in enumerate(rows):
        if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
            raise ValueError(f"prompt {number} is no list of token ids, which are whole numbers")
        if not row.size:
            raise ValueError(f"prompt {number} is empty: give at least one token")
        if row.min() < 0 or row.max() >= vocab_size:
            token = row.min() if row.min() < 0 else row.max()
            raise ValueError(
                f"prompt {number} has token {token}, which is not in the vocabulary of {vocab_size}"
            )
    length = max(row.size for row in rows)
    tokens = np.zeros((len(rows), length), np.int32)
    real = np.zeros((len(rows), length), bool)
    for number, row in enumerate(rows):
        tokens[number, length - row.size :] = row
        real[number, length - row.size :] = True
    return tokens, real


def _until(tokens: list[int], stop_token: int | None) -> list[int]:
    return tokens[: tokens.index(stop_token)] if stop_token in tokens else tokens
