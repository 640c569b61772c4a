import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import mesh_of
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_jax.config import Config, Model
from alibi_jax.model import abstract_model, initial_params, losses
from alibi_jax.model.losses import token_nll
from alibi_jax.model.vocabulary import ROW_MULTIPLE, Vocabulary

pytestmark = pytest.mark.usefixtures("quick_compile")


def make(vocab_size, width=4, **model):
    config = Model(width=width, num_heads=1, **model)
    return Vocabulary(config, vocab_size, nnx.Rngs(0))


def hidden_and_targets(vocab_size, batch=2, length=5, width=4):
    random = np.random.default_rng(0)
    hidden = jnp.asarray(random.normal(size=(batch, length, width)), jnp.float32)
    return hidden, jnp.asarray(random.integers(0, vocab_size, (batch, length)), jnp.int32)


def oracle(hidden, table, targets):
    logits = np.asarray(hidden, float) @ np.asarray(table, float).T
    log_sums = np.log(np.exp(logits).sum(-1))
    return log_sums - np.take_along_axis(logits, np.array(targets)[..., None], -1)[..., 0]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3 * ROW_MULTIPLE), st.booleans())
def test_rows_that_fill_up_the_table_are_no_tokens(vocab_size, tied):
    vocabulary = make(vocab_size, tied_embeddings=tied)
    rows = len(vocabulary.unembedding)
    assert rows % ROW_MULTIPLE == 0
    assert 0 <= rows - vocab_size < ROW_MULTIPLE
    hidden, targets = hidden_and_targets(vocab_size)
    table = vocabulary.unembedding[:vocab_size]
    nll = vocabulary.token_nll(hidden, targets)
    np.testing.assert_allclose(nll, oracle(hidden, table, targets), rtol=1e-5, atol=2e-6)
    assert vocabulary.logits(hidden).shape == (2, 5, vocab_size)


@pytest.mark.parametrize("logits", [2**24, 3 * ROW_MULTIPLE])
def test_rows_that_fill_up_the_table_get_no_gradient(logits, monkeypatch):
    """In one chunk, and in several."""
    monkeypatch.setattr(losses, "MAX_CHUNK_LOGITS", logits)
    vocabulary = make(ROW_MULTIPLE + 3)
    hidden, targets = hidden_and_targets(ROW_MULTIPLE + 3)

    def loss(table):
        return token_nll(hidden, table, targets, vocab_size=ROW_MULTIPLE + 3).sum()

    gradient = jax.grad(loss)(vocabulary.unembedding)
    assert jnp.isfinite(gradient).all()
    assert (gradient[: ROW_MULTIPLE + 3] != 0).all()
    assert (gradient[ROW_MULTIPLE + 3 :] == 0).all()


def test_the_first_parameters_of_a_token_do_not_depend_on_how_many_there_are():
    few, many = make(3), make(ROW_MULTIPLE + 1)
    np.testing.assert_array_equal(few.embedding[:3], many.embedding[:3])


@pytest.mark.parametrize("shards", [1, 2, 8])
@pytest.mark.parametrize("length", [16, 24])
def test_chunks_of_a_sequence_that_is_sharded(shards, length, monkeypatch):
    monkeypatch.setattr(losses, "MAX_CHUNK_LOGITS", 2 * 3 * ROW_MULTIPLE)
    vocabulary = make(5)
    hidden, targets = hidden_and_targets(5, length=length)
    expected = oracle(hidden, vocabulary.unembedding[:5], targets)
    with jax.set_mesh(mesh_of(1, 1, shards, 1)):
        nll = jax.jit(vocabulary.token_nll)(hidden, targets)
    np.testing.assert_allclose(nll, expected, rtol=1e-5, atol=2e-6)


def test_a_vocabulary_of_any_size_is_sharded():
    config = Config(model=Model(width=16, num_heads=8, num_layers=1))
    mesh = mesh_of(1, 1, 1, 8)
    graphdef, abstract = abstract_model(config, 257, mesh)
    table = abstract["vocabulary"]["embedding"]
    assert table.shape == (384, 16)
    assert table.sharding.shard_shape(table.shape) == (48, 16)
    params = initial_params(config, 257, jax.random.key(0))
    hidden, targets = hidden_and_targets(257, width=16)

    def nll(params):
        return nnx.merge(graphdef, params).token_nll(hidden, targets)

    sharded_params = jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, abstract))
    with jax.set_mesh(mesh):
        sharded = jax.jit(nll)(sharded_params)
    np.testing.assert_allclose(sharded, nll(params), rtol=1e-5)
