import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from alibi_jax.biases import (
    FireWeights,
    alibi_bias,
    alibi_bias_at,
    alibi_slopes,
    fire_bias_at,
    kerple_log_bias_at,
    kerple_power_bias_at,
    sandwich_bias_at,
    sandwich_ratios,
    t5_bias_at,
)
from alibi_jax.config import POSITIONS, RESCALINGS, Model
from alibi_jax.embeddings import sinusoidal
from alibi_jax.positions import METHODS, MethodSpec, PositionMethod, make_position_method
from alibi_jax.rotations import (
    interpolated_frequencies,
    ntk_frequencies,
    rotary,
    rotary_frequencies,
    transformer_xl,
    truncated_frequencies,
    xpos,
    yarn_frequencies,
    yarn_temperature,
)

WIDTH, HEADS, SIZE, LENGTH = 16, 4, 4, 6

# The hook through which each method acts.
HOOKS = {
    "alibi": "bias",
    "alibi_learned": "bias",
    "sinusoidal": "embed",
    "learned": "embed",
    "shape": "embed",
    "randomized": "embed",
    "rotary": "rotate",
    "rotary_truncated": "rotate",
    "xpos": "rotate",
    "transformer_xl": "rotate",
    "t5": "bias",
    "kerple_log": "bias",
    "kerple_power": "bias",
    "sandwich": "bias",
    "fire": "bias",
    "fox": "gates",
    "none": None,
}
# The biases that depend on distances only. FIRE's also depends on the query's position.
RELATIVE_BIASES = ["alibi", "alibi_learned", "t5", "kerple_log", "kerple_power", "sandwich"]
WITHOUT_PARAMETERS = [
    "alibi", "sinusoidal", "shape", "randomized", "rotary", "rotary_truncated", "xpos",
    "sandwich", "none",
]  # fmt: skip


def method(name, train_length=LENGTH, **model):
    config = Model(position=name, width=WIDTH, num_heads=HEADS, **model)
    return make_position_method(name, config, train_length=train_length, rngs=nnx.Rngs(0))


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


def bias_of(position, query_positions, key_positions):
    bias = position.bias()
    return None if bias is None else bias(query_positions, key_positions)


def hooks(position, positions=None):
    """The results of a method's hooks for random embeddings, queries and keys."""
    if positions is None:
        positions = jnp.arange(LENGTH)
    query, key = normal(2, LENGTH, HEADS, SIZE), normal(2, LENGTH, HEADS, SIZE)[:, ::-1]
    return {
        "embed": position.embed(normal(2, LENGTH, WIDTH), positions),
        "rotate": position.rotate(query, key, positions, positions),
        "bias": bias_of(position, positions, positions),
        "gates": position.gates(normal(2, LENGTH, WIDTH)),
    }


def leaves(tree):
    return jax.tree.leaves(tree)


def test_the_configuration_and_the_registry_name_the_same_methods():
    assert list(METHODS) == list(POSITIONS)


def acting_hooks(name):
    """The hooks whose results differ from those of the method `none`."""
    results, unchanged = hooks(method(name)), hooks(method("none"))
    return {
        hook
        for hook in results
        if len(leaves(results[hook])) != len(leaves(unchanged[hook]))
        or not all(map(np.array_equal, leaves(results[hook]), leaves(unchanged[hook])))
    }


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.sample(6)
def test_the_configuration_knows_which_methods_only_embed(name):
    """One that embeds but is not known to would be accepted for some layers and act in all."""
    acting = acting_hooks(name)
    assert ("embed" in acting) == POSITIONS[name].embeds
    assert not POSITIONS[name].embeds or acting == {"embed"}


@pytest.mark.parametrize("rescaling", [name for name in RESCALINGS if name != "none"])
@pytest.mark.parametrize("name", POSITIONS)
def test_the_configuration_knows_which_methods_can_be_rescaled(name, rescaling):
    plain, rescaled = (
        leaves(hooks(method(name, rescaling=rescaling, rescaling_factor=factor)))
        for factor in (1.0, 8.0)
    )
    changed = not all(map(np.array_equal, rescaled, plain))
    assert changed == (rescaling in POSITIONS[name].rescalings)


@pytest.mark.parametrize("name", POSITIONS)
def test_each_method_acts_through_its_own_hook_only(name):
    assert acting_hooks(name) == ({HOOKS[name]} if HOOKS[name] else set())


class Embeds(PositionMethod):
    def embed(self, x, positions):
        return 2 * x


class DrawsPositions(PositionMethod):
    def training_positions(self, positions, key, batch_size):
        return positions + 1


class EndsAtLength(PositionMethod):
    def __init__(self):
        self.max_length = 8


@pytest.mark.parametrize(
    ("kind", "hook"),
    [(Embeds, "embed"), (DrawsPositions, "training_positions"), (EndsAtLength, "max_length")],
)
def test_a_method_for_each_layer_must_not_override_a_hook_for_the_whole_model(
    monkeypatch, kind, hook
):
    """The model calls these hooks of shared methods only: the method would train as `none`."""
    spec = MethodSpec(lambda config, train_length, rngs: kind(), per_layer=True)
    monkeypatch.setitem(METHODS, "new", spec)
    with pytest.raises(ValueError, match=f"'new' has per_layer=True and overrides {hook}, "):
        method("new")
    monkeypatch.setitem(METHODS, "new", dataclasses.replace(spec, per_layer=False))
    assert isinstance(method("new"), kind)


@pytest.mark.parametrize("name", [*RELATIVE_BIASES, "fire"])
@pytest.mark.parametrize("positions", [np.arange(LENGTH), np.array([[0, 0, 1, 2], [9, 3, 5, 7]])])
def test_biases_are_the_pure_functions(name, positions):
    position = method(name)
    given = jnp.asarray(positions, jnp.int32)
    pure = {
        "alibi": lambda: alibi_bias_at(alibi_slopes(HEADS), given, given),
        "alibi_learned": lambda: alibi_bias_at(jnp.exp(position.log_slopes[...]), given, given),
        "t5": lambda: t5_bias_at(position.table[...], given, given),
        "kerple_log": lambda: kerple_log_bias_at(
            jnp.exp(position.log_scale[...]), jnp.exp(position.log_rate[...]), given, given
        ),
        "kerple_power": lambda: kerple_power_bias_at(
            jnp.exp(position.log_scale[...]),
            2 * jax.nn.sigmoid(position.exponent_logits[...]),
            given,
            given,
        ),
        "sandwich": lambda: sandwich_bias_at(sandwich_ratios(HEADS), given, given),
        "fire": lambda: fire_bias_at(
            FireWeights(
                threshold=jnp.exp(position.log_threshold[...]),
                **{
                    field: getattr(position, field)[...]
                    for field in FireWeights._fields
                    if field != "threshold"
                },
            ),
            given,
            given,
        ),
    }
    np.testing.assert_array_equal(bias_of(position, given, given), pure[name]())


@pytest.mark.parametrize("positions", [np.arange(LENGTH), np.array([[0, 0, 1, 2], [9, 3, 5, 7]])])
def test_rotations_are_the_pure_functions(positions):
    given = jnp.asarray(positions, jnp.int32)
    query = normal(2, given.shape[-1], HEADS, SIZE)
    key = query[:, ::-1]

    def rotated(frequencies, temperature=1.0):
        rotated_query, rotated_key = (
            rotary(x, given, frequencies=frequencies) for x in (query, key)
        )
        return rotated_query * temperature**2, rotated_key

    xl = method("transformer_xl")
    pure = {
        method("rotary"): rotated(rotary_frequencies(SIZE)),
        method("rotary_truncated", rotary_fraction=0.5): rotated(truncated_frequencies(SIZE, 0.5)),
        method("rotary", rescaling="linear", rescaling_factor=8.0): rotated(
            interpolated_frequencies(SIZE, 8.0)
        ),
        method("rotary", rescaling="ntk", rescaling_factor=8.0): rotated(
            ntk_frequencies(SIZE, 8.0)
        ),
        method("rotary", rescaling="yarn", rescaling_factor=8.0): rotated(
            yarn_frequencies(SIZE, 8.0, LENGTH), yarn_temperature(8.0)
        ),
        method("xpos"): xpos(query, key, given, given),
        xl: transformer_xl(
            query,
            key,
            given,
            given,
            xl.content_bias[...],
            xl.position_bias[...],
            xl.kernel[...],
        ),
    }
    for position, expected in pure.items():
        for x, y in zip(position.rotate(query, key, given, given), expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["alibi", "alibi_learned"])
def test_linear_rescaling_divides_the_slopes(name):
    """Al-Khateeb et al. 2023: position interpolation for ALiBi."""
    positions = jnp.arange(LENGTH)
    np.testing.assert_allclose(
        bias_of(method(name, rescaling="linear", rescaling_factor=4.0), positions, positions),
        alibi_bias_at(alibi_slopes(HEADS), positions, positions) / 4,
        rtol=1e-6,
    )


@pytest.mark.parametrize("name", ["rotary", "alibi"])
def test_e4_a_factor_of_one_changes_nothing(name):
    plain = hooks(method(name))
    for rescaling in POSITIONS[name].rescalings:
        rescaled = hooks(method(name, rescaling=rescaling, rescaling_factor=1.0))
        for x, y in zip(leaves(rescaled), leaves(plain), strict=True):
            np.testing.assert_array_equal(x, y)


def test_sinusoids_are_added():
    for positions in (jnp.arange(LENGTH), jnp.array([[0, 0, 1, 2, 3, 4], [9, 3, 5, 7, 8, 1]])):
        x = normal(2, LENGTH, WIDTH)
        for name in ("sinusoidal", "shape", "randomized"):
            np.testing.assert_allclose(
                method(name).embed(x, positions), x + sinusoidal(positions, WIDTH), atol=1e-6
            )


def test_shape_shifts_each_training_sequence_as_a_whole():
    """Kiyono et al. 2021, section 3: the shift is uniform from 0 to `max_shift`."""
    drawn = method("shape", max_shift=3).training_positions(
        jnp.arange(LENGTH), jax.random.key(0), 400
    )
    assert drawn.shape == (400, LENGTH)
    np.testing.assert_array_equal(drawn - drawn[:, :1], np.tile(np.arange(LENGTH), (400, 1)))
    shifts, counts = np.unique(drawn[:, 0], return_counts=True)
    np.testing.assert_array_equal(shifts, [0, 1, 2, 3])
    assert counts.min() > 60


def test_randomized_draws_an_ordered_subset_for_each_training_sequence():
    """Ruoss et al. 2023, section 3: it is drawn without replacement from the whole range."""
    position = method("randomized", randomized_range=8)
    drawn = position.training_positions(jnp.arange(LENGTH), jax.random.key(0), 400)
    assert (np.diff(drawn, axis=1) > 0).all()
    values, counts = np.unique(drawn, return_counts=True)
    np.testing.assert_array_equal(values, np.arange(8))
    # 6 of 8 positions are drawn, so each is drawn in three quarters of 400 sequences.
    np.testing.assert_allclose(counts, 300, atol=45)
    # Each packed document starts again at the smallest position of the row's subset.
    packed = jnp.array([[0, 1, 2, 0, 1, 2]])
    of_packed = position.training_positions(packed, jax.random.key(1), 1)
    np.testing.assert_array_equal(of_packed[0, :3], of_packed[0, 3:])


def test_randomized_refuses_more_positions_than_its_range():
    position = method("randomized", randomized_range=5)
    with pytest.raises(ValueError, match="6 positions can't be drawn from a range of 5"):
        position.training_positions(jnp.arange(LENGTH), jax.random.key(0), 1)


@pytest.mark.parametrize("name", sorted(set(POSITIONS) - {"shape", "randomized"}))
def test_other_methods_train_at_the_positions_given(name):
    positions = jnp.array([[3, 1, 4]])
    assert method(name).training_positions(positions, jax.random.key(0), 1) is positions


def test_forget_gates_are_log_sigmoids_of_a_projection():
    fox, x = method("fox"), normal(2, 3, WIDTH)
    fox.gate_bias[...] = normal(HEADS)
    logits = np.asarray(x) @ np.asarray(fox.kernel[...]) + np.asarray(fox.gate_bias[...])
    np.testing.assert_allclose(fox.gates(x), -np.log1p(np.exp(-logits)), rtol=1e-5)
    assert fox.num_gates == HEADS


def test_parameters_start_where_the_authors_start_them():
    config = Model(width=1024, num_heads=1024)

    def made(name):
        return make_position_method(name, config, train_length=2048, rngs=nnx.Rngs(0))

    # chijames/KERPLE, megatron/mpu/layers.py: uniform up to 2 or up to 1, and at least 0.01.
    for values, largest in [
        (jnp.exp(made("kerple_log").log_scale[...]), 2),
        (jnp.exp(made("kerple_log").log_rate[...]), 1),
        (jnp.exp(made("kerple_power").log_scale[...]), 1),
        (2 * jax.nn.sigmoid(made("kerple_power").exponent_logits[...]), 2),
    ]:
        assert 0.009 < values.min() < 0.05
        assert 0.95 * largest < values.max() <= largest
        np.testing.assert_allclose(values.mean(), largest / 2, atol=0.06)
    # Li et al. 2023, appendix: c starts at 0.1, and L at 512 for a training length of 2048.
    fire = made("fire")
    assert float(fire.rate[...]) == np.float32(0.1)
    np.testing.assert_allclose(jnp.exp(fire.log_threshold[...]), 512, rtol=1e-6)
    assert fire.hidden_kernel.shape == (32,)
    np.testing.assert_allclose(
        jnp.exp(made("alibi_learned").log_slopes[...]), alibi_slopes(1024), rtol=1e-5
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
    query = normal(2, LENGTH, HEADS, SIZE, dtype=jnp.bfloat16)
    rotated = position.rotate(query, query, positions, positions)
    assert [half.dtype for half in rotated] == [jnp.bfloat16] * 2
    for added in (bias_of(position, positions, positions), position.gates(x)):
        assert added is None or added.dtype == jnp.float32


def test_c6_angles_of_bfloat16_queries_are_float32():
    """EleutherAI/gpt-neox#1003: bfloat16 can't represent odd integers above 256."""
    query = jnp.ones((1, 2, 1, SIZE), jnp.bfloat16)
    near = jnp.array([256, 257])
    rotated, _ = method("rotary").rotate(query, query, near, near)
    assert not np.array_equal(rotated[0, 0], rotated[0, 1])
    far = jnp.array([1857])
    exact = rotary(jnp.ones((1, 1, 1, SIZE)), far)
    for half in method("rotary").rotate(query[:, :1], query[:, :1], far, far):
        np.testing.assert_allclose(np.asarray(half, np.float32), exact, atol=8e-3)


@pytest.mark.parametrize("name", WITHOUT_PARAMETERS)
def test_a6_fixed_methods_have_no_parameters(name):
    assert not jax.tree.leaves(nnx.state(method(name)))


def test_a3_alibi_is_of_all_heads():
    np.testing.assert_array_equal(
        bias_of(method("alibi"), jnp.arange(LENGTH), jnp.arange(LENGTH)), alibi_bias(HEADS, LENGTH)
    )


# Positions past the end of a learned table. JAX's own indexing clamps or wraps them silently.


def test_e6_learned_has_every_row_of_its_table():
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
    # Positions that are constants of the trace are refused too.
    with pytest.raises(ValueError, match=rf"end at 6.* length of {positions.max() + 1}"):
        jax.jit(functools.partial(learned.embed, positions=positions))(x)


@pytest.mark.parametrize("past", [6, 7, 1000, -1, -6])
def test_e6_traced_positions_past_the_table_give_nan(past):
    x = normal(1, 3, WIDTH)
    out = jax.jit(method("learned").embed)(x, jnp.array([0, past, 2]))
    assert jnp.isnan(out[0, 1]).all()
    assert jnp.isfinite(out[0, [0, 2]]).all()


def test_e6_decoding_at_the_end_of_the_table_is_refused():
    """Decoding is one token at a time, so the position must be checked, not the length."""
    learned, x = method("learned"), normal(1, 1, WIDTH)
    assert jnp.isfinite(learned.embed(x, jnp.array([5]))).all()
    with pytest.raises(ValueError, match=r"end at 6.* length of 7"):
        learned.embed(x, jnp.array([6]))


@pytest.mark.parametrize("name", sorted(set(POSITIONS) - {"learned"}))
def test_other_methods_have_no_maximal_length(name):
    position, far = method(name), jnp.arange(100_000, 100_000 + LENGTH)
    assert position.max_length is None
    assert all(jnp.isfinite(x).all() for x in leaves(hooks(position, far)))


@pytest.mark.parametrize("name", RELATIVE_BIASES)
def test_relative_biases_do_not_change_when_all_positions_shift(name):
    position, near = method(name), jnp.arange(LENGTH)
    np.testing.assert_allclose(
        bias_of(position, near + 1000, near + 1000),
        bias_of(position, near, near),
        rtol=0,
        # Sandwich sums the rounded products of 64 pairs; the other biases are exact.
        atol=1e-5 if name == "sandwich" else 0,
    )


@pytest.mark.parametrize(
    ("name", "shift"),
    [("rotary", 1000), ("rotary_truncated", 1000), ("xpos", 100_000), ("transformer_xl", 100_000)],
)
def test_products_do_not_change_when_all_positions_shift(name, shift):
    position, near = method(name), jnp.arange(LENGTH)
    query, key = normal(1, LENGTH, HEADS, SIZE), normal(1, LENGTH, HEADS, SIZE)[:, ::-1]

    def products(positions):
        return jnp.einsum("btnh,bsnh->bnts", *position.rotate(query, key, positions, positions))

    np.testing.assert_allclose(products(near + shift), products(near), atol=1e-3)


@pytest.mark.parametrize("name", POSITIONS)
def test_a_method_can_be_made_while_tracing(name):
    """The static part must be equal each time, or each new model would be compiled again."""
    first, second = (nnx.eval_shape(lambda: method(name)) for _ in range(2))
    assert nnx.graphdef(first) == nnx.graphdef(second)
    assert hash(nnx.graphdef(first)) == hash(nnx.graphdef(method(name)))
