"""Frequencies at which rotary rotates pairs of features: the paper's, truncated or rescaled.

All functions are pure functions of Python numbers, so a long input leaves no state that changes a
later short one. The `*_frequencies` functions return float32 `[size/2]`, in radians per position,
computed in float64 and cast last, and raise ValueError unless `size` is even and positive. The
`factor` of a rescaling is the wanted length divided by the training length; a factor of 1 gives
exactly rotary's frequencies.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float


def rotary_frequencies(size: int, *, base: float = 10000.0) -> Float[Array, "{size}//2"]:
    """Rotary's frequencies, base^(−2k/size), which fall from 1.

    Float32 `[size/2]`, in radians per position.

    Su et al. 2021 (RoFormer), equation 15.
    """
    return jnp.asarray(frequencies_in_float64(size, base), jnp.float32)


def truncated_frequencies(
    size: int, fraction: float, *, base: float = 10000.0
) -> Float[Array, "{size}//2"]:
    """Truncated rotary (p-RoPE): the slowest pairs are not rotated.

    Float32 `[size/2]`, in radians per position: the highest floor(fraction · size/2) of rotary's
    frequencies, then zeros. If the fraction is less than one pair, no pair is rotated, and the
    result carries no information about positions. Raises ValueError unless 0 < fraction ≤ 1.

    Barbero et al. 2024, "Round and Round We Go!", arXiv 2410.06205.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction} of the pairs must be above 0 and at most 1")
    frequencies = frequencies_in_float64(size, base)
    # Round before the floor: in floats, 1/49 of 49 pairs is a little less than one.
    frequencies[math.floor(round(fraction * frequencies.size, 6)) :] = 0.0
    return jnp.asarray(frequencies, jnp.float32)


def interpolated_frequencies(
    size: int, factor: float, *, base: float = 10000.0
) -> Float[Array, "{size}//2"]:
    """Position interpolation: every pair rotates `factor` times slower.

    Float32 `[size/2]`, in radians per position: position p gets the angles of p / factor. Raises
    ValueError for a factor below 1.

    Chen et al. 2023, "Extending Context Window of Large Language Models via Positional
    Interpolation", arXiv 2306.15595.
    """
    return jnp.asarray(frequencies_in_float64(size, base) / _checked_factor(factor), jnp.float32)


def ntk_frequencies(
    size: int, factor: float, *, base: float = 10000.0
) -> Float[Array, "{size}//2"]:
    """NTK-aware rescaling: a larger base, with which only the slowest pair is fully interpolated.

    Float32 `[size/2]`, in radians per position: rotary's frequencies with the base
    base · factor^(size/(size−2)). Raises ValueError for a factor below 1, or a size of 2.

    Peng et al. 2023 (YaRN), section 3.1, definition 1; found by bloc97.
    """
    if size == 2:
        raise ValueError(
            "size=2 must be at least 4: the frequency of the first pair does not depend on the base"
        )
    return rotary_frequencies(size, base=base * _checked_factor(factor) ** (size / (size - 2)))


def dynamic_ntk_factor(factor: float, length: int, train_length: int) -> float:
    """The factor for `ntk_frequencies` that follows the length of the input.

    factor · length / train_length − (factor − 1) past the training length, and exactly 1 up to it.
    Queries and keys must be rotated with the same frequencies. So either the cache holds keys
    before their rotation, or the factor must not change after the first cached key. Raises
    ValueError for a factor or a training length below 1.

    Peng et al. 2023 (YaRN), section 3.3, in the form of huggingface/transformers#24653.
    """
    _check_train_length(train_length)
    return _checked_factor(factor) * max(length / train_length - 1.0, 0.0) + 1.0


def yarn_frequencies(
    size: int,
    factor: float,
    train_length: int,
    *,
    base: float = 10000.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> Float[Array, "{size}//2"]:
    """YaRN's rescaling: fast pairs keep their frequencies, slow pairs are interpolated.

    Float32 `[size/2]`, in radians per position. Let r be the number of turns that a pair makes in
    the training length. For r above `beta_fast` the pair keeps its frequency. For r below
    `beta_slow` the frequency is divided by `factor`. In between it is a mixture of both that is
    linear in r. The authors' code differs: its mixture is linear in the index of the pair, that
    is in log r, and both limits are rounded outwards to whole pairs. YaRN uses these
    frequencies together with `yarn_temperature`. Raises ValueError for a factor or a
    training length below 1, or a `beta_slow` that is not below `beta_fast`.

    Peng et al. 2023 (YaRN), section 3.2, equations 17 and 18 and definition 2.
    """
    _check_train_length(train_length)
    if not beta_slow < beta_fast:
        raise ValueError(f"beta_slow={beta_slow} must be below beta_fast={beta_fast}")
    frequencies = frequencies_in_float64(size, base)
    turns = train_length * frequencies / (2 * math.pi)
    # YaRN's γ: the share of the original frequency in the mixture.
    ramp = np.clip((turns - beta_slow) / (beta_fast - beta_slow), 0, 1)
    return jnp.asarray(frequencies * (ramp + (1 - ramp) / _checked_factor(factor)), jnp.float32)


def yarn_temperature(factor: float) -> float:
    """The number by which YaRN multiplies both queries and keys: 0.1 · ln(factor) + 1.

    It is the square root of 1/t, where t is the paper's temperature, which divides the scores.
    Raises ValueError for a factor below 1.

    Peng et al. 2023 (YaRN), section 3.4, equation 22.
    """
    return 0.1 * math.log(_checked_factor(factor)) + 1.0


def frequencies_in_float64(size: int, base: float = 10000.0) -> Float[np.ndarray, "{size}//2"]:
    """Rotary's frequencies before their rounding, float64 `[size/2]`, in radians per position."""
    if size < 2 or size % 2:
        raise ValueError(f"size={size} must be even and positive: features are rotated in pairs")
    return base ** (-np.arange(0, size, 2) / size)


def _checked_factor(factor: float) -> float:
    # `not >=` rather than `<`, so that NaN is refused too.
    if not factor >= 1:
        raise ValueError(
            f"factor={factor} must be at least 1: it is the wanted length divided by the training "
            "length, and 1 changes nothing"
        )
    return factor


def _check_train_length(train_length: int) -> None:
    if train_length < 1:
        raise ValueError(f"train_length={train_length} must be at least 1, in positions")
