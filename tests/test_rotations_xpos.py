import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_jax.rotations import xpos

quick = settings(max_examples=15, deadline=None)


def oracle(query, key, query_positions, key_positions, base=1e4, gamma=0.4, scale_base=512.0):
    """Scores [N, T, S], pair by pair: Re(q · conj(k) · e^(iθ(n−m))) · ζ^((n−m)/scale_base)."""
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    half = query.shape[-1] // 2
    scores = np.zeros((query.shape[1], query.shape[0], key.shape[0]))
    for head, t, s in np.ndindex(*scores.shape):
        distance = float(query_positions[t]) - float(key_positions[s])
        for k in range(half):
            q = complex(query[t, head, k], query[t, head, k + half])
            other = complex(key[s, head, k], key[s, head, k + half])
            turn = np.exp(1j * distance * base ** (-2 * k / (2 * half)))
            zeta = (k / half + gamma) / (1 + gamma)
            scores[head, t, s] += (q * other.conjugate() * turn).real * zeta ** (
                distance / scale_base
            )
    return scores


def scores(query, key, query_positions, key_positions, **options):
    query, key = xpos(query, key, query_positions, key_positions, **options)
    return jnp.einsum("...TNH,...SNH->...NTS", query, key, preferred_element_type=jnp.float32)


# Compiled as a whole: otherwise each operation is compiled separately for each shape.
compiled_xpos, compiled_scores = jax.jit(xpos), jax.jit(scores)


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


QUERY, KEY = normal(3, 2, 8, seed=1), normal(5, 2, 8, seed=2)
QUERY_POSITIONS, KEY_POSITIONS = 2 + jnp.arange(3), jnp.arange(5)


@quick
@given(
    st.lists(st.integers(-1000, 1000), min_size=3, max_size=3),
    st.lists(st.integers(-1000, 1000), min_size=5, max_size=5),
    st.floats(0.1, 2.0),
    st.floats(400.0, 2000.0),
    st.floats(10.0, 1e5),
)
def test_xpos_is_the_oracle(queries, keys, gamma, scale_base, base):
    options = {"gamma": gamma, "scale_base": scale_base, "base": base}
    found = scores(QUERY, KEY, jnp.array(queries), jnp.array(keys), **options)
    expected = oracle(QUERY, KEY, queries, keys, **options)
    # Scores of keys after a query can be large.
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())


def test_xpos_near_positions_are_tight():
    expected = oracle(QUERY, KEY, QUERY_POSITIONS, KEY_POSITIONS)
    np.testing.assert_allclose(
        scores(QUERY, KEY, QUERY_POSITIONS, KEY_POSITIONS), expected, atol=1e-5
    )


def test_xpos_exact_values():
    # With 4 features, pair 0 decays by (0.4 / 1.4)^(1/512) per position and pair 1 by
    # (0.9 / 1.4)^(1/512), so 512 positions decay by 0.4 / 1.4 and 0.9 / 1.4.
    ones = jnp.eye(4)[:2, None]
    query, key = xpos(ones, ones, jnp.array([512, 512]), jnp.array([0, 0]))
    lengths = jnp.linalg.norm(query, axis=-1)[:, 0] * jnp.linalg.norm(key, axis=-1)[:, 0]
    np.testing.assert_allclose(lengths, [0.4 / 1.4, 0.9 / 1.4], rtol=1e-6)


def test_xpos_scores_depend_on_the_distance_only():
    near = xpos(QUERY, KEY, QUERY_POSITIONS, KEY_POSITIONS)
    far = xpos(QUERY, KEY, 100_000 + QUERY_POSITIONS, 100_000 + KEY_POSITIONS)
    jax.tree.map(np.testing.assert_array_equal, near, far)


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ([2**31 - 3, 2**31 - 2, 2**31 - 1], [2**31 - 9000, 2**31 - 4]),
        ([-(2**31) + 9000, -(2**31) + 9001, -(2**31) + 9002], [-(2**31), -(2**31) + 1]),
        ([5000.5, 5001.25, 5002.0], [0.0, 4999.75]),
    ],
    ids=["far", "far below zero", "not whole"],
)
def test_c1_any_positions_are_the_oracle(queries, keys):
    queries, keys = jnp.array(queries), jnp.array(keys)
    expected = oracle(QUERY, KEY[:2], queries, keys)
    found = scores(QUERY, KEY[:2], queries, keys)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("length", "key_length"), [(0, 5), (3, 0), (0, 0)])
def test_no_queries_or_no_keys(length, key_length):
    query, key = compiled_xpos(
        *(QUERY[:length], KEY[:key_length]),
        *(QUERY_POSITIONS[:length], KEY_POSITIONS[:key_length]),
    )
    assert (query.shape, key.shape) == ((length, 2, 8), (key_length, 2, 8))


def test_e3_rows_at_different_offsets_are_each_row_alone():
    query, key = normal(3, 2, 1, 8, seed=1), normal(3, 4, 1, 8, seed=2)
    at = jnp.array([[2, 3], [60, 61], [0, 5]])
    keys_at = jnp.array([[0, 1, 2, 3], [58, 59, 60, 61], [0, 0, 1, 5]])
    together = compiled_xpos(query, key, at, keys_at)
    mapped = jax.jit(jax.vmap(xpos))(query, key, at, keys_at)
    alone = [compiled_xpos(*row) for row in zip(query, key, at, keys_at)]
    for found, other, rows in zip(together, mapped, zip(*alone)):
        np.testing.assert_allclose(found, np.stack(rows), atol=1e-6)
        np.testing.assert_allclose(found, other, atol=1e-6)


def test_e3_cached_steps_are_the_whole():
    whole = compiled_scores(KEY, KEY, KEY_POSITIONS, KEY_POSITIONS)
    for t in (0, 2, 4):
        at, keys_at = KEY_POSITIONS[t : t + 1], KEY_POSITIONS[: t + 1]
        step = compiled_scores(KEY[t : t + 1], KEY[: t + 1], at, keys_at)
        np.testing.assert_allclose(step[:, 0], whole[:, t, : t + 1], atol=1e-5)


def test_e3_sharded_queries_are_rows_of_the_whole():
    mesh = jax.make_mesh((8,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    x, at = normal(16, 1, 8), jnp.arange(16)
    spec = jax.P("devices")
    sharded = jax.shard_map(
        scores, mesh=mesh, in_specs=(spec, jax.P(), spec, jax.P()), out_specs=jax.P(None, "devices")
    )
    found = jax.jit(sharded)(x, x, at, at)
    np.testing.assert_allclose(found, compiled_scores(x, x, at, at), atol=1e-5)


def test_d1_d3_padded_and_packed_positions():
    x = normal(8, 1, 8)
    packed = jnp.array([0, 0, 0, 1, 2, 0, 1, 2])
    found = compiled_scores(x, x, packed, packed)
    for own in (slice(2, 5), slice(5, 8)):
        alone = compiled_scores(x[own], x[own], jnp.arange(3), jnp.arange(3))
        np.testing.assert_allclose(found[:, own, own], alone, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "span", "rtol"),
    [(jnp.float32, 65536, 1e-4), (jnp.bfloat16, 65536, 2**-7), (jnp.float16, 4096, 2**-9)],
)
def test_longest_range_of_each_dtype(dtype, span, rtol):
    # The same vector at both ends and in the middle: its score with itself must stay the same.
    at = 100_000 + jnp.array([0, span // 2, span])
    x = jnp.tile(normal(1, 2, 8), (3, 1, 1)).astype(dtype)

    def rotated(x):
        return xpos(x, x, at, at)

    query, key = rotated(x)
    assert query.dtype == key.dtype == dtype
    assert jnp.isfinite(query).all()
    assert jnp.isfinite(key).all()
    own_scores = jnp.sum(query.astype(jnp.float32) * key.astype(jnp.float32), axis=-1)
    squares = jnp.sum(x.astype(jnp.float32) ** 2, axis=-1)
    np.testing.assert_allclose(own_scores, squares, rtol=rtol)
    gradient = jax.grad(lambda x: sum(jnp.sum(y) for y in rotated(x)))(x)
    assert jnp.isfinite(gradient).all()


def test_masked_attention_over_the_longest_range_is_finite():
    at = jnp.array([0, 32768, 65536])

    @jax.jit
    def attended(query, key):
        products = scores(query, key, at, at)
        weights = jax.nn.softmax(jnp.where(jnp.tri(3, dtype=bool), products, -jnp.inf))
        return weights[:, :, 0].sum(), products

    query, key = QUERY, KEY[:3]
    gradients, products = jax.grad(attended, argnums=(0, 1), has_aux=True)(query, key)
    # Some scores overflow, so the mask has something to hide.
    assert not jnp.isfinite(products).all()
    expected = np.tril(oracle(query, key, at, at))
    np.testing.assert_allclose(jnp.tril(products), expected, atol=1e-5)
    for gradient in gradients:
        assert jnp.isfinite(gradient).all()
        assert (gradient != 0).any()


def test_bfloat16_is_rotated_in_float32():
    halves = [x.astype(jnp.bfloat16) for x in (QUERY, KEY)]
    whole = xpos(
        *(x.astype(jnp.float32) for x in halves), 300 * QUERY_POSITIONS, 300 * KEY_POSITIONS
    )
    found = xpos(*halves, 300 * QUERY_POSITIONS, 300 * KEY_POSITIONS)
    for half, exact in zip(found, whole):
        np.testing.assert_array_equal(half, exact.astype(jnp.bfloat16))


@pytest.mark.slow
def test_no_axis_is_added_implicitly():
    query, key = QUERY[None], KEY[None]
    expected = xpos(query, key, QUERY_POSITIONS, KEY_POSITIONS)
    with jax.numpy_rank_promotion("raise"):
        found = xpos(query, key, QUERY_POSITIONS, KEY_POSITIONS)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_exported_is_the_function():
    exported = jax.export.export(jax.jit(xpos))(QUERY, KEY, QUERY_POSITIONS, KEY_POSITIONS)
    found, expected = (
        exported.call(QUERY, KEY, QUERY_POSITIONS, KEY_POSITIONS),
        xpos(QUERY, KEY, QUERY_POSITIONS, KEY_POSITIONS),
    )
    for x, y in zip(found, expected):
        np.testing.assert_allclose(x, y, atol=1e-6)


@pytest.mark.parametrize("options", [{"gamma": 0.0}, {"gamma": -1.0}, {"scale_base": 0.0}])
def test_no_gamma_or_scale_base_is_refused(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}={value} .*above 0"):
        xpos(QUERY, KEY, QUERY_POSITIONS, KEY_POSITIONS, **options)


def test_odd_head_is_refused():
    with pytest.raises(ValueError, match="size=7 must be even"):
        xpos(QUERY[..., :7], KEY[..., :7], QUERY_POSITIONS, KEY_POSITIONS)
