import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi_jax.biases import FireWeights, fire_bias, fire_bias_at


def fire_weights(num_heads, threshold=3.0):
    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    rng = np.random.default_rng(0)
    layers = normal(16), normal(16), normal(16, num_heads) / 4, normal(num_heads)
    return FireWeights(jnp.float32(0.3), jnp.float32(threshold), *layers)


def fire_oracle(weights, query_positions, key_positions):
    rate, threshold, hidden_kernel, hidden_bias, out_kernel, out_bias = (
        np.asarray(weight, np.float64) for weight in weights
    )
    bias = np.zeros((len(out_bias), len(query_positions), len(key_positions)))
    for t, s in np.ndindex(*bias.shape[1:]):
        i, j = int(query_positions[t]), int(key_positions[s])
        normalizer = math.log(abs(rate) * max(abs(threshold), i) + 1) + 1e-6
        x = math.log(abs(rate) * abs(i - j) + 1) / normalizer
        hidden = [max(0.0, k * x + b) for k, b in zip(hidden_kernel, hidden_bias)]
        for head in range(len(out_bias)):
            bias[head, t, s] = out_bias[head] + sum(hidden * out_kernel[:, head])
    return bias


def identity_weights(rate, threshold):
    """Weights of a perceptron that returns its input."""
    one, zero = jnp.ones(1), jnp.zeros(1)
    return FireWeights(jnp.float32(rate), jnp.float32(threshold), one, zero, one[None], zero)


def test_rows_within_and_past_the_threshold():
    bias = fire_bias(identity_weights(1, 4), 9)[0]
    within = [math.log(1 + d) / math.log(5) for d in (2, 1, 0)]
    np.testing.assert_allclose(bias[2, :3], within, rtol=2e-6)
    past = [math.log(1 + d) / math.log(9) for d in range(8, -1, -1)]
    np.testing.assert_allclose(bias[8], past, rtol=2e-6)
    # A key after its query gets the bias of its distance.
    np.testing.assert_allclose(bias[1, 3], within[0], rtol=2e-6)


def test_signs_of_rate_and_threshold_are_ignored():
    weights = fire_weights(2)
    negated = weights._replace(rate=-weights.rate, threshold=-weights.threshold)
    np.testing.assert_array_equal(fire_bias(negated, 8), fire_bias(weights, 8))


def test_first_query_without_a_threshold_is_finite():
    """The bias is not 0 / 0 where position and threshold are both 0."""
    value, gradient = jax.value_and_grad(lambda weights: fire_bias(weights, 1).sum())(
        identity_weights(1, 0)
    )
    assert value == 0
    assert all(jnp.isfinite(leaf).all() for leaf in gradient)


def test_more_queries_than_fit_in_one_chunk():
    weights, queries, keys = fire_weights(2), jnp.arange(130), jnp.arange(0, 130, 13)
    np.testing.assert_allclose(
        fire_bias_at(weights, queries, keys), fire_oracle(weights, queries, keys), atol=3e-6
    )


@pytest.mark.parametrize(
    "function", [fire_bias_at, jax.grad(lambda *arguments: fire_bias_at(*arguments).sum())]
)
def test_b11_hidden_units_of_all_pairs_never_exist(function):
    weights, positions = fire_weights(2), jnp.arange(2048)
    compiled = jax.jit(function).lower(weights, positions, positions).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * 2048 * 2048 * 4
