"""Attention over parts of the keys, combined by log-sum-exps, as in ring attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi_jax.attention import alibi_attention, attention, engines
from alibi_jax.biases import LinearBias, alibi_slopes

pytestmark = pytest.mark.usefixtures("quick_compile")

LENGTH, HEADS, SIZE = 64, 4, 8


@pytest.fixture(params=["dense", "blockwise"])
def engine(request, monkeypatch):
    """All scores at once, and blocks so small that each part has several."""
    if request.param == "blockwise":
        monkeypatch.setattr(engines, "_DENSE_MAX_SCORES", 0)
        monkeypatch.setattr(engines, "_DENSE_MAX_QUERIES", 0)
        monkeypatch.setattr(engines, "_BLOCK_SIZE", {"cpu": 8})
        monkeypatch.setattr(engines, "_MAX_BLOCKS_WITHOUT_REACH", 0)


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
    """Each device keeps its queries; the parts of the keys and values pass by all devices."""
    part = query.shape[1]
    device = jax.lax.axis_index("ring")
    out, total = 0.0, -jnp.inf
    for step in range(devices):
        owner = (device - step) % devices
        part_out, part_total = attention(
            query,
            key,
            value,
            bias=LinearBias(slopes),
            causal=causal,
            offset=(device - owner) * part,
            return_residual=True,
        )
        new_total = jnp.logaddexp(total, part_total)
        # A row that has seen no key yet has a total of -inf, of which the difference would be NaN.
        safe = jnp.where(new_total == -jnp.inf, 0.0, new_total)
        out = out * jnp.exp(total - safe)[..., None]
        out += part_out * jnp.exp(part_total - safe)[..., None]
        total = new_total
        to_next = [(sender, (sender + 1) % devices) for sender in range(devices)]
        key, value = (jax.lax.ppermute(x, "ring", to_next) for x in (key, value))
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.sample(2)
def test_d8_ring_attention_is_the_whole(causal, engine):
    arrays = normal(0), normal(1, 2), normal(2, 2), alibi_slopes(HEADS)
    by_sequence = jax.P(None, "ring")
    sharded = jax.jit(
        jax.shard_map(
            functools.partial(ring_attention, causal=causal, devices=4),
            mesh=mesh_of(4),
            in_specs=(by_sequence, by_sequence, by_sequence, jax.P()),
            out_specs=by_sequence,
        )
    )
    whole = functools.partial(alibi_attention, causal=causal, implementation="dense")
    np.testing.assert_allclose(sharded(*arrays), whole(*arrays), atol=1e-5)
    for got, right in zip(gradients(sharded, arrays), gradients(whole, arrays)):
        np.testing.assert_allclose(got, right, atol=1e-5 * float(jnp.abs(right).max()))


def test_residuals_are_the_log_sum_exps_of_the_scores(engine):
    query, key, value = normal(0), normal(1), normal(2)
    ids = jnp.ones((2, LENGTH), jnp.int32).at[0, :3].set(0)
    slopes = alibi_slopes(HEADS)

    def residuals(query, key):
        return attention(
            query,
            key,
            value,
            bias=LinearBias(slopes),
            query_segment_ids=ids,
            key_segment_ids=ids,
            return_residual=True,
        )[1]

    def plain(query, key):
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) * SIZE**-0.5
        index = jnp.arange(LENGTH)
        scores -= slopes[:, None, None] * abs(index[:, None] - index)
        seen = (index <= index[:, None]) & (ids[:, None, None, :] != 0)
        scores = jnp.where(seen, scores, -1e30)
        return jnp.moveaxis(jax.nn.logsumexp(scores, axis=-1), 1, 2)

    real = np.asarray(ids != 0)
    got, right = jax.jit(residuals)(query, key), jax.jit(plain)(query, key)
    np.testing.assert_allclose(got[real], right[real], atol=1e-5)
    assert (np.asarray(got)[~real] == -np.inf).all()

    def total(function):
        return lambda *x: jnp.where(real[..., None], function(*x), 0.0).sum()

    for got, wanted in zip(
        jax.jit(jax.grad(total(residuals), (0, 1)))(query, key),
        jax.jit(jax.grad(total(plain), (0, 1)))(query, key),
    ):
        np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_heads_and_rows_of_a_shard_map_that_checks_what_varies(engine):
    arrays = normal(0), normal(1), normal(2), alibi_slopes(HEADS)
    by_row = jax.P("ring")
    in_parts = jax.jit(
        jax.shard_map(
            alibi_attention,
            mesh=mesh_of(2),
            in_specs=(by_row, by_row, by_row, jax.P()),
            out_specs=by_row,
        )
    )
    np.testing.assert_allclose(in_parts(*arrays), alibi_attention(*arrays), atol=1e-6)
    # All devices have the same slopes, whose gradient is the sum over the devices' rows.
    for got, right in zip(gradients(in_parts, arrays), gradients(alibi_attention, arrays)):
        np.testing.assert_allclose(got, right, atol=1e-5 * float(jnp.abs(right).max()))
