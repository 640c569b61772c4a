import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_jax.embeddings import sinusoidal

quick = settings(max_examples=25, deadline=None)
LAYOUTS = ["interleaved", "halves"]

# Compiled as a whole: otherwise each operation is compiled separately for each shape.
compiled = jax.jit(sinusoidal, static_argnums=1, static_argnames="layout")


def oracle(position, width, layout):
    """The embedding of one position, from the wavelengths."""
    if layout == "interleaved":
        wavelengths = [10000.0 ** (2 * k / width) for k in range(width // 2)]
        return [
            f(position / wavelength) for wavelength in wavelengths for f in (math.sin, math.cos)
        ]
    exponent_divisor = max(width // 2 - 1, 1)
    wavelengths = [math.exp(k * math.log(10000.0) / exponent_divisor) for k in range(width // 2)]
    return [f(position / wavelength) for f in (math.sin, math.cos) for wavelength in wavelengths]


@pytest.mark.parametrize(
    ("layout", "row"),
    [
        ("interleaved", [0.8414710, 0.5403023, 0.0099998, 0.9999500]),
        ("halves", [0.8414710, 0.0001, 0.5403023, 1.0]),
    ],
)
def test_e5_position_1_of_width_4(layout, row):
    np.testing.assert_allclose(sinusoidal(jnp.array([1]), 4, layout=layout)[0], row, atol=1e-7)


def test_e5_default_layout_is_the_papers():
    at = jnp.arange(5)
    np.testing.assert_array_equal(sinusoidal(at, 8), sinusoidal(at, 8, layout="interleaved"))


@pytest.mark.parametrize(
    ("layout", "row"), [("interleaved", [0, 1, 0, 1]), ("halves", [0, 0, 1, 1])]
)
def test_e5_first_position_is_0(layout, row):
    np.testing.assert_array_equal(sinusoidal(jnp.arange(3), 4, layout=layout)[0], row)


@quick
@given(st.sampled_from(LAYOUTS), st.integers(-(2**31), 2**31 - 1), st.sampled_from([1, 6, 64]))
def test_e5_any_position_is_the_oracle(layout, position, pairs):
    table = compiled(jnp.array([position]), 2 * pairs, layout=layout)
    assert table.dtype == jnp.float32
    np.testing.assert_allclose(table[0], oracle(position, 2 * pairs, layout), atol=3e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_c1_neighbours_differ_at_any_position(layout):
    starts = jnp.array([0, 10**6, 10**7, 2**24, 2**30, 2**31 - 2])
    products = sinusoidal(starts, 64, layout=layout) * sinusoidal(starts + 1, 64, layout=layout)
    exact = np.dot(oracle(0, 64, layout), oracle(1, 64, layout))
    np.testing.assert_allclose(products.sum(-1), [exact] * 6, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_that_are_not_whole_are_the_oracle(layout):
    positions = [0.5, 2.25, 100_000.5, 1_000_000.5]
    table = sinusoidal(jnp.array(positions), 64, layout=layout)
    expected = [oracle(position, 64, layout) for position in positions]
    np.testing.assert_allclose(table, expected, atol=3e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_e5_near_positions_are_tight(layout):
    expected = [oracle(t, 64, layout) for t in range(128)]
    np.testing.assert_allclose(sinusoidal(jnp.arange(128), 64, layout=layout), expected, atol=2e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sample(1)
def test_e5_jit_vmap_and_shards_are_the_whole(layout):
    mesh = jax.make_mesh((8,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    positions = jnp.arange(64).reshape(2, 32)

    def table(positions):
        return sinusoidal(positions, 16, layout=layout)

    whole = table(positions)
    assert whole.shape == (2, 32, 16)
    sharded = jax.shard_map(
        table, mesh=mesh, in_specs=jax.P(None, "devices"), out_specs=jax.P(None, "devices")
    )
    for other in (jax.jit(table), jax.vmap(table), sharded):
        np.testing.assert_allclose(other(positions), whole, atol=1e-6)


def test_d1_d3_padded_and_packed_positions():
    packed = sinusoidal(jnp.array([0, 0, 0, 1, 2, 0, 1, 2]), 8)
    np.testing.assert_array_equal(packed[2:5], sinusoidal(jnp.arange(3), 8))
    np.testing.assert_array_equal(packed[5:], sinusoidal(jnp.arange(3), 8))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [5, 0])
def test_e5_odd_or_no_width_is_refused(layout, width):
    with pytest.raises(ValueError, match=f"width={width} must be even"):
        sinusoidal(jnp.arange(3), width, layout=layout)


def test_e5_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="'half' must be 'interleaved' or 'halves'"):
        sinusoidal(jnp.arange(3), 4, layout="half")
