import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from alibi_jax.attention.reach import KeyBlocks
from alibi_jax.attention.tpu import attention as tpu_attention
from alibi_jax.attention.tpu import grid
from alibi_jax.attention.tpu.attention import pallas_tpu

pytestmark = pytest.mark.usefixtures("quick_compile")

BLOCK = 128
PLAIN = {"causal": True, "offset": 0, "window": None, "ids": None}


def arrays(length=200, key_length=None, batch=1, heads=2, kv_heads=None, size=32, value_size=None):
    """Random query, key, value, slopes, and a cotangent of the output, float32."""
    random = np.random.default_rng(length + heads)
    key_length, kv_heads = key_length or length, kv_heads or heads
    value_size = value_size or size
    shapes = (
        (batch, length, heads, size),
        (batch, key_length, kv_heads, size),
        (batch, key_length, kv_heads, value_size),
        (batch, length, heads, value_size),
    )
    query, key, value, cotangent = (jnp.asarray(random.normal(size=x), jnp.float32) for x in shapes)
    # Not powers of two: their products with a distance are rounded.
    slopes = jnp.asarray(2.0 ** -np.linspace(0.5, 7.5, heads), jnp.float32)
    return query, key, value, slopes, cotangent


def every_block(query, key, block=BLOCK):
    """All key blocks for every query block: the kernel itself must mask the invisible keys."""
    shape = (query.shape[0], query.shape[2], -(-query.shape[1] // block))
    count = -(-key.shape[1] // block)
    return KeyBlocks(jnp.zeros(shape, jnp.int32), jnp.full(shape, count, jnp.int32))


def oracle(query, key, value, slopes, cotangent, blocks, *, causal, offset, window, ids):
    """Output and all gradients in numpy and float64, computed from the full score matrix."""
    query, key, value, slopes, cotangent = (
        np.asarray(x, np.float64) for x in (query, key, value, slopes, cotangent)
    )
    (batch, length, heads, size), (key_length, kv_heads) = query.shape, key.shape[1:3]
    groups = heads // kv_heads
    wide_key, wide_value = np.repeat(key, groups, axis=2), np.repeat(value, groups, axis=2)
    relative = offset + np.arange(length)[:, None] - np.arange(key_length)
    distance = np.abs(relative)
    visible = np.broadcast_to(relative >= 0 if causal else True, (batch, heads, length, key_length))
    if window is not None:
        visible = visible & (distance < window)
    if ids is not None:
        query_ids, key_ids = (np.asarray(x) for x in ids)
        same_segment = (query_ids[:, :, None] == key_ids[:, None]) & (key_ids != 0)[:, None]
        visible = visible & same_segment[:, None]
    first, stop = (np.repeat(x, BLOCK, axis=-1)[..., :length, None] for x in blocks)
    key_block = np.arange(key_length) // BLOCK
    visible = visible & (first <= key_block) & (key_block < stop)
    scores = np.einsum("btnh,bsnh->bnts", query, wide_key) / math.sqrt(size)
    scores = np.where(visible, scores - slopes[:, None, None] * distance, -np.inf)
    row_max = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(row_max), row_max, 0.0))
    total = weights.sum(-1, keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    output = np.einsum("bnts,bsnh->btnh", weights, wide_value)
    d_weights = np.einsum("btnh,bsnh->bnts", cotangent, wide_value)
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True))
    d_key = np.einsum("bnts,btnh->bsnh", d_scores, query) / math.sqrt(size)
    d_value = np.einsum("bnts,btnh->bsnh", weights, cotangent)
    return (
        output,
        np.einsum("bnts,bsnh->btnh", d_scores, wide_key) / math.sqrt(size),
        d_key.reshape(batch, key_length, kv_heads, groups, -1).sum(3),
        d_value.reshape(batch, key_length, kv_heads, groups, -1).sum(3),
        -(d_scores * distance).sum((0, 2, 3)),
    )


def attend(*arrays, ids, block=BLOCK, interpret=True, **options):
    query_ids, key_ids = ids or (None, None)
    segment_ids = {"query_segment_ids": query_ids, "key_segment_ids": key_ids}
    return pallas_tpu(*arrays, block_size=block, interpret=interpret, **segment_ids, **options)


@functools.partial(jax.jit, static_argnames=("causal", "window", "interpret"))
def run(query, key, value, slopes, cotangent, blocks, **options):
    """Output and all gradients of the kernel, with a traced offset."""
    output, pull = jax.vjp(
        lambda *arrays: attend(*arrays, blocks, **options), query, key, value, slopes
    )
    return output, *pull(cotangent.astype(output.dtype))


def assert_is_oracle(inputs, blocks=None, tolerance=1e-5, interpret=True, **options):
    """Compares output and gradients; the tolerance is relative to each array's maximum, or 1."""
    blocks = every_block(*inputs[:2]) if blocks is None else blocks
    actual = run(*inputs, blocks, interpret=interpret, **PLAIN | options)
    expected = oracle(*inputs, blocks, **PLAIN | options)
    for x, wanted in zip(actual, expected, strict=True):
        assert x.shape == wanted.shape
        scale = max(np.abs(wanted).max(), 1.0)
        np.testing.assert_allclose(np.asarray(x, np.float64), wanted, atol=tolerance * scale)


# Comparison with the oracle.


@pytest.mark.parametrize("length", [1, 7, 64, 192, 200, 257])
@pytest.mark.sample(2)
def test_d9_lengths_that_are_no_multiple_of_the_block(length):
    assert_is_oracle(arrays(length))


@pytest.mark.parametrize(("length", "key_length"), [(1, 257), (64, 190), (192, 257)])
@pytest.mark.sample(1)
def test_d9_d4_the_queries_are_the_last_of_the_keys(length, key_length):
    assert_is_oracle(arrays(length, key_length), offset=key_length - length)


@pytest.mark.parametrize("window", [100, 255])
def test_windows_narrower_than_a_block_or_near_its_edge_are_the_oracles(window):
    """One narrower than a block, one that ends just before the previous block's first key."""
    assert_is_oracle(arrays(450), window=window)


def test_both_directions_within_a_window():
    assert_is_oracle(arrays(400), causal=False, window=255)


SEGMENTS = np.repeat([[3, 1, 0, 2, 0], [1, 2, 3, 4, 5]], [30, 100, 50, 60, 17], axis=1)


def test_segments_and_padding():
    ids = jnp.asarray(SEGMENTS, jnp.int32)
    assert_is_oracle(arrays(257, batch=2), ids=(ids, ids))


def test_both_directions_segments_grouped_keys_and_values_of_another_size():
    ids = (jnp.asarray(x, jnp.int32) for x in (SEGMENTS[:, 60:200], SEGMENTS))
    inputs = arrays(140, 257, batch=2, heads=6, kv_heads=2, size=48, value_size=64)
    assert_is_oracle(inputs, causal=False, offset=60, ids=tuple(ids))


# Per block of queries: no block of keys, one, all but the first, or all.
RANGES = KeyBlocks(
    jnp.asarray([[[2, 1, 1, 0], [0, 0, 2, 4]]], jnp.int32),
    jnp.asarray([[[2, 2, 3, 4], [1, 0, 3, 4]]], jnp.int32),
)


def test_only_the_blocks_given_are_computed():
    assert_is_oracle(arrays(450), RANGES)


def test_bfloat16_is_the_oracle_up_to_its_rounding():
    inputs = arrays(257, heads=4, kv_heads=2)
    query, key, value = (x.astype(jnp.bfloat16) for x in inputs[:3])
    assert_is_oracle((query, key, value, *inputs[3:]), tolerance=1e-2)


def test_rows_and_spans_that_do_not_fit_at_once(monkeypatch):
    """Forward launches take two rows. Backward ones take a key head's three, in two spans."""
    monkeypatch.setattr(grid, "_MAX_STEPS", 32)
    monkeypatch.setattr(tpu_attention, "_SPAN_BYTES", 2 * BLOCK * 32 * 4)
    inputs = arrays(450, batch=2, heads=6, kv_heads=2)
    assert_is_oracle(inputs, KeyBlocks(*(jnp.tile(x, (2, 3, 1)) for x in RANGES)))


@pytest.mark.parametrize("segments", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_simulated_tpu(segments):
    ids = (jnp.asarray(SEGMENTS[:1], jnp.int32),) * 2 if segments else None
    assert_is_oracle(arrays(257), ids=ids, interpret=pltpu.InterpretParams())


# Exact values and exact zeros.


def test_b1_weights_fall_towards_the_past():
    """Queries of 0 make the weights a softmax of the biases; one-hot values read them out."""
    query = jnp.zeros((1, 4, 2, 64))
    value = jnp.broadcast_to(jnp.eye(4)[None, :, None], (1, 4, 2, 4))
    slopes = jnp.asarray([0.5, 1 / 256])
    out = attend(query, query, value, slopes, every_block(query, query), **PLAIN)
    np.testing.assert_allclose(
        out[0, -1],
        [[0.101536, 0.167405, 0.276004, 0.455054], [0.248537, 0.249510, 0.250486, 0.251467]],
        atol=1e-6,
    )


def test_skipped_keys_are_not_read():
    query, key, value, slopes, _ = arrays(450)
    key, value = (x.at[:, :128, 1].set(jnp.nan) for x in (key, value))
    blocks = KeyBlocks(jnp.ones((1, 2, 4), jnp.int32), jnp.full((1, 2, 4), 4, jnp.int32))
    out = attend(query, key, value, slopes, blocks, **PLAIN)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(out[:, :128], 0.0)


def test_c4_d3_invisible_keys_change_nothing():
    """Output and gradients are equal bit for bit, and those of padding are zero."""
    query, key, value, slopes, cotangent = arrays(257, batch=2)
    ids = jnp.asarray(SEGMENTS, jnp.int32)
    padding = SEGMENTS == 0
    options = PLAIN | {"ids": (ids, ids)}
    blocks = every_block(query, key)
    results = run(query, key, value, slopes, cotangent, blocks, **options)
    changed = [jnp.where(padding[..., None, None], 100.0, x) for x in (query, key, value)]
    changed_results = run(*changed, slopes, cotangent, blocks, **options)
    for x, y in zip(results, changed_results, strict=True):
        np.testing.assert_array_equal(x, y)
    for x in results[:4]:
        np.testing.assert_array_equal(np.asarray(x)[padding], 0.0)


# Gradients on request, precision, and refused blocks.


def test_the_gradient_of_slopes_is_computed_only_on_request():
    query, key, value, slopes, _ = arrays(64)
    blocks = every_block(query, key)

    def backward(*inputs):
        def loss(*arrays):
            return attend(*arrays, blocks, **PLAIN).sum()

        jaxpr = jax.make_jaxpr(jax.grad(loss, inputs))(query, key, value, slopes)
        return str(jaxpr).count("f32[2,1,128]")

    assert backward(0, 1, 2) < backward(0, 1, 2, 3)


def test_products_of_float32_are_float32():
    """By default a TPU rounds the factors of a product to bfloat16."""
    query, key, value, slopes, _ = arrays(64)
    blocks = every_block(query, key)

    def products(dtype):
        attends = functools.partial(attend, **PLAIN)
        inputs = (x.astype(dtype) for x in (query, key, value))
        return str(jax.make_jaxpr(attends)(*inputs, slopes, blocks))

    assert "HIGHEST" in products(jnp.float32)
    assert "DEFAULT" not in products(jnp.float32)
    assert "HIGHEST" not in products(jnp.bfloat16)


@pytest.mark.parametrize("block", [0, 64, 200, 640])
def test_blocks_of_other_sizes_are_refused(block):
    query, key, value, slopes, _ = arrays(64)
    with pytest.raises(ValueError, match=f"block_size={block}: give 128, 256, 384 or 512"):
        attend(query, key, value, slopes, RANGES, block=block, **PLAIN)
