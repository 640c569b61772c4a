"""Reach keeps every key block that matters, whatever the data, and leaves out most others."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_jax.attention import alibi_attention, engines
from alibi_jax.attention.reach import NEGLIGIBLE, KeyBlocks, norm_bound, reach
from alibi_jax.attention.visibility import Visibility
from alibi_jax.biases import LinearBias, alibi_slopes

# The last block has only one query.
BLOCK_SIZE, LENGTH, HEADS, SIZE = 16, 129, 4, 8
# A flat slope, a steep one, one that rewards distance, and one too shallow to leave out any key.
ODD_SLOPES = np.array([0.0, 2.0, -0.125, 1e-4], np.float32)

pytestmark = pytest.mark.usefixtures("quick_compile")


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def arrays(batch=2, length=LENGTH, key_length=LENGTH, heads=HEADS, kv_heads=2, size=SIZE):
    return normal(0, batch, length, heads, size), normal(1, batch, key_length, kv_heads, size)


def heavy(query, key, index=3):
    """One key, of the first key head, to which all queries attend from any distance."""
    query, key = np.abs(query), key.copy()
    key[:, index, 0] = 40.0
    return query, key


def opposed(query, key):
    """Queries of equal norm; the own key of each is either the lightest key or the heaviest."""
    length, key_length = query.shape[1], key.shape[1]
    signs = np.where(np.arange(key_length) % 3 == 0, 1.0, -1.0)
    query = np.full_like(query, 1.5)
    query[:, length // 2 :] *= -1
    return query, np.broadcast_to(1.5 * signs[:, None, None], key.shape).astype(np.float32)


DATA = {
    "normal": lambda query, key: (query, key),
    "three times": lambda query, key: (3 * query, 3 * key),
    "thirty times": lambda query, key: (30 * query, key),
    "huge": lambda query, key: (1e4 * query, 1e4 * key),
    "no queries": lambda query, key: (0 * query, key),
    "no keys": lambda query, key: (query, 0 * key),
    "heavy": heavy,
    "heavy ahead": functools.partial(heavy, index=-3),
    "opposed": opposed,
}


@functools.partial(jax.jit, static_argnums=(3, 4, 5), static_argnames="block_size")
def key_blocks(query, key, bias, causal, window, tolerance, arrays, block_size=BLOCK_SIZE):
    """`reach` of traced arrays; `arrays` are the fields of the `Visibility` that may be traced."""
    visibility = Visibility(causal, window, **arrays)
    return reach(query, key, bias, visibility, block_size=block_size, tolerance=tolerance)


def seen_by(causal, window, fields, length, key_length):
    """True where a query sees a key, `[B or 1, 1, T, S]`."""
    query_indices = np.arange(length)[:, None] + int(fields.get("offset", 0))
    keys = np.arange(key_length)
    seen = (keys <= query_indices) | (not causal)
    if window is not None:
        seen &= np.abs(keys - query_indices) < window
    seen = seen[None, None]
    if "query_segment_ids" in fields:
        ids = np.asarray(fields["query_segment_ids"])[:, None, :, None]
        seen = seen & (ids == np.asarray(fields["key_segment_ids"])[:, None, None]) & (ids != 0)
    return seen


def shares(query, key, slopes, causal=True, window=None, fields=None, future_slopes=None):
    """The weight of each key in a row, `[B, N, T, S]`, in numpy and float64."""
    query, key, slopes = (np.asarray(x, np.float64) for x in (query, key, slopes))
    (length, heads, size), (key_length, kv_heads) = query.shape[1:], key.shape[1:3]
    fields = fields or {}
    key = np.repeat(key, heads // kv_heads, axis=2)
    scores = np.einsum("btnh,bsnh->bnts", query, key) / math.sqrt(size)
    query_indices = np.arange(length) + int(fields.get("offset", 0))
    positions = np.asarray(fields.get("query_positions", query_indices), np.float64)
    key_positions = np.asarray(fields.get("key_positions", np.arange(key_length)), np.float64)
    relative = (key_positions[..., None, :] - positions[..., None])[..., None, :, :]
    future = slopes if future_slopes is None else np.asarray(future_slopes, np.float64)
    slope = np.where(relative > 0, future[:, None, None], slopes[:, None, None])
    scores = scores - slope * np.abs(relative)
    seen = seen_by(causal, window, fields, length, key_length)
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(-1, keepdims=True)
    return np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)


def left_out(blocks, length, key_length, block_size=BLOCK_SIZE):
    """True where a key is outside the range of a query, `[B, N, T, S]`."""
    start, stop = (np.repeat(x, block_size, axis=-1)[..., :length, None] for x in blocks)
    index = np.arange(key_length) // block_size
    return (index < start) | (index >= stop)


def lost(blocks, weights, block_size=BLOCK_SIZE):
    """The share of each row that is left out: its error in total variation."""
    return np.where(left_out(blocks, *weights.shape[2:], block_size), weights, 0.0).sum(-1)


# The keys that are left out have at most the tolerance.


@pytest.mark.parametrize("tolerance", [NEGLIGIBLE, 1e-6, 1e-3, 0.1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.sample(3)
def test_left_out_is_at_most_the_tolerance_whatever_the_data(causal, tolerance):
    skipped = 0.0
    for slopes in (np.asarray(alibi_slopes(HEADS)), ODD_SLOPES):
        for make in DATA.values():
            query, key = make(*arrays())
            blocks = key_blocks(query, key, LinearBias(slopes), causal, None, tolerance, {})
            assert blocks.start.dtype == blocks.stop.dtype == jnp.int32
            weights = shares(query, key, slopes, causal)
            assert lost(blocks, weights).max() <= tolerance
            skipped = max(skipped, left_out(blocks, LENGTH, LENGTH)[:, 1].mean())
    # The steepest head skips most blocks, so that the bound is put to the test.
    assert skipped > 0.6


def packed(length):
    """Segments of 1, 40, 50 and 20 tokens, then padding; padding first; and one segment."""
    ids = np.zeros((3, length), np.int32)
    ids[0, :111] = np.repeat([1, 2, 3, 4], [1, 40, 50, 20])
    ids[1, 37:] = 1
    ids[2] = 7
    return {"query_segment_ids": ids, "key_segment_ids": ids}


def same(positions):
    return {"query_positions": positions, "key_positions": positions}


INDEX = np.arange(LENGTH, dtype=np.int32)
JUMPS = np.cumsum(np.random.default_rng(5).integers(0, 40, LENGTH), dtype=np.int32)
LAYOUTS = {
    "a cache": (50, {"offset": 61}),
    "the last of the keys": (50, {"offset": LENGTH - 50}),
    "more queries than keys": (LENGTH + 20, {"offset": -20}),
    "packed": (LENGTH, packed(LENGTH)),
    "packed, positions modulo 41": (LENGTH, packed(LENGTH) | same(INDEX % 41)),
    "padded on the left": (LENGTH, same(np.maximum(INDEX - np.array([[0], [9], [99]]), 0))),
    "gaps": (LENGTH, same(JUMPS)),
    "descending": (LENGTH, same(INDEX[::-1].copy())),
    "shuffled": (LENGTH, same(np.random.default_rng(6).permutation(INDEX))),
    "queries far from all keys": (
        LENGTH,
        {"query_positions": INDEX + 1000, "key_positions": INDEX},
    ),
}


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 33)])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.sample(10)
def test_left_out_is_at_most_the_tolerance_at_any_positions(name, causal, window):
    length, fields = LAYOUTS[name]
    slopes, tolerance = np.array([2.0, 0.3, -0.125, 0.02], np.float32), 0.02
    future = None if causal else np.array([0.01, 3.0, 0.5, -0.25], np.float32)
    for make in DATA.values():
        query, key = make(*arrays(3, length))
        blocks = key_blocks(
            query, key, LinearBias(slopes, future), causal, window, tolerance, fields
        )
        weights = shares(query, key, slopes, causal, window, fields, future)
        assert lost(blocks, weights).max() <= tolerance


@settings(max_examples=6, deadline=None)
@given(
    length=st.integers(1, 60),
    more=st.integers(0, 30),
    block_size=st.integers(1, 20),
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 3),
    size=st.integers(1, 5),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 60),
    tolerance=st.floats(1e-6, 0.5),
    spread=st.floats(0.1, 20.0),
    data=st.data(),
)
def test_left_out_is_at_most_the_tolerance_for_any_shape(
    length, more, block_size, kv_heads, groups, size, causal, window, tolerance, spread, data
):
    heads, key_length = kv_heads * groups, length + more
    query, key = arrays(2, length, key_length, heads, kv_heads, size)
    seed = data.draw(st.integers(0, 99))
    slopes = (spread * normal(seed, heads)).astype(np.float32)
    ids = np.random.default_rng(seed).integers(0, 3, (2, key_length)).astype(np.int32)
    fields = {
        "offset": data.draw(st.integers(0, more)),
        "query_segment_ids": ids[:, more:],
        "key_segment_ids": ids,
    }
    blocks = key_blocks(
        spread * query,
        key,
        LinearBias(slopes),
        causal,
        window,
        tolerance,
        fields,
        block_size=block_size,
    )
    weights = shares(spread * query, key, slopes, causal, window, fields)
    assert lost(blocks, weights, block_size).max() <= tolerance


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tolerance", [1e-4, 0.1])
@pytest.mark.sample(2)
def test_left_out_comes_close_to_the_tolerance(causal, tolerance):
    """Data for which the bound is nearly exact: a lower bound would exceed the tolerance.

    One query, the first of its block, sees keys of equal scores in the first and the last block,
    its own key, and other keys of negligible weight. The score of its own key rises from one batch
    row to the next. The other queries of its block attend to their own keys, in another feature.
    """
    length, index, slope = 10 * BLOCK_SIZE, 5 * BLOCK_SIZE, 2.0**-8
    steps = np.linspace(-1.0, 2.0, 61)
    query = np.zeros((len(steps), length, 1, 2), np.float32)
    key = np.zeros((len(steps), length, 1, 2), np.float32)
    query[..., 1] = math.sqrt(2)
    query[:, index] = math.sqrt(2), 0.0
    key[...] = -60.0, 60.0
    key[:, :BLOCK_SIZE] = key[:, -BLOCK_SIZE:] = 0.1, 0.0
    # Around the score at which the keys of one end together weigh `tolerance` times the own key.
    nearest = index - (BLOCK_SIZE - 1)
    key[:, index, 0, 0] = math.log(BLOCK_SIZE / tolerance) - slope * nearest + steps
    key[:, index, 0, 1] = 0.0
    slopes = np.array([slope], np.float32)
    blocks = key_blocks(query, key, LinearBias(slopes), causal, None, tolerance, {})
    share = lost(blocks, shares(query, key, slopes, causal))[:, 0, index]
    assert 0.8 * tolerance < share.max() <= tolerance


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["query", "key"])
def test_numbers_that_are_not_finite_are_not_left_out(side, bad):
    """Each query that sees the key computes with it, so that the result shows it."""
    slopes, index = np.full(HEADS, 2.0, np.float32), 40
    query, key = arrays()
    {"query": query, "key": key}[side][:, index] = bad
    for causal in (True, False):
        blocks = key_blocks(query, key, LinearBias(slopes), causal, None, NEGLIGIBLE, {})
        out = left_out(blocks, LENGTH, LENGTH)
        seen = seen_by(causal, None, {}, LENGTH, LENGTH)
        assert out[:, :, :BLOCK_SIZE, -BLOCK_SIZE:].all()
        if side == "key":
            assert not (out & seen)[..., index].any()
        else:
            assert not (out & seen)[:, :, index].any()


def test_a_query_whose_own_key_is_hidden_keeps_the_keys_that_it_sees():
    """Its own key is in another segment, so that the weight of its row has no known bound."""
    slopes = np.full(HEADS, 2.0, np.float32)
    query, key = arrays()
    query *= 0
    ids = np.ones((2, LENGTH), np.int32)
    key_ids = ids.copy()
    key_ids[:, 100:] = 2
    fields = {"query_segment_ids": ids, "key_segment_ids": key_ids}
    blocks = key_blocks(query, key, LinearBias(slopes), True, None, 1e-3, fields)
    weights = shares(query, key, slopes, True, None, fields)
    assert weights[:, :, -1, 99].min() > 0.5
    assert lost(blocks, weights).max() <= 1e-3


# With a tolerance of 0, or without a bias, only invisible blocks are left out.


@pytest.mark.parametrize(
    ("length", "causal", "window", "fields"),
    [
        (LENGTH, True, None, {}),
        (LENGTH, True, 20, {}),
        (LENGTH, False, 1, {}),
        (50, True, 17, {"offset": 61}),
        (LENGTH, True, None, packed(LENGTH)),
        (LENGTH, False, None, packed(LENGTH)),
    ],
    ids=["causal", "window", "own key", "cache", "packed", "packed both ways"],
)
def test_tolerance_of_zero_leaves_out_exactly_the_invisible(length, causal, window, fields):
    query, key = arrays(3, length)
    steep = LinearBias(np.full(HEADS, 50.0, np.float32))
    seen = np.broadcast_to(
        seen_by(causal, window, fields, length, LENGTH), (3, HEADS, length, LENGTH)
    )
    expected = np.zeros((2, 3, HEADS, -(-length // BLOCK_SIZE)), np.int32)
    for row, head, number in np.ndindex(expected.shape[1:]):
        queries = seen[row, head, number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE]
        columns = np.flatnonzero(queries.any(0)) // BLOCK_SIZE
        if len(columns):
            expected[:, row, head, number] = columns[0], columns[-1] + 1
    for bias, tolerance in ((steep, 0.0), (None, 1e-3)):
        blocks = key_blocks(query, key, bias, causal, window, tolerance, fields)
        np.testing.assert_array_equal(blocks, expected)


# Most of the blocks that could be left out are left out.


def share_kept(query, key, slopes, tolerance, block_size=128):
    """The share of the causal blocks that are in reach."""
    length = query.shape[1]
    blocks = key_blocks(
        query, key, LinearBias(slopes), True, None, tolerance, {}, block_size=block_size
    )
    visible = -(-np.arange(block_size, length + block_size, block_size) // block_size)
    kept = np.asarray(blocks.stop - blocks.start, np.float64)
    return (kept / kept.shape[1]).sum() / visible.sum()


def test_the_smallest_positive_tolerance_has_a_logarithm():
    query, key = jnp.asarray(normal(0, 1, 64, 2, 8)), jnp.asarray(normal(1, 1, 64, 2, 8))
    bias = LinearBias(alibi_slopes(2))
    least = reach(query, key, bias, Visibility(causal=False), block_size=8, tolerance=5e-324)
    full = reach(query, key, bias, Visibility(causal=False), block_size=8, tolerance=0.0)
    assert (least.start == full.start).all()
    assert (least.stop == full.stop).all()


def test_half_the_blocks_of_long_rows_are_left_out():
    """Random data with a head size of 64, whose scores differ by at most about 17."""
    query, key = arrays(1, 4096, 4096, 8, 8, 64)
    slopes = alibi_slopes(8)
    assert share_kept(query, key, slopes, NEGLIGIBLE) <= 0.53
    assert share_kept(query, key, slopes, 1e-3) <= 0.47
    # With such norms any key may outweigh all others.
    assert share_kept(100 * query, 100 * key, slopes, NEGLIGIBLE) == 1.0


# Attention within reach.


def with_gradients(**kwargs):
    """A function from query, key, value, slopes and cotangent to the output and all gradients."""

    @jax.jit
    def run(query, key, value, slopes, cotangent):
        attend = functools.partial(alibi_attention, implementation="blockwise", **kwargs)
        output, pull = jax.vjp(attend, query, key, value, slopes)
        return output, *pull(cotangent)

    return run


@pytest.mark.parametrize("name", ["normal", "three times", "heavy", "opposed"])
@pytest.mark.sample(2)
def test_attention_and_its_gradients_are_those_without_a_tolerance(name, reaching):
    within_reach, whole = reaching
    query, key = DATA[name](*arrays(1, 600, 600, 8, 4, 16))
    slopes = alibi_slopes(8)
    others = normal(2, 1, 600, 4, 16), slopes, normal(3, 1, 600, 8, 16)
    for got, exact in zip(
        within_reach(query, key, *others), whole(query, key, *others), strict=True
    ):
        exact = np.asarray(exact)
        np.testing.assert_allclose(got, exact, rtol=0, atol=3e-7 * np.abs(exact).max())


@pytest.fixture(scope="module")
def reaching():
    """Attention at the default tolerance and at a tolerance of 0, each compiled once."""
    return with_gradients(), with_gradients(tolerance=0.0)


def test_a_tolerance_moves_the_output_by_twice_its_share_of_the_values():
    tolerance = 1e-2
    attend = jax.jit(
        functools.partial(alibi_attention, implementation="blockwise"), static_argnames="tolerance"
    )
    value = normal(2, 1, 600, 4, 16)
    value[:, :300] *= 50.0
    slopes = alibi_slopes(8)
    moved = 0.0
    for name in ("normal", "no queries", "opposed"):
        query, key = DATA[name](*arrays(1, 600, 600, 8, 4, 16))
        out, exact = (
            np.asarray(attend(query, key, value, slopes, tolerance=t), np.float64)
            for t in (tolerance, 0.0)
        )
        assert np.abs(out - exact).max() <= 2 * tolerance * np.abs(value).max()
        moved = max(moved, np.abs(out - exact).max())
    # Some keys were left out.
    assert moved > 1e-4


def test_a_mask_may_hide_a_querys_own_key():
    """All keys that a row sees may then be far away, and none may be left out."""
    query, key = map(jnp.asarray, arrays(1, 300, 300))
    mask = jnp.zeros((1, 1, 300, 300), bool).at[..., 0].set(True)
    attend = jax.jit(functools.partial(alibi_attention, mask=mask, implementation="blockwise"))
    out = attend(query, key, key, jnp.full(HEADS, 0.5))
    expected = np.broadcast_to(np.repeat(key[:, :1], 2, axis=2), out.shape)
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_reach_maps_over_rows_and_has_no_gradient():
    query, key = arrays(3)
    slopes = alibi_slopes(HEADS)

    def blocks_of(query, key, slopes):
        return reach(
            query, key, LinearBias(slopes), Visibility(), block_size=BLOCK_SIZE, tolerance=1e-3
        )

    def count(*arrays):
        blocks = blocks_of(*arrays)
        return (blocks.stop - blocks.start).sum().astype(jnp.float32)

    whole = jax.jit(blocks_of)(query, key, slopes)
    mapped = jax.jit(jax.vmap(blocks_of, in_axes=(0, 0, None)))(
        query[:, None], key[:, None], slopes
    )
    np.testing.assert_array_equal(KeyBlocks(*(x[:, 0] for x in mapped)), whole)
    gradients = jax.jit(jax.grad(count, argnums=(0, 1, 2)))(query, key, slopes)
    assert not any(np.asarray(x).any() for x in gradients)


def test_attention_maps_over_rows_with_different_reaches(monkeypatch):
    """vmap over loops of different lengths, forward and backward."""
    monkeypatch.setattr(engines, "_BLOCK_SIZE", {"cpu": BLOCK_SIZE})
    query, key = (np.concatenate(x) for x in zip(arrays(1), heavy(*arrays(1)), strict=True))
    value, slopes = normal(2, 2, LENGTH, 2, SIZE), alibi_slopes(HEADS)

    def total(query, key, value, slopes):
        out = alibi_attention(query, key, value, slopes, implementation="blockwise")
        return (out**2).sum()

    gradient = jax.grad(total, argnums=(0, 1, 2, 3))
    *mapped, row_slopes = jax.jit(jax.vmap(gradient, in_axes=(0, 0, 0, None)))(
        query[:, None], key[:, None], value[:, None], slopes
    )
    *whole, all_slopes = jax.jit(gradient)(query, key, value, slopes)
    mapped = [*(x[:, 0] for x in mapped), row_slopes.sum(0)]
    for got, wanted in zip(mapped, [*whole, all_slopes], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_norms_of_numbers_whose_squares_underflow():
    """The squares of 1e-20 underflow, but products of 1e-20 with other numbers may not."""
    x = np.array([[3e-20, 4e-20], [0.0, 0.0], [3e-15, 4e-15], [3.0, 4.0]], np.float32)
    bounds = np.asarray(norm_bound(jnp.asarray(x)))
    exact = np.linalg.norm(x.astype(np.float64), axis=-1)
    assert (bounds >= exact).all()
    np.testing.assert_allclose(bounds[2:], exact[2:], rtol=1e-3)
    assert not np.isfinite(
        norm_bound(jnp.asarray([[np.inf, 1.0], [np.nan, 1.0], [1e30, 1.0]]))
    ).any()


def test_tiny_queries_and_huge_keys_are_in_reach():
    length, size = 600, 128
    query = np.full((1, length, 1, size), 1e-18, np.float32)
    key = np.zeros((1, length, 1, size), np.float32)
    key[:, :100] = 1.5e18
    slopes = np.array([0.03], np.float32)
    blocks = key_blocks(query, key, LinearBias(slopes), True, None, NEGLIGIBLE, {})
    assert int(blocks.start.max()) == 0
