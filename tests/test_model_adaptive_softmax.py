import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import mesh_of
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_jax.config import Config, ConfigError, Model
from alibi_jax.model import abstract_model, check_model_fits, initial_params, losses
from alibi_jax.model.adaptive_softmax import AdaptiveVocabulary, Band, make_bands
from alibi_jax.model.losses import token_nll
from alibi_jax.model.vocabulary import ROW_MULTIPLE

pytestmark = pytest.mark.usefixtures("quick_compile")

# Three bands, of 5, 7 and 28 tokens, of widths 16, 8 and 4.
VOCAB, WIDTH = 40, 16
MODEL = {"width": WIDTH, "num_heads": 8, "adaptive_cutoffs": "5,12", "adaptive_factor": 2}


def make(vocab_size=VOCAB, **model):
    return AdaptiveVocabulary(Model(**MODEL | model), vocab_size, nnx.Rngs(0))


def hidden_and_tokens(batch=3, length=8, vocab_size=VOCAB, dtype=jnp.float32):
    """Hidden states, and tokens of all bands."""
    random = np.random.default_rng(0)
    hidden = jnp.asarray(random.normal(size=(batch, length, WIDTH)), dtype)
    return hidden, jnp.asarray(random.integers(0, vocab_size, (batch, length)), jnp.int32)


# The oracle computes one token after the other, in float64.


def band_of(vocabulary, token):
    (number,) = (
        n for n, band in enumerate(vocabulary.bands) if 0 <= token - band.first < band.size
    )
    return number, token - vocabulary.bands[number].first


def to_float64(params):
    return [np.asarray(param[...], np.float64) for param in params]


def oracle(vocabulary, hidden, targets):
    """(losses, gradients of their sum for hidden states, tables and projections)."""
    tables, projections = to_float64(vocabulary.tables), to_float64(vocabulary.projections)
    hidden = np.asarray(hidden, np.float64)
    nll = np.zeros(targets.shape)
    d_hidden, d_tables, d_projections = (
        jax.tree.map(np.zeros_like, x) for x in (hidden, tables, projections)
    )

    def softmax(table, rows, x, target):
        logits = table[:rows] @ x
        probabilities = np.exp(logits - logits.max())
        probabilities /= probabilities.sum()
        d_logits = probabilities - np.eye(rows)[target]
        return -math.log(probabilities[target]), d_logits @ table[:rows], np.outer(d_logits, x)

    num_tokens, others = vocabulary.bands[0].size, len(vocabulary.bands) - 1
    for index in np.ndindex(targets.shape):
        number, index_in_band = band_of(vocabulary, int(targets[index]))
        chosen = index_in_band if number == 0 else num_tokens + number - 1
        rows = num_tokens + others
        nll[index], d_hidden[index], d_rows = softmax(tables[0], rows, hidden[index], chosen)
        d_tables[0][:rows] += d_rows
        if number:
            rows = vocabulary.bands[number].size
            narrow = projections[number] @ hidden[index]
            within, d_narrow, d_rows = softmax(tables[number], rows, narrow, index_in_band)
            nll[index] += within
            d_tables[number][:rows] += d_rows
            d_hidden[index] += d_narrow @ projections[number]
            d_projections[number] += np.outer(d_narrow, hidden[index])
    return nll, d_hidden, d_tables, d_projections


def gradients(vocabulary, hidden, targets):
    """(losses, gradients) in the order of the oracle, computed under jit."""
    graphdef, params = nnx.split(vocabulary)

    def total(params, hidden):
        nll = nnx.merge(graphdef, params).token_nll(hidden, targets)
        return nll.sum(), nll

    (_, nll), (d_params, d_hidden) = jax.jit(
        jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    )(params, hidden)
    d = nnx.merge(graphdef, d_params)
    return nll, d_hidden, to_float64(d.tables), to_float64(d.projections)


def assert_close(found, expected, tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * max(1, np.abs(b).max()))


def test_bands_are_those_of_the_paper():
    model = Model(width=1024, adaptive_cutoffs="20000,60000")
    assert make_bands(model, 267_735) == [
        Band(0, 20_000, 1024),
        Band(20_000, 40_000, 256),
        Band(60_000, 207_735, 64),
    ]


@pytest.mark.parametrize("logits", [2**24, 7 * ROW_MULTIPLE, ROW_MULTIPLE])
@pytest.mark.parametrize("cutoffs", ["5,12", "1", "39", "3,4,5"])
@pytest.mark.sample(5)
def test_losses_and_gradients_are_the_oracles(cutoffs, logits, monkeypatch):
    """In one chunk, and in chunks of which some have no target in a band."""
    monkeypatch.setattr(losses, "MAX_CHUNK_LOGITS", logits)
    vocabulary, inputs = make(adaptive_cutoffs=cutoffs), hidden_and_tokens()
    assert_close(gradients(vocabulary, *inputs), oracle(vocabulary, *inputs), 2e-6)


@settings(max_examples=15, deadline=None)
@given(st.data())
@pytest.mark.slow
def test_losses_of_any_bands(data):
    vocab_size = data.draw(st.integers(2, 300))
    numbers = st.sets(st.integers(1, vocab_size - 1), min_size=1, max_size=3)
    cutoffs = ",".join(map(str, sorted(data.draw(numbers))))
    vocabulary = make(vocab_size, adaptive_cutoffs=cutoffs)
    hidden, tokens = hidden_and_tokens(2, data.draw(st.integers(1, 9)), vocab_size)
    nll = vocabulary.token_nll(hidden, tokens)
    assert_close(nll, oracle(vocabulary, hidden, tokens)[0], 3e-6)
    log_probabilities = vocabulary.logits(hidden)
    assert log_probabilities.shape == (*tokens.shape, vocab_size)
    np.testing.assert_allclose(jnp.exp(log_probabilities).sum(-1), 1.0, rtol=1e-5)
    chosen = jnp.take_along_axis(log_probabilities, tokens[..., None], -1)[..., 0]
    np.testing.assert_allclose(nll, -chosen, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("band", range(3))
def test_targets_all_of_one_band(band, monkeypatch):
    """The tables of the other bands get no gradient; their classes in the first table do."""
    monkeypatch.setattr(losses, "MAX_CHUNK_LOGITS", 5 * ROW_MULTIPLE)
    vocabulary = make()
    hidden, tokens = hidden_and_tokens()
    first, size, _ = vocabulary.bands[band]
    tokens = first + tokens % size
    found = gradients(vocabulary, hidden, tokens)
    assert_close(found, oracle(vocabulary, hidden, tokens), 2e-6)
    for number in {1, 2} - {band}:
        assert not found[2][number].any()
        assert not found[3][number].any()


def test_embeddings_and_their_gradients_are_the_oracles():
    vocabulary = make()
    _, tokens = hidden_and_tokens()
    weights = np.random.default_rng(1).normal(size=(*tokens.shape, WIDTH))
    graphdef, params = nnx.split(vocabulary)

    def total(params):
        out = nnx.merge(graphdef, params).embed(tokens)
        return (out * weights).sum(), out

    (_, out), d_params = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
    d = nnx.merge(graphdef, d_params)
    tables, projections = to_float64(vocabulary.tables), to_float64(vocabulary.projections)
    d_tables, d_projections = (
        [np.zeros_like(x) for x in arrays] for arrays in (tables, projections)
    )
    for index in np.ndindex(tokens.shape):
        number, index_in_band = band_of(vocabulary, int(tokens[index]))
        row, scale = tables[number][index_in_band], math.sqrt(WIDTH)
        np.testing.assert_allclose(out[index], scale * row @ projections[number], atol=1e-5)
        d_tables[number][index_in_band] += scale * projections[number] @ weights[index]
        d_projections[number] += scale * np.outer(row, weights[index])
    assert_close(to_float64(d.tables), d_tables, 2e-6)
    assert_close(to_float64(d.projections), d_projections, 2e-6)


def test_bfloat16_states_give_float32_losses_and_table_gradients():
    vocabulary = make(dtype="bfloat16")
    hidden, tokens = hidden_and_tokens(dtype=jnp.bfloat16)
    nll, _, d_tables, _ = gradients(vocabulary, hidden, tokens)
    assert nll.dtype == jnp.float32
    expected, _, d_expected, _ = oracle(vocabulary, hidden, tokens)
    # Tables and projected inputs are rounded to 8 bits.
    np.testing.assert_allclose(nll, expected, rtol=0.02, atol=0.02)
    assert_close(d_tables, d_expected, 0.02)
    assert vocabulary.embed(tokens).dtype == jnp.bfloat16


def test_bfloat16_table_gradients_are_summed_in_float32_over_chunks(monkeypatch):
    """With one token per chunk and one target for all tokens."""
    vocabulary = make(dtype="bfloat16")
    hidden, _ = hidden_and_tokens(4, 64, dtype=jnp.bfloat16)
    targets = jnp.full((4, 64), 39, jnp.int32)
    whole = gradients(vocabulary, hidden, targets)[2][2]
    monkeypatch.setattr(losses, "MAX_CHUNK_LOGITS", 1)
    parts = gradients(vocabulary, hidden, targets)[2][2]
    # Only each chunk rounds; a sum of 256 chunks in 16 bits would be off by much more.
    assert np.linalg.norm(parts - whole) < 2**-8 * np.linalg.norm(whole)


def test_initial_rows_of_the_other_bands_classes_are_uniform():
    """As in fairseq."""
    table = make(300, width=256, adaptive_cutoffs="100,200").tables[0][...]
    limit = math.sqrt(6 / (2 + 256))
    assert np.abs(table[100:102]).max() <= limit
    assert np.std(table[100:102]) == pytest.approx(limit / math.sqrt(3), rel=0.05)
    assert np.std(table[:100]) == pytest.approx(1 / 16, rel=0.02)


def test_only_chunks_with_targets_of_a_band_are_computed(monkeypatch):
    """The loops compute only the targets of the second and third bands, of 24 tokens in all."""
    monkeypatch.setattr(losses, "MAX_CHUNK_LOGITS", 4 * ROW_MULTIPLE)
    vocabulary, (hidden, tokens) = make(adaptive_cutoffs="5,13"), hidden_and_tokens()
    computed = []

    def counted(hidden, table, targets, *, vocab_size):
        jax.debug.callback(lambda: computed.append(vocab_size))
        return token_nll(hidden, table, targets, vocab_size=vocab_size)

    monkeypatch.setattr("alibi_jax.model.adaptive_softmax.token_nll", counted)
    for targets in (tokens, tokens % 5, 13 + tokens % 27):
        computed.clear()
        gradients(vocabulary, hidden, targets)
        jax.effects_barrier()
        counts = [int(((targets >= a) & (targets < b)).sum()) for a, b in ((5, 13), (13, 40))]
        chunks = [2 * math.ceil(count / 4) for count in counts]
        assert [computed.count(n) for n in (8, 27)] == chunks
    assert chunks == [0, 12]


def test_a_nan_in_a_band_without_targets_does_not_spread():
    vocabulary, (hidden, tokens) = make(), hidden_and_tokens()
    vocabulary.tables[1].set_value(vocabulary.tables[1] * jnp.nan)
    nll, d_hidden, d_tables, _ = gradients(vocabulary, hidden, tokens % 5)
    assert all(np.isfinite(array).all() for array in (nll, d_hidden, *d_tables))


# Dropout.


def test_dropout_is_before_each_softmax_and_not_without_a_key(monkeypatch):
    vocabulary, (hidden, tokens) = make(adaptive_dropout=0.5), hidden_and_tokens()
    plain, _, _, _ = oracle(vocabulary, hidden, tokens)
    np.testing.assert_allclose(vocabulary.token_nll(hidden, tokens), plain, rtol=1e-5)
    calls = []

    def halved(x, rate, key, salt):
        calls.append((x.shape[-1], rate, salt))
        return x / 2 if salt else x

    monkeypatch.setattr("alibi_jax.model.adaptive_softmax.dropout", halved)
    nll = vocabulary.token_nll(hidden, tokens, jax.random.key(0))
    assert calls == [(16, 0.5, 0), (8, 0.5, 1), (4, 0.5, 2)]
    for projection in list(vocabulary.projections)[1:]:
        projection.set_value(projection[...] / 2)
    np.testing.assert_allclose(nll, oracle(vocabulary, hidden, tokens)[0], rtol=1e-5)


# Devices.


@pytest.mark.parametrize(
    "mesh", [(1, 1, 1, 1), (4, 2, 1, 1), (2, 1, 2, 2), (1, 2, 1, 4), (1, 1, 1, 8), (1, 1, 8, 1)]
)
@pytest.mark.parametrize("length", [16, 6])
@pytest.mark.sample(4)
def test_every_mesh_gives_the_losses_and_gradients_of_one_device(mesh, length, monkeypatch):
    """With lengths that the number of devices divides, and others."""
    monkeypatch.setattr(losses, "MAX_CHUNK_LOGITS", 9 * ROW_MULTIPLE)
    config = Config(model=Model(num_layers=1, adaptive_dropout=0.3, **MODEL))
    mesh = mesh_of(*mesh)
    graphdef, abstract = abstract_model(config, VOCAB, mesh)
    params = initial_params(config, VOCAB, jax.random.key(0))
    hidden, targets = hidden_and_tokens(8, length)

    def loss(params):
        model = nnx.merge(graphdef, params)
        embedded = model.vocabulary.embed(targets)
        nll = model.token_nll(hidden + embedded, targets, training_key=jax.random.key(1))
        return nll.sum(), nll

    expected = jax.value_and_grad(loss, has_aux=True)(params)
    sharded_params = jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, abstract))
    with jax.set_mesh(mesh):
        found = jax.jit(jax.value_and_grad(loss, has_aux=True))(sharded_params)
    assert_close(found, expected, 5e-6)


def test_tables_are_sharded():
    config = Config(model=Model(num_layers=1, **MODEL))
    _, abstract = abstract_model(config, VOCAB, mesh_of(1, 4, 1, 2))
    tables = abstract["vocabulary"]["tables"]
    for number, width in enumerate((16, 8, 4)):
        assert tables[number].shape == (ROW_MULTIPLE, width)
        assert tables[number].sharding.shard_shape((ROW_MULTIPLE, width)) == (
            ROW_MULTIPLE // 2,
            width // 4,
        )


# Invalid configurations.


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"adaptive_cutoffs": "20000;60000"}, "'20000;60000': give rising token numbers"),
        ({"adaptive_cutoffs": "12,5"}, "'12,5': give rising token numbers"),
        ({"adaptive_cutoffs": "5,5"}, "give rising"),
        ({"adaptive_cutoffs": "0,5"}, "give rising"),
        ({"adaptive_cutoffs": "²"}, "give rising"),
        ({"adaptive_cutoffs": "5,12", "adaptive_factor": 8}, "leaves the rarest tokens no width"),
        ({"adaptive_cutoffs": "5", "tied_embeddings": False}, "share their tables; leave it True"),
        ({"adaptive_cutoffs": "", "adaptive_dropout": 0.2}, "would change nothing: leave it 0"),
        ({"adaptive_cutoffs": "5,256"}, "with the 256 tokens of data.tokenizer='bytes'"),
    ],
)
def test_invalid_configurations_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        Config(model=Model(**MODEL | values)).check()


def test_a_vocabulary_below_the_last_cutoff_is_refused():
    with pytest.raises(ConfigError, match="vocabulary of 12 tokens: the last cutoff must be below"):
        make(12)


@pytest.mark.parametrize(
    ("values", "fsdp", "message"),
    [
        ({}, 4, None),
        ({}, 8, "the width 4 of band 2 of model.adaptive_cutoffs is not divisible by the 8"),
        ({"width": 44, "num_heads": 4, "adaptive_factor": 3}, 4, "the width 14 of band 1"),
    ],
)
def test_a_mesh_that_does_not_divide_every_band_is_refused(values, fsdp, message):
    model = Model(**MODEL | values)
    if message is None:
        check_model_fits(model, mesh_of(1, fsdp, 1, 1))
        return
    with pytest.raises(ConfigError, match=message):
        check_model_fits(model, mesh_of(1, fsdp, 1, 1))
