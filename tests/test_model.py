import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_jax.config import ACTIVATIONS, POSITIONS, Config, Mesh, Model
from alibi_jax.distributed import sharding
from alibi_jax.model import Transformer, abstract_model, initial_params, make_model
from alibi_jax.model.dropout import dropout
from alibi_jax.model.losses import weighted_sum
from alibi_jax.model.packing import segment_positions, segment_runs

VOCAB = 11
# Most tests run without jit and share few shapes (batches of 2, lengths of 9, 5 and 4), so that
# each operation is compiled once for all of them. One method for each hook of `PositionMethod` is
# enough here; test_exactness.py compares every method with its paper.
ONE_PER_HOOK = ["alibi", "learned", "rotary", "t5", "transformer_xl", "fire", "fox", "none"]


pytestmark = pytest.mark.usefixtures("quick_compile")


def make(position="alibi", *, vocab_size=VOCAB, train_length=32, **model):
    """A tiny model. Learned tables are as large as token embeddings, so that tests see them."""
    values = {"num_layers": 1, "width": 16, "num_heads": 4} | model
    config = Model(position=position, **values)
    made = Transformer(config, vocab_size=vocab_size, train_length=train_length, rngs=nnx.Rngs(0))
    for method in made.positions.values():
        if hasattr(method, "table"):
            method.table[...] = normal(*method.table.shape)
    return made


def without_positions(model):
    """The model with the same other parameters and no position method."""
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    params.pop("positions", None)
    for layer in params["layers"]["stacks"].values():
        layer["attention"].pop("position", None)
    return nnx.merge(nnx.graphdef(make("none")), params)


def normal(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def some_tokens(batch, length, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB, (batch, length)), jnp.int32)


def logits_of(model, tokens, **kwargs):
    """Logits of a forward pass."""
    return model.logits(model.hidden_states(tokens, **kwargs))


def compiled_logits_of(model, tokens):
    graphdef, params = nnx.split(model)
    return jax.jit(lambda params: logits_of(nnx.merge(graphdef, params), tokens))(params)


def loss_and_gradients(
    model, tokens, targets, weights=None, *, transform=lambda function: function, **kwargs
):
    """((sum, count), gradients of the sum), as in training."""
    graphdef, params = nnx.split(model, nnx.Param)

    def loss(params):
        model = nnx.merge(graphdef, params)
        hidden = model.hidden_states(tokens, **kwargs)
        return weighted_sum(model.token_nll(hidden, targets), weights)

    return transform(jax.value_and_grad(loss, has_aux=True))(nnx.to_pure_dict(params))


def assert_trees_close(left, right, **tolerances):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerances), left, right)


def shapes(tree):
    return jax.tree.map(lambda leaf: leaf.shape, tree)


# Hidden states and logits.


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.sample(2)
def test_hidden_states_and_logits_are_separate_and_consistent(tied, dtype):
    model, tokens = make(tied_embeddings=tied, dtype=dtype), some_tokens(2, 9)
    targets = some_tokens(2, 9, seed=1)
    hidden = model.hidden_states(tokens)
    assert (hidden.shape, hidden.dtype) == ((2, 9, 16), jnp.dtype(dtype))
    logits = model.logits(hidden)
    assert (logits.shape, logits.dtype) == ((2, 9, VOCAB), jnp.float32)
    vocabulary = model.vocabulary
    assert vocabulary.unembedding.dtype == jnp.float32
    assert np.array_equal(vocabulary.unembedding, vocabulary.embedding[...]) == tied
    table = np.asarray(vocabulary.unembedding[:VOCAB].astype(dtype), np.float64)
    np.testing.assert_allclose(logits, np.asarray(hidden, np.float64) @ table.T, atol=1e-5)
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(model.token_nll(hidden, targets), nll, atol=1e-5)


@pytest.mark.parametrize("position", [*POSITIONS, "rotary,none"])
@pytest.mark.sample(6)
def test_the_last_tokens_alone_are_as_in_the_whole(position):
    """For the other tokens the final layer computes only keys and values."""
    model, tokens = make(position, num_layers=2, num_kv_heads=2), some_tokens(2, 9)
    ids = jnp.asarray([[1] * 9, [0, 2, 2, 3, 3, 3, 3, 3, 3]])

    @jax.jit
    def hidden_states(ids):
        return [model.hidden_states(tokens, segment_ids=ids, last=last) for last in (None, 1, 4, 9)]

    for segment_ids in (None, ids):
        whole, *parts = hidden_states(segment_ids)
        for last in parts:
            np.testing.assert_allclose(last, whole[:, -last.shape[1] :], atol=2e-6)


def test_logits_of_a_fresh_model_are_of_unit_scale():
    logits = logits_of(make(tied_embeddings=False), some_tokens(2, 9))
    assert 0.5 < logits.std() < 2


@pytest.mark.parametrize("position", ONE_PER_HOOK)
@pytest.mark.sample(3)
def test_no_token_sees_the_future(position):
    model, tokens = make(position), some_tokens(2, 9)
    changed = tokens.at[:, 6:].set((tokens[:, 6:] + 1) % VOCAB)
    before, after = logits_of(model, tokens), logits_of(model, changed)
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert (before[:, 6:] != after[:, 6:]).any(axis=-1).all()


VARIANTS = [
    *({"activation": name} for name in ACTIVATIONS),
    {"norm": "rmsnorm"},
    {"tied_embeddings": False},
    {"num_kv_heads": 2, "ff_width": 24},
    {"dtype": "bfloat16", "activation": "swiglu", "norm": "rmsnorm", "tied_embeddings": False},
    {"dtype": "bfloat16", "remat": "full", "dropout": 0.1, "activation_dropout": 0.1},
    *({"position": name, "dtype": "bfloat16"} for name in POSITIONS),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.sample(10)
def test_every_variant_has_finite_gradients_of_every_parameter(variant):
    model = make(**{"attention_dropout": 0.1} | variant)
    # With the shapes of the other tests, the operations are compiled already and need no jit.
    common_shapes = not {"num_kv_heads", "remat"} & set(variant)
    (total, count), grads = loss_and_gradients(
        model,
        some_tokens(2, 9),
        some_tokens(2, 9, seed=1),
        training_key=jax.random.key(0),
        transform=(lambda function: function) if common_shapes else jax.jit,
    )
    assert count == 18
    assert 1 < total / count < 10
    for path, leaf in jax.tree.leaves_with_path(grads):
        assert leaf.dtype == jnp.float32, path
        assert jnp.isfinite(leaf).all(), path
        assert (leaf != 0).any(), path


# Position methods.


@pytest.mark.parametrize("position", sorted(set(POSITIONS) - {"none"}))
@pytest.mark.sample(6)
def test_a5_every_method_has_an_effect(position):
    """sgl-project/sglang PR#16868: slopes never reached the attention."""
    tokens = some_tokens(2, 9)
    model = make(position)
    logits = logits_of(model, tokens)
    assert jnp.abs(logits_of(without_positions(model), tokens) - logits).max() > 1e-2


@pytest.mark.parametrize("position", ONE_PER_HOOK)
@pytest.mark.sample(3)
def test_a5_training_without_dropout_is_evaluation(position):
    tokens, targets = some_tokens(2, 9), some_tokens(2, 9, seed=1)
    evaluated = logits_of(make(position), tokens)
    # In training: with a key, and with all rates zero.
    trained = logits_of(make(position), tokens, training_key=jax.random.key(0))
    np.testing.assert_array_equal(trained, evaluated)
    # In evaluation: with rates, and without a key.
    rates = {"dropout": 0.5, "attention_dropout": 0.5, "activation_dropout": 0.5}
    np.testing.assert_array_equal(logits_of(make(position, **rates), tokens), evaluated)
    # The forward pass of a gradient.
    (total, _), _ = loss_and_gradients(make(position), tokens, targets)
    nll = -jnp.take_along_axis(jax.nn.log_softmax(evaluated), targets[..., None], axis=-1)
    np.testing.assert_allclose(total, nll.sum(), rtol=1e-6)


@pytest.mark.parametrize("position", ONE_PER_HOOK)
@pytest.mark.sample(3)
def test_a5_rematerialised_layers_are_the_same(position):
    arguments = some_tokens(2, 9), some_tokens(2, 9, seed=1)
    rates = {"dropout": 0.5, "attention_dropout": 0.5, "activation_dropout": 0.5}
    key = jax.random.key(0)
    plain, remat = (
        loss_and_gradients(
            make(position, remat=remat, num_layers=2, **rates), *arguments, training_key=key
        )
        for remat in ("none", "full")
    )
    np.testing.assert_allclose(remat[0], plain[0], rtol=1e-6)
    assert_trees_close(remat[1], plain[1], rtol=1e-4, atol=1e-5)


def test_a5_compiled_and_rematerialised_forward_passes_are_the_same():
    tokens = some_tokens(2, 9)
    plain, remat = (
        compiled_logits_of(make(remat=remat), tokens) for remat in ("none", "projections")
    )
    np.testing.assert_array_equal(remat, plain)
    np.testing.assert_allclose(plain, logits_of(make(), tokens), atol=1e-5)


def test_a5_order_of_the_context_matters_to_alibi_and_not_without_positions():
    tokens = jnp.arange(18).reshape(2, 9) % VOCAB
    swapped = tokens.at[:, [1, 6]].set(tokens[:, [6, 1]])

    def change(position):
        model = make(position)
        return jnp.abs(logits_of(model, tokens) - logits_of(model, swapped))[0, -1].max()

    assert change("none") < 1e-5
    assert change("alibi") > 1e-2


def test_a6_alibi_has_no_parameters_of_its_own():
    alibi, none = (nnx.to_pure_dict(nnx.state(make(name), nnx.Param)) for name in ("alibi", "none"))
    assert shapes(alibi) == shapes(none)
    # It has no other state either: slopes are not in checkpoints.
    assert not jax.tree.leaves(nnx.state(make("alibi").positions))


@pytest.mark.parametrize("position", ONE_PER_HOOK)
@pytest.mark.sample(3)
def test_positions_are_as_given(position):
    model, tokens = make(position), some_tokens(2, 9)
    whole = logits_of(model, tokens)
    np.testing.assert_array_equal(logits_of(model, tokens, positions=jnp.arange(9)), whole)
    # Rows with different positions give the results of each row alone.
    positions = jnp.array([range(9), [7, 9, 12, 13, 20, 21, 22, 25, 31]])
    rows = logits_of(model, tokens, positions=positions)
    np.testing.assert_allclose(rows[0], whole[0], atol=1e-5)
    alone = logits_of(model, tokens, positions=positions[1])
    np.testing.assert_allclose(rows[1], alone[1], atol=1e-5)
    # Gates count tokens, not positions.
    assert (jnp.abs(rows[1] - whole[1]).max() > 1e-3) == (position not in ("fox", "none"))


@pytest.mark.parametrize("position", ["alibi", "t5", "rotary", "none"])
def test_relative_methods_do_not_see_all_positions_move(position):
    model, tokens = make(position), some_tokens(2, 9)
    moved = logits_of(model, tokens, positions=jnp.arange(1000, 1009))
    np.testing.assert_allclose(moved, logits_of(model, tokens), atol=1e-3)


# Padding and packing.


@pytest.mark.parametrize("position", ONE_PER_HOOK)
@pytest.mark.sample(4)
def test_d1_left_padding_changes_nothing(position):
    """huggingface/transformers#26380."""
    model, tokens = make(position), some_tokens(2, 5)
    alone = logits_of(model, tokens)
    segments = jnp.array([[0, 0, 0, 0, 1, 1, 1, 1, 1]] * 2)
    for pad in (0, 7):
        padded = jnp.pad(tokens, ((0, 0), (4, 0)), constant_values=pad)
        # The text of another row changes nothing either.
        padded = padded.at[1].set(pad)
        out = logits_of(model, padded, segment_ids=segments)
        assert jnp.isfinite(out).all()
        np.testing.assert_allclose(out[0, 4:], alone[0], atol=1e-5)


@pytest.mark.parametrize("position", ONE_PER_HOOK)
@pytest.mark.sample(3)
def test_d2_loss_of_a_document_is_the_same_however_padded(position):
    model, document = make(position), some_tokens(1, 6)
    sums = []
    for left, right in [(0, 0), (0, 4), (4, 0), (3, 1)]:
        pads = ((0, 0), (left, right))
        inputs, targets, ones = (
            jnp.pad(x, pads) for x in (document[:, :-1], document[:, 1:], jnp.ones((1, 5)))
        )
        # The batch has another document, whose weights are 0.
        others = some_tokens(1, inputs.shape[1], seed=2)
        inputs, targets = (jnp.concatenate([others, x]) for x in (inputs, targets))
        weights = jnp.concatenate([jnp.zeros(others.shape), ones])
        segments = jnp.concatenate([jnp.ones_like(others), ones.astype(jnp.int32)])
        hidden = model.hidden_states(inputs, segment_ids=segments)
        sums.append(weighted_sum(model.token_nll(hidden, targets), weights))
    np.testing.assert_allclose(sums, [sums[0]] * 4, rtol=1e-6)
    assert sums[0][1] == 5


@pytest.mark.parametrize("position", ONE_PER_HOOK)
@pytest.mark.sample(3)
def test_d3_packed_documents(position):
    """mosaicml/llm-foundry PR#738, allenai/open-instruct#669."""
    model = make(position)
    first, second, other = (some_tokens(2, n, seed) for seed, n in enumerate((5, 4, 5)))
    segments = jnp.array([[1, 1, 1, 1, 1, 2, 2, 2, 2]] * 2)
    packed = logits_of(model, jnp.concatenate([first, second], axis=1), segment_ids=segments)
    np.testing.assert_allclose(packed[:, :5], logits_of(model, first), atol=1e-5)
    np.testing.assert_allclose(packed[:, 5:], logits_of(model, second), atol=1e-5)
    beside_other = logits_of(model, jnp.concatenate([other, second], axis=1), segment_ids=segments)
    assert not np.array_equal(beside_other[:, :5], packed[:, :5])
    np.testing.assert_array_equal(beside_other[:, 5:], packed[:, 5:])


def test_d3_positions_start_anew_with_each_document():
    np.testing.assert_array_equal(
        segment_positions(jnp.array([[1, 1, 1, 1, 1, 2, 2, 2], [0, 0, 4, 4, 1, 1, 1, 0]])),
        [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 0, 1, 2, 0]],
    )


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=12, max_size=12), min_size=1, max_size=3))
def test_positions_count_within_each_run(rows):
    expected = np.zeros((len(rows), 12), int)
    for row, t in np.ndindex(*expected.shape):
        if t and rows[row][t] == rows[row][t - 1]:
            expected[row, t] = expected[row, t - 1] + 1
    positions = segment_positions(jnp.array(rows, jnp.int32))
    assert positions.dtype == jnp.int32
    np.testing.assert_array_equal(positions, expected)


@pytest.mark.parametrize("position", ["alibi", "rotary", "fox"])
def test_d3_an_id_that_recurs_is_another_segment(position):
    """Positions and visibility follow the runs of ids, whether positions are given or not."""
    model, tokens = make(position), some_tokens(2, 9)
    ids = jnp.array([[1, 1, 1, 0, 1, 1, 1, 1, 1], [2, 2, 3, 3, 3, 2, 2, 2, 2]])
    runs = segment_runs(ids)
    np.testing.assert_array_equal(runs, [[1, 1, 1, 0, 3, 3, 3, 3, 3], [1, 1, 2, 2, 2, 3, 3, 3, 3]])
    hidden = model.hidden_states(tokens, segment_ids=ids)
    given = model.hidden_states(tokens, positions=segment_positions(ids), segment_ids=runs)
    np.testing.assert_allclose(hidden, given, atol=1e-5)
    alone = model.hidden_states(tokens[:, 5:])
    np.testing.assert_allclose(hidden[1, 5:], alone[1], atol=1e-5)


@pytest.mark.parametrize("position", ["alibi", "rotary", "learned"])
def test_c4_example_of_padding_only_changes_no_gradient(position):
    """pytorch/pytorch#41508."""
    model, tokens, targets = make(position), some_tokens(3, 9), some_tokens(3, 9, seed=1)
    weights = jnp.ones((3, 9)).at[1].set(0)
    with_padding = loss_and_gradients(
        model,
        tokens,
        targets,
        weights,
        segment_ids=weights.astype(jnp.int32),
        transform=jax.jit,
    )
    rest = jnp.array([0, 2])
    without = loss_and_gradients(
        model, tokens[rest], targets[rest], jnp.ones((2, 9)), transform=jax.jit
    )
    assert with_padding[0][1] == 18
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(with_padding))
    np.testing.assert_allclose(with_padding[0], without[0], rtol=1e-6)
    assert_trees_close(with_padding[1], without[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transform", [lambda function: function, jax.jit])
def test_e6_learned_past_its_table_is_refused(transform):
    model, tokens = make("learned", train_length=9), some_tokens(2, 10)
    run = transform(model.hidden_states)
    with pytest.raises(ValueError, match=r"end at 9.* length of 10"):
        run(tokens)
    assert jnp.isfinite(run(tokens[:, :9])).all()
    # Concrete positions are refused while tracing, too.
    far = functools.partial(model.hidden_states, positions=jnp.arange(3, 12))
    with pytest.raises(ValueError, match=r"end at 9.* length of 12"):
        transform(far)(tokens[:, :9])


def test_e6_traced_positions_past_the_table_give_nan():
    model, tokens = make("learned", train_length=9), some_tokens(2, 9)
    out = jax.jit(model.hidden_states)(tokens, positions=jnp.arange(3, 12))
    assert jnp.isnan(out[:, 6:]).all()


# Precision.


def test_c1_bfloat16_model_is_near_float32_at_length_4096():
    tokens = some_tokens(1, 4096)
    probabilities = []
    for dtype in ("float32", "bfloat16"):
        model = make(dtype=dtype, width=8, num_heads=8)
        # Attention outweighs the residual stream to which it is added.
        model.layers.stacks[0].attention.out.kernel[...] *= 4
        probabilities.append(jax.nn.softmax(compiled_logits_of(model, tokens)[0]))
    distance = jnp.abs(probabilities[0] - probabilities[1]).sum(-1) / 2
    assert distance[-1000:].max() < 0.01


# Dropout.


@pytest.mark.parametrize("kind", ["dropout", "attention_dropout", "activation_dropout"])
def test_dropout_is_a_function_of_its_key(kind):
    model, tokens = make(**{kind: 0.3}), some_tokens(2, 9)
    first, second = jax.random.split(jax.random.key(0))
    dropped = logits_of(model, tokens, training_key=first)
    np.testing.assert_array_equal(logits_of(model, tokens, training_key=first), dropped)
    assert not np.array_equal(logits_of(model, tokens, training_key=second), dropped)
    np.testing.assert_array_equal(logits_of(model, tokens), logits_of(make(), tokens))
    assert not np.array_equal(logits_of(model, tokens), dropped)


def test_dropout_keeps_the_mean_and_its_share():
    x = 1 + jnp.arange(200_000.0) / 200_000
    dropped = dropout(x, 0.3, jax.random.key(0), salt=0)
    kept = dropped != 0
    assert abs(kept.mean() - 0.7) < 5 * math.sqrt(0.21 / x.size)
    np.testing.assert_allclose(dropped[kept], (x / 0.7)[kept], rtol=1e-6)
    assert not np.array_equal(dropout(x, 0.3, jax.random.key(0), salt=1), dropped)
    assert dropout(x, 0.3, None, salt=0) is x
    assert dropout(x, 0.0, jax.random.key(0), salt=0) is x
    assert dropout(x.astype(jnp.bfloat16), 0.3, jax.random.key(0), salt=0).dtype == jnp.bfloat16


# Sharding and configurations.


def config_of(position="alibi", length=16, **model):
    config = Config()
    config.model = Model(position=position, num_layers=1, **model)
    config.train.length = length
    config.check()
    return config


def sharded_logits(config, vocab_size, tensor):
    """Logits of the initial parameters, sharded like the work over a mesh of all devices."""
    mesh = sharding.make_mesh(Mesh(tensor=tensor))
    graphdef, abstract = abstract_model(config, vocab_size, mesh)
    params = initial_params(config, vocab_size, jax.random.key(0))
    params = jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, abstract))
    tokens = np.arange(8 * 16, dtype=np.int32).reshape(8, 16) * 7 % vocab_size
    tokens = jax.device_put(tokens, sharding.named_sharding(mesh, "batch", None))
    with jax.set_mesh(mesh):
        logits = jax.jit(lambda params: logits_of(nnx.merge(graphdef, params), tokens))(params)
    return logits, params


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "meshes"),
    [(8, None, (2, 4, 8)), (12, None, (2, 4)), (8, 2, (2,))],
)
def test_a3_heads_split_over_devices_keep_their_slopes(num_heads, num_kv_heads, meshes):
    """bigscience-workshop/Megatron-DeepSpeed#227: slopes from the local number of heads."""
    config = config_of(width=2 * num_heads, num_heads=num_heads, num_kv_heads=num_kv_heads)
    whole, _ = sharded_logits(config, 16, tensor=1)
    for tensor in meshes:
        logits, params = sharded_logits(config, 16, tensor=tensor)
        kernel = params["layers"]["stacks"][0]["attention"]["query"]["kernel"]
        assert kernel.sharding.shard_shape(kernel.shape)[2] == num_heads // tensor
        np.testing.assert_allclose(logits, whole, atol=1e-5)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.sample(6)
def test_g4_parameters_fit_another_training_length(position):
    """huggingface/transformers PR#28837: position state came out of checkpoints."""
    short, long = (config_of(position, length, width=16, num_heads=4) for length in (32, 128))
    mesh = sharding.make_mesh()
    params = initial_params(short, VOCAB, jax.random.key(0))
    graphdef, wanted = abstract_model(long, VOCAB, mesh)
    if position == "learned":
        assert shapes(params)["positions"]["learned"]["table"] == (32, 16)
        assert shapes(wanted)["positions"]["learned"]["table"] == (128, 16)
        return
    assert shapes(params) == shapes(wanted)
    if position not in ONE_PER_HOOK:
        return
    model = nnx.merge(graphdef, params)
    tokens = some_tokens(1, 128)
    logits = compiled_logits_of(model, tokens)
    assert jnp.isfinite(logits).all()
    trained = nnx.merge(abstract_model(short, VOCAB, mesh)[0], params)
    np.testing.assert_array_equal(compiled_logits_of(trained, tokens), logits)


@pytest.mark.parametrize("position", POSITIONS)
def test_initial_parameters_are_as_laid_out(position):
    config = config_of(position, width=16, num_heads=4, num_kv_heads=2, tied_embeddings=False)
    _, abstract = abstract_model(config, VOCAB, sharding.make_mesh())
    params = jax.eval_shape(lambda key: initial_params(config, VOCAB, key), jax.random.key(0))
    assert jax.tree.structure(params) == jax.tree.structure(abstract)
    assert shapes(params) == shapes(abstract)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}


def test_learned_positions_reach_to_the_training_length():
    model = make_model(config_of("learned", 24, width=16, num_heads=4), VOCAB, nnx.Rngs(0))
    assert model.positions["learned"].table.shape == (24, 16)


def test_bfloat16_gradients_of_frequent_tokens_are_summed_in_float32():
    """In bfloat16 a sum stops growing once a term is too small beside it."""
    tokens = jnp.zeros((16, 256), jnp.int32).at[:, ::7].set(1)

    def gradient(dtype):
        config = Model(width=16, num_heads=2, num_layers=1, position="none", dtype=dtype)
        model = Transformer(config, vocab_size=8, train_length=256, rngs=nnx.Rngs(0))
        graphdef, params = nnx.split(model, nnx.Param)

        def loss(params):
            hidden = nnx.merge(graphdef, params).hidden_states(tokens)
            return hidden.astype(jnp.float32)[..., 0].sum()

        return jax.jit(jax.grad(loss))(params)["vocabulary"]["embedding"][...][0]

    exact, half = gradient("float32"), gradient("bfloat16")
    assert jnp.linalg.norm(half - exact) < 0.05 * jnp.linalg.norm(exact)
