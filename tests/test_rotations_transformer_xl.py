import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_jax.rotations import transformer_xl

quick = settings(max_examples=15, deadline=None)


def oracle(query, key, query_positions, key_positions, content_bias, position_bias, kernel):
    """The paper's scores [N, T, S], divided by sqrt(H); R is made for each pair of positions."""
    query, key, content_bias, position_bias, kernel = (
        np.asarray(x, np.float64) for x in (query, key, content_bias, position_bias, kernel)
    )
    width, heads, size = kernel.shape
    wavelengths = [10000.0 ** (2 * k / width) for k in range(width // 2)]
    scores = np.zeros((heads, query.shape[0], key.shape[0]))
    for head, t, s in np.ndindex(*scores.shape):
        distance = float(query_positions[t]) - float(key_positions[s])
        r = np.array(
            [f(distance / wavelength) for f in (np.sin, np.cos) for wavelength in wavelengths]
        )
        relative = np.array(
            [sum(kernel[d, head, h] * r[d] for d in range(width)) for h in range(size)]
        )
        key_head = head * key.shape[1] // heads
        content = (query[t, head] + content_bias[head]) @ key[s, key_head]
        position = (query[t, head] + position_bias[head]) @ relative
        scores[head, t, s] = (content + position) / size**0.5
    return scores


def scores(*arguments):
    """Plain attention's scores [N, T, S]; N/K neighbouring query heads share a key head."""
    query, key = transformer_xl(*arguments)
    key = jnp.repeat(key, query.shape[-2] // key.shape[-2], axis=-2)
    products = jnp.einsum("TNH,SNH->NTS", query, key, preferred_element_type=jnp.float32)
    return products / query.shape[-1] ** 0.5


# Compiled as a whole: otherwise each operation is compiled separately for each shape.
compiled_xl, compiled_scores = jax.jit(transformer_xl), jax.jit(scores)


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


QUERY, KEY = normal(3, 2, 4, seed=1), normal(5, 2, 4, seed=2)
QUERY_POSITIONS, KEY_POSITIONS = 2 + jnp.arange(3), jnp.arange(5)
LEARNED = (normal(2, 4, seed=3), normal(2, 4, seed=4), normal(6, 2, 4, seed=5))


@quick
@given(
    st.lists(st.integers(-1000, 1000), min_size=3, max_size=3),
    st.lists(st.integers(-1000, 1000), min_size=5, max_size=5),
)
def test_transformer_xl_is_the_oracle(queries, keys):
    found = scores(QUERY, KEY, jnp.array(queries), jnp.array(keys), *LEARNED)
    expected = oracle(QUERY, KEY, queries, keys, *LEARNED)
    np.testing.assert_allclose(found, expected, atol=5e-5)


@pytest.mark.parametrize("key_heads", [1, 2])
def test_near_positions_are_tight(key_heads):
    key = KEY[:, :key_heads]
    query, _ = transformer_xl(QUERY, key, QUERY_POSITIONS, KEY_POSITIONS, *LEARNED)
    assert query.shape == (3, 2, 10)
    expected = oracle(QUERY, key, QUERY_POSITIONS, KEY_POSITIONS, *LEARNED)
    np.testing.assert_allclose(
        scores(QUERY, key, QUERY_POSITIONS, KEY_POSITIONS, *LEARNED), expected, atol=1e-5
    )


def test_scores_depend_on_the_distance_only():
    near = transformer_xl(QUERY, KEY, QUERY_POSITIONS, KEY_POSITIONS, *LEARNED)
    far = transformer_xl(QUERY, KEY, 100_000 + QUERY_POSITIONS, 100_000 + KEY_POSITIONS, *LEARNED)
    jax.tree.map(np.testing.assert_array_equal, near, far)


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ([2**31 - 3, 2**31 - 2, 2**31 - 1], [0, 10**6, 2**30, 2**31 - 3, 2**31 - 1]),
        ([-(2**31), 0, 2**31 - 1], [-(2**31), -1, 0, 10**9, 2**31 - 1]),
        ([0.5, 1.25, 100_000.5], [0.0, 0.5, 3.75, 50_000.25, 100_000.5]),
    ],
    ids=["far", "both signs", "not whole"],
)
def test_c1_any_positions_are_the_oracle(queries, keys):
    queries, keys = jnp.array(queries), jnp.array(keys)
    expected = oracle(QUERY, KEY, queries, keys, *LEARNED)
    found = scores(QUERY, KEY, queries, keys, *LEARNED)
    np.testing.assert_allclose(found, expected, atol=5e-5)


@pytest.mark.parametrize(("length", "key_length"), [(0, 5), (3, 0), (0, 0)])
def test_no_queries_or_no_keys(length, key_length):
    arguments = (
        *(QUERY[:length], KEY[:key_length]),
        *(QUERY_POSITIONS[:length], KEY_POSITIONS[:key_length]),
        *LEARNED,
    )
    query, key = compiled_xl(*arguments)
    assert (query.shape, key.shape) == ((length, 2, 10), (key_length, 2, 10))
    # The gradient of no scores is zero.
    gradient = jax.grad(lambda kernel: scores(*arguments[:-1], kernel).sum())(LEARNED[-1])
    np.testing.assert_array_equal(gradient, np.zeros((6, 2, 4)))


def test_the_additional_features_of_keys_are_the_same_for_all_heads():
    _, key = transformer_xl(QUERY, KEY, QUERY_POSITIONS, KEY_POSITIONS, *LEARNED)
    np.testing.assert_array_equal(key[..., :4], KEY)
    np.testing.assert_array_equal(key[:, 0, 4:], key[:, 1, 4:])


def test_e3_rows_at_different_offsets_are_each_row_alone():
    query, key = normal(3, 2, 2, 4, seed=1), normal(3, 4, 2, 4, seed=2)
    at = jnp.array([[2, 3], [60, 61], [0, 5]])
    keys_at = jnp.array([[0, 1, 2, 3], [58, 59, 60, 61], [0, 0, 1, 5]])
    together = compiled_xl(query, key, at, keys_at, *LEARNED)
    alone = [compiled_xl(*row, *LEARNED) for row in zip(query, key, at, keys_at)]
    mapped = jax.vmap(lambda *row: compiled_xl(*row, *LEARNED))(query, key, at, keys_at)
    for found, other, rows in zip(together, mapped, zip(*alone)):
        np.testing.assert_allclose(found, np.stack(rows), atol=1e-6)
        np.testing.assert_allclose(found, other, atol=1e-6)


def test_e3_cached_steps_are_the_whole():
    whole = compiled_scores(KEY, KEY, KEY_POSITIONS, KEY_POSITIONS, *LEARNED)
    for t in (0, 2, 4):
        at, keys_at = KEY_POSITIONS[t : t + 1], KEY_POSITIONS[: t + 1]
        step = compiled_scores(KEY[t : t + 1], KEY[: t + 1], at, keys_at, *LEARNED)
        np.testing.assert_allclose(step[:, 0], whole[:, t, : t + 1], atol=1e-5)


def test_e3_sharded_queries_are_rows_of_the_whole():
    mesh = jax.make_mesh((8,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    x, at = normal(16, 2, 4), jnp.arange(16)
    spec, whole = jax.P("devices"), jax.P()
    sharded = jax.shard_map(
        scores,
        mesh=mesh,
        in_specs=(spec, whole, spec, whole, whole, whole, whole),
        out_specs=jax.P(None, "devices"),
    )
    found = jax.jit(sharded)(x, x, at, at, *LEARNED)
    np.testing.assert_allclose(found, compiled_scores(x, x, at, at, *LEARNED), atol=1e-5)


def test_d1_d3_padded_and_packed_positions():
    x = normal(8, 2, 4)
    packed = jnp.array([0, 0, 0, 1, 2, 0, 1, 2])
    found = compiled_scores(x, x, packed, packed, *LEARNED)
    for own in (slice(2, 5), slice(5, 8)):
        alone = compiled_scores(x[own], x[own], jnp.arange(3), jnp.arange(3), *LEARNED)
        np.testing.assert_allclose(found[:, own, own], alone, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_c6_half_precision_has_float32_angles(dtype):
    at, keys_at = 4000 + QUERY_POSITIONS, KEY_POSITIONS
    arguments = QUERY.astype(dtype), KEY.astype(dtype), at, keys_at
    query, key = transformer_xl(*arguments, *LEARNED)
    assert query.dtype == key.dtype == dtype
    # The error is only the rounding of the sums with the biases, the kernel and the results.
    expected = oracle(*arguments, *LEARNED)
    atol = 8 * float(jnp.finfo(dtype).eps) * np.abs(expected).max()
    np.testing.assert_allclose(compiled_scores(*arguments, *LEARNED), expected, atol=atol)


def test_gradients_are_central_differences():
    @jax.jit
    def loss(*floats):
        query, key, *learned = floats
        return jnp.sum(scores(query, key, QUERY_POSITIONS, KEY_POSITIONS, *learned) ** 2)

    floats = (QUERY, KEY, *LEARNED)
    gradients = jax.jit(jax.grad(loss, argnums=range(5)))(*floats)
    for number, gradient in enumerate(gradients):
        direction = normal(*gradient.shape, seed=number)
        ends = [
            loss(*(x + step * direction if i == number else x for i, x in enumerate(floats)))
            for step in (-1e-2, 1e-2)
        ]
        np.testing.assert_allclose(
            jnp.vdot(gradient, direction), (ends[1] - ends[0]) / 2e-2, rtol=1e-3
        )


@pytest.mark.slow
def test_no_axis_is_added_implicitly():
    arguments = (QUERY[None], KEY[None], QUERY_POSITIONS, KEY_POSITIONS, *LEARNED)
    expected = transformer_xl(*arguments)
    with jax.numpy_rank_promotion("raise"):
        found = transformer_xl(*arguments)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_exported_is_the_function():
    arguments = (QUERY, KEY, QUERY_POSITIONS, KEY_POSITIONS, *LEARNED)
    found = jax.export.export(jax.jit(transformer_xl))(*arguments).call(*arguments)
    for x, y in zip(found, transformer_xl(*arguments)):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_odd_width_is_refused():
    with pytest.raises(ValueError, match="size=5 must be even"):
        transformer_xl(QUERY, KEY, QUERY_POSITIONS, KEY_POSITIONS, *LEARNED[:2], LEARNED[2][:5])
