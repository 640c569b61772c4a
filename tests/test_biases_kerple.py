import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi_jax.biases import (
    alibi_bias,
    alibi_slopes,
    kerple_log_bias,
    kerple_log_bias_at,
    kerple_power_bias,
    kerple_power_bias_at,
)


def log_oracle(scale, rate, query_positions, key_positions):
    bias = np.zeros((len(scale), len(query_positions), len(key_positions)))
    for head, t, s in np.ndindex(*bias.shape):
        distance = abs(int(query_positions[t]) - int(key_positions[s]))
        bias[head, t, s] = -float(scale[head]) * math.log(1 + float(rate[head]) * distance)
    return bias


def power_oracle(scale, exponent, query_positions, key_positions):
    bias = np.zeros((len(scale), len(query_positions), len(key_positions)))
    for head, t, s in np.ndindex(*bias.shape):
        distance = abs(int(query_positions[t]) - int(key_positions[s]))
        bias[head, t, s] = -float(scale[head]) * distance ** float(exponent[head])
    return bias


def test_rows_of_the_logarithmic_bias_have_exact_values():
    bias = kerple_log_bias(jnp.array([2.0]), jnp.array([3.0]), 4)[0]
    row = [-2 * math.log(10), -2 * math.log(7), -2 * math.log(4), 0]
    np.testing.assert_allclose(bias[3], row, rtol=3e-7)
    np.testing.assert_array_equal(bias, bias.T)


def test_log_of_a_small_rate_keeps_its_digits():
    """A bias computed with the rounded 1 + rate, which is 1, would be 0."""
    bias = kerple_log_bias(jnp.ones(1), jnp.array([1e-8]), 1, 2)
    np.testing.assert_allclose(bias[0, 0], [-1e-8, 0], rtol=1e-6)


@pytest.mark.parametrize(
    ("exponent", "row"),
    [
        (0.5, [-3 * math.sqrt(2), -3, 0, -3]),
        (1, [-6, -3, 0, -3]),
        (2, [-12, -3, 0, -3]),
    ],
)
def test_rows_of_the_power_bias_have_exact_values(exponent, row):
    keys = jnp.arange(4)
    bias = kerple_power_bias_at(jnp.array([3.0]), jnp.array([float(exponent)]), keys[2:3], keys)
    np.testing.assert_allclose(bias[0, 0], row, rtol=3e-7)


def test_power_of_one_is_alibi():
    slopes = alibi_slopes(8)
    np.testing.assert_allclose(
        kerple_power_bias(slopes, jnp.ones(8), 16), alibi_bias(slopes, 16), rtol=1e-6
    )


@pytest.mark.parametrize("bias", [kerple_log_bias_at, kerple_power_bias_at])
def test_distance_zero_has_a_zero_gradient(bias):
    """The formula 0 · log 0 of the derivative of 0^p is NaN, which would stop a training run."""
    position = jnp.array([7])
    value, gradient = jax.value_and_grad(lambda weights: bias(*weights, position, position).sum())(
        (jnp.array([2.0]), jnp.array([0.5]))
    )
    assert value == 0
    assert gradient == (0, 0)
