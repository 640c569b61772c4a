import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alibi_jax.attention.rolling_cache import (
    init_rolling_cache,
    omitted_share,
    reach_length,
    rolling_cache_attention,
)
from alibi_jax.biases import alibi_slopes

pytestmark = pytest.mark.usefixtures("quick_compile")

BATCH, LENGTH, HEADS, KV_HEADS, SIZE = 2, 24, 6, 3, 8
# A steep, a shallow and a steep pair. Each pair of query heads shares a key head.
SLOPES = [1.0, 0.5, 0.25, 0.125, 0.5, 2.0]


# Reach.


def greatest_omitted_share(slope, gap, distance):
    """The sum of the bound, term by term, until a term no longer changes it."""
    terms = (math.exp(gap - slope * d) for d in range(distance, 10**7))
    total = 0.0
    for term in terms:
        if total + term == total:
            return total
        total += term
    raise AssertionError("the sum did not converge")


@settings(max_examples=100, deadline=None)
@given(st.floats(0.02, 4.0), st.floats(-5.0, 40.0), st.floats(1e-8, 0.9))
def test_reach_is_the_least_number_of_keys(slope, gap, tolerance):
    (length,) = reach_length([slope], gap, tolerance)
    assert greatest_omitted_share(slope, gap, int(length)) <= tolerance * (1 + 1e-9)
    if length > 1:
        assert greatest_omitted_share(slope, gap, int(length) - 1) > tolerance * (1 - 1e-9)


def test_reach_of_eight_heads():
    lengths = reach_length(alibi_slopes(8), 10.0, 1e-3)
    assert lengths.dtype == np.int32
    expected = [36, 74, 153, 316, 653, 1349, 2786, 5749]
    np.testing.assert_array_equal(lengths, expected)
    # The first slope fits a float32, but its reach exceeds int32.
    np.testing.assert_array_equal(reach_length([1e-30, 100.0], 0.0, 0.5), [2**31 - 1, 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.5, 0.0], 1.0, 0.1), "a slope of 0 does not bound the reach"),
        (([0.5, -0.25], 1.0, 0.1), "a slope of -0.25"),
        (([float("nan")], 1.0, 0.1), "a slope of nan"),
        (([0.5], float("inf"), 0.1), "gap=inf must be finite"),
        (([0.5], float("nan"), 0.1), "gap=nan"),
        (([0.5], 1.0, 0.0), "tolerance=0.0 must be above 0 and below 1"),
        (([0.5], 1.0, 1.0), "tolerance=1.0"),
        (([0.5], 1.0, float("nan")), "tolerance=nan"),
    ],
)
def test_values_that_bound_nothing_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        reach_length(*arguments)


# The bound.

bounded = jax.jit(omitted_share)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.floats(2e-3, 2.0),
    st.floats(0.0, 90.0),
    st.floats(0.01, 30.0),
    # Up to scores that float32 represents to one decimal only.
    st.floats(0.0, 6.0).map(lambda x: 10**x - 1),
    st.one_of(st.just(1.0), st.floats(-1.0, 1.0)),
)
def test_omitted_keys_weigh_at_most_the_bound(
    seed, slope, bias, query_norm, evicted_norm, alignment
):
    """The worst case: keys along the query, of the greatest norm, one at each position."""
    distance = max(1, round(bias / slope))
    rng = np.random.default_rng(seed)
    direction, other = rng.normal(size=(2, SIZE))
    direction /= np.linalg.norm(direction)
    query = np.float32(query_norm * direction)
    own = np.float32(alignment * evicted_norm * direction + 0.1 * other)
    # Rounded as in the cache, and its norm is that of the rounded key.
    evicted = np.float32(evicted_norm * direction)

    def bound_at(distance):
        bound = bounded(
            query[None, None, None],
            own[None, None, None],
            jnp.float32([slope]),
            jnp.linalg.norm(evicted)[None, None, None],
            jnp.int32([[distance]]),
        )
        assert (bound.shape, bound.dtype) == ((1, 1, 1), jnp.float32)
        return float(bound[0, 0, 0])

    bound = bound_at(distance)
    query, own, evicted, slope = (np.float64(np.float32(x)) for x in (query, own, evicted, slope))
    own_score, evicted_score = (query @ x / math.sqrt(SIZE) for x in (own, evicted))
    # The weight of infinitely many keys, relative to the own key's: their share is at most this.
    log_ratio = evicted_score - own_score - slope * distance - math.log(-math.expm1(-slope))
    assert math.exp(min(log_ratio, 0.0)) <= bound <= 1
    # The bound is tight: it equals the closed form up to rounding.
    rounding = 0.02 + 1e-5 * (abs(own_score) + abs(evicted_score) + slope * distance)
    assert bound <= max(math.exp(min(log_ratio + rounding, 0.0)), 2e-35)
    # At the reach for exactly this gap the bound is the tolerance.
    (length,) = reach_length([slope], evicted_score - own_score, 1e-3)
    rounding = 0.02 + 1e-5 * (abs(own_score) + abs(evicted_score) + slope * length)
    assert bound_at(length) <= 1e-3 * math.exp(rounding)


# The cache.


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "capacity", "expected"),
    [
        (8, 8, 65536, {64 << n: (n,) for n in range(8)}),
        (8, 8, 300, {64: (0,), 128: (1,), 256: (2,), 300: (3, 4, 5, 6, 7)}),
        # The shallowest of the query heads that share a key head decides.
        (8, 2, 65536, {512: (0,), 8192: (1,)}),
        # The slopes of three heads are not in descending order.
        (3, 3, 4096, {512: (0,), 4096: (1,), 128: (2,)}),
    ],
)
def test_heads_with_the_same_number_of_slots_form_a_group(
    num_heads, num_kv_heads, capacity, expected
):
    cache = jax.eval_shape(
        functools.partial(
            init_rolling_cache,
            np.asarray(alibi_slopes(num_heads)),
            batch_size=2,
            capacity=capacity,
            num_kv_heads=num_kv_heads,
            head_size=SIZE,
            dtype=jnp.bfloat16,
            gap=10.0,
            tolerance=1e-3,
        )
    )
    assert cache.key_heads == tuple(expected.values())
    for group, (num_slots, heads) in zip(cache.groups, expected.items()):
        assert group.slots.key.shape == group.slots.value.shape == (2, num_slots, len(heads), SIZE)
        assert group.slots.key.dtype == jnp.bfloat16


def empty_cache():
    """Two groups: the steep heads with 8 slots, the others with 32."""
    return init_rolling_cache(
        SLOPES,
        batch_size=BATCH,
        capacity=32,
        num_kv_heads=KV_HEADS,
        head_size=SIZE,
        dtype=jnp.float32,
        gap=0.0,
        tolerance=0.25,
    )


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def arrays(seed=0):
    return (
        normal(seed, BATCH, LENGTH, HEADS, SIZE),
        normal(seed + 1, BATCH, LENGTH, KV_HEADS, SIZE),
        normal(seed + 2, BATCH, LENGTH, KV_HEADS, SIZE),
    )


attend = jax.jit(rolling_cache_attention)


def in_chunks(chunks, query, key, value, positions, ids, cache):
    """The outputs of all chunks, joined, and the final cache."""
    outs, start = [], 0
    for chunk in chunks:
        tokens = slice(start, start + chunk)
        out, cache = attend(
            *(jnp.asarray(x[:, tokens]) for x in (query, key, value)),
            jnp.float32(SLOPES),
            cache,
            used=jnp.int32(start),
            positions=jnp.asarray(positions[:, tokens], jnp.int32),
            segment_ids=jnp.asarray(ids[:, tokens], jnp.int32),
        )
        outs.append(out)
        start += chunk
    return np.concatenate(outs, axis=1), cache


def weights_of(query, key, positions, ids):
    """The weights of all pairs, [B, N, T, S], in float64; zeros for a padding query."""
    query, key = np.float64(query), np.repeat(np.float64(key), HEADS // KV_HEADS, axis=2)
    distance = np.abs(positions[:, None, :, None] - positions[:, None, None, :])
    scores = np.einsum("btnh,bsnh->bnts", query, key) / math.sqrt(SIZE)
    scores -= np.array(SLOPES)[:, None, None] * distance
    causal = np.tril(np.ones((LENGTH, LENGTH), bool))
    visible = causal & (ids[:, None, :, None] * ids[:, None, None])
    scores = np.where(visible, scores, -np.inf)
    row_max = np.maximum(scores.max(-1, keepdims=True), -1e300)
    weights = np.exp(scores - row_max)
    return weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)


def cached_keys(num_slots):
    """True where a query's key is still in the cache, [N, T, S]; `num_slots` is per head."""
    age = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    return age < np.array(num_slots)[:, None, None]


def weighted_mean(weights, value):
    value = np.repeat(np.float64(value), HEADS // KV_HEADS, axis=2)
    total = np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return np.einsum("bnts,bsnh->btnh", weights / total, value)


# The second row has padding on the left and in the middle.
IDS = np.ones((BATCH, LENGTH), int)
IDS[1, [0, 1, 2, 9, 10]] = 0
# Positions are not the slot numbers, not the indices, and not consecutive.
POSITIONS = 1000 + 3 * np.maximum(IDS.cumsum(1) - 1, 0)


@pytest.mark.parametrize("chunks", [[12, *[1] * 12], [1] * 24, [24], [3, 5, 16]], ids=str)
@pytest.mark.sample(2)
def test_d5_chunks_see_the_last_keys_at_their_positions(chunks):
    """Lightning-AI/litgpt#2182: a chunk with more tokens than slots; slots used as positions."""
    cache = empty_cache()
    num_slots = [group.slots.key.shape[1] for group in cache.groups]
    assert (num_slots, cache.key_heads) == ([8, 32], ((0, 2), (1,)))
    query, key, value = arrays()
    out, cache = in_chunks(chunks, query, key, value, POSITIONS, IDS, cache)
    weights = weights_of(query, key, POSITIONS, IDS) * cached_keys([8, 8, 32, 32, 8, 8])
    np.testing.assert_allclose(out, weighted_mean(weights, value), atol=1e-6)
    # Padding sees nothing.
    assert not out[IDS == 0].any()
    # The record of the evicted tokens does not depend on the chunks.
    short, long = cache.groups
    norms = np.linalg.norm(key[:, :16, [0, 2]], axis=-1) * IDS[:, :16, None]
    np.testing.assert_allclose(short.evicted_norm, norms.max(1), rtol=1e-6)
    np.testing.assert_array_equal(short.evicted_position, POSITIONS[:, 15])
    _, single = in_chunks([24], query, key, value, POSITIONS, IDS, empty_cache())
    np.testing.assert_allclose(short.omitted_share, single.groups[0].omitted_share, rtol=1e-5)
    assert (short.omitted_share > 0).all()
    # The group with more slots has evicted nothing.
    np.testing.assert_array_equal(long.omitted_share, [0, 0])
    np.testing.assert_array_equal(long.evicted_position, [-1, -1])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.floats(0.0, 6.0),
    st.integers(0, LENGTH - 1),
    st.floats(1.0, 30.0),
    st.sampled_from([0.0, 0.1, 0.5]),
)
@example(1, 5.75, 1, 7.5, 0.0)
def test_omitted_share_bounds_the_actual_loss(seed, scale, heavy, factor, padding):
    """With one heavy key and padding anywhere, the cache never underestimates its loss."""
    query, key, value = arrays(seed)
    query *= np.float32(scale)
    key[:, heavy] *= np.float32(factor)
    ids = (np.random.default_rng(seed).random((BATCH, LENGTH)) >= padding).astype(int)
    positions = np.maximum(ids.cumsum(1) - 1, 0)
    out, cache = in_chunks([12] + [1] * 12, query, key, value, positions, ids, empty_cache())
    weights, cached = weights_of(query, key, positions, ids), cached_keys([8, 8, 32, 32, 8, 8])
    # Rounding may make the weights of a row add up to more than 1.
    share = np.minimum((weights * ~cached).sum(-1), 1.0)
    bound = np.stack([group.omitted_share for group in cache.groups], axis=1)
    greatest = share.max(2).reshape(BATCH, KV_HEADS, -1).max(2)
    assert (greatest <= bound[:, [0, 1, 0]]).all()
    # The two means differ because one of them omits this share of the weight.
    difference = np.abs(out - weighted_mean(weights, value)).max(axis=3)
    allowed = 2 * bound.max(1)[:, None, None] * np.abs(value).max()
    assert (difference <= allowed + 1e-5 * scale * factor).all()
