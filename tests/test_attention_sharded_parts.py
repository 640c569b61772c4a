"""Attention over parts of the keys, put together by log-sum-exps: ring attention."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi_jax.attention import alibi_attention, attention_with_residual
from alibi_jax.biases import LinearBias, alibi_slopes

engines = importlib.import_module("alibi_jax.attention.engines")
pytestmark = pytest.mark.usefixtures("quick_compile")

LENGTH, HEADS, SIZE = 64, 4, 8


@pytest.fixture(params=["dense", "blockwise"])
def engine(request, monkeypatch):
    """Attention all at once, and in blocks of which each part has several."""
    if request.param == "blockwise":
        monkeypatch.setattr(engines, "_DENSE_SCORES", 0)
        monkeypatch.setattr(engines, "_DENSE_QUERIES", 0)
        monkeypatch.setattr(engines, "_BLOCK", {"cpu": 8})
        monkeypatch.setattr(engines, "_TOO_FEW_BLOCKS", 0)


def normal(seed, heads=HEADS, length=LENGTH):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(2, length, heads, SIZE)), "float32")


def mesh_of(devices):
    return jax.make_mesh(
        (devices,),
        ("ring",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:devices],
    )


def gradients(attend, arrays):
    return jax.jit(jax.grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2, 3)))(*arrays)


def ring_attention(query, key, value, slopes, causal, devices):
    """Keys and values go round; each device has its queries, and sums up what it sees of them."""
    part = query.shape[1]
    here = jax.lax.axis_index("ring")
    out, total = 0.0, -jnp.inf
    for step in range(devices):
        there = (here - step) % devices
        one, log_sum = attention_with_residual(
            query,
            key,
            value,
            bias=LinearBias(slopes),
            causal=causal,
            offset=(here - there) * part,
        )
        both = jnp.logaddexp(total, log_sum)
        # Nothing seen yet: nothing to weigh.
        safe = jnp.where(both == -jnp.inf, 0.0, both)
        out = out * jnp.exp(total - safe)[..., None] + one * jnp.exp(log_sum - safe)[..., None]
        total = both
        round_ = [(device, (device + 1) % devices) for device in range(devices)]
        key, value = (jax.lax.ppermute(x, "ring", round_) for x in (key, value))
    return out


@pytest.mark.parametrize("causal", [True, False])
def test_d8_ring_attention_is_the_whole(causal, engine):
    arrays = normal(0), normal(1, 2), normal(2, 2), alibi_slopes(HEADS)
    of_sequence = jax.P(None, "ring")
    sharded = jax.jit(
        jax.shard_map(
            functools.partial(ring_attention, causal=causal, devices=4),
            mesh=mesh_of(4),
            in_specs=(of_sequence, of_sequence, of_sequence, jax.P()),
            out_specs=of_sequence,
        )
    )
    whole = functools.partial(alibi_attention, causal=causal, implementation="dense")
    np.testing.assert_allclose(sharded(*arrays), whole(*arrays), atol=1e-5)
    for got, right in zip(gradients(sharded, arrays), gradients(whole, arrays)):
        np.testing.assert_allclose(got, right, atol=1e-5 * float(jnp.abs(right).max()))


def test_log_sums_are_those_of_the_scores(engine):
    query, key, value = normal(0), normal(1), normal(2)
    ids = jnp.ones((2, LENGTH), jnp.int32).at[0, :3].set(0)
    slopes = alibi_slopes(HEADS)

    def log_sums(query, key):
        return attention_with_residual(
            query,
            key,
            value,
            bias=LinearBias(slopes),
            query_segment_ids=ids,
            key_segment_ids=ids,
        )[1]

    def plain(query, key):
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) * SIZE**-0.5
        index = jnp.arange(LENGTH)
        scores -= slopes[:, None, None] * abs(index[:, None] - index)
        seen = (index <= index[:, None]) & (ids[:, None, None, :] != 0)
        scores = jnp.where(seen, scores, -1e30)
        return jnp.moveaxis(jax.nn.logsumexp(scores, axis=-1), 1, 2)

    real = np.asarray(ids != 0)
    got, right = jax.jit(log_sums)(query, key), jax.jit(plain)(query, key)
    np.testing.assert_allclose(got[real], right[real], atol=1e-5)
    assert (np.asarray(got)[~real] == -np.inf).all()

    def weighed(log_sums):
        return lambda *x: jnp.where(real[..., None], log_sums(*x), 0.0).sum()

    for one, other in zip(
        jax.jit(jax.grad(weighed(log_sums), (0, 1)))(query, key),
        jax.jit(jax.grad(weighed(plain), (0, 1)))(query, key),
    ):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_heads_and_rows_of_a_shard_map_that_checks_what_varies(engine):
    arrays = normal(0), normal(1), normal(2), alibi_slopes(HEADS)
    by_row = jax.P("ring")
    split = jax.jit(
        jax.shard_map(
            alibi_attention,
            mesh=mesh_of(2),
            in_specs=(by_row, by_row, by_row, jax.P()),
            out_specs=by_row,
        )
    )
    np.testing.assert_allclose(split(*arrays), alibi_attention(*arrays), atol=1e-6)
    # The slopes are the same on all devices: their gradient is the sum over the devices' rows.
    for got, right in zip(gradients(split, arrays), gradients(alibi_attention, arrays)):
        np.testing.assert_allclose(got, right, atol=1e-5 * float(jnp.abs(right).max()))
