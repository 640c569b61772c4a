"""Which keys each query sees: caches with free slots, rolling caches, shards, masks, features."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from alibi_jax.attention import alibi_attention, attention, engines
from alibi_jax.biases import alibi_bias_at, alibi_slopes, forget_bias_at, forget_decay

HEADS, SIZE, LENGTH = 4, 8, 12

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(params=["dense", "head_by_head", "all_heads"], autouse=True)
def path(request, monkeypatch):
    """All scores at once, and blocks so small that five queries take several."""
    if request.param != "dense":
        all_heads = request.param == "all_heads"
        monkeypatch.setattr(engines, "_partitioned_by_compiler", lambda: all_heads)
        monkeypatch.setattr(engines, "_DENSE_MAX_SCORES", 0)
        monkeypatch.setattr(engines, "_DENSE_MAX_QUERIES", 0)
        monkeypatch.setattr(engines, "_BLOCK_SIZE", {"cpu": 2})


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def arrays(length=LENGTH, key_length=LENGTH, kv_heads=2, value_size=SIZE):
    return (
        normal(0, 2, length, HEADS, SIZE),
        normal(1, 2, key_length, kv_heads, SIZE),
        normal(2, 2, key_length, kv_heads, value_size),
    )


def oracle(query, key, value, bias, seen):
    """Attention in numpy and float64; `bias` and `seen`, the visible pairs, are [B, N, T, S]."""
    query, key, value, bias = (np.asarray(x, np.float64) for x in (query, key, value, bias))
    groups = query.shape[2] // key.shape[2]
    key, value = (np.repeat(x, groups, axis=2) for x in (key, value))
    scores = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[-1]) + bias
    weights = np.where(seen, np.exp(scores), 0.0)
    total = weights.sum(-1, keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return np.einsum("bnts,bsnh->btnh", weights, value)


def linear(query_positions, key_positions):
    distance = np.abs(np.asarray(query_positions)[..., :, None] - np.asarray(key_positions))
    return -np.asarray(alibi_slopes(HEADS))[:, None, None] * distance[..., None, :, :]


@pytest.mark.parametrize(
    ("chunks", "traced"),
    [([8], True), ([1] * 8, True), ([3, 5], True), ([1, 7], True), ([3, 5], False)],
)
@pytest.mark.sample(5)
def test_b8_d4_chunks_over_a_cache_with_room_are_the_whole(chunks, traced):
    """A query's own key is at `offset`, not among the last keys: the cache has free slots."""
    query, key, value = arrays()
    slopes = alibi_slopes(HEADS)
    whole = alibi_attention(query, key, value, slopes)
    attend = jax.jit(alibi_attention) if traced else alibi_attention
    start = 0
    for chunk in chunks:
        stop = start + chunk
        # The contents of free slots do not matter.
        cache = [x.at[:, stop:].set(1e3) for x in (key, value)]
        out = attend(query[:, start:stop], *cache, slopes, offset=start)
        np.testing.assert_allclose(out, whole[:, start:stop], atol=1e-6)
        start = stop


@pytest.mark.parametrize("offset", [-1, 9])
def test_d4_an_offset_past_the_keys_is_refused(offset):
    query, key, value = arrays(length=4)
    with pytest.raises(ValueError, match=f"offset={offset} puts 4 causal queries .* of 12 keys"):
        attention(query, key, value, offset=offset)


def test_d5_keys_in_a_rolling_cache_have_positions_other_than_their_slots():
    """Lightning-AI/litgpt#2182: 12 tokens in a cache of 8 slots, the first of them overwritten."""
    query, key, value = arrays(kv_heads=HEADS)
    slopes, window = alibi_slopes(HEADS), 8
    index = np.arange(LENGTH)
    distance = index[:, None] - index
    seen = (distance >= 0) & (distance < window)
    full = oracle(query, key, value, linear(index, index), seen)
    for now in (8, 11):
        positions = np.array([now - (now - slot) % window for slot in range(window)])
        out = alibi_attention(
            query[:, now : now + 1],
            key[:, positions],
            value[:, positions],
            slopes,
            causal=False,
            query_positions=jnp.array([now]),
            key_positions=jnp.asarray(positions),
        )
        np.testing.assert_allclose(out, full[:, now : now + 1], atol=1e-5)


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.sample(3)
def test_d8_queries_sharded_along_the_sequence_are_the_whole(shards):
    """NVIDIA/TransformerEngine#1046: a shard's first query is not query 0."""
    query, key, value = arrays(length=16, key_length=16)
    slopes = alibi_slopes(HEADS)
    mesh = jax.make_mesh(
        (shards,), ("sequence",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:shards]
    )
    along, whole = PartitionSpec(None, "sequence"), PartitionSpec()

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(along, whole, whole), out_specs=along, check_vma=False
    )
    def shard(query, key, value):
        offset = jax.lax.axis_index("sequence") * query.shape[1]
        return alibi_attention(query, key, value, slopes, offset=offset)

    expected = alibi_attention(query, key, value, slopes)
    np.testing.assert_allclose(shard(query, key, value), expected, atol=1e-5)


@pytest.mark.parametrize("mask_heads", [1, HEADS])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.sample(5)
def test_a_mask_hides_keys_from_queries(mask_heads, causal):
    query, key, value = arrays(length=5, key_length=5)
    mask = np.random.default_rng(3).random((2, mask_heads, 5, 5)) < 0.6
    mask[1, :, 2] = False
    index = np.arange(5)
    seen = mask & ((index <= index[:, None]) | (not causal))
    attend = functools.partial(alibi_attention, slopes=alibi_slopes(HEADS), causal=causal)
    out = attend(query, key, value, mask=jnp.asarray(mask))
    expected = oracle(query, key, value, linear(index, index), seen)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert not np.asarray(out[1, 2]).any()
    gradient = jax.grad(lambda query: attend(query, key, value, mask=jnp.asarray(mask)).sum())(
        query
    )
    assert jnp.isfinite(gradient).all()
    assert not np.asarray(gradient[1, 2]).any()


def test_features_reach_the_bias_along_with_their_queries_and_keys():
    query, key, value = arrays(length=5)
    decay = forget_decay(jnp.log(jax.random.uniform(jax.random.key(0), (2, LENGTH, HEADS))))
    last = jax.tree.map(lambda x: x[:, -5:], decay)
    out = attention(
        query,
        key,
        value,
        bias=lambda query_positions, key_positions, one, other: forget_bias_at(one, other),
        query_features=last,
        key_features=decay,
    )
    bias = forget_bias_at(last, decay)
    seen = np.arange(LENGTH) <= np.arange(7, 12)[:, None]
    np.testing.assert_allclose(out, oracle(query, key, value, bias, seen), atol=1e-5)


def test_b2_keys_after_their_query_may_have_other_slopes():
    """ofirpress/attention_with_linear_biases#5: an encoder that distinguishes the directions."""
    query, key, value = arrays(length=5, key_length=5)
    slopes, index = alibi_slopes(HEADS), np.arange(5)
    after = slopes[::-1] * 3
    bias = np.where(
        index > index[:, None],
        -np.asarray(after)[:, None, None] * np.abs(index - index[:, None]),
        linear(index, index),
    )
    out = alibi_attention(query, key, value, slopes, future_slopes=after, causal=False)
    np.testing.assert_allclose(out, oracle(query, key, value, bias, True), atol=1e-5)


def test_values_may_have_another_head_size():
    query, key, value = arrays(length=5, key_length=5, value_size=3)
    index = np.arange(5)
    out = alibi_attention(query, key, value, alibi_slopes(HEADS))
    assert out.shape == (2, 5, HEADS, 3)
    expected = oracle(query, key, value, linear(index, index), index <= index[:, None])
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_invalid_arguments_are_refused(monkeypatch):
    # Without the type checks of the tests, as for users.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    query, key, value = arrays(length=5)
    with pytest.raises(ValueError, match="query_features is None: give both"):
        attention(query, key, value, key_features=key)
    with pytest.raises(ValueError, match="offset=8 puts 5 causal queries"):
        attention(query, key, value, offset=np.int64(8))
    with pytest.raises(ValueError, match="mask is float32: give booleans"):
        attention(query, key, value, mask=jnp.zeros((1, 1, 5, LENGTH)))
    with pytest.raises(ValueError, match=r"slopes must be an array \[N\]"):
        alibi_bias_at(8, jnp.arange(3), jnp.arange(3))
