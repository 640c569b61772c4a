import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_jax.rotations import (
    dynamic_ntk_factor,
    interpolated_frequencies,
    ntk_frequencies,
    rotary,
    rotary_frequencies,
    truncated_frequencies,
    yarn_frequencies,
    yarn_temperature,
)

quick = settings(max_examples=20, deadline=None)
sizes = st.integers(2, 64).map(lambda pairs: 2 * pairs)
factors = st.floats(1.0, 64.0)
bases = st.floats(10.0, 1e6)

# The relative rounding error of float32 is at most 2^-24.
ROUNDING = 1e-7


def wavelengths(size, base=10000.0):
    """The wavelengths, in positions per turn; a frequency is 2π divided by its wavelength."""
    return [2 * math.pi * base ** (2 * pair / size) for pair in range(size // 2)]


def yarn_oracle(size, factor, train_length, base=10000.0, beta_fast=32.0, beta_slow=1.0):
    """The paper's three cases, for one pair at a time."""
    frequencies = []
    for wavelength in wavelengths(size, base):
        turns = train_length / wavelength
        if turns < beta_slow:
            gamma = 0.0
        elif turns > beta_fast:
            gamma = 1.0
        else:
            gamma = (turns - beta_slow) / (beta_fast - beta_slow)
        frequency = 2 * math.pi / wavelength
        frequencies.append((1 - gamma) * frequency / factor + gamma * frequency)
    return frequencies


@quick
@given(sizes, bases)
def test_rotary_frequencies_have_the_wavelengths_of_the_paper(size, base):
    frequencies = rotary_frequencies(size, base=base)
    assert frequencies.dtype == jnp.float32
    np.testing.assert_allclose(
        frequencies, 2 * np.pi / np.array(wavelengths(size, base)), rtol=ROUNDING
    )


@quick
@given(sizes, factors, bases)
def test_e4_interpolation_divides_every_angle(size, factor, base):
    frequencies = interpolated_frequencies(size, factor, base=base)
    assert frequencies.dtype == jnp.float32
    expected = [2 * np.pi / (factor * wavelength) for wavelength in wavelengths(size, base)]
    np.testing.assert_allclose(frequencies, expected, rtol=ROUNDING)


def test_e4_interpolated_position_is_the_position_over_the_factor():
    x = jax.random.normal(jax.random.key(0), (3, 2, 8))
    slower = rotary(x, jnp.array([0, 6, 12]), frequencies=interpolated_frequencies(8, 2.0))
    np.testing.assert_array_equal(slower, rotary(x, jnp.array([0, 3, 6])))


@pytest.mark.parametrize(
    ("size", "factor", "base"),
    [
        (64, 2.0, 20452.2287),
        (64, 4.0, 41829.3659),
        (64, 8.0, 85550.3759),
        (128, 2.0, 20221.2617),
    ],
)
def test_e4_ntk_bases(size, factor, base):
    expected = 2 * np.pi / np.array(wavelengths(size, base))
    np.testing.assert_allclose(ntk_frequencies(size, factor), expected, rtol=ROUNDING)


@quick
@given(sizes, factors, bases)
def test_e4_ntk_leaves_the_fastest_pair_and_interpolates_the_slowest(size, factor, base):
    frequencies = ntk_frequencies(size, factor, base=base)
    assert frequencies[0] == 1.0
    slowest = interpolated_frequencies(size, factor, base=base)[-1]
    np.testing.assert_allclose(frequencies[-1], slowest, rtol=2 * ROUNDING)


def test_e4_dynamic_ntk_base():
    factor = dynamic_ntk_factor(2.0, 4096, 2048)
    assert factor == 3.0
    expected = 2 * np.pi / np.array(wavelengths(128, 30527.7367))
    np.testing.assert_allclose(ntk_frequencies(128, factor), expected, rtol=ROUNDING)


@quick
@given(factors, st.integers(1, 5000), st.integers(1, 5000))
def test_e4_dynamic_factor_is_the_formula(factor, length, train_length):
    expected = 1.0
    if length > train_length:
        expected = factor * length / train_length - (factor - 1)
    found = dynamic_ntk_factor(factor, length, train_length)
    assert found == pytest.approx(expected, rel=1e-12)
    if length <= train_length:
        assert found == 1.0


def test_e4_long_then_short_is_short_alone():
    def dynamic():
        def turned(x):
            factor = dynamic_ntk_factor(2.0, x.shape[0], 4)
            at = jnp.arange(x.shape[0])
            return rotary(x, at, frequencies=ntk_frequencies(8, factor))

        return jax.jit(turned)

    long = jax.random.normal(jax.random.key(0), (12, 1, 8))
    short = long[:4]
    alone = dynamic()(short)
    both = dynamic()
    # The long input is rescaled, so a state that leaked into the short one would show.
    assert (both(long)[1:4, 0, 1] != alone[1:4, 0, 1]).all()
    np.testing.assert_array_equal(both(short), alone)
    np.testing.assert_array_equal(alone, jax.jit(rotary)(short, jnp.arange(4)))


@quick
@given(sizes, factors, st.integers(1, 5000), bases)
def test_e4_yarn_is_the_oracle(size, factor, train_length, base):
    frequencies = yarn_frequencies(size, factor, train_length, base=base)
    assert frequencies.dtype == jnp.float32
    expected = yarn_oracle(size, factor, train_length, base)
    np.testing.assert_allclose(frequencies, expected, rtol=ROUNDING)


def test_e4_yarn_parts():
    # The pairs make 163, 51.5, 16.3, 5.15 and 1.63 turns in 1024 positions; the rest less than one.
    frequencies, unscaled = yarn_frequencies(16, 4.0, 1024), rotary_frequencies(16)
    np.testing.assert_array_equal(frequencies[:2], unscaled[:2])
    np.testing.assert_array_equal(frequencies[5:], unscaled[5:] / 4)
    # The mixture of 0.1 and 0.1 / 4 with the share (16.2975 - 1) / 31 of 0.1.
    np.testing.assert_allclose(frequencies[2], 0.0620101, rtol=1e-5)
    betas = yarn_frequencies(16, 4.0, 1024, beta_fast=4.0, beta_slow=2.0)
    np.testing.assert_array_equal(betas[:4], unscaled[:4])
    np.testing.assert_array_equal(betas[4:], unscaled[4:] / 4)


def test_e4_yarn_temperature():
    assert yarn_temperature(1.0) == 1.0
    assert yarn_temperature(8.0) == pytest.approx(1.2079441541679836, rel=1e-15)
    assert yarn_temperature(math.exp(10)) == pytest.approx(2.0, rel=1e-15)


@quick
@given(sizes, bases, st.integers(1, 5000))
def test_e4_factor_1_is_exactly_unscaled(size, base, train_length):
    unscaled = rotary_frequencies(size, base=base)
    for rescaled in (
        interpolated_frequencies(size, 1.0, base=base),
        ntk_frequencies(size, 1.0, base=base),
        yarn_frequencies(size, 1.0, train_length, base=base),
        truncated_frequencies(size, 1.0, base=base),
    ):
        np.testing.assert_array_equal(rescaled, unscaled)


@quick
@given(st.integers(1, 100), st.data(), bases)
def test_truncated_rotates_the_fastest_pairs_only(pairs, data, base):
    turning = data.draw(st.integers(1, pairs))
    frequencies = truncated_frequencies(2 * pairs, turning / pairs, base=base)
    assert frequencies.dtype == jnp.float32
    expected = rotary_frequencies(2 * pairs, base=base)
    np.testing.assert_array_equal(frequencies[:turning], expected[:turning])
    np.testing.assert_array_equal(frequencies[turning:], 0)


@pytest.mark.parametrize(("fraction", "turning"), [(0.75, 3), (0.7, 2), (0.25, 1), (0.2, 0)])
def test_truncated_rounds_down(fraction, turning):
    assert jnp.count_nonzero(truncated_frequencies(8, fraction)) == turning


def test_truncated_counts_whole_pairs_in_spite_of_floats():
    assert 1 / 49 * 49 < 1
    assert jnp.count_nonzero(truncated_frequencies(98, 1 / 49)) == 1


def test_truncated_does_not_rotate_the_other_pairs():
    x = jax.random.normal(jax.random.key(0), (3, 2, 8))
    turned = rotary(x, 1 + jnp.arange(3), frequencies=truncated_frequencies(8, 0.5))
    still = np.array([2, 3, 6, 7])
    np.testing.assert_array_equal(turned[..., still], x[..., still])
    assert (turned[..., still - 2] != x[..., still - 2]).all()


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5, math.nan])
def test_truncated_refuses_invalid_fractions(fraction):
    with pytest.raises(ValueError, match=f"fraction={fraction} .* above 0 and at most 1"):
        truncated_frequencies(8, fraction)


@pytest.mark.parametrize("factor", [0.5, 0.0, -2.0, math.nan])
@pytest.mark.parametrize(
    "rescaled",
    [
        lambda factor: interpolated_frequencies(8, factor),
        lambda factor: ntk_frequencies(8, factor),
        lambda factor: dynamic_ntk_factor(factor, 1, 2),
        lambda factor: yarn_frequencies(8, factor, 16),
        yarn_temperature,
    ],
)
def test_e4_factors_below_1_are_refused(rescaled, factor):
    with pytest.raises(
        ValueError, match=f"factor={factor} must be at least 1: .* wanted length divided"
    ):
        rescaled(factor)


@pytest.mark.parametrize("size", [3, 0, -2])
@pytest.mark.parametrize(
    "frequencies",
    [
        rotary_frequencies,
        lambda size: truncated_frequencies(size, 0.5),
        lambda size: interpolated_frequencies(size, 2.0),
        lambda size: ntk_frequencies(size, 2.0),
        lambda size: yarn_frequencies(size, 2.0, 16),
    ],
)
def test_odd_or_no_size_is_refused(frequencies, size):
    with pytest.raises(ValueError, match=f"size={size} must be even"):
        frequencies(size)


def test_e4_ntk_refuses_a_single_pair():
    with pytest.raises(ValueError, match="size=2 must be at least 4"):
        ntk_frequencies(2, 2.0)


def test_e4_no_training_length_is_refused():
    for rescaled in (lambda: dynamic_ntk_factor(2.0, 8, 0), lambda: yarn_frequencies(8, 2.0, 0)):
        with pytest.raises(ValueError, match="train_length=0 must be at least 1"):
            rescaled()


def test_e4_yarn_refuses_betas_out_of_order():
    with pytest.raises(ValueError, match=r"beta_slow=4.0 must be below beta_fast=4.0"):
        yarn_frequencies(8, 2.0, 16, beta_fast=4.0, beta_slow=4.0)
