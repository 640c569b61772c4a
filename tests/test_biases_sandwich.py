import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi_jax.biases import sandwich_bias, sandwich_bias_at, sandwich_ratios


def sandwich_oracle(ratios, query_positions, key_positions, width=128):
    bias = np.zeros((len(ratios), len(query_positions), len(key_positions)))
    for t, s in np.ndindex(*bias.shape[1:]):
        gap = int(query_positions[t]) - int(key_positions[s])
        product = sum(math.cos(gap / 10000 ** (2 * k / width)) for k in range(width // 2))
        bias[:, t, s] = (product - width / 2) / np.asarray(ratios, np.float64)
    return bias


@pytest.mark.parametrize(
    ("num_heads", "ratios"),
    [(1, [8]), (4, [2, 4, 6, 8]), (12, [2 / 3 * h for h in range(1, 13)])],
)
def test_ratios_are_8h_over_the_number_of_heads(num_heads, ratios):
    assert sandwich_ratios(num_heads).dtype == jnp.float32
    np.testing.assert_allclose(sandwich_ratios(num_heads), ratios, rtol=1e-7)


@pytest.mark.parametrize("num_heads", [0, -8])
def test_ratios_refuse_no_heads(num_heads):
    with pytest.raises(ValueError, match=f"num_heads={num_heads} "):
        sandwich_ratios(num_heads)


@pytest.mark.parametrize("num_heads", [4, np.int64(4)])
def test_a_number_of_heads_means_its_ratios(num_heads):
    np.testing.assert_array_equal(sandwich_bias(num_heads, 3), sandwich_bias(sandwich_ratios(4), 3))


def test_rows_of_four_features():
    """The frequencies of width 4 are 1 and 0.01."""
    bias = sandwich_bias(jnp.array([1.0, 2.0]), 1, 3, width=4)
    row = [math.cos(d) + math.cos(d / 100) - 2 for d in (2, 1, 0)]
    np.testing.assert_allclose(bias[:, 0], [row, [value / 2 for value in row]], atol=1e-6)


def test_the_bias_is_zero_at_distance_zero_and_negative_elsewhere():
    bias = sandwich_bias(1, 64)[0] * 8
    np.testing.assert_allclose(jnp.diagonal(bias), 0, atol=5e-5)
    assert bias[~np.eye(64, dtype=bool)].max() < -0.4


@pytest.mark.parametrize(
    ("first", "distance"), [(0, 4096), (2**30, 4096), (0, 100_000), (0, 2**31 - 1)]
)
def test_c6_the_error_is_small_at_any_position_and_distance(first, distance):
    keys = first + distance - np.linspace(0, distance, 200).astype(int)
    queries = np.array([first + distance])
    bias = sandwich_bias_at(jnp.ones(1), jnp.asarray(queries), jnp.asarray(keys))
    np.testing.assert_allclose(bias, sandwich_oracle([1.0], queries, keys), rtol=0, atol=2e-5)


def test_b11_no_array_of_all_angles_exists():
    at = jnp.arange(512)
    compiled = jax.jit(sandwich_bias_at).lower(sandwich_ratios(2), at, at).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * 512 * 512 * 4


@pytest.mark.parametrize("width", [0, -2, 7])
def test_odd_or_no_width_is_refused(width):
    with pytest.raises(ValueError, match=f"width={width} "):
        sandwich_bias(2, 3, width=width)
