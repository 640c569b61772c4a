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

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture
def optimized(quick_compile):
    """Compiles with XLA's optimizations, which must not simplify the rounding errors to zero."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def forget_oracle(log_gates, ids=None):
    """The log of the product of the gates after key j, up to query i; 0 if i does not see j."""
    length, num_heads = log_gates.shape
    ids = [0] * length if ids is None else ids
    bias = np.zeros((num_heads, length, length))
    for head, i in np.ndindex(num_heads, length):
        for j in range(i + 1):
            if len(set(ids[j : i + 1])) == 1:
                gates = [math.exp(log_gates[t, head]) for t in range(j + 1, i + 1)]
                bias[head, i, j] = math.log(math.prod(gates))
    return bias


def gates_of(*shape, seed=0):
    return -jnp.abs(jax.random.normal(jax.random.key(seed), shape))


decay_of = jax.jit(forget_decay)


@jax.jit
def bias_of(log_gates, ids=None):
    decay = forget_decay(log_gates, ids)
    return forget_bias_at(decay, decay)


def part(decay, start, end):
    return jax.tree.map(lambda x: x[..., start:end, :], decay)


def visible_bias(bias, ids=None):
    """The bias, with 0 where the query does not see the key."""
    runs = 0 if ids is None else np.cumsum(np.diff(ids, prepend=ids[0]) != 0)
    return jnp.where(np.equal.outer(runs, runs), jnp.tril(bias), 0)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-4, 0), min_size=12, max_size=12))
def test_bias_is_the_oracle(values):
    log_gates = np.array(values).reshape(6, 2)
    bias = bias_of(jnp.asarray(log_gates, jnp.float32))
    assert bias.dtype == jnp.float32
    np.testing.assert_allclose(visible_bias(bias), forget_oracle(log_gates), atol=5e-6)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.floats(-4, 0), min_size=12, max_size=12),
    st.lists(st.integers(0, 2), min_size=6, max_size=6),
)
def test_d3_bias_in_segments_is_the_oracle(values, ids):
    log_gates = np.array(values).reshape(6, 2)
    bias = bias_of(jnp.asarray(log_gates, jnp.float32), jnp.array(ids))
    np.testing.assert_allclose(visible_bias(bias, ids), forget_oracle(log_gates, ids), atol=5e-6)


def test_a_bias_sums_the_gates_after_the_key_up_to_the_query():
    decay = forget_decay(jnp.array([[-1.0], [-2.0], [-4.0]]))
    np.testing.assert_array_equal(decay.high[:, 0], [-1, -3, -7])
    # The sum includes the query's gate, not the key's. Keys after the query get a positive bias.
    np.testing.assert_array_equal(
        forget_bias_at(decay, decay)[0], [[0, 2, 6], [-2, 0, 4], [-6, -4, 0]]
    )


def test_equal_gates_are_alibi():
    slopes = jnp.array([0.5, 0.0625])
    np.testing.assert_array_equal(
        visible_bias(bias_of(jnp.broadcast_to(-slopes, (16, 2)))),
        visible_bias(alibi_bias(slopes, 16)),
    )


def test_c1_gates_in_bfloat16_are_summed_in_float32():
    """A bfloat16 sum of -1 would stop changing at -256."""
    decay = decay_of(jnp.full((512, 1), -1, jnp.bfloat16))
    assert decay.high.dtype == decay.low.dtype == jnp.float32
    np.testing.assert_array_equal(decay.high[:, 0], -np.arange(1.0, 513))
    np.testing.assert_array_equal(decay.low, 0)


def test_c1_late_in_a_long_text_biases_of_near_tokens_are_exact(optimized):
    """The sums are about -13000, where float32 numbers are 1e-3 apart."""
    log_gates = gates_of(16384, 2)
    last = part(decay_of(log_gates), -64, None)
    sums = np.cumsum(np.float64(log_gates), axis=0)[-64:].T
    expected = np.tril(sums[:, :, None] - sums[:, None, :])
    np.testing.assert_allclose(
        visible_bias(forget_bias_at(last, last)), expected, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("chunks", [[8], [1] * 8, [3, 5], [1, 7]])
def test_b8_decoding_steps_are_rows_of_the_whole_bias(chunks):
    log_gates, steps = gates_of(8, 2), []
    for start, end in itertools.pairwise(np.cumsum([0, *chunks])):
        # Slots of the cache that are not filled yet are zero, as padding is.
        filled = jnp.arange(8) < end
        decay = decay_of(jnp.where(filled[:, None], log_gates, 0), filled.astype(jnp.int32))
        steps.append(forget_bias_at(part(decay, start, end), decay))
    np.testing.assert_allclose(
        visible_bias(jnp.concatenate(steps, axis=1)), visible_bias(bias_of(log_gates)), atol=2e-6
    )


# Padding has the id 0 and another document the id 1; the tested document follows it.
@pytest.mark.parametrize("first_id", [0, 1])
def test_d1_d3_tokens_before_a_segment_change_nothing_in_it(first_id, optimized):
    first, second = 1500, 40
    log_gates, ids = gates_of(second, 2, seed=1), np.repeat([first_id, 2], [first, second])

    def bias_after(others):
        return visible_bias(bias_of(jnp.concatenate([others, log_gates]), ids)[:, first:, first:])

    bias = bias_after(gates_of(first, 2))
    np.testing.assert_array_equal(bias, bias_after(100 * gates_of(first, 2, seed=2)))
    np.testing.assert_array_equal(bias, bias_after(jnp.zeros((first, 2))))
    sums = np.cumsum(np.float64(log_gates), axis=0).T
    expected = np.tril(sums[:, :, None] - sums[:, None, :])
    np.testing.assert_allclose(bias, expected, rtol=0, atol=1e-5)


def test_a3_bias_with_heads_sharded_is_the_whole_bias():
    log_gates = gates_of(6, 8)
    by_shard = jax.shard_map(
        bias_of,
        mesh=devices_mesh(8),
        in_specs=jax.P(None, "devices"),
        out_specs=jax.P("devices"),
    )
    np.testing.assert_allclose(by_shard(log_gates), bias_of(log_gates), atol=1e-6)


def test_d8_bias_of_a_shard_is_its_rows_of_the_whole():
    decay = decay_of(gates_of(64, 2))
    rows = jax.shard_map(
        forget_bias_at,
        mesh=devices_mesh(8),
        in_specs=(jax.P("devices"), jax.P()),
        out_specs=jax.P(None, "devices"),
    )(decay, decay)
    np.testing.assert_array_equal(rows, forget_bias_at(decay, decay))


def test_batches_by_broadcasting_and_by_vmap():
    log_gates, ids = gates_of(2, 6, 3), jnp.array([[1, 1, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1]])
    whole = bias_of(log_gates, ids)
    assert whole.shape == (2, 3, 6, 6)
    for row, row_gates, row_ids in zip(whole, log_gates, ids):
        np.testing.assert_array_equal(row, bias_of(row_gates, row_ids))
    np.testing.assert_array_equal(bias_of(log_gates[:, None], ids[:, None])[:, 0], whole)
    np.testing.assert_allclose(jax.vmap(bias_of)(log_gates, ids), whole, atol=1e-6)


def test_a6_gradient_counts_the_pairs_on_both_sides_of_a_gate():
    gradient = jax.grad(lambda gates: visible_bias(bias_of(gates)).sum())(gates_of(5, 2))
    pairs = [t * (5 - t) for t in range(5)]
    np.testing.assert_allclose(gradient, np.transpose([pairs, pairs]), atol=1e-5)


def test_a6_gradient_in_segments_is_the_oracles_central_difference():
    log_gates, ids = gates_of(8, 2), [0, 0, 3, 3, 3, 3, 1, 1]
    weights = np.random.default_rng(0).normal(size=(2, 8, 8))

    def loss(gates):
        return (visible_bias(bias_of(gates, jnp.array(ids)), ids) * jnp.float32(weights)).sum()

    def oracle_loss(at, step):
        moved = np.float64(log_gates)
        moved[at] += step
        return (forget_oracle(moved, ids) * weights).sum()

    differences = np.zeros((8, 2))
    for at in np.ndindex(8, 2):
        differences[at] = (oracle_loss(at, 1e-4) - oracle_loss(at, -1e-4)) / 2e-4
    assert (differences != 0).any()
    np.testing.assert_allclose(jax.grad(loss)(log_gates), differences, atol=1e-5)


def test_a6_gradient_late_in_a_long_row_is_that_of_its_document():
    first, second = 1500, 5
    ids = np.repeat([1, 2], [first, second])

    @jax.jit
    @jax.grad
    def gradient(gates):
        return visible_bias(bias_of(gates, ids)[:, first:, first:]).sum()

    gradients = gradient(gates_of(first + second, 2))
    np.testing.assert_array_equal(gradients[:first], 0)
    pairs = [t * (5 - t) for t in range(5)]
    np.testing.assert_allclose(gradients[first:], np.transpose([pairs, pairs]), atol=1e-5)


def test_bias_is_exported_for_any_number_of_rows():
    (rows,) = jax.export.symbolic_shape("rows")
    shape = jax.ShapeDtypeStruct((rows, 6, 2), jnp.float32)
    exported = jax.export.export(bias_of)(shape)
    log_gates = gates_of(3, 6, 2)
    np.testing.assert_allclose(exported.call(log_gates), bias_of(log_gates), atol=1e-6)
