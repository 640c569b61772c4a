import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from alibi_jax.biases import alibi_bias, alibi_bias_at, alibi_slopes, t5_bias_at
from alibi_jax.config import POSITIONS, ConfigError
from alibi_jax.embeddings import sinusoidal
from alibi_jax.positions import METHODS, make_position_method
from alibi_jax.rotations import rotary

WIDTH, HEADS, LENGTH = 8, 4, 6


def method(name, max_length=LENGTH):
    return make_position_method(
        name, num_heads=HEADS, width=WIDTH, max_length=max_length, rngs=nnx.Rngs(0)
    )


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


def hooks(position, positions=None):
    """What a method's three hooks give for some embeddings, queries and positions."""
    if positions is None:
        positions = jnp.arange(LENGTH)
    return (
        position.embed(normal(2, LENGTH, WIDTH), positions),
        position.rotate(normal(2, LENGTH, HEADS, WIDTH // HEADS), positions),
        position.bias(positions, positions),
    )


def test_every_configurable_method_is_there():
    assert set(METHODS) == set(POSITIONS)


def test_unknown_method_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"'alibbi' is not known; did you mean 'alibi'\?"):
        method("alibbi")


@pytest.mark.parametrize(
    ("name", "acts"),
    [
        ("none", (False, False, False)),
        ("sinusoidal", (True, False, False)),
        ("learned", (True, False, False)),
        ("rotary", (False, True, False)),
        ("alibi", (False, False, True)),
        ("t5", (False, False, True)),
    ],
)
def test_each_method_acts_in_its_own_place(name, acts):
    embedded, rotated, bias = hooks(method(name))
    nothing = hooks(method("none"))
    assert acts == (
        not np.array_equal(embedded, nothing[0]),
        not np.array_equal(rotated, nothing[1]),
        bias is not None,
    )


@pytest.mark.parametrize("positions", [np.arange(LENGTH), np.array([[0, 0, 1, 2], [9, 3, 5, 7]])])
def test_hooks_are_the_pure_functions(positions):
    positions = jnp.asarray(positions, jnp.int32)
    length = positions.shape[-1]
    x, query = normal(2, length, WIDTH), normal(2, length, HEADS, 2)
    t5 = method("t5")
    np.testing.assert_array_equal(
        method("alibi").bias(positions, positions),
        alibi_bias_at(alibi_slopes(HEADS), positions, positions),
    )
    np.testing.assert_array_equal(
        t5.bias(positions, positions), t5_bias_at(t5.table[...], positions, positions)
    )
    np.testing.assert_array_equal(
        method("rotary").rotate(query, positions), rotary(query, positions)
    )
    np.testing.assert_allclose(
        method("sinusoidal").embed(x, positions), x + sinusoidal(positions, WIDTH), atol=1e-6
    )


def test_learned_adds_the_row_of_each_position():
    learned = method("learned")
    x, table = normal(2, 3, WIDTH), learned.table[...]
    out = learned.embed(x, jnp.array([[0, 1, 5], [4, 4, 2]]))
    np.testing.assert_array_equal(out[0], x[0] + table[jnp.array([0, 1, 5])])
    np.testing.assert_array_equal(out[1], x[1] + table[jnp.array([4, 4, 2])])


@pytest.mark.parametrize("name", POSITIONS)
def test_embeddings_and_queries_keep_their_dtype_and_biases_are_float32(name):
    position, positions = method(name), jnp.arange(LENGTH)
    x = normal(2, LENGTH, WIDTH, dtype=jnp.bfloat16)
    assert position.embed(x, positions).dtype == jnp.bfloat16
    query = normal(2, LENGTH, HEADS, 2, dtype=jnp.bfloat16)
    assert position.rotate(query, positions).dtype == jnp.bfloat16
    bias = position.bias(positions, positions)
    assert bias is None or bias.dtype == jnp.float32


def test_c6_angles_of_bfloat16_queries_are_float32():
    """EleutherAI/gpt-neox#1003: bfloat16 has no odd integer above 256."""
    query = jnp.ones((1, 2, 1, 2), jnp.bfloat16)
    rotated = method("rotary").rotate(query, jnp.array([256, 257]))
    assert not np.array_equal(rotated[0, 0], rotated[0, 1])
    exact = rotary(jnp.ones((1, 1, 1, 2)), jnp.array([1857]))
    near = method("rotary").rotate(query[:, :1], jnp.array([1857]))
    np.testing.assert_allclose(np.asarray(near, np.float32), exact, atol=8e-3)


@pytest.mark.parametrize("name", ["alibi", "sinusoidal", "rotary", "none"])
def test_a6_fixed_methods_have_no_parameters(name):
    assert not jax.tree.leaves(nnx.state(method(name)))


def test_a3_alibi_is_of_all_heads():
    np.testing.assert_array_equal(
        method("alibi").bias(jnp.arange(LENGTH), jnp.arange(LENGTH)), alibi_bias(HEADS, LENGTH)
    )


# Past the end of a learned table, where JAX's own indexing clamps, wraps or says nothing.


def test_e6_learned_reaches_to_its_end():
    learned = method("learned")
    assert jnp.isfinite(learned.embed(normal(1, LENGTH, WIDTH), jnp.arange(LENGTH))).all()


@pytest.mark.parametrize("compiled", [False, True])
def test_e6_learned_past_its_table_names_both_numbers(compiled):
    embed = method("learned").embed
    x, positions = normal(1, 9, WIDTH), jnp.arange(9)
    with pytest.raises(ValueError, match=r"end at 6.* length of 9"):
        (jax.jit(embed) if compiled else embed)(x, positions)


def test_e6_learned_past_its_table_is_refused_before_anything_runs():
    shapes = jax.ShapeDtypeStruct((1, 9, WIDTH), jnp.float32), jax.ShapeDtypeStruct((9,), jnp.int32)
    with pytest.raises(ValueError, match=r"end at 6.* length of 9"):
        jax.eval_shape(method("learned").embed, *shapes)


@pytest.mark.parametrize("positions", [[0, 1, 6], [[0, 1, 2], [3, 100, 4]]])
def test_e6_explicit_positions_past_the_table_are_refused(positions):
    learned, x = method("learned"), normal(2, 3, WIDTH)
    positions = jnp.array(positions)
    with pytest.raises(ValueError, match=rf"end at 6.* length of {positions.max() + 1}"):
        learned.embed(x, positions)
    # Known while tracing, too.
    with pytest.raises(ValueError, match=rf"end at 6.* length of {positions.max() + 1}"):
        jax.jit(functools.partial(learned.embed, positions=positions))(x)


@pytest.mark.parametrize("past", [6, 7, 1000, -1, -6])
def test_e6_traced_positions_past_the_table_give_nan(past):
    x = normal(1, 3, WIDTH)
    out = jax.jit(method("learned").embed)(x, jnp.array([0, past, 2]))
    assert jnp.isnan(out[0, 1]).all()
    assert jnp.isfinite(out[0, [0, 2]]).all()


def test_e6_decoding_at_the_end_of_the_table_is_refused():
    """One token at a time: the length says nothing, the position does."""
    learned, x = method("learned"), normal(1, 1, WIDTH)
    assert jnp.isfinite(learned.embed(x, jnp.array([5]))).all()
    with pytest.raises(ValueError, match=r"end at 6.* length of 7"):
        learned.embed(x, jnp.array([6]))


@pytest.mark.parametrize("name", ["alibi", "sinusoidal", "rotary", "t5", "none"])
def test_other_methods_reach_any_position(name):
    position, far = method(name), jnp.arange(100_000, 100_000 + LENGTH)
    values = [x for x in hooks(position, far) if x is not None]
    assert all(jnp.isfinite(x).all() for x in values)


@pytest.mark.parametrize("name", ["alibi", "t5"])
def test_relative_biases_do_not_change_when_all_positions_move(name):
    position, near = method(name), jnp.arange(LENGTH)
    np.testing.assert_array_equal(
        position.bias(near + 1000, near + 1000), position.bias(near, near)
    )


def test_rotary_products_do_not_change_when_all_positions_move():
    position, near = method("rotary"), jnp.arange(LENGTH)
    query, key = normal(1, LENGTH, HEADS, 2), normal(1, LENGTH, HEADS, 2)[:, ::-1]

    def products(positions):
        rotated = position.rotate(query, positions), position.rotate(key, positions)
        return jnp.einsum("btnh,bsnh->bnts", *rotated)

    np.testing.assert_allclose(products(near + 1000), products(near), atol=1e-3)
