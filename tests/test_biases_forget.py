import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_biases_alibi import devices_mesh

from alibi_jax.biases import alibi_bias, forget_bias_at, forget_decay


def forget_oracle(log_gates):
    """Log of the product of the gates after key j up to query i; keys after it are left at 0."""
    length, num_heads = log_gates.shape
    bias = np.zeros((num_heads, length, length))
    for head, i in np.ndindex(num_heads, length):
        for j in range(i + 1):
            gates = [math.exp(log_gates[t, head]) for t in range(j + 1, i + 1)]
            bias[head, i, j] = math.log(math.prod(gates))
    return bias


def gates_of(*shape, seed=0):
    return -jnp.abs(jax.random.normal(jax.random.key(seed), shape))


def bias_of(log_gates):
    decay = forget_decay(log_gates)
    return forget_bias_at(decay, decay)


def past(bias):
    return jnp.tril(bias)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-4, 0), min_size=12, max_size=12))
def test_bias_is_the_oracle(values):
    log_gates = np.array(values).reshape(6, 2)
    bias = bias_of(jnp.asarray(log_gates, jnp.float32))
    assert bias.dtype == jnp.float32
    np.testing.assert_allclose(past(bias), forget_oracle(log_gates), atol=5e-6)


def test_rows():
    decay = forget_decay(jnp.array([[-1.0], [-2.0], [-4.0]]))
    np.testing.assert_array_equal(decay[:, 0], [-1, -3, -7])
    # Its own gate is in what a query forgets, the key's own is not. Keys ahead are rewarded.
    np.testing.assert_array_equal(
        forget_bias_at(decay, decay)[0], [[0, 2, 6], [-2, 0, 4], [-6, -4, 0]]
    )


def test_gates_alike_are_alibi():
    slopes = jnp.array([0.5, 0.0625])
    np.testing.assert_array_equal(
        past(bias_of(jnp.broadcast_to(-slopes, (16, 2)))), past(alibi_bias(slopes, 16))
    )


def test_c1_gates_in_bfloat16_are_summed_in_float32():
    """A sum in bfloat16 stands still at -256."""
    decay = forget_decay(jnp.full((512, 1), -1, jnp.bfloat16))
    assert decay.dtype == jnp.float32
    np.testing.assert_array_equal(decay[:, 0], -np.arange(1.0, 513))


@pytest.mark.parametrize("chunks", [[8], [1] * 8, [3, 5], [1, 7]])
def test_b8_decoding_steps_are_rows_of_the_whole_bias(chunks):
    log_gates = gates_of(8, 2)
    decay = jnp.zeros((1, 2))
    for own in np.split(log_gates, np.cumsum(chunks)[:-1]):
        decay = jnp.concatenate([decay, decay[-1] + forget_decay(jnp.asarray(own))])
    ends = np.cumsum([0, *chunks])
    steps = [
        forget_bias_at(decay[1:][start:end], decay[1:]) for start, end in itertools.pairwise(ends)
    ]
    assert all(jnp.any(one != 0) for one in steps)
    np.testing.assert_allclose(jnp.concatenate(steps, axis=1), bias_of(log_gates), atol=2e-6)


def test_d1_left_padding_changes_no_bias_of_real_tokens():
    log_gates = gates_of(3, 2)
    padded = jnp.concatenate([gates_of(2, 2, seed=1), log_gates])
    np.testing.assert_allclose(bias_of(padded)[:, 2:, 2:], bias_of(log_gates), atol=1e-6)


def test_d3_packed_documents_have_their_own_bias():
    first, second = gates_of(5, 2), gates_of(3, 2, seed=1)
    whole = bias_of(jnp.concatenate([first, second]))
    np.testing.assert_allclose(whole[:, :5, :5], bias_of(first), atol=2e-6)
    np.testing.assert_allclose(whole[:, 5:, 5:], bias_of(second), atol=2e-6)


def test_a3_bias_with_heads_sharded_is_the_whole_bias():
    log_gates = gates_of(6, 8)
    by_shard = jax.shard_map(
        bias_of,
        mesh=devices_mesh(8),
        in_specs=jax.P(None, "devices"),
        out_specs=jax.P("devices"),
    )(log_gates)
    np.testing.assert_allclose(by_shard, bias_of(log_gates), atol=1e-6)


def test_d8_bias_of_a_shard_is_its_rows_of_the_whole():
    decay = forget_decay(gates_of(64, 2))
    rows = jax.shard_map(
        forget_bias_at,
        mesh=devices_mesh(8),
        in_specs=(jax.P("devices"), jax.P()),
        out_specs=jax.P(None, "devices"),
    )(decay, decay)
    np.testing.assert_array_equal(rows, forget_bias_at(decay, decay))


def test_batches_by_broadcasting_and_by_vmap():
    log_gates = gates_of(2, 6, 3)
    whole = bias_of(log_gates)
    assert whole.shape == (2, 3, 6, 6)
    for row, own in zip(whole, log_gates):
        np.testing.assert_array_equal(row, bias_of(own))
    np.testing.assert_allclose(jax.jit(jax.vmap(bias_of))(log_gates), whole, atol=1e-6)


def test_a6_gradient_counts_the_pairs_that_a_gate_stands_between():
    gradient = jax.grad(lambda gates: past(bias_of(gates)).sum())(gates_of(5, 2))
    pairs = [t * (5 - t) for t in range(5)]
    np.testing.assert_allclose(gradient, np.transpose([pairs, pairs]), atol=1e-5)


def test_bias_is_exported_for_any_length():
    (length,) = jax.export.symbolic_shape("length")
    shape = jax.ShapeDtypeStruct((length, 2), jnp.float32)
    exported = jax.export.export(jax.jit(bias_of))(shape)
    log_gates = gates_of(6, 2)
    np.testing.assert_allclose(exported.call(log_gates), bias_of(log_gates), atol=1e-6)
