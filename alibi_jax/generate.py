"""Generates tokens after prompts of any lengths, greedily or by sampling, with one cache.

Axes: B prompts, T tokens, V vocabulary.
"""

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
    """Generates the tokens that follow each prompt, up to `stop_token`, which is not returned.

    At temperature 0 each token is the likeliest one. Above 0 each token is drawn from
    softmax(logits / temperature) over the likeliest tokens that together have a probability of at
    least `top_p` (Holtzman et al. 2020, section 3.1). The new tokens of a row do not depend on the
    other prompts: shorter prompts are padded on the left with invisible tokens, and each row has
    a random key of its own (`key` is split, or holds one key per prompt).

    A `cache_tolerance` is for models with linear biases only. Each head then keeps only its last
    keys. All other keys together have at most the share `cache_tolerance` of a token's attention
    weight, for tokens whose gap is at most `cache_gap`. `Transformer.init_cache` defines the gap.

    Two functions are compiled: one pass over the prompts, and one loop over the new tokens. They
    are compiled for each model, number of prompts, greatest prompt length and `max_new_tokens`.
    The loop is also compiled for each way of choosing tokens, greedy or random. With a
    `cache_tolerance`, both are also compiled for the numbers of keys that the slopes, the
    tolerance and the gap give.

    Raises:
        ValueError: if a prompt is empty or has a token that is not in the vocabulary, if an option
            is out of range, if the length exceeds a learned position table, or, after decoding, if
            the omitted share of some token's attention exceeds `cache_tolerance`.
    """
    tokens, token_mask = _pad_prompts(prompts, model.vocabulary.vocab_size)
    batch_size, length = tokens.shape
    if not isinstance(max_new_tokens, int | np.integer) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be a whole number of at least 1")
    max_new_tokens = int(max_new_tokens)
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be at least 0")
    # XLA may round a temperature below float32's least normal number to 0. Division by 0 would give
    # NaN, so such a temperature counts as 0.
    sampled = temperature >= float(np.finfo(np.float32).tiny)
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1")
    # The last new token is returned, but not passed to the model.
    max_row_length = int(token_mask.sum(axis=1).max()) + max_new_tokens - 1
    if model.max_length is not None and max_row_length > model.max_length:
        raise ValueError(
            f"a prompt of {max_row_length - max_new_tokens + 1} tokens and {max_new_tokens} new "
            f"tokens need more than the {model.max_length} learned positions"
        )
    if temperature > 0.0 and key is None:
        raise ValueError(f"temperature={temperature} draws at random: give a key")
    keys = jax.random.key(0) if key is None else key
    if not isinstance(keys, jax.Array) or not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
        raise ValueError("key must come from jax.random.key; it may be split into one per prompt")
    keys = jax.random.split(keys, batch_size) if keys.ndim == 0 else keys
    if keys.shape != (batch_size,):
        raise ValueError(
            f"{keys.shape[0]} keys for {batch_size} prompts: give one key, or one key per prompt"
        )
    graphdef, state = nnx.split(model)
    cache = model.init_cache(
        batch_size,
        length + max_new_tokens - 1,
        tolerance=cache_tolerance,
        gap=None if cache_tolerance is None else cache_gap,
    )
    logits, cache = prefill(graphdef, state, tokens, token_mask, cache)
    new_tokens, cache = generate_tokens(
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
        # The negation also catches NaN.
        if not share <= cache_tolerance:
            raise ValueError(
                f"the cache omitted up to {share:.2g} of a token's attention, more than "
                f"cache_tolerance={cache_tolerance:g}: give a cache_gap above {cache_gap:g}"
            )
    return [_cut_at_stop(row, stop_token) for row in np.asarray(new_tokens).tolist()]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def prefill(
    graphdef: Any,
    state: Any,
    tokens: Int[Array, "B T"],
    token_mask: Bool[Array, "B T"],
    cache: KVCache | BoundedKVCache,
) -> tuple[Float[Array, "B V"], KVCache | BoundedKVCache]:
    """Computes the logits after the prompts, and fills the empty cache with the prompts."""
    model = nnx.merge(graphdef, state)
    hidden, cache = model.hidden_states_with_cache(tokens, cache, token_mask=token_mask)
    return model.logits(hidden[:, -1:])[:, 0], cache


@functools.partial(jax.jit, static_argnums=(0, 8, 9), donate_argnums=2)
def generate_tokens(
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
    """Generates the new tokens one by one; returns them and the cache.

    The argument `cache` is donated, so the returned cache reuses its buffers.

    After its stop token a row is filled with stop tokens. The loop ends before `max_new_tokens`
    once all rows have stopped.
    """
    model = nnx.merge(graphdef, state)
    layers = model.unstacked_layers()

    def choose(step: Int[Array, ""], logits: Float[Array, "B V"]) -> Int[Array, "B"]:
        if not sampled:
            return logits.argmax(axis=-1).astype(jnp.int32)
        step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, step)
        # The greatest logit becomes 0, so that no temperature makes several logits +infinity.
        scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature
        sampled_tokens = jax.vmap(jax.random.categorical)(step_keys, nucleus(scaled, top_p))
        return sampled_tokens.astype(jnp.int32)

    def write_token(tokens: Array, step: Array, token: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], step, axis=1)

    def is_unfinished(carry: tuple[Any, ...]) -> Bool[Array, ""]:
        step, token, *_ = carry
        return (step < max_new_tokens) & (token != stop_token).any()

    def decode_step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        step, previous, tokens, cache = carry
        # Tokens after a row's stop token are not returned, so their omitted share must not count.
        token_mask = (previous != stop_token)[:, None]
        hidden, cache = model.hidden_states_with_cache(
            previous[:, None], cache, token_mask=token_mask, layers=layers
        )
        token = choose(step, model.logits(hidden)[:, 0])
        token = jnp.where(previous == stop_token, stop_token, token)
        return step + 1, token, write_token(tokens, step, token), cache

    first = choose(jnp.int32(0), logits)
    tokens = jnp.full((logits.shape[0], max_new_tokens), stop_token)
    carry = (jnp.int32(1), first, write_token(tokens, jnp.int32(0), first), cache)
    _, _, tokens, cache = jax.lax.while_loop(is_unfinished, decode_step, carry)
    return tokens, cache


def nucleus(logits: Float[Array, "B V"], top_p: float | Float[Array, ""]) -> Float[Array, "B V"]:
    """Logits with -inf for all but the likeliest tokens with a total probability of `top_p`.

    The likeliest tokens are the fewest whose total is at least `top_p`; tokens that are exactly
    as likely as the last of these are kept too.
    """
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    # For each token: the total probability of the tokens before it, which are likelier.
    likelier = jnp.cumsum(probabilities, axis=-1) - probabilities
    # A `top_p` of 1 keeps all tokens, even where the sum of the likelier ones is rounded up to 1.
    # One token always stays.
    keep = (likelier < top_p) | (jnp.asarray(top_p) >= 1.0)
    keep = keep.at[..., 0].set(True)
    threshold = jnp.where(keep, ordered, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def _pad_prompts(
    prompts: Sequence[Prompt], vocab_size: int
) -> tuple[Int[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """The prompts, padded on the left, and a mask that is False for padding."""
    if not len(prompts):
        raise ValueError("there is no prompt: give at least one")
    rows = [np.asarray(prompt) for prompt in prompts]
    for number, row in enumerate(rows):
        if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
            raise ValueError(
                f"prompt {number} must be a list of token ids, which are whole numbers"
            )
        if not row.size:
            raise ValueError(f"prompt {number} is empty: give at least one token")
        if row.min() < 0 or row.max() >= vocab_size:
            token = row.min() if row.min() < 0 else row.max()
            raise ValueError(
                f"prompt {number} has token {token}, which is not in the vocabulary of {vocab_size}"
            )
    length = max(row.size for row in rows)
    tokens = np.zeros((len(rows), length), np.int32)
    token_mask = np.zeros((len(rows), length), bool)
    for number, row in enumerate(rows):
        tokens[number, length - row.size :] = row
        token_mask[number, length - row.size :] = True
    return tokens, token_mask


def _cut_at_stop(tokens: list[int], stop_token: int | None) -> list[int]:
    """The tokens before the first stop token."""
    return tokens[: tokens.index(stop_token)] if stop_token in tokens else tokens
