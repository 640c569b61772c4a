"""How fast each pair of features turns: rotary's own frequencies, fewer, or slower ones.

Pure functions of Python numbers, so that nothing is carried from a long input to a short one.
Every one gives float32 `[size/2]`, in radians a position, computed in float64 and cast last, and
raises ValueError unless `size` is even and positive. The `factor` of a rescaling is the length
wanted over the training length; 1 gives the very frequencies of rotary.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float


def rotary_frequencies(size: int, *, base: float = 10000.0) -> Float[Array, "{size}//2"]:
    """Rotary's frequencies, falling from 1: base^(−2k/size).

    Float32 `[size/2]`, in radians a position.

    Su et al. 2021 (RoFormer), equation 15.
    """
    return jnp.asarray(_exact(size, base), jnp.float32)


def truncated_frequencies(
    size: int, fraction: float, *, base: float = 10000.0
) -> Float[Array, "{size}//2"]:
    """Truncated rotary (p-RoPE): the slowest pairs don't turn at all.

    Float32 `[size/2]`, in radians a position: the highest floor(fraction · size/2) of rotary's
    frequencies, then zeros. A fraction too small for one pair leaves no positions at all. Raises
    ValueError unless 0 < fraction ≤ 1.

    Barbero et al. 2024, "Round and Round We Go!", arXiv 2410.06205.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction} of the pairs must be above 0 and at most 1")
    frequencies = _exact(size, base)
    # Rounded first: in floats 1/49 of 49 pairs is a little less than one.
    frequencies[math.floor(round(fraction * frequencies.size, 6)) :] = 0.0
    return jnp.asarray(frequencies, jnp.float32)


def interpolated_frequencies(
    size: int, factor: float, *, base: float = 10000.0
) -> Float[Array, "{size}//2"]:
    """Position interpolation: every pair turns `factor` times slower.

    Float32 `[size/2]`, in radians a position: position p gets the angles of p / factor. Raises
    ValueError for a factor below 1.

    Chen et al. 2023, "Extending Context Window of Large Language Models via Positional
    Interpolation", arXiv 2306.15595.
    """
    return jnp.asarray(_exact(size, base) / _at_least_1(factor), jnp.float32)


def ntk_frequencies(
    size: int, factor: float, *, base: float = 10000.0
) -> Float[Array, "{size}//2"]:
    """NTK-aware rescaling: a larger base, by which only the slowest pair is interpolated in full.

    Float32 `[size/2]`, in radians a position: rotary's, with base · factor^(size/(size−2)).
    Raises ValueError for a factor below 1, or a size of 2.

    Peng et al. 2023 (YaRN), section 3.1, definition 1; found by bloc97.
    """
    if size == 2:
        raise ValueError("size=2 must be at least 4: a lone pair turns the same with every base")
    return rotary_frequencies(size, base=base * _at_least_1(factor) ** (size / (size - 2)))


def dynamic_ntk_factor(factor: float, length: int, train_length: int) -> float:
    """The factor of `ntk_frequencies` that follows the length of the input.

    factor · length / train_length − (factor − 1) past the training length, exactly 1 up to it.
    A cache has to hold its keys unrotated, or the factor stay what it was for the first of them:
    keys and queries turn by the same frequencies. Raises ValueError for a factor or a training
    length below 1.

    Peng et al. 2023 (YaRN), section 3.3, in the form of huggingface/transformers#24653.
    """
    _at_least_1_position(train_length)
    return _at_least_1(factor) * max(length / train_length - 1.0, 0.0) + 1.0


def yarn_frequencies(
    size: int,
    factor: float,
    train_length: int,
    *,
    base: float = 10000.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> Float[Array, "{size}//2"]:
    """YaRN's rescaling by parts: fast pairs are left alone, slow ones interpolated.

    Float32 `[size/2]`, in radians a position. A pair that turns r times in the training length
    keeps its frequency for r above `beta_fast`, has it divided by `factor` for r below
    `beta_slow`, and gets a mixture linear in r between them. The authors' code differs: there the
    mixture is linear in the number of the pair, that is in log r, between ends rounded outwards
    to whole pairs. Goes with `yarn_temperature`. Raises ValueError for a factor or a training
    length below 1, or `beta_slow` not below `beta_fast`.

    Peng et al. 2023 (YaRN), section 3.2, equations 17 and 18 and definition 2.
    """
    _at_least_1_position(train_length)
    if not beta_slow < beta_fast:
        raise ValueError(f"beta_slow={beta_slow} must be below beta_fast={beta_fast}")
    frequencies = _exact(size, base)
    turns = train_length * frequencies / (2 * math.pi)
    kept = np.clip((turns - beta_slow) / (beta_fast - beta_slow), 0, 1)
    return jnp.asarray(frequencies * (kept + (1 - kept) / _at_least_1(factor)), jnp.float32)


def yarn_temperature(factor: float) -> float:
    """What YaRN multiplies both queries and keys by: 0.1 · ln(factor) + 1.

    The square root of 1/t, where t divides the scores. Raises ValueError for a factor below 1.

    Peng et al. 2023 (YaRN), section 3.4, equation 22.
    """
    return 0.1 * math.log(_at_least_1(factor)) + 1.0


def _exact(size: int, base: float) -> np.ndarray:
    if size < 2 or size % 2:
        raise ValueError(f"size={size} must be even and positive: features turn in pairs")
    return base ** (-np.arange(0, size, 2) / size)


def _at_least_1(factor: float) -> float:
    # Not `<`: NaN is no factor either.
    if not factor >= 1:
        raise ValueError(
            f"factor={factor} must be at least 1: it is the length wanted over the training "
            "length, and 1 changes nothing"
        )
    return factor


def _at_least_1_position(train_length: int) -> None:
    if train_length < 1:
        raise ValueError(f"train_length={train_length} must be at least 1, in positions")
