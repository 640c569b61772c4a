"""Every position method on every path through the model, against the oracle in float64.

Most tests run without jit and share few shapes, so that each operation is compiled once.
"""

import functools
import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from helpers import mesh_of

from alibi_jax.attention import engines, statistics
from alibi_jax.config import POSITIONS, Config, Model
from alibi_jax.distributed.sharding import named_sharding
from alibi_jax.model import Transformer, abstract_model

pytestmark = pytest.mark.usefixtures("quick_compile")

VOCAB = 12
TRAIN_LENGTH = 16
BATCH, LENGTH = 4, 8
# Tolerance for a whole forward pass in float32; logits are about 5.
EXACT = 1e-5

# So small that the tests can try all positions that a method may draw.
MAX_SHIFT, RANDOMIZED_RANGE = 7, 9
CASES = {
    **{
        name: {"position": name}
        for name in (*POSITIONS, "rotary,none", "alibi,t5", "fox,kerple_log")
    },
    "shape": {"position": "shape", "max_shift": MAX_SHIFT},
    "randomized": {"position": "randomized", "randomized_range": RANDOMIZED_RANGE},
    "alibi, no groups": {"position": "alibi", "num_kv_heads": None},
    **{
        f"{name}, {rescaling}": {
            "position": name,
            "rescaling": rescaling,
            "rescaling_factor": 3.0,
        }
        for name, choice in POSITIONS.items()
        for rescaling in choice.rescalings
    },
}
POSSIBLE = {
    "shape": [range(shift, shift + LENGTH) for shift in range(MAX_SHIFT + 1)],
    "randomized": list(itertools.combinations(range(RANDOMIZED_RANGE), LENGTH)),
}
# One method for each part of the model that positions can enter.
REPRESENTATIVES = ("sinusoidal", "rotary", "transformer_xl", "alibi", "t5", "fox")
every_case = pytest.mark.parametrize("case", CASES)


def config_of(case, **changes):
    # Two query heads for each key head, and the same shapes in all cases.
    values = {"num_layers": 2, "width": 16, "num_heads": 4, "num_kv_heads": 2}
    values = values | CASES[case] | changes
    return Model(**values)


@functools.cache
def make(case, **changes):
    """A model with random parameters, including those of its position method."""
    model = Transformer(
        config_of(case, **changes),
        vocab_size=VOCAB,
        train_length=TRAIN_LENGTH,
        rngs=nnx.Rngs(0),
    )
    rng = np.random.default_rng(zlib.crc32(CASES[case]["position"].encode()))
    for leaf in jax.tree.leaves(
        nnx.state(model, nnx.Param), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    ):
        # numpy, here and below, so that nothing is compiled.
        drawn = np.asarray(leaf[...]) + 0.3 * rng.normal(size=leaf.shape)
        leaf[...] = jnp.asarray(drawn, jnp.float32)
    return model


def params_of(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def some_tokens(batch=BATCH, length=LENGTH):
    return np.random.default_rng(0).integers(0, VOCAB, (batch, length), np.int32)


def logits_of(model, tokens, **kwargs):
    return model.logits(model.hidden_states(jnp.asarray(tokens), **kwargs))


def expected(case, tokens, positions=None, segment_ids=None, params=None, **changes):
    """The oracle's logits, row by row; zero at padding."""
    batch, length = tokens.shape
    config = config_of(case, **changes)
    params = params_of(make(case, **changes)) if params is None else params
    positions = np.broadcast_to(
        np.arange(length) if positions is None else positions, (batch, length)
    )
    segment_ids = np.ones((batch, length), int) if segment_ids is None else np.asarray(segment_ids)
    rows = []
    for row, row_positions, ids in zip(tokens, positions, segment_ids):
        visible = np.tri(length, dtype=bool) & (ids[:, None] == ids) & (ids != 0)
        logits = oracle.logits(
            params,
            config,
            row,
            row_positions,
            visible,
            train_length=TRAIN_LENGTH,
            vocab_size=VOCAB,
        )
        rows.append(np.where(ids[:, None], logits, 0.0))
    return np.array(rows)


def assert_exact(logits, wanted, real=True):
    real = np.broadcast_to(real, wanted.shape[:-1])[..., None]
    np.testing.assert_allclose(np.where(real, logits, 0.0), wanted, rtol=0, atol=EXACT)


# Whole sequences.


@every_case
@pytest.mark.sample(9)
def test_evaluation_is_the_oracle(case):
    tokens = some_tokens()
    assert_exact(logits_of(make(case), tokens), expected(case, tokens))


@every_case
@pytest.mark.sample(9)
def test_evaluation_in_blocks(case, monkeypatch):
    monkeypatch.setattr(engines, "_DENSE_MAX_SCORES", 0)
    monkeypatch.setattr(engines, "_DENSE_MAX_QUERIES", 0)
    monkeypatch.setattr(engines, "_BLOCK_SIZE", {"cpu": 3})
    # Two blocks of three queries, and two more queries.
    tokens = some_tokens()
    # Compiled as a whole: otherwise JAX would compile the loop over blocks in each layer.
    logits = jax.jit(functools.partial(logits_of, make(case)))(tokens)
    assert_exact(logits, expected(case, tokens))


@every_case
@pytest.mark.sample(9)
def test_e3_each_row_has_its_own_positions(case):
    positions = np.array(
        [range(8), range(8, 16), [0, 1, 3, 4, 7, 9, 12, 15], [1, 3, 4, 5, 9, 10, 11, 13]]
    )
    if "learned" not in make(case).positions:
        # Past the training length, and past the last of T5's buckets that hold one distance.
        positions[1] = [0, 2, 3, 17, 40, 41, 95, 140]
    tokens = some_tokens()
    logits = logits_of(make(case), tokens, positions=jnp.asarray(positions))
    assert_exact(logits, expected(case, tokens, positions))


@every_case
def test_d1_d2_d3_packed_and_padded(case):
    """huggingface/transformers#26380, mosaicml/llm-foundry PR#738."""
    # One document, two documents, padding on the left, padding on both sides.
    segment_ids = np.array(
        [
            [1, 1, 1, 1, 1, 1, 1, 1],
            [1, 1, 1, 1, 1, 2, 2, 2],
            [0, 0, 0, 1, 1, 1, 1, 1],
            [0, 1, 1, 1, 1, 1, 0, 0],
        ]
    )
    positions = [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 2, 3, 4, 0, 1, 2],
        [0, 0, 0, 0, 1, 2, 3, 4],
        [0, 0, 1, 2, 3, 4, 0, 0],
    ]
    tokens = some_tokens()
    logits = logits_of(make(case), tokens, segment_ids=jnp.asarray(segment_ids, jnp.int32))
    assert_exact(logits, expected(case, tokens, positions, segment_ids), segment_ids != 0)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("case", ["fox", "alibi", "transformer_xl", "sandwich", "xpos"])
@pytest.mark.sample(2)
def test_d1_d3_after_a_long_document_or_padding(case):
    """huggingface/transformers#26380, mosaicml/llm-foundry PR#738."""
    before, length = 700, 20
    model, tokens = make(case, num_layers=1), some_tokens(1, before + length)
    compiled = jax.jit(lambda tokens, ids: logits_of(model, tokens, segment_ids=ids)[:, before:])

    def logits_after(others, segment):
        row = np.concatenate([np.broadcast_to(others, (1, before)), tokens[:, before:]], axis=1)
        ids = np.repeat([[segment, 2]], [before, length], axis=1)
        return compiled(np.int32(row), np.int32(ids))

    wanted = expected(case, tokens[:, before:], num_layers=1)
    for segment, others in [(1, tokens[:, :before]), (0, np.int32(0))]:
        logits = logits_after(others, segment)
        np.testing.assert_array_equal(logits, logits_after((others + 7) % VOCAB, segment))
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=2e-5)


@every_case
@pytest.mark.sample(9)
def test_a5_training_uses_the_positions_that_the_method_draws(case):
    model, tokens, key = make(case), some_tokens(), jax.random.key(3)
    trained = logits_of(model, tokens, training_key=key)
    if case not in ("shape", "randomized"):
        np.testing.assert_array_equal(trained, logits_of(model, tokens))
        return
    drawn = [np.array(list(positions)) for positions in POSSIBLE[case]]
    rows = [
        [np.abs(expected(case, tokens[row : row + 1], p)[0] - trained[row]).max() for p in drawn]
        for row in range(BATCH)
    ]
    # Each row has positions that the method may draw, and the rows do not all have the same.
    assert np.min(rows, axis=1).max() < EXACT
    assert len(set(np.argmin(rows, axis=1))) > 1


def test_shape_draws_one_shift_a_row():
    """Kiyono et al. 2021, section 3."""
    method = make("shape").positions["shape"]
    drawn = method.training_positions(jnp.arange(LENGTH), jax.random.key(0), 200)
    np.testing.assert_array_equal(drawn - drawn[:, :1], np.tile(np.arange(LENGTH), (200, 1)))
    assert set(np.asarray(drawn[:, 0]).tolist()) == set(range(MAX_SHIFT + 1))


def test_randomized_draws_an_ordered_subset_a_row():
    """Ruoss et al. 2023, section 3."""
    method = make("randomized").positions["randomized"]
    drawn = method.training_positions(jnp.arange(4), jax.random.key(0), 200)
    assert (np.diff(drawn, axis=1) > 0).all()
    assert set(np.asarray(drawn).ravel().tolist()) == set(range(RANDOMIZED_RANGE))


# Decoding.


@every_case
@pytest.mark.sample(8)
def test_b8_e3_decoding_in_chunks(case):
    """keras-team/keras-hub#2861: a decode step without any bias."""
    model, tokens = make(case), some_tokens()
    real = np.arange(LENGTH) >= np.array([0, 3, 1, 5])[:, None]
    positions = np.maximum(np.cumsum(real, axis=1) - 1, 0)
    wanted = expected(case, tokens, positions, real.astype(int))
    for chunks in ([8], [1] * 8, [3, 5], [1, 7]):
        # The cache has one free slot, which must not matter.
        cache, hidden = model.init_cache(BATCH, LENGTH + 1), []
        for end, size in zip(np.cumsum(chunks), chunks):
            part = slice(end - size, end)
            out, cache = model.hidden_states_with_cache(
                jnp.asarray(tokens[:, part]), cache, token_mask=jnp.asarray(real[:, part])
            )
            hidden.append(out)
        assert cache.num_tokens == LENGTH
        assert_exact(model.logits(jnp.asarray(np.concatenate(hidden, axis=1))), wanted, real)


@pytest.mark.parametrize("case", ["alibi", "fox"])
def test_tokens_past_the_end_of_the_cache(case):
    model, tokens = make(case), some_tokens(length=LENGTH + 2)
    first, one, two = (jnp.asarray(tokens[:, part]) for part in np.s_[:8, 8:9, 8:])
    _, cache = model.hidden_states_with_cache(first, model.init_cache(BATCH, LENGTH + 1))
    with pytest.raises(ValueError, match=r"2 more tokens .* a cache of 9 slots, 8 of them taken"):
        model.hidden_states_with_cache(two, cache)
    compiled = jax.jit(model.hidden_states_with_cache)
    with pytest.raises(ValueError, match=r"8 more tokens .* a cache of 7 slots"):
        compiled(first, model.init_cache(BATCH, 7))
    # While tracing, the number of taken slots is unknown: then the results are NaN from there on.
    hidden, full = compiled(two, cache)
    assert np.isnan(hidden).all()
    hidden, _ = compiled(one, full)
    assert np.isnan(hidden).all()
    hidden, _ = compiled(one, cache)
    assert_exact(model.logits(hidden), expected(case, tokens[:, :9])[:, 8:])


def test_e6_decoding_past_the_learned_table():
    """facebookresearch/ParlAI PR#1717; a JAX index past the end silently reads the last row."""
    model, tokens = make("learned"), some_tokens(length=TRAIN_LENGTH)
    compiled = jax.jit(model.hidden_states_with_cache)
    hidden, cache = compiled(jnp.asarray(tokens), model.init_cache(BATCH, TRAIN_LENGTH + 2))
    assert_exact(model.logits(hidden), expected("learned", tokens))
    one = jnp.asarray(tokens[:, :1])
    with pytest.raises(ValueError, match=r"end at 16.* length of 17"):
        model.hidden_states_with_cache(one, cache)
    hidden, _ = compiled(one, cache)
    assert np.isnan(hidden).all()


# Transformations.


@every_case
@pytest.mark.sample(7)
def test_gradients_with_and_without_rematerialisation(case):
    tokens, weights = some_tokens(), np.random.default_rng(1).normal(size=(BATCH, LENGTH, VOCAB))
    params = params_of(make(case))

    def loss_and_gradients(model):
        graphdef = nnx.graphdef(model)

        def loss(params):
            logits = logits_of(nnx.merge(graphdef, params), tokens)
            return (logits * jnp.asarray(weights, jnp.float32)).sum(), logits

        return jax.value_and_grad(loss, has_aux=True)(params)

    (_, logits), gradients = loss_and_gradients(make(case))
    (_, again), others = loss_and_gradients(make(case, remat="full"))
    assert_exact(logits, expected(case, tokens))
    assert_exact(again, expected(case, tokens))
    for (path, one), other in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(others)):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5, err_msg=str(path))

    # The derivative along one direction of all parameters, by central differences of the oracle.
    rng = np.random.default_rng(2)
    direction = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), params)

    def oracle_loss(step):
        moved = jax.tree.map(lambda leaf, d: np.float64(leaf) + step * d, params, direction)
        return (expected(case, tokens, params=moved) * weights).sum()

    slope = (oracle_loss(1e-6) - oracle_loss(-1e-6)) / 2e-6
    along = jax.tree.map(lambda g, d: (np.float64(g) * d).sum(), gradients, direction)
    np.testing.assert_allclose(sum(jax.tree.leaves(along)), slope, rtol=1e-4)


@every_case
@pytest.mark.sample(9)
def test_a_mapped_model_is_the_oracle(case):
    model, tokens = make(case), some_tokens()
    logits = jax.vmap(functools.partial(logits_of, model))(tokens.reshape(2, 2, LENGTH))
    assert_exact(np.reshape(logits, (BATCH, LENGTH, VOCAB)), expected(case, tokens))


@pytest.mark.parametrize(
    "case", [*REPRESENTATIVES, "fire", "xpos", "alibi, linear", "rotary, ntk", "rotary, yarn"]
)
@pytest.mark.sample(4)
def test_e4_one_function_for_several_lengths(case):
    """huggingface/transformers#25104: a long input changed the results of later inputs."""
    graphdef, params = nnx.split(make(case))
    compiled = jax.jit(lambda params, tokens: logits_of(nnx.merge(graphdef, params), tokens))
    for length in (TRAIN_LENGTH, 5):
        tokens = some_tokens(length=length)
        assert_exact(compiled(params, tokens), expected(case, tokens))


@pytest.mark.parametrize("case", REPRESENTATIVES)
def test_an_exported_model_is_the_oracle(case):
    model, tokens = make(case), some_tokens()
    graphdef = nnx.graphdef(model)

    def forward(params, tokens):
        return logits_of(nnx.merge(graphdef, params), tokens)

    exported = jax.export.export(jax.jit(forward))(params_of(model), tokens)
    assert_exact(exported.call(params_of(model), tokens), expected(case, tokens))


@pytest.mark.parametrize("case", POSITIONS)
@pytest.mark.sample(6)
def test_a3_a_sharded_model_is_the_oracle(case):
    """bigscience-workshop/Megatron-DeepSpeed#227: slopes from the local number of heads."""
    graphdef, params, tokens, mesh = on_eight_devices(case)
    with jax.set_mesh(mesh):
        logits = jax.jit(lambda params: logits_of(nnx.merge(graphdef, params), tokens))(params)
    assert_exact(logits, expected(case, some_tokens(), num_layers=1))


def on_eight_devices(case):
    """(graphdef, parameters, tokens, mesh) of one layer, sharded along each axis of the mesh."""
    config = Config(model=config_of(case, num_layers=1))
    config.train.length = TRAIN_LENGTH
    mesh = mesh_of(2, 2, 1, 2)
    graphdef, abstract = abstract_model(config, VOCAB, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    params = jax.device_put(params_of(make(case, num_layers=1)), shardings)
    kernel = params["layers"]["stacks"][0]["attention"]["query"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (1, 8, 2, 4)
    tokens = jax.device_put(some_tokens(), named_sharding(mesh, "batch", None))
    return graphdef, params, tokens, mesh


# Attention statistics.


def expected_statistics(case, tokens, monkeypatch, **changes):
    """Entropies, distances and mean scores by distance, from the oracle's scores."""
    rows, scores_of = [], oracle.scores_of

    def record(name, pairs):
        rows.append(scores_of(name, pairs))
        return rows[-1]

    with monkeypatch.context() as patch:
        patch.setattr(oracle, "scores_of", record)
        expected(case, tokens, **changes)
    config, (batch, length) = config_of(case, **changes), tokens.shape
    entropy, distance, scores = ([] for _ in range(3))
    for start in range(0, len(rows), length):
        head = rows[start : start + length]
        shares = [np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in head]
        entropy.append(np.mean([-(p * np.log(p)).sum() for p in shares]))
        distance.append(np.mean([(p * np.arange(len(p))[::-1]).sum() for p in shares]))
        scores.append([np.mean([row[-1 - n] for row in head[n:]]) for n in range(length)])
    shape = batch, config.num_layers, config.num_heads
    return [
        np.reshape(x, shape + np.shape(x)[1:]).swapaxes(0, 1) for x in (entropy, distance, scores)
    ]


def assert_same_statistics(statistics, wanted):
    for name, x, other in zip(statistics._fields, statistics, wanted, strict=True):
        assert x.dtype == jnp.float32
        np.testing.assert_allclose(x, other, rtol=0, atol=EXACT, err_msg=name)


@every_case
@pytest.mark.sample(9)
def test_attention_statistics(case, monkeypatch):
    # Chunks of three queries, and two more queries.
    monkeypatch.setattr(statistics, "MAX_SCORES", 3 * BATCH * 4 * LENGTH)
    tokens = some_tokens()
    measured = jax.jit(make(case).attention_statistics)(tokens)
    assert measured.scores.shape == (2, BATCH, 4, LENGTH)
    assert_same_statistics(measured, expected_statistics(case, tokens, monkeypatch))


@pytest.mark.parametrize("case", REPRESENTATIVES)
@pytest.mark.sample(2)
def test_attention_statistics_of_a_model_in_training(case, monkeypatch):
    """Dropout and remat apply to the training step only."""
    model = make(case, remat="full", dropout=0.5, attention_dropout=0.5, activation_dropout=0.5)
    tokens = some_tokens()
    measured = model.attention_statistics(jnp.asarray(tokens))
    assert_same_statistics(measured, expected_statistics(case, tokens, monkeypatch))


@pytest.mark.parametrize(
    "case",
    [
        name
        if name in ("alibi", "xpos", "t5", "fox")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in POSITIONS
    ],
)
def test_attention_statistics_sharded(case, monkeypatch):
    graphdef, params, tokens, mesh = on_eight_devices(case)
    # Chunks of five queries; each device has one batch row and two heads.
    monkeypatch.setattr(statistics, "MAX_SCORES", 5 * 2 * LENGTH)

    def measure(params):
        return nnx.merge(graphdef, params).attention_statistics(tokens)

    with jax.set_mesh(mesh):
        measured = jax.jit(measure)(params)
    wanted = expected_statistics(case, some_tokens(), monkeypatch, num_layers=1)
    assert_same_statistics(measured, wanted)


# Half precision.


@pytest.mark.parametrize(
    "position",
    [
        name if name in ("alibi", "rotary") else pytest.param(name, marks=pytest.mark.slow)
        for name in POSITIONS
    ],
)
def test_c1_half_precision_is_near_float32_at_length_4096(position):
    """NVIDIA/TensorRT-Model-Connect#667: positions in bfloat16."""
    tokens, probabilities = jnp.asarray(some_tokens(1, 4096)), {}
    for dtype in ("float32", "bfloat16", "float16"):
        config = Model(position=position, num_layers=1, width=16, num_heads=2, dtype=dtype)
        model = Transformer(config, vocab_size=VOCAB, train_length=4096, rngs=nnx.Rngs(0))
        # Scaled up, so that attention outweighs the residual stream.
        model.layers.stacks[0].attention.out.kernel[...] *= 4
        *first, last = jnp.split(tokens, 16, axis=1)
        # In a single layer the keys do not depend on attention: the compiler leaves it out.
        fill = jax.jit(lambda part, cache, run=model.hidden_states_with_cache: run(part, cache)[1])
        cache = model.init_cache(1, 4096)
        for part in first:
            cache = fill(part, cache)
        hidden, _ = jax.jit(model.hidden_states_with_cache)(last, cache)
        probabilities[dtype] = np.asarray(jax.nn.softmax(model.logits(hidden[:, -4:])))
    for dtype in ("bfloat16", "float16"):
        apart = np.abs(probabilities[dtype] - probabilities["float32"]).sum(-1) / 2
        assert apart.max() < 0.01
