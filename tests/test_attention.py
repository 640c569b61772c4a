"""Attention is the oracle in float64, with the slopes, masks, positions and dropout it is given."""

import functools
import math

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_jax.attention import alibi_attention, attention, engines
from alibi_jax.biases import alibi_bias_at, alibi_slopes

# Each example has a new shape, which has to be compiled.
quick = settings(max_examples=8, deadline=None)
jitted = jax.jit(alibi_attention, static_argnames="causal")


pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(params=["dense", "head_by_head", "all_heads"])
def path(request, monkeypatch):
    """All scores at once, and blocks so small that ten queries take several."""
    if request.param != "dense":
        set_blocks(monkeypatch, block=4, head_by_head=request.param == "head_by_head")


def set_blocks(patch, block, head_by_head):
    patch.setattr(engines, "_partitioned_by_compiler", lambda: not head_by_head)
    patch.setattr(engines, "_DENSE_MAX_SCORES", 0)
    patch.setattr(engines, "_DENSE_MAX_QUERIES", 0)
    patch.setattr(engines, "_BLOCK_SIZE", {"cpu": block})


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def arrays(batch=2, length=5, key_length=None, heads=4, kv_heads=2, size=8, dtype=jnp.float32):
    """Random queries, keys and values."""
    keys = (batch, key_length or length, kv_heads, size)
    query = normal(0, batch, length, heads, size, dtype=dtype)
    return query, normal(1, *keys, dtype=dtype), normal(2, *keys, dtype=dtype)


def row_weights(attend, key_length, heads, row=-1):
    """The weight of each key in a row, [N, S]: the gradient of the output by the values."""
    value = jnp.zeros((1, key_length, heads, 1))
    return jax.grad(lambda value: attend(value)[0, row, :, 0].sum())(value)[0, :, :, 0].T


def oracle(query, key, value, cotangent=None, *, slopes=None, bias=None, causal=True, ids=None):
    """Attention in numpy and float64: key heads repeated, all scores at once, -inf where invisible.

    `ids` are the segment ids of queries and keys. Returns the output and, if a cotangent is given,
    the gradients of query, key, value and slopes.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    (batch, length, heads, size), (key_length, kv_heads) = query.shape, key.shape[1:3]
    groups = heads // kv_heads
    wide_key, wide_value = np.repeat(key, groups, axis=2), np.repeat(value, groups, axis=2)
    scores = np.einsum("btnh,bsnh->bnts", query, wide_key) / math.sqrt(size)
    query_indices = np.arange(length)[:, None] + key_length - length
    distance = np.abs(query_indices - np.arange(key_length))
    if slopes is not None:
        scores = scores - np.asarray(slopes, np.float64)[:, None, None] * distance
    if bias is not None:
        scores = scores + np.asarray(bias, np.float64)
    seen = np.ones((batch, 1, length, key_length), bool)
    if causal:
        seen &= np.arange(key_length) <= query_indices
    if ids is not None:
        query_ids, key_ids = (np.asarray(x) for x in ids)
        same = query_ids[:, :, None] == key_ids[:, None, :]
        seen &= (same & (query_ids != 0)[:, :, None])[:, None]
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(-1, keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    output = np.einsum("bnts,bsnh->btnh", weights, wide_value)
    if cotangent is None:
        return output
    cotangent = np.asarray(cotangent, np.float64)
    d_weights = np.einsum("btnh,bsnh->bnts", cotangent, wide_value)
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True))
    d_key = np.einsum("bnts,btnh->bsnh", d_scores, query) / math.sqrt(size)
    d_value = np.einsum("bnts,btnh->bsnh", weights, cotangent)
    return (
        output,
        np.einsum("bnts,bsnh->btnh", d_scores, wide_key) / math.sqrt(size),
        d_key.reshape(batch, key_length, kv_heads, groups, size).sum(3),
        d_value.reshape(batch, key_length, kv_heads, groups, size).sum(3),
        -(d_scores * distance).sum((0, 2, 3)),
    )


def with_gradients(query, key, value, cotangent, slopes, **kwargs):
    """Output of `alibi_attention` and its gradients, as `oracle` returns them."""

    @jax.jit
    def run(*arrays):
        output, pull = jax.vjp(lambda *arrays: alibi_attention(*arrays, **kwargs), *arrays)
        return output, *pull(cotangent)

    return run(query, key, value, slopes)


def assert_all_close(actual, expected, **tolerances):
    for got, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, wanted, **tolerances)


def add_table(table):
    """A bias function that reads a table [N, T, S] by positions."""
    return lambda query_positions, key_positions: table[:, query_positions][..., key_positions]


# Compared with the oracle.


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_is_the_oracle(causal, kv_heads):
    query, key, value = arrays(kv_heads=kv_heads, length=9)
    np.testing.assert_allclose(
        attention(query, key, value, causal=causal),
        oracle(query, key, value, causal=causal),
        atol=1e-5,
    )


@pytest.mark.parametrize("causal", [True, False])
def test_bias_function_is_added(causal):
    query, key, value = arrays(length=9)
    table = 3 * normal(3, 4, 9, 9)
    np.testing.assert_allclose(
        attention(query, key, value, bias=add_table(table), causal=causal),
        oracle(query, key, value, bias=table, causal=causal),
        atol=1e-5,
    )


def test_bias_function_may_return_none():
    query, key, value = arrays()
    np.testing.assert_array_equal(
        attention(query, key, value, bias=lambda *_: None), attention(query, key, value)
    )


@pytest.mark.parametrize("causal", [True, False])
def test_segments_see_themselves_only(causal):
    query, key, value = arrays(length=8)
    ids = jnp.array([[1, 1, 1, 2, 2, 0, 0, 3], [0, 0, 7, 7, 7, 7, 5, 5]])
    cotangent = normal(4, *query.shape)
    slopes = alibi_slopes(4)
    segments = {"query_segment_ids": ids, "key_segment_ids": ids}
    assert_all_close(
        with_gradients(query, key, value, cotangent, slopes, causal=causal, **segments),
        oracle(query, key, value, cotangent, slopes=slopes, causal=causal, ids=(ids, ids)),
        atol=2e-5,
    )


def test_bfloat16_is_the_oracle_to_its_own_precision(path):
    query, key, value = arrays(length=50, dtype=jnp.bfloat16)
    slopes = alibi_slopes(4)
    output = alibi_attention(query, key, value, slopes)
    assert output.dtype == jnp.bfloat16
    # The oracle has the same inputs, so that only weights and output are rounded, to 8 bits each.
    expected = oracle(query, key, value, slopes=slopes)
    np.testing.assert_allclose(np.asarray(output, np.float64), expected, atol=2e-2, rtol=1e-2)
    assert np.abs(np.asarray(output, np.float64) - expected).mean() < 3e-3


@quick
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    length=st.integers(1, 9),
    more=st.integers(0, 5),
    size=st.integers(1, 5),
    causal=st.booleans(),
    data=st.data(),
)
def test_any_shape_is_the_oracle(batch, kv_heads, groups, length, more, size, causal, data):
    heads, key_length = kv_heads * groups, length + more
    query, key, value = arrays(batch, length, key_length, heads, kv_heads, size)
    ids = st.lists(st.integers(0, 2), min_size=key_length, max_size=key_length)
    key_ids = jnp.array([data.draw(ids) for _ in range(batch)])
    query_ids = key_ids[:, more:]
    slopes = alibi_slopes(heads)
    output = jitted(
        query,
        key,
        value,
        slopes,
        causal=causal,
        query_positions=jnp.arange(more, key_length),
        key_positions=jnp.arange(key_length),
        query_segment_ids=query_ids,
        key_segment_ids=key_ids,
    )
    np.testing.assert_allclose(
        output,
        oracle(query, key, value, slopes=slopes, causal=causal, ids=(query_ids, key_ids)),
        atol=1e-5,
    )


@quick
@given(
    length=st.integers(1, 40),
    more=st.integers(0, 9),
    block=st.integers(1, 12),
    head_by_head=st.booleans(),
    causal=st.booleans(),
    batched=st.booleans(),
)
def test_any_block_size_is_the_oracle(length, more, block, head_by_head, causal, batched):
    query, key, value = arrays(2, length, length + more, 2, 1, 4)
    slopes = alibi_slopes(2)
    ids = jnp.asarray(np.random.default_rng(3).integers(0, 3, (2, length + more)), jnp.int32)
    positions = jnp.arange(length + more) + 5
    if batched:
        positions = jnp.stack([positions, positions])
    with pytest.MonkeyPatch.context() as patch:
        set_blocks(patch, block, head_by_head)
        output = jax.jit(functools.partial(alibi_attention, causal=causal))(
            query,
            key,
            value,
            slopes,
            query_positions=positions[..., more:],
            key_positions=positions,
            query_segment_ids=ids[:, more:],
            key_segment_ids=ids,
        )
    expected = oracle(query, key, value, slopes=slopes, causal=causal, ids=(ids[:, more:], ids))
    np.testing.assert_allclose(output, expected, atol=1e-5)


# jax-ml/jax#24491 and #27224: lengths that no block size divides, and more keys than queries.
@pytest.mark.parametrize("length", [1, 7, 64, 192, 200, 257, 300, 700])
def test_d9_every_length_is_the_oracle(length):
    query, key, value = arrays(1, length, length, 4, 2, 4)
    slopes = alibi_slopes(4)
    output = jitted(query, key, value, slopes)
    np.testing.assert_allclose(output, oracle(query, key, value, slopes=slopes), atol=1e-5)


@pytest.mark.parametrize("length", [1, 7, 64, 192, 200, 257, 300, 700])
@pytest.mark.sample(3)
def test_d9_every_length_with_more_keys_is_the_oracle(length):
    query, key, value = arrays(1, length, length + 37, 4, 2, 4)
    cotangent = normal(4, *query.shape)
    slopes = alibi_slopes(4)
    assert_all_close(
        with_gradients(query, key, value, cotangent, slopes),
        oracle(query, key, value, cotangent, slopes=slopes),
        atol=1e-4,
        rtol=1e-4,
    )


def test_d9_bidirectional_blocks_are_the_oracle():
    query, key, value = arrays(1, 300, 337, 4, 2, 4)
    cotangent = normal(4, *query.shape)
    slopes = alibi_slopes(4)
    assert_all_close(
        with_gradients(
            query,
            key,
            value,
            cotangent,
            slopes,
            causal=False,
            query_positions=jnp.arange(37, 337),
            key_positions=jnp.arange(337),
        ),
        oracle(query, key, value, cotangent, slopes=slopes, causal=False),
        atol=1e-4,
        rtol=1e-4,
    )


# Slopes belong to query heads.


def test_a4_slopes_belong_to_query_heads():
    query, key, value = arrays(heads=8, kv_heads=2, length=12)
    slopes = alibi_slopes(8)
    repeated = (jnp.repeat(x, 4, axis=2) for x in (key, value))
    np.testing.assert_allclose(
        alibi_attention(query, key, value, slopes),
        alibi_attention(query, *repeated, slopes),
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("slope", "row"),
    [
        (0.5, [0.101536, 0.167405, 0.276004, 0.455054]),
        (1 / 256, [0.248537, 0.249510, 0.250486, 0.251467]),
    ],
)
@pytest.mark.parametrize("size", [1, 64])
@pytest.mark.sample(2)
def test_b1_b4_near_keys_are_favoured_whatever_the_head_size(slope, row, size):
    # Scores are 0, so that only the bias is left, which the head size must not scale.
    zeros = jnp.zeros((1, 4, 1, size))

    def attend(value):
        value = jnp.broadcast_to(value, zeros.shape)
        return alibi_attention(zeros, zeros, value, jnp.array([slope]))

    np.testing.assert_allclose(row_weights(attend, 4, 1)[0], row, atol=1e-6)


def test_b4_scores_are_scaled_before_the_bias_is_added():
    query, key, value = arrays(1, 6, 6, 1, 1, 64)
    scores = np.einsum("th,sh->ts", query[0, :, 0], key[0, :, 0]) / 8
    scores -= 0.5 * np.abs(np.arange(6)[:, None] - np.arange(6))
    weights = np.exp(scores) * np.tri(6)
    expected = weights @ np.asarray(value[0, :, 0]) / weights.sum(-1, keepdims=True)
    output = alibi_attention(query, key, value, jnp.array([0.5]))[0, :, 0]
    np.testing.assert_allclose(output, expected, atol=1e-5)


def test_b5_bias_of_minus_infinity_masks_without_nan():
    """ofirpress/attention_with_linear_biases#7: a mask is added to scores, never multiplied."""
    query, key, value = arrays(length=6)
    table = jnp.where(jnp.arange(6) == 2, -jnp.inf, normal(3, 4, 6, 6))
    # A bias may leave a query without any key.
    table = table.at[:, 4].set(-jnp.inf)

    for causal in (True, False):
        attend = jax.jit(functools.partial(attention, bias=add_table(table), causal=causal))
        output, pull = jax.vjp(attend, query, key, value)
        expected = oracle(query, key, value, bias=table, causal=causal)
        np.testing.assert_allclose(output, expected, atol=1e-5)
        gradients = pull(output)
        assert all(jnp.isfinite(one).all() for one in gradients)
        np.testing.assert_array_equal(gradients[2][:, 2], 0)


@pytest.mark.parametrize("num_slopes", [6, 2, 16])
def test_b10_wrong_number_of_slopes_names_both(num_slopes, monkeypatch):
    # Without the type checks of the tests, as for users.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    query, key, value = arrays(heads=8)
    with pytest.raises(
        ValueError, match=rf"slopes has shape \({num_slopes},\): .* the 8 query heads"
    ):
        alibi_attention(query, key, value, alibi_slopes(num_slopes))


def test_b11_long_attention_compiles_into_little_memory():
    """pytorch/pytorch#107959: the bias alone would be 8 GiB."""
    array = jax.ShapeDtypeStruct((1, 16384, 8, 64), jnp.float32)
    slopes = jax.ShapeDtypeStruct((8,), jnp.float32)

    def total(*arrays):
        return alibi_attention(*arrays).sum()

    for function in (alibi_attention, jax.grad(total, argnums=(0, 1, 2))):
        compiled = jax.jit(function).lower(array, array, array, slopes).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 2**30


def test_b11_long_attention_is_the_oracle():
    query, key, value = arrays(1, 1024, 1024, 8, 2, 8)
    slopes = alibi_slopes(8)
    np.testing.assert_allclose(
        jax.jit(alibi_attention)(query, key, value, slopes),
        oracle(query, key, value, slopes=slopes),
        atol=1e-5,
    )


def test_c1_bfloat16_queries_have_exact_distances():
    """NVIDIA/TensorRT-Model-Connect#667: bfloat16 can hold 769 of the positions below 4096."""
    slopes = alibi_slopes(8)
    zeros = jnp.zeros((1, 4096, 8, 1), jnp.bfloat16)

    def attend(value):
        return alibi_attention(zeros[:, :1], zeros, value, slopes)

    weights = np.asarray(row_weights(attend, 4096, 8), np.float64)
    exact = np.exp(-np.asarray(slopes, np.float64)[:, None] * np.arange(4095, -1, -1))
    exact /= exact.sum(-1, keepdims=True)
    assert np.abs(weights - exact).sum(-1).max() / 2 < 0.01


# Masks.


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_c3_no_bias_lifts_a_masked_key(dtype, path):
    """huggingface/transformers#18185: masked keys became visible again."""
    query, key, value = arrays(1, 10, 10, 2, 2, 4, dtype)

    def reward_future(query_positions, key_positions):
        ahead = key_positions[None, :] > query_positions[:, None]
        return jnp.stack([jnp.where(ahead, 3e38, 0.0), jnp.where(ahead, 1.0, -3e38)])

    def middle(query, key, value):
        row = attention(query, key, value, bias=reward_future)[:, 5]
        return row.astype(jnp.float32).sum()

    gradients = jax.jit(jax.grad(middle, argnums=(0, 1, 2)))(query, key, value)
    assert all(jnp.isfinite(one).all() for one in gradients)
    np.testing.assert_array_equal(gradients[1][:, 6:], 0)
    np.testing.assert_array_equal(gradients[2][:, 6:], 0)
    assert (gradients[2][:, :6] != 0).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_c3_far_keys_of_another_segment_have_weights_of_zero(dtype):
    slopes = alibi_slopes(8)
    query = normal(0, 1, 1, 8, 1, dtype=dtype)
    key = normal(1, 1, 65536, 8, 1, dtype=dtype)

    def attend(value):
        return alibi_attention(
            query,
            key,
            value,
            slopes,
            query_positions=jnp.array([65535]),
            query_segment_ids=jnp.array([[1]]),
            key_segment_ids=jnp.where(jnp.arange(65536) < 8, 1, 2)[None],
        )

    weights = row_weights(attend, 65536, 8)
    np.testing.assert_array_equal(weights[:, 8:], 0)
    np.testing.assert_allclose(weights[:, :8].sum(-1), 1, rtol=2e-2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.sample(3)
def test_c4_rows_of_padding_are_zero_with_finite_gradients(causal, path):
    """pytorch/pytorch#41508: one masked row poisoned every gradient."""
    query, key, value = arrays(3, 10)
    slopes = alibi_slopes(4)
    # A row of padding only, a row that starts with padding, a row without padding.
    ids = jnp.ones((3, 10), jnp.int32).at[1].set(0).at[0, :4].set(0)
    segments = {"query_segment_ids": ids, "key_segment_ids": ids}
    # Large, as for a sum over many tokens: a division by a tiny number would overflow.
    cotangent = 1e6 * normal(4, *query.shape)
    outputs = with_gradients(query, key, value, cotangent, slopes, causal=causal, **segments)
    assert all(jnp.isfinite(one).all() for one in outputs)
    for one in outputs[:4]:
        np.testing.assert_array_equal(one[1], 0)
        np.testing.assert_array_equal(one[0, :4], 0)
    rest = jnp.array([0, 2])
    alone = with_gradients(
        query[rest],
        key[rest],
        value[rest],
        cotangent[rest],
        slopes,
        causal=causal,
        **{name: ids[rest] for name in segments},
    )
    kept = [one[rest] for one in outputs[:4]]
    assert_all_close([*kept, outputs[4]], alone, rtol=1e-4, atol=10)


@pytest.mark.parametrize(("num_queries", "row"), [(1, 0), (2, 0), (2, 1), (5, 0), (5, 4)])
@pytest.mark.sample(2)
def test_d4_queries_are_the_last_of_the_keys(num_queries, row):
    """jax.nn.dot_product_attention puts query 0 at key 0; so did Dao-AILab/flash-attention#282."""
    zeros = jnp.zeros((1, 5, 1, 1))
    weights = row_weights(lambda value: attention(zeros[:, :num_queries], zeros, value), 5, 1, row)
    seen = 5 - num_queries + row + 1
    np.testing.assert_allclose(weights[0], [1 / seen] * seen + [0] * (5 - seen), atol=1e-6)


def test_d4_last_queries_are_the_last_rows_of_all(path):
    query, key, value = arrays(length=20)
    # A new function, so that no program compiled for other block sizes is reused.
    attend = jax.jit(functools.partial(alibi_attention, slopes=alibi_slopes(4)))
    whole = attend(query, key, value)
    np.testing.assert_allclose(attend(query[:, -7:], key, value), whole[:, -7:], atol=1e-6)


def test_d7_bias_in_cross_attention_needs_positions():
    """ofirpress/attention_with_linear_biases#5: cross-attention has no default distances."""
    query, key, value = arrays(length=3, key_length=5)
    slopes, positions = alibi_slopes(4), jnp.arange(5)
    for known in ({}, {"query_positions": positions[:3]}, {"key_positions": positions}):
        with pytest.raises(
            ValueError, match=r"between 3 queries and 5 other keys .* give query_positions"
        ):
            alibi_attention(query, key, value, slopes, causal=False, **known)
    positions_given = {"query_positions": positions[2:], "key_positions": positions}
    np.testing.assert_allclose(
        alibi_attention(query, key, value, slopes, causal=False, **positions_given),
        oracle(query, key, value, slopes=slopes, causal=False),
        atol=1e-5,
    )
    # Without a bias no distances are needed.
    np.testing.assert_allclose(
        attention(query, key, value, causal=False),
        oracle(query, key, value, causal=False),
        atol=1e-5,
    )


def test_positions_feed_the_bias_alone():
    query, key, value = arrays(length=6)
    slopes = alibi_slopes(4)
    backwards = jnp.arange(6)[::-1]
    output = alibi_attention(
        query, key, value, slopes, query_positions=backwards, key_positions=backwards
    )
    # Distances are the same in both directions, and visibility depends on indices only.
    np.testing.assert_allclose(output, alibi_attention(query, key, value, slopes), atol=1e-6)


def test_each_batch_row_has_its_own_positions():
    query, key, value = arrays(length=6)
    slopes = alibi_slopes(4)
    positions = jnp.array([[0, 1, 2, 3, 4, 5], [0, 2, 3, 7, 11, 20]])
    whole = alibi_attention(
        query, key, value, slopes, query_positions=positions, key_positions=positions
    )
    for row in range(2):
        alone = alibi_attention(
            query[row : row + 1],
            key[row : row + 1],
            value[row : row + 1],
            slopes,
            query_positions=positions[row],
            key_positions=positions[row],
        )
        np.testing.assert_allclose(whole[row : row + 1], alone, atol=1e-6)


def test_alibi_attention_is_attention_with_the_bias():
    query, key, value = arrays(length=6)
    slopes = alibi_slopes(4)
    np.testing.assert_array_equal(
        alibi_attention(query, key, value, slopes),
        attention(query, key, value, bias=lambda i, j: alibi_bias_at(slopes, i, j)),
    )


def test_sizes_that_do_not_fit_are_refused():
    query, key, value = arrays(heads=4, kv_heads=3)
    with pytest.raises(ValueError, match="key has 3 heads and query has 4: give a number"):
        attention(query, key, value)
    query, key, value = arrays(length=5, key_length=3)
    with pytest.raises(ValueError, match="causal attention of 5 queries over 3 keys: give"):
        attention(query, key, value)
    assert attention(query, key, value, causal=False).shape == query.shape
    query, key, value = arrays(length=5)
    with pytest.raises(ValueError, match="query_segment_ids is None: give both"):
        attention(query, key, value, key_segment_ids=jnp.ones((2, 5), jnp.int32))


# Dropout.


def test_dropout_keeps_the_mean(path):
    # Many equal batch rows are many draws.
    draws = 2000
    query, key, value = (
        jnp.broadcast_to(x, (draws, *x.shape[1:])) for x in arrays(1, 10, 10, 2, 1, 2)
    )
    plain = attention(query[:1], key[:1], value[:1])
    drop = jax.jit(functools.partial(attention, dropout_rate=0.25))
    dropped = np.asarray(drop(query, key, value, dropout_key=jax.random.key(0)), np.float64)
    spread = dropped.std(0)
    assert (spread > 0).all()
    # In units of the standard error: 40 draws of about a normal distribution.
    error = (dropped.mean(0) - np.asarray(plain[0])) / (spread / math.sqrt(draws))
    assert np.abs(error).max() < 4


def test_dropout_is_a_function_of_its_key(path):
    query, key, value = arrays(length=10)

    @functools.partial(jax.jit, static_argnums=0)
    def attend(rate, dropout_key):
        return attention(query, key, value, dropout_rate=rate, dropout_key=dropout_key)

    plain = attend(0.0, None)
    first = attend(0.5, jax.random.key(1))
    np.testing.assert_array_equal(attend(0.5, jax.random.key(1)), first)
    assert not np.array_equal(attend(0.5, jax.random.key(2)), first)
    assert not np.array_equal(plain, first)
    np.testing.assert_array_equal(attend(0.5, None), plain)
    np.testing.assert_array_equal(attend(0.0, jax.random.key(1)), plain)


def test_dropout_draws_anew_for_every_head_and_query(path):
    # Without dropout all rows would be equal.
    zeros = jnp.zeros((2, 40, 2, 16))
    value = jnp.broadcast_to(normal(0, 1, 40, 1, 16), (2, 40, 2, 16))
    output = attention(
        zeros, zeros, value, causal=False, dropout_rate=0.5, dropout_key=jax.random.key(0)
    )
    rows = np.asarray(output).reshape(-1, 16)
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_dropout_drops_the_same_in_the_backward_pass(path):
    """Gradients recompute the blocks, which must drop the same weights again."""
    query, key, value = arrays(1, 10, 10, 1, 1, 2)

    def attend(value):
        return attention(query, key, value, dropout_rate=0.5, dropout_key=jax.random.key(3))

    # The output is linear in the values, so that its derivative along the values is the output.
    cotangent = normal(5, *query.shape)
    total, gradient = jax.jit(jax.value_and_grad(lambda value: (attend(value) * cotangent).sum()))(
        value
    )
    np.testing.assert_allclose((gradient * value).sum(), total, rtol=1e-4)
