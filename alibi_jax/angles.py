"""The angles of rotary and sinusoidal positions, exact at any position."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Real

from alibi_jax.position_arrays import as_positions

# The first 72 bits of 1/(2π), 12 bits in each of six numbers.
_TURNS_PER_RADIAN = np.array(
    [
        bits * 2.0 ** (-12 * place)
        for place, bits in enumerate((0x28B, 0xE60, 0xDB9, 0x391, 0x054, 0xA7F), start=1)
    ],
    np.float32,
)


def rotary_angles(
    positions: Real[Array, "... T"], frequencies: Float[Array | np.ndarray, "F"]
) -> Float[Array, "... T F"]:
    """The angle of each pair of features at each position: position · frequency, less whole turns.

    Float32 `[..., T, F]`, in radians, whatever the model's dtype: bfloat16 can't represent odd
    integers above 256. `frequencies` are in radians per position. Their float32 values count, or
    the first 48 bits of a float64 array. Up to 16 radians, an angle is the float32 product. At 10^6
    radians the product would be off by 0.03, so larger angles lose whole turns, which are counted
    in integers. At positions between −2^31 and 2^31 their error is below 3e-6, for float32
    frequencies and for float64 frequencies up to 1; for positions that are not whole, up to
    frequencies of 2π. The derivatives are the derivatives of the product. Raises ValueError for
    positions that int32 cannot represent.

    Su et al. 2021 (RoFormer), equation 15.
    """
    positions = as_positions(positions)
    if not isinstance(frequencies, Array):
        frequencies = np.asarray(frequencies)
    high = frequencies.astype(np.float32)
    angles = _angles(positions, jnp.asarray(high))
    if frequencies.dtype == np.float64:
        low = (frequencies - high).astype(np.float32)
        angles += _angles(positions, jnp.asarray(low))
    return angles


def _product(
    positions: Real[Array, "... T"], frequencies: Float[Array, "F"]
) -> Float[Array, "... T F"]:
    """Position · frequency in float32."""
    frequencies = jnp.expand_dims(frequencies, range(positions.ndim))
    return positions.astype(jnp.float32)[..., None] * frequencies


@jax.custom_jvp
def _angles(
    positions: Real[Array, "... T"], frequencies: Float[Array, "F"]
) -> Float[Array, "... T F"]:
    """`rotary_angles` for float32 frequencies."""
    product = _product(positions, frequencies)
    units, rest = (
        jnp.expand_dims(x, range(positions.ndim)) for x in _units_per_position(frequencies)
    )
    whole = positions
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        whole = jnp.floor(positions)
    # Angles are int32 in units of 2^-32 turns, which overflow exactly at whole turns.
    turned = (whole.astype(jnp.int32)[..., None] * units).astype(jnp.float32)
    turned += whole.astype(jnp.float32)[..., None] * rest
    reduced = turned * (2 * np.pi / 2**32)
    if whole is not positions:
        reduced += _product(positions - whole, frequencies)
    return jnp.where(jnp.abs(product) <= 16, product, reduced)


@_angles.defjvp
def _angles_jvp(primals, tangents):
    # Whole turns are constants, so their derivatives are zero.
    return _angles(*primals), jax.jvp(_product, primals, tangents)[1]


def _units_per_position(
    frequencies: Float[Array, "F"],
) -> tuple[Int[Array, "F"], Float[Array, "F"]]:
    """Frequencies in units of 2^-32 turns per position, less whole turns.

    Whole units, int32 `[F]`, and the rest between −½ and ½, float32 `[F]`, which together are
    exact to 2^-24 units.
    """
    magnitude = jnp.abs(frequencies)
    # The first 12 bits of each frequency and the last 12. A product of two numbers of 12 bits has
    # at most 24 bits, so float32 holds it and its fraction exactly.
    bits = jax.lax.bitcast_convert_type(magnitude, jnp.uint32)
    high = jax.lax.bitcast_convert_type(bits & np.uint32(0xFFFFF000), jnp.float32)
    parts = jnp.stack([high, magnitude - high])
    turns = parts[:, None, :] * _TURNS_PER_RADIAN[None, :, None]
    scaled = (turns - jnp.floor(turns)) * 2.0**32
    # The sum, in integers, of the whole units and then of 2^-28 units, which can't overflow.
    units = jnp.floor(scaled)
    total = units.astype(jnp.uint32).sum((0, 1), dtype=jnp.uint32)
    small = jnp.floor((scaled - units) * 2.0**28).astype(jnp.uint32).sum((0, 1), dtype=jnp.uint32)
    carry = (small + np.uint32(2**27)) >> np.uint32(28)
    rest = (small - (carry << np.uint32(28))).astype(jnp.int32).astype(jnp.float32) * 2.0**-28
    sign = jnp.sign(frequencies)
    rest = jnp.where(jnp.isfinite(frequencies), rest * sign, jnp.nan)
    return (total + carry).astype(jnp.int32) * sign.astype(jnp.int32), rest
