import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_jax.rotations import (
    interpolated_frequencies,
    ntk_frequencies,
    rotary,
    rotary_angles,
    rotary_frequencies,
    truncated_frequencies,
    yarn_frequencies,
)

quick = settings(max_examples=25, deadline=None)

# Compiled as a whole: otherwise each operation is compiled separately for each shape.
compiled = jax.jit(rotary)


def oracle(x, positions, base=10000.0, size=None):
    """Multiplies each pair, as a complex number, by e^(i·angle), in float64."""
    size = x.shape[-1] if size is None else size
    return oracle_of(x, positions, [base ** (-2 * k / size) for k in range(size // 2)])


def oracle_of(x, positions, frequencies):
    """The oracle for given frequencies."""
    x = np.array(x, np.float64)
    half = len(frequencies)
    for k, frequency in enumerate(frequencies):
        turn = np.exp(1j * np.asarray(positions, np.float64) * frequency)
        pair = (x[..., k] + 1j * x[..., k + half]) * turn[..., None]
        x[..., k], x[..., k + half] = pair.real, pair.imag
    return x


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def test_c6_angles_are_float32():
    angles = rotary_angles(jnp.arange(2048), rotary_frequencies(32))
    assert angles.dtype == jnp.float32
    assert angles.shape == (2048, 16)
    np.testing.assert_allclose(angles[1857, 1], 1044.26784 - 166 * 2 * np.pi, atol=1e-4)
    exact = np.arange(2048)[:, None] * 10000.0 ** (-np.arange(16) / 16)
    assert np.abs(np.cos(np.asarray(angles, np.float64)) - np.cos(exact)).max() < 1e-4


def test_c6_bfloat16_is_rotated_in_float32():
    x = normal(2048, 1, 32).astype(jnp.bfloat16)
    positions = jnp.arange(2048)
    rotated = rotary(x, positions)
    assert rotated.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        rotated, rotary(x.astype(jnp.float32), positions).astype(jnp.bfloat16)
    )
    # The error is at most the rounding to bfloat16, half a unit in the last place.
    np.testing.assert_allclose(
        np.asarray(rotated, np.float64), oracle(x, positions), rtol=2**-8, atol=1e-3
    )


def test_c6_neighbours_past_256_differ():
    x = jnp.ones((2, 1, 32), jnp.bfloat16)
    rotated = rotary(x, jnp.array([256, 257]))
    assert (rotated[0] != rotated[1]).any()


def test_e2_one_zero_rotated_to_position_3():
    rotated = rotary(jnp.array([[[1.0, 0.0]]]), jnp.array([3]))
    np.testing.assert_allclose(rotated[0, 0], [-0.9899925, 0.1411200], atol=1e-6)


def test_e2_layout_pairs_the_halves():
    rotated = rotary(jnp.eye(8)[:1][None], jnp.array([1]))[0, 0]
    np.testing.assert_array_equal(jnp.nonzero(rotated)[0], [0, 4])


def test_e2_scores_depend_on_the_distance_only():
    query, key = normal(2, 64, seed=1), normal(2, 64, seed=2)
    query /= jnp.linalg.norm(query, axis=-1, keepdims=True)
    key /= jnp.linalg.norm(key, axis=-1, keepdims=True)

    def scores(start):
        at = start + jnp.arange(16)
        queries, keys = (rotary(jnp.tile(x, (16, 1, 1)), at) for x in (query, key))
        return jnp.einsum("TNH,SNH->NTS", queries, keys)

    np.testing.assert_allclose(scores(0), scores(1000), atol=1e-6)
    for gap in (-3, 0, 5):
        diagonal = jnp.diagonal(scores(0), gap, 1, 2)
        np.testing.assert_allclose(
            diagonal, jnp.broadcast_to(diagonal[:, :1], diagonal.shape), atol=1e-5
        )


@pytest.mark.parametrize(
    "frequencies",
    [
        rotary_frequencies(64),
        rotary_frequencies(32),
        truncated_frequencies(64, 0.75),
        interpolated_frequencies(64, 8.0),
        ntk_frequencies(64, 8.0),
        yarn_frequencies(64, 8.0, 1024),
    ],
    ids=["rotary", "part", "truncated", "interpolated", "ntk", "yarn"],
)
def test_c1_neighbours_have_the_same_score_at_any_position(frequencies):
    query, key = normal(64, seed=1), normal(64, seed=2)
    size = 2 * len(frequencies)
    pairs = (np.asarray(x, np.float64)[:size].reshape(2, -1) for x in (query, key))
    q, k = (first + 1j * second for first, second in pairs)
    turned = (q * np.exp(1j * np.asarray(frequencies, np.float64)) * k.conj()).real.sum()
    unturned = np.asarray(query, np.float64)[size:] @ np.asarray(key, np.float64)[size:]
    exact = (turned + unturned) / 8

    starts = [0, 1, 2047, 10**6, 10**7, 2**24, 2**30, 2**31 - 2, -(2**31)]
    keys_at = jnp.array(starts, jnp.int32)[:, None]
    # Rows of one token, as in decoding, and whole rows at once.
    queries = compiled(jnp.tile(query, (9, 1, 1, 1)), keys_at + 1, frequencies=frequencies)
    keys = compiled(jnp.tile(key, (9, 1, 1, 1)), keys_at, frequencies=frequencies)
    scores = jnp.einsum("BTNH,BTNH->B", queries, keys) / 8
    np.testing.assert_allclose(scores, [exact] * 9, rtol=0, atol=1e-5)


def test_positions_that_are_not_whole_are_between_their_neighbours():
    x, positions = normal(4, 2, 8), np.array([0.5, 3.25, 4096.5, 1_000_000.5])
    rotated = rotary(x, jnp.asarray(positions, jnp.float32))
    np.testing.assert_allclose(rotated[:2], oracle(x[:2], positions[:2]), atol=1e-6)
    exact = oracle_of(x, positions, np.asarray(rotary_frequencies(8), np.float64))
    np.testing.assert_allclose(rotated, exact, atol=1e-5)


def test_e2_part_of_the_head_is_rotated():
    x = normal(2, 5, 3, 16)
    positions = jnp.arange(5)
    rotated = rotary(x, positions, frequencies=rotary_frequencies(8))
    np.testing.assert_array_equal(rotated[..., 8:], x[..., 8:])
    # The frequencies are those of a head with 8 features, not with 16.
    np.testing.assert_array_equal(rotated[..., :8], rotary(x[..., :8], positions))
    np.testing.assert_allclose(rotated, oracle(x, positions, size=8), atol=1e-5)


def test_e3_cached_steps_are_the_whole():
    x = normal(1, 8, 2, 16)
    steps = [compiled(x[:, t : t + 1], jnp.array([t])) for t in range(8)]
    np.testing.assert_allclose(jnp.concatenate(steps, 1), compiled(x, jnp.arange(8)), atol=1e-6)


def test_e3_rows_at_different_offsets_are_each_row_alone():
    x = normal(3, 4, 2, 16)
    positions = jnp.array([[0, 1, 2, 3], [6, 7, 8, 9], [0, 0, 0, 1]])
    rotated = rotary(x, positions)
    for rotated_row, row, row_positions in zip(rotated, x, positions):
        np.testing.assert_array_equal(rotated_row, rotary(row, row_positions))
    np.testing.assert_array_equal(rotated, jax.vmap(rotary)(x, positions))


def test_e3_sharded_positions_are_rows_of_the_whole():
    mesh = jax.make_mesh((8,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    x, positions = normal(64, 2, 16), jnp.arange(64)
    sharded = jax.shard_map(
        rotary, mesh=mesh, in_specs=jax.P("devices"), out_specs=jax.P("devices")
    )
    rows = jax.jit(sharded)(x, positions)
    np.testing.assert_allclose(rows, compiled(x, positions), atol=1e-6)


def test_d1_d3_padded_and_packed_positions():
    x = normal(8, 2, 16)
    packed = rotary(x, jnp.array([0, 0, 0, 1, 2, 0, 1, 2]))
    np.testing.assert_array_equal(packed[2:5], rotary(x[2:5], jnp.arange(3)))
    np.testing.assert_array_equal(packed[5:], rotary(x[5:], jnp.arange(3)))


@quick
@given(
    st.lists(st.integers(-2000, 2000), min_size=3, max_size=3),
    st.integers(1, 4),
    st.floats(10.0, 1e6),
    st.integers(0, 100),
)
def test_rotary_is_the_oracle_and_keeps_norms(positions, pairs, base, seed):
    x = normal(2, 3, 2, 8, seed=seed)
    frequencies = rotary_frequencies(2 * pairs, base=base)
    rotated = compiled(x, jnp.array(positions), frequencies=frequencies)
    assert rotated.dtype == x.dtype
    np.testing.assert_allclose(rotated, oracle(x, positions, base, 2 * pairs), atol=5e-4)
    np.testing.assert_allclose(
        jnp.linalg.norm(rotated, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5
    )


def test_gradient_is_the_rotation_back():
    x, cotangent = normal(5, 2, 8, seed=1), normal(5, 2, 8, seed=2)
    at = jnp.arange(5)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(rotary(x, at) * cotangent)))(x)
    np.testing.assert_allclose(gradient, compiled(cotangent, -at), atol=1e-5)


def test_frequencies_may_be_traced():
    x, at = normal(3, 2, 8), jnp.arange(3)

    def loss(frequencies):
        return jnp.sum(rotary(x, at, frequencies=frequencies) ** 3)

    gradient = jax.jit(jax.grad(loss))(rotary_frequencies(8))
    assert jnp.isfinite(gradient).all()
    assert (gradient != 0).all()


def test_exported_for_any_length():
    symbolic_length = jax.export.symbolic_shape("T")
    exported = jax.export.export(compiled)(
        jax.ShapeDtypeStruct((*symbolic_length, 2, 8), jnp.float32),
        jax.ShapeDtypeStruct(symbolic_length, jnp.int32),
    )
    for length in (1, 5):
        x, at = normal(length, 2, 8), 7 + jnp.arange(length)
        np.testing.assert_allclose(exported.call(x, at), compiled(x, at), atol=1e-6)


@pytest.mark.slow
def test_no_axis_is_added_implicitly():
    x, at = normal(2, 3, 2, 8), jnp.arange(3)
    expected = rotary(x, at)
    with jax.numpy_rank_promotion("raise"):
        np.testing.assert_array_equal(rotary(x, at), expected)


def test_odd_head_is_refused():
    with pytest.raises(ValueError, match="size=7 must be even"):
        rotary(jnp.ones((1, 1, 7)), jnp.arange(1))


def test_frequencies_above_the_head_name_both():
    with pytest.raises(ValueError, match="5 frequencies rotate 10 features, more than the 8 "):
        rotary(jnp.ones((1, 1, 8)), jnp.arange(1), frequencies=rotary_frequencies(10))
