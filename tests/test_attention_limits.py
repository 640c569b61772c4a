"""Windows of any size, positions that are not whole, explicit meshes, symbolic lengths."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from alibi_jax.attention import alibi_attention, attention, engines
from alibi_jax.biases import (
    alibi_bias,
    alibi_bias_at,
    alibi_slopes,
    kerple_log_bias_at,
    kerple_power_bias_at,
    sandwich_bias_at,
    t5_buckets,
)

HEADS, SIZE = 4, 8

pytestmark = pytest.mark.usefixtures("quick_compile")


def arrays(length, kv_heads=2, batch=2):
    random = np.random.default_rng(0)
    shapes = ((batch, length, x, SIZE) for x in (HEADS, kv_heads, kv_heads))
    return [jnp.asarray(random.normal(size=x), jnp.float32) for x in shapes]


def jax_nn(query, key, value):
    index = jnp.arange(query.shape[1])
    bias = -alibi_slopes(HEADS)[:, None, None] * jnp.abs(index - index[:, None])
    return jax.nn.dot_product_attention(query, key, value, bias[None], is_causal=True)


def gradients(attend, inputs):
    return jax.jit(jax.grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2)))(*inputs)


@pytest.mark.parametrize("implementation", ["dense", "blockwise", "pallas_tpu", "folded"])
@pytest.mark.parametrize("window", [9, 2**31 - 2, 2**31 - 1, 2**31, 2**64])
@pytest.mark.sample(8)
def test_a_window_that_hides_no_key_is_no_window(implementation, window, monkeypatch):
    monkeypatch.setattr(
        engines, "_BLOCK_SIZE", {"cpu": 128 if implementation == "pallas_tpu" else 4}
    )
    inputs = arrays(9)

    def attend(**options):
        return lambda *x: alibi_attention(
            *x, alibi_slopes(HEADS), implementation=implementation, **options
        )

    np.testing.assert_array_equal(attend(window=window)(*inputs), attend()(*inputs))
    for got, right in zip(gradients(attend(window=window), inputs), gradients(attend(), inputs)):
        np.testing.assert_array_equal(got, right)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.sample(2)
def test_a_traced_offset_and_a_huge_window_do_not_overflow(implementation, causal, monkeypatch):
    monkeypatch.setattr(engines, "_BLOCK_SIZE", {"cpu": 4})
    query, key, value = arrays(9)

    @jax.jit
    def run(offset, window=None):
        return alibi_attention(
            query[:, :3],
            key,
            value,
            alibi_slopes(HEADS),
            offset=offset,
            causal=causal,
            window=2**31 - 1 if window is None else window,
            implementation=implementation,
        )

    # One program is compiled as a whole, the other operation by operation.
    np.testing.assert_allclose(
        run(jnp.int32(5)),
        alibi_attention(
            query[:, :3],
            key,
            value,
            alibi_slopes(HEADS),
            offset=5,
            causal=causal,
            implementation=implementation,
        ),
        atol=1e-6,
    )


HALVES = jnp.array([0.0, 0.5, 1.0, 1.5])
DISTANCES = np.abs(np.arange(4)[:, None] - np.arange(4)) / 2


def test_distances_between_positions_need_not_be_whole():
    slope = jnp.array([0.0625])
    bias = alibi_bias_at(slope, HALVES, HALVES)
    np.testing.assert_array_equal(bias[0, -1], [-0.09375, -0.0625, -0.03125, 0.0])
    np.testing.assert_array_equal(bias, alibi_bias_at(slope, *[HALVES.astype(jnp.bfloat16)] * 2))
    one = jnp.ones(1)
    np.testing.assert_allclose(
        kerple_log_bias_at(one, one, HALVES, HALVES)[0], -np.log1p(DISTANCES), rtol=1e-6
    )
    np.testing.assert_allclose(
        kerple_power_bias_at(one, 2 * one, HALVES, HALVES)[0], -(DISTANCES**2), rtol=1e-6
    )
    frequencies = 10000.0 ** (-np.arange(0, 128, 2) / 128)
    for start in (0, 100_000):
        sandwich = sandwich_bias_at(one, HALVES + start, HALVES + start)[0]
        expected = np.cos(DISTANCES[..., None] * frequencies).sum(-1) - 64
        np.testing.assert_allclose(sandwich, expected, atol=5e-5)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.sample(1)
def test_attention_takes_positions_that_are_not_whole(implementation, monkeypatch):
    monkeypatch.setattr(engines, "_BLOCK_SIZE", {"cpu": 4})
    inputs, slopes = arrays(30), alibi_slopes(HEADS)
    whole = jnp.arange(30)
    halves = alibi_attention(
        *inputs,
        slopes,
        query_positions=whole / 2,
        key_positions=whole / 2,
        implementation=implementation,
    )
    np.testing.assert_allclose(
        halves, alibi_attention(*inputs, slopes / 2, implementation=implementation), atol=1e-6
    )


def test_positions_and_offsets_without_a_meaning_are_refused(monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(ValueError, match="positions are float32: give integers"):
        t5_buckets(HALVES, bidirectional=False)
    with pytest.raises(ValueError, match="positions are bool"):
        alibi_bias_at(jnp.ones(1), HALVES > 0, HALVES)
    with pytest.raises(ValueError, match="positions from 0 to 2147483648 do not fit 32 bits"):
        alibi_bias_at(jnp.ones(1), np.array([0, 2**31]), HALVES)
    for offset in (1.5, True, jnp.float32(1)):
        with pytest.raises(ValueError, match="offset"):
            alibi_bias(1, 2, 4, offset=offset)
        with pytest.raises(ValueError, match="offset"):
            attention(*arrays(4), causal=False, offset=offset)


@pytest.mark.parametrize("axis", [0, 2])
@pytest.mark.parametrize("length", [16, 300])
@pytest.mark.sample(2)
def test_explicit_axes_are_jax_nn(length, axis):
    inputs = arrays(length)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    spec = jax.P(*["x" if i == axis else None for i in range(4)])
    sharded = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in inputs]

    def attend(*x):
        return alibi_attention(*x, alibi_slopes(HEADS))

    with jax.set_mesh(mesh):
        out = jax.jit(attend)(*sharded)
        got = gradients(attend, sharded)
    np.testing.assert_allclose(out, jax_nn(*inputs), atol=1e-5)
    for x, right in zip(got, gradients(jax_nn, inputs)):
        np.testing.assert_allclose(x, right, atol=2e-5)


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint])
@pytest.mark.sample(1)
def test_a_bias_may_close_over_a_traced_integer(transform):
    inputs, weights = arrays(20), jnp.ones(HEADS)
    index = jnp.arange(20)

    def total(weights, shift):
        def bias(queries, keys):
            relative = keys[None, :] - queries[:, None] + shift
            return -weights[:, None, None] * jnp.abs(relative)

        return (attention(*inputs, bias=bias, implementation="blockwise") ** 2).sum()

    def expected(weights):
        bias = -weights[:, None, None] * jnp.abs(index - index[:, None] + 3)
        return (jax.nn.dot_product_attention(*inputs, bias[None], is_causal=True) ** 2).sum()

    right = jax.grad(expected)(weights)
    np.testing.assert_allclose(jax.grad(transform(total))(weights, 3), right, atol=1e-4)

    def scanned(weights):
        return jax.lax.scan(lambda x, n: (x + total(weights, n), None), 0.0, jnp.array([3]))[0]

    np.testing.assert_allclose(jax.grad(scanned)(weights), right, atol=1e-4)


@pytest.mark.parametrize("implementation", [None, "dense", "blockwise"])
@pytest.mark.sample(2)
def test_lengths_may_be_symbolic(implementation, monkeypatch):
    # The type checks of the tests cannot compare symbolic sizes.
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    (length,) = jax.export.symbolic_shape("t")
    shapes = [jax.ShapeDtypeStruct((2, length, x, SIZE), jnp.float32) for x in (HEADS, 2, 2)]
    exported = jax.export.export(
        jax.jit(lambda *x: alibi_attention(*x, alibi_slopes(HEADS), implementation=implementation))
    )(*shapes)
    for number in (5, 300):
        inputs = arrays(number)
        np.testing.assert_allclose(exported.call(*inputs), jax_nn(*inputs), atol=1e-5)


@pytest.mark.parametrize("implementation", ["dense", "blockwise", "pallas_tpu", "folded"])
def test_no_array_is_broadcast_to_more_axes_silently(implementation):
    inputs = arrays(20)

    def attend(*x):
        return alibi_attention(*x, alibi_slopes(HEADS), implementation=implementation)

    with jax.numpy_rank_promotion("raise"):
        jax.eval_shape(jax.grad(lambda *x: attend(*x).sum(), (0, 1, 2)), *inputs)


@pytest.mark.parametrize("implementation", [None, "dense", "blockwise"])
@pytest.mark.parametrize("length", [4, 300])
@pytest.mark.sample(2)
def test_values_may_have_no_features(implementation, length):
    query = jnp.ones((1, length, 1, 2))
    out = attention(query, query, jnp.ones((1, length, 1, 0)), implementation=implementation)
    assert out.shape == (1, length, 1, 0)
