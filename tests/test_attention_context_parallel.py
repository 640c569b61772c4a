"""D8 (NVIDIA/TransformerEngine#1046): a sequence that is split over devices, as one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi_jax.attention import alibi_attention, attention, context_parallel
from alibi_jax.attention.context_parallel import context_attention, near_heads
from alibi_jax.biases import alibi_bias, alibi_bias_at, alibi_slopes

pytestmark = pytest.mark.usefixtures("quick_compile")

BATCH, HEADS, SIZE, PARTS = 2, 4, 8, 4
STEEP = np.float32([0.01, 3.0, 0.02, 2.5])


def normal(seed, heads=HEADS, length=64):
    random = np.random.default_rng(seed)
    return jnp.asarray(random.normal(size=(BATCH, length, heads, SIZE)), jnp.float32)


def split(function, **specs):
    """`function` of arrays by name, each device with its part of them along the sequence."""
    axes = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((PARTS,), ("parts",), axes, devices=jax.devices()[:PARTS])
    rows = jax.P(None, "parts")

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


def assert_same(function, whole, arrays, tolerance=1e-5, **specs):
    """Both, and the gradients of a loss of them."""
    sharded = split(function, **specs)
    np.testing.assert_allclose(sharded(arrays), whole(**arrays), atol=1e-5)
    floats = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    others = {name: x for name, x in arrays.items() if name not in floats}

    def gradient(function):
        return jax.jit(jax.grad(lambda floats: (function(floats | others) ** 2).sum()))(floats)

    wanted = gradient(lambda arrays: whole(**arrays))
    for name, found in gradient(sharded).items():
        scale = float(jnp.abs(wanted[name]).max())
        np.testing.assert_allclose(found, wanted[name], atol=tolerance * scale, err_msg=name)


@pytest.mark.parametrize("slopes", [None, "alibi"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_d8_the_parts_are_the_whole(slopes, kv_heads):
    arrays = {"query": normal(0), "key": normal(1, kv_heads), "value": normal(2, kv_heads)}
    whole = attention
    if slopes:
        arrays["slopes"] = alibi_slopes(HEADS)
        whole = functools.partial(alibi_attention, implementation="dense")
    assert_same(
        functools.partial(context_attention, axes=("parts",)), whole, arrays, slopes=jax.P()
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

    def whole(segment_ids, positions, **arrays):
        return alibi_attention(
            **arrays,
            query_positions=positions,
            key_positions=positions,
            query_segment_ids=segment_ids,
            key_segment_ids=segment_ids,
            implementation="dense",
        )

    sharded = functools.partial(context_attention, axes=("parts",))
    assert_same(sharded, whole, arrays, slopes=jax.P())


def near_arrays(kv_heads=HEADS, slopes=STEEP):
    arrays = {"query": normal(0), "key": normal(1, kv_heads), "value": normal(2, kv_heads)}
    return arrays | {"slopes": jnp.asarray(slopes)}


def whole_with_segments(segment_ids=None, **arrays):
    return alibi_attention(
        **arrays,
        query_segment_ids=segment_ids,
        key_segment_ids=segment_ids,
        implementation="dense",
        tolerance=0.0,
    )


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize(
    ("kv_heads", "slopes", "near"), [(4, STEEP, (1, 3)), (2, np.sort(STEEP), (1,))]
)
def test_steep_heads_beside_others(kv_heads, slopes, near, segments):
    arrays = near_arrays(kv_heads, slopes)
    assert near_heads(slopes, kv_heads, 16) == near
    if segments:
        ids = np.repeat([[1, 2, 0], [1, 1, 2]], [20, 40, 4], axis=1).astype(np.int32)
        arrays["segment_ids"] = jnp.asarray(ids)
    sharded = functools.partial(context_attention, axes=("parts",), near=near)
    assert_same(sharded, whole_with_segments, arrays, slopes=jax.P())


def with_a_heavy_key(arrays):
    """One so long that it outweighs its distance, however steep the slopes."""
    key, query = arrays["key"], arrays["query"]
    return arrays | {
        "key": key.at[:, 3].multiply(8.0),
        "query": query.at[:, 60:].set(10.0 * key[:, 3:4]),
    }


def test_a_heavy_key_far_away_is_fetched():
    arrays = with_a_heavy_key(near_arrays())
    wanted = whole_with_segments(**arrays)
    neighbours = whole_with_segments(**arrays | {"key": arrays["key"].at[:, :32].set(0.0)})
    assert jnp.abs(wanted - neighbours)[:, 60:, 1].max() > 0.1
    sharded = functools.partial(context_attention, axes=("parts",), near=(1, 3))
    # Scores of hundreds, whose last digit is 3e-5.
    assert_same(sharded, whole_with_segments, arrays, 3e-5, slopes=jax.P())


def test_steep_heads_fetch_the_neighbours_keys_alone(monkeypatch):
    """Gathering all keys gives nothing here: it comes to that for a heavy key, and for no other."""
    monkeypatch.setattr(context_parallel, "_far", lambda query, *_: jnp.zeros_like(query))
    arrays = near_arrays(slopes=STEEP + 2.0)
    sharded = split(
        functools.partial(context_attention, axes=("parts",), near=(0, 1, 2, 3)), slopes=jax.P()
    )
    np.testing.assert_allclose(sharded(arrays), whole_with_segments(**arrays), atol=1e-5)
    assert (sharded(with_a_heavy_key(arrays)) == 0).all()


def test_d8_the_bias_of_a_part_is_the_rows_of_the_whole():
    whole = alibi_bias(HEADS, 64)
    for part in range(PARTS):
        rows = jnp.arange(part * 16, (part + 1) * 16, dtype=jnp.int32)
        of_part = alibi_bias_at(alibi_slopes(HEADS), rows, jnp.arange(64, dtype=jnp.int32))
        np.testing.assert_array_equal(of_part, whole[:, rows])


def test_heads_are_near_by_their_slopes():
    slopes = np.asarray(alibi_slopes(8))
    # The reach of a slope of m is about 33 / m.
    reached = [near_heads(slopes, 8, length) for length in (8, 70, 600, 10_000)]
    assert reached == [(), (0,), (0, 1, 2, 3), tuple(range(8))]
    # A key head is as far-sighted as the farthest of its query heads.
    assert near_heads(slopes, 2, 600) == (0,)
    assert near_heads(slopes, 1, 600) == ()
