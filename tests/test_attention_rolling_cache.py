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
# Steep, shallow, steep, for each two that share a key head.
SLOPES = [1.0, 0.5, 0.25, 0.125, 0.5, 2.0]


# Reach.


def most_left_out(slope, gap, distance):
    """The sum itself, term by term, until nothing is added."""
    terms, total = (math.exp(gap - slope * d) for d in range(distance, 10**7)), 0.0
    for term in terms:
        if total + term == total:
            return total
        total += term
    raise AssertionError("too far")


@settings(max_examples=100, deadline=None)
@given(st.floats(0.02, 4.0), st.floats(-5.0, 40.0), st.floats(1e-8, 0.9))
def test_reach_is_the_least_number_of_keys(slope, gap, tolerance):
    (length,) = reach_length([slope], gap, tolerance)
    assert most_left_out(slope, gap, int(length)) <= tolerance * (1 + 1e-9)
    if length > 1:
        assert most_left_out(slope, gap, int(length) - 1) > tolerance * (1 - 1e-9)


def test_reach_of_eight_heads():
    lengths = reach_length(alibi_slopes(8), 10.0, 1e-3)
    assert lengths.dtype == np.int32
    expected = [36, 74, 153, 316, 653, 1349, 2786, 5749]
    np.testing.assert_array_equal(lengths, expected)
    # Of a slope that a float32 can hold, and whose reach an int32 cannot.
    np.testing.assert_array_equal(reach_length([1e-30, 100.0], 0.0, 0.5), [2**31 - 1, 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.5, 0.0], 1.0, 0.1), "a slope of 0 bounds no reach"),
        (([0.5, -0.25], 1.0, 0.1), "a slope of -0.25"),
        (([float("nan")], 1.0, 0.1), "a slope of nan"),
        (([0.5], float("inf"), 0.1), "gap=inf must be finite"),
        (([0.5], float("nan"), 0.1), "gap=nan"),
        (([0.5], 1.0, 0.0), "tolerance=0.0 must be above 0 and below 1"),
        (([0.5], 1.0, 1.0), "tolerance=1.0"),
        (([0.5], 1.0, float("nan")), "tolerance=nan"),
    ],
)
def test_what_bounds_nothing_is_refused(arguments, message):
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
    # Up to scores of which float32 has but one decimal.
    st.floats(0.0, 6.0).map(lambda x: 10**x - 1),
    st.one_of(st.just(1.0), st.floats(-1.0, 1.0)),
)
def test_nothing_left_out_weighs_more_than_the_bound(
    seed, slope, fall, query_norm, evicted_norm, along
):
    """The worst keys there are: along the query, of the greatest norm, one at each position."""
    distance = max(1, round(fall / slope))
    rng = np.random.default_rng(seed)
    direction, other = rng.normal(size=(2, SIZE))
    direction /= np.linalg.norm(direction)
    query = np.float32(query_norm * direction)
    own = np.float32(along * evicted_norm * direction + 0.1 * other)
    # Rounded as the cache has it, and its norm as it is taken of it.
    lost = np.float32(evicted_norm * direction)

    def bound_at(distance):
        bound = bounded(
            query[None, None, None],
            own[None, None, None],
            jnp.float32([slope]),
            jnp.linalg.norm(lost)[None, None, None],
            jnp.int32([[distance]]),
        )
        assert (bound.shape, bound.dtype) == ((1, 1, 1), jnp.float32)
        return float(bound[0, 0, 0])

    bound = bound_at(distance)
    query, own, lost, slope = (np.float64(np.float32(x)) for x in (query, own, lost, slope))
    score, lost_score = (query @ x / math.sqrt(SIZE) for x in (own, lost))
    # All of the infinitely many that there can be, beside the own key: a share is at most that.
    log_ratio = lost_score - score - slope * distance - math.log(-math.expm1(-slope))
    assert math.exp(min(log_ratio, 0.0)) <= bound <= 1
    # And it is the closed form, but for rounding, not just anything large.
    rounding = 0.02 + 1e-5 * (abs(score) + abs(lost_score) + slope * distance)
    assert bound <= max(math.exp(min(log_ratio + rounding, 0.0)), 2e-35)
    # As far as the reach for that very gap it is what was asked for.
    (length,) = reach_length([slope], lost_score - score, 1e-3)
    rounding = 0.02 + 1e-5 * (abs(score) + abs(lost_score) + slope * length)
    assert bound_at(length) <= 1e-3 * math.exp(rounding)


# Rings.


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "capacity", "expected"),
    [
        (8, 8, 65536, {64 << n: (n,) for n in range(8)}),
        (8, 8, 300, {64: (0,), 128: (1,), 256: (2,), 300: (3, 4, 5, 6, 7)}),
        # As long as the shallowest of the query heads that share a key head asks for.
        (8, 2, 65536, {512: (0,), 8192: (1,)}),
        # Twelve heads are not in the order of their slopes.
        (3, 3, 4096, {512: (0,), 4096: (1,), 128: (2,)}),
    ],
)
def test_heads_of_one_length_share_a_ring(num_heads, num_kv_heads, capacity, expected):
    rings = jax.eval_shape(
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
    assert rings.heads == tuple(expected.values())
    for ring, (length, heads) in zip(rings.groups, expected.items()):
        assert ring.slots.key.shape == ring.slots.value.shape == (2, length, len(heads), SIZE)
        assert ring.slots.key.dtype == jnp.bfloat16


def rings_of():
    """Of 8 slots for the steep heads, and of 32."""
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


step = jax.jit(rolling_cache_attention)


def in_chunks(chunks, query, key, value, positions, ids, rings):
    """What ring attention gives of the whole, and the rings at its end."""
    outs, start = [], 0
    for chunk in chunks:
        part = slice(start, start + chunk)
        out, rings = step(
            *(jnp.asarray(x[:, part]) for x in (query, key, value)),
            jnp.float32(SLOPES),
            rings,
            used=jnp.int32(start),
            positions=jnp.asarray(positions[:, part], jnp.int32),
            segment_ids=jnp.asarray(ids[:, part], jnp.int32),
        )
        outs.append(out)
        start += chunk
    return np.concatenate(outs, axis=1), rings


def weights_of(query, key, positions, ids):
    """Of every query and key, [B, N, T, S], in float64; zeros for a query of padding."""
    query, key = np.float64(query), np.repeat(np.float64(key), HEADS // KV_HEADS, axis=2)
    distance = np.abs(positions[:, None, :, None] - positions[:, None, None, :])
    scores = np.einsum("btnh,bsnh->bnts", query, key) / math.sqrt(SIZE)
    scores -= np.array(SLOPES)[:, None, None] * distance
    seen = np.tril(np.ones((LENGTH, LENGTH), bool)) & (ids[:, None, :, None] * ids[:, None, None])
    scores = np.where(seen, scores, -np.inf)
    top = np.maximum(scores.max(-1, keepdims=True), -1e300)
    weights = np.exp(scores - top)
    return weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)


def held(lengths):
    """Which keys a query's ring still holds, [N, T, S], by index."""
    behind = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    return behind < np.array(lengths)[:, None, None]


def attended(weights, value):
    value = np.repeat(np.float64(value), HEADS // KV_HEADS, axis=2)
    total = np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return np.einsum("bnts,bsnh->btnh", weights / total, value)


# The second row is padded on the left, and once more later on.
IDS = np.ones((BATCH, LENGTH), int)
IDS[1, [0, 1, 2, 9, 10]] = 0
# Neither slots nor indices, and not one apart.
POSITIONS = 1000 + 3 * np.maximum(IDS.cumsum(1) - 1, 0)


@pytest.mark.parametrize("chunks", [[12, *[1] * 12], [1] * 24, [24], [3, 5, 16]], ids=str)
def test_d5_chunks_see_the_last_keys_at_their_positions(chunks):
    """Lightning-AI/litgpt#2182: more tokens than slots at once, and slots taken for positions."""
    rings = rings_of()
    lengths = [ring.slots.key.shape[1] for ring in rings.groups]
    assert (lengths, rings.heads) == ([8, 32], ((0, 2), (1,)))
    query, key, value = arrays()
    out, rings = in_chunks(chunks, query, key, value, POSITIONS, IDS, rings)
    weights = weights_of(query, key, POSITIONS, IDS) * held([8, 8, 32, 32, 8, 8])
    np.testing.assert_allclose(out, attended(weights, value), atol=1e-6)
    # Padding sees nothing.
    assert not out[IDS == 0].any()
    # What is known of the lost does not depend on the chunks.
    ring = rings.groups[0]
    lost = np.linalg.norm(key[:, :16, [0, 2]], axis=-1) * IDS[:, :16, None]
    np.testing.assert_allclose(ring.evicted_norm, lost.max(1), rtol=1e-6)
    np.testing.assert_array_equal(ring.evicted_position, POSITIONS[:, 15])
    _, whole = in_chunks([24], query, key, value, POSITIONS, IDS, rings_of())
    np.testing.assert_allclose(ring.omitted_share, whole.groups[0].omitted_share, rtol=1e-5)
    assert (ring.omitted_share > 0).all()
    # Of the longer ring nothing is.
    np.testing.assert_array_equal(rings.groups[1].omitted_share, [0, 0])
    np.testing.assert_array_equal(rings.groups[1].evicted_position, [-1, -1])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.floats(0.0, 6.0),
    st.integers(0, LENGTH - 1),
    st.floats(1.0, 30.0),
    st.sampled_from([0.0, 0.1, 0.5]),
)
@example(1, 5.75, 1, 7.5, 0.0)
def test_the_promise_of_a_ring_is_kept_or_known_to_be_broken(seed, scale, heavy, by, padding):
    """One heavy key, padding anywhere: the loss is never more than the ring has it."""
    query, key, value = arrays(seed)
    query *= np.float32(scale)
    key[:, heavy] *= np.float32(by)
    ids = (np.random.default_rng(seed).random((BATCH, LENGTH)) >= padding).astype(int)
    positions = np.maximum(ids.cumsum(1) - 1, 0)
    out, rings = in_chunks([12] + [1] * 12, query, key, value, positions, ids, rings_of())
    weights, kept = weights_of(query, key, positions, ids), held([8, 8, 32, 32, 8, 8])
    # All weights of a row may add up to more than 1 by their rounding.
    share = np.minimum((weights * ~kept).sum(-1), 1.0)
    bound = np.stack([ring.omitted_share for ring in rings.groups], axis=1)
    most = share.max(2).reshape(BATCH, KV_HEADS, -1).max(2)
    assert (most <= bound[:, [0, 1, 0]]).all()
    # Two averages of which one leaves out that share.
    apart = np.abs(out - attended(weights, value)).max(axis=3)
    most = 2 * bound.max(1)[:, None, None] * np.abs(value).max()
    assert (apart <= most + 1e-5 * scale * by).all()
