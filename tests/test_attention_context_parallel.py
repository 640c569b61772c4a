"""D8 (NVIDIA/TransformerEngine#1046): a sharded sequence gives the results of a whole one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi_jax.attention import alibi_attention, attention, context_parallel
from alibi_jax.attention.context_parallel import context_attention, short_range_heads
from alibi_jax.biases import alibi_bias, alibi_bias_at, alibi_slopes

pytestmark = pytest.mark.usefixtures("quick_compile")

BATCH, HEADS, SIZE, SHARDS = 2, 4, 8, 4
STEEP = np.float32([0.01, 3.0, 0.02, 2.5])


def normal(seed, heads=HEADS, length=64):
    random = np.random.default_rng(seed)
    return jnp.asarray(random.normal(size=(BATCH, length, heads, SIZE)), jnp.float32)


def shard_sequence(function, **specs):
    """`function` of a dict of arrays, each sharded along the sequence or as `specs` says."""
    axes = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((SHARDS,), ("context",), axes, devices=jax.devices()[:SHARDS])
    rows = jax.P(None, "context")

    def run(arrays):
        in_specs = ({name: specs.get(name, rows) for name in arrays},)
        return jax.shard_map(
            lambda arrays: function(**arrays),
            mesh=mesh,
            in_specs=in_specs,
            out_specs=rows,
            check_vma=False,
        )(arrays)

    return jax.jit(run)


def assert_same(function, reference, arrays, tolerance=1e-5, **specs):
    """Compares the results of both functions, and the gradients of a loss of them."""
    sharded = shard_sequence(function, **specs)
    np.testing.assert_allclose(sharded(arrays), reference(**arrays), atol=1e-5)
    floats = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    others = {name: x for name, x in arrays.items() if name not in floats}

    def gradient(function):
        return jax.jit(jax.grad(lambda floats: (function(floats | others) ** 2).sum()))(floats)

    wanted = gradient(lambda arrays: reference(**arrays))
    for name, found in gradient(sharded).items():
        scale = float(jnp.abs(wanted[name]).max())
        np.testing.assert_allclose(found, wanted[name], atol=tolerance * scale, err_msg=name)


@pytest.mark.parametrize("slopes", [None, "alibi"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.sample(2)
def test_d8_sharded_attention_equals_unsharded(slopes, kv_heads):
    arrays = {"query": normal(0), "key": normal(1, kv_heads), "value": normal(2, kv_heads)}
    reference = attention
    if slopes:
        arrays["slopes"] = alibi_slopes(HEADS)
        reference = functools.partial(alibi_attention, implementation="dense")
    assert_same(
        functools.partial(context_attention, axes=("context",)), reference, arrays, slopes=jax.P()
    )


def test_d8_with_segments_and_positions():
    ids = np.repeat([[1, 2, 3, 0], [1, 1, 2, 2]], [15, 3, 40, 6], axis=1).astype(np.int32)
    positions = np.cumsum(np.random.default_rng(0).integers(1, 3, (BATCH, 64)), axis=1)
    arrays = {
        "query": normal(0),
        "key": normal(1),
        "value": normal(2),
        "slopes": alibi_slopes(HEADS),
        "segment_ids": jnp.asarray(ids),
        "positions": jnp.asarray(positions, jnp.int32),
    }

    def reference(segment_ids, positions, **arrays):
        return alibi_attention(
            **arrays,
            query_positions=positions,
            key_positions=positions,
            query_segment_ids=segment_ids,
            key_segment_ids=segment_ids,
            implementation="dense",
        )

    sharded = functools.partial(context_attention, axes=("context",))
    assert_same(sharded, reference, arrays, slopes=jax.P())


def arrays_with_slopes(kv_heads=HEADS, slopes=STEEP):
    arrays = {"query": normal(0), "key": normal(1, kv_heads), "value": normal(2, kv_heads)}
    return arrays | {"slopes": jnp.asarray(slopes)}


def unsharded(segment_ids=None, **arrays):
    return alibi_attention(
        **arrays,
        query_segment_ids=segment_ids,
        key_segment_ids=segment_ids,
        implementation="dense",
        tolerance=0.0,
    )


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize(
    ("kv_heads", "slopes", "short_range"), [(4, STEEP, (1, 3)), (2, np.sort(STEEP), (1,))]
)
@pytest.mark.sample(2)
def test_short_range_heads_among_others(kv_heads, slopes, short_range, segments):
    arrays = arrays_with_slopes(kv_heads, slopes)
    assert short_range_heads(slopes, kv_heads, 16) == short_range
    if segments:
        ids = np.repeat([[1, 2, 0], [1, 1, 2]], [20, 40, 4], axis=1).astype(np.int32)
        arrays["segment_ids"] = jnp.asarray(ids)
    sharded = functools.partial(context_attention, axes=("context",), short_range=short_range)
    assert_same(sharded, unsharded, arrays, slopes=jax.P())


def with_a_heavy_key(arrays):
    """The arrays with a key of so great a norm that it outweighs its distance under all slopes."""
    key, query = arrays["key"], arrays["query"]
    return arrays | {
        "key": key.at[:, 3].multiply(8.0),
        "query": query.at[:, 60:].set(10.0 * key[:, 3:4]),
    }


def test_a_heavy_key_far_away_is_fetched():
    arrays = with_a_heavy_key(arrays_with_slopes())
    wanted = unsharded(**arrays)
    without_far = unsharded(**arrays | {"key": arrays["key"].at[:, :32].set(0.0)})
    assert jnp.abs(wanted - without_far)[:, 60:, 1].max() > 0.1
    sharded = functools.partial(context_attention, axes=("context",), short_range=(1, 3))
    # Scores reach hundreds, where float32 has steps of 3e-5.
    assert_same(sharded, unsharded, arrays, 3e-5, slopes=jax.P())


def test_short_range_heads_fetch_only_the_previous_shards_keys(monkeypatch):
    """Attention to all keys is replaced by zeros, which appear only with a heavy key."""
    monkeypatch.setattr(context_parallel, "_attend_to_all", lambda query, *_: jnp.zeros_like(query))
    arrays = arrays_with_slopes(slopes=STEEP + 2.0)
    sharded = shard_sequence(
        functools.partial(context_attention, axes=("context",), short_range=(0, 1, 2, 3)),
        slopes=jax.P(),
    )
    np.testing.assert_allclose(sharded(arrays), unsharded(**arrays), atol=1e-5)
    assert (sharded(with_a_heavy_key(arrays)) == 0).all()


def test_d8_the_bias_of_a_shard_is_its_rows_of_the_whole():
    full_bias = alibi_bias(HEADS, 64)
    for shard in range(SHARDS):
        rows = jnp.arange(shard * 16, (shard + 1) * 16, dtype=jnp.int32)
        bias = alibi_bias_at(alibi_slopes(HEADS), rows, jnp.arange(64, dtype=jnp.int32))
        np.testing.assert_array_equal(bias, full_bias[:, rows])


def test_short_range_heads_have_steep_slopes():
    slopes = np.asarray(alibi_slopes(8))
    # The reach of a slope of m is about 33 / m.
    heads = [short_range_heads(slopes, 8, length) for length in (8, 70, 600, 10_000)]
    assert heads == [(), (0,), (0, 1, 2, 3), tuple(range(8))]
    # The reach of a key head is the greatest of its query heads'.
    assert short_range_heads(slopes, 2, 600) == (0,)
    assert short_range_heads(slopes, 1, 600) == ()
