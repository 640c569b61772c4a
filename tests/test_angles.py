import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_jax.angles import rotary_angles
from alibi_jax.rotations import rotary_frequencies

quick = settings(max_examples=25, deadline=None)

# 192 bits of 1/(2π).
TURNS_PER_RADIAN = Fraction(0x28BE60DB9391054A7F09D5F47D4D377036D8A5664F10E410, 16**48)

# Compiled as a whole: otherwise each operation is compiled separately for each shape.
compiled = jax.jit(rotary_angles)


def turns(position, frequency):
    """The product in turns, less whole turns, in exact arithmetic."""
    product = Fraction(position) * Fraction(frequency) * TURNS_PER_RADIAN
    return float(product - math.floor(product + Fraction(1, 2)))


def errors(angles, positions, frequencies):
    """The distance on the circle of each angle, [T, F], from the exact product, in radians."""
    exact = [[turns(p, f) for f in frequencies.tolist()] for p in positions.tolist()]
    apart = np.asarray(angles, np.float64) / (2 * math.pi) - exact
    return 2 * math.pi * np.abs(apart - np.round(apart))


@pytest.mark.parametrize(
    "first", [-(2**31), -(2**24) - 32, -32, 0, 2048, 10**6, 10**7, 2**24, 2**31 - 64]
)
def test_c1_whole_positions_have_exact_angles(first):
    positions = jnp.arange(64) + jnp.int32(first)
    frequencies = rotary_frequencies(64)
    found = compiled(positions, frequencies)
    assert found.dtype == jnp.float32
    assert errors(found, positions, frequencies).max() < 1e-6


@quick
@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=4, max_size=4),
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=8, max_size=8),
)
def test_any_frequency_has_exact_angles(positions, frequencies):
    positions, frequencies = jnp.array(positions), jnp.array(frequencies)
    assert errors(compiled(positions, frequencies), positions, frequencies).max() < 2e-6


@quick
@given(
    st.lists(st.floats(-(2.0**31), 2.0**31 - 128, width=32), min_size=4, max_size=4),
    st.lists(st.floats(-6, 6, width=32), min_size=8, max_size=8),
)
def test_positions_that_are_not_whole_have_exact_angles(positions, frequencies):
    positions, frequencies = jnp.array(positions), jnp.array(frequencies)
    assert errors(compiled(positions, frequencies), positions, frequencies).max() < 2e-6


def test_a_half_position_is_between_its_neighbours():
    halves = np.array([0.5, 100_000.5, 1_000_000.5])
    found = rotary_angles(jnp.asarray(halves, jnp.float32), jnp.array([1.0]))
    assert errors(found, halves, np.array([1.0])).max() < 1e-6


def test_float64_frequencies_keep_all_bits():
    positions = np.array([10**6, 2**31 - 1])
    frequencies = 10000.0 ** (-np.arange(8) / 8)
    found = rotary_angles(jnp.asarray(positions), frequencies)
    assert found.dtype == jnp.float32
    assert errors(found, positions, frequencies).max() < 2e-6
    # As float32 they are other frequencies, which shows at these positions.
    rounded = rotary_angles(jnp.asarray(positions), frequencies.astype(np.float32))
    assert errors(rounded, positions, frequencies).max() > 0.01


def test_small_angles_are_the_product():
    positions, frequencies = jnp.arange(17), rotary_frequencies(32)
    products = np.arange(17, dtype=np.float32)[:, None] * np.asarray(frequencies)
    np.testing.assert_array_equal(compiled(positions, frequencies), products)


def test_the_dtype_of_positions_does_not_matter():
    frequencies = rotary_frequencies(8)
    expected = rotary_angles(jnp.arange(100, 120), frequencies)
    for dtype in (jnp.int8, jnp.uint8, jnp.int16, jnp.uint32, jnp.bfloat16, jnp.float32):
        found = rotary_angles(jnp.arange(100, 120).astype(dtype), frequencies)
        np.testing.assert_allclose(found, expected, atol=1e-6)
    with jax.enable_x64(True):
        for dtype in (jnp.int64, jnp.float64):
            found = rotary_angles(jnp.arange(100, 120).astype(dtype), frequencies)
            assert found.dtype == jnp.float32
            np.testing.assert_allclose(found, expected, atol=1e-6)


def test_transformed_functions_give_the_same_angles():
    positions = jnp.arange(12).reshape(3, 4) + 10**8
    frequencies = jnp.stack([rotary_frequencies(8), rotary_frequencies(8) / 3])
    expected = np.stack([rotary_angles(positions, row) for row in frequencies])
    over_frequencies = jax.vmap(rotary_angles, (None, 0))(positions, frequencies)
    np.testing.assert_array_equal(over_frequencies, expected)
    over_positions = jax.vmap(rotary_angles, (0, None))(positions, frequencies[0])
    np.testing.assert_array_equal(over_positions, expected[0])
    np.testing.assert_array_equal(
        jax.checkpoint(rotary_angles)(positions, frequencies[1]), expected[1]
    )


def test_derivatives_are_the_products():
    positions, frequencies = jnp.array([3.0, 1e6, 2.0**30]), jnp.array([1.0, 0.25])
    by_position, by_frequency = jax.jacobian(rotary_angles, (0, 1))(positions, frequencies)
    np.testing.assert_array_equal(by_position, np.eye(3)[:, None] * frequencies[:, None])
    np.testing.assert_array_equal(
        by_frequency, np.asarray(positions)[:, None, None] * np.eye(2)[None]
    )
    whole = jax.jacobian(rotary_angles, 1)(jnp.array([3, 10**6]), frequencies)
    np.testing.assert_array_equal(whole[1], 1e6 * np.eye(2))
    forward = jax.jvp(lambda f: rotary_angles(positions, f), (frequencies,), (jnp.ones(2),))[1]
    np.testing.assert_array_equal(forward, np.asarray(positions)[:, None] * np.ones(2))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_angle(value):
    assert np.isnan(rotary_angles(jnp.array([1, 100]), jnp.array([value]))).all()
    assert np.isnan(rotary_angles(jnp.array([value]), jnp.array([1.0, 0.25]))).all()


def test_no_positions():
    assert rotary_angles(jnp.zeros((2, 0), jnp.int32), rotary_frequencies(8)).shape == (2, 0, 4)
