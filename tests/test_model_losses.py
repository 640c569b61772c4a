import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import every_jaxpr, mesh_of
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_jax.model import losses
from alibi_jax.model.losses import token_nll, weighted_sum

# Tokens of a row in each chunk of the arrays below.
CHUNK = 64
LENGTHS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 5]


def arrays(length, batch=2, width=4, vocab_size=11, dtype=jnp.float32):
    """Hidden states, unembedding and targets."""
    random = np.random.default_rng(0)
    hidden = jnp.asarray(random.normal(size=(batch, length, width)), dtype)
    table = jnp.asarray(random.normal(size=(vocab_size, width)), jnp.float32)
    return hidden, table, jnp.asarray(random.integers(0, vocab_size, (batch, length)), jnp.int32)


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "MAX_CHUNK_LOGITS", 2 * CHUNK * 11)
        yield


def oracle(hidden, table, targets, weights=None):
    """The loss of each target, and the gradients of the weighted sum, in NumPy and float64."""
    hidden, table, targets = np.asarray(hidden, float), np.asarray(table, float), np.array(targets)
    scores = np.exp(hidden @ table.T)
    probabilities = scores / scores.sum(-1, keepdims=True)
    chosen = np.eye(len(table))[targets]
    nll = -np.log((probabilities * chosen).sum(-1))
    d_logits = probabilities - chosen
    if weights is not None:
        d_logits = d_logits * np.asarray(weights, float)[..., None]
    return nll, d_logits @ table, np.einsum("btv,btd->vd", d_logits, hidden)


def loss(hidden, table, targets, weights=None):
    return weighted_sum(token_nll(hidden, table, targets), weights)


gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.sample(2)
def test_token_nll_is_the_plain_computation(length):
    hidden, table, targets = arrays(length)
    nll, d_hidden, d_table = oracle(hidden, table, targets)
    np.testing.assert_allclose(
        jax.jit(token_nll)(hidden, table, targets), nll, rtol=1e-5, atol=1e-6
    )
    (total, count), grads = gradients(hidden, table, targets)
    np.testing.assert_allclose(total, nll.sum(), rtol=1e-5)
    assert count == nll.size
    np.testing.assert_allclose(grads[0], d_hidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grads[1], d_table, rtol=1e-4, atol=1e-4)


@settings(max_examples=8, deadline=None)
@given(
    length=st.integers(1, 3 * CHUNK),
    batch=st.integers(1, 3),
    width=st.integers(1, 5),
    vocab_size=st.integers(1, 7),
)
def test_token_nll_of_any_shape(length, batch, width, vocab_size):
    hidden, table, targets = arrays(length, batch, width, vocab_size)
    np.testing.assert_allclose(
        jax.jit(token_nll)(hidden, table, targets),
        oracle(hidden, table, targets)[0],
        rtol=1e-4,
        atol=1e-5,
    )


def test_an_empty_batch_has_no_losses():
    hidden, table, targets = arrays(CHUNK + 1)
    assert token_nll(hidden[:0], table, targets[:0]).shape == (0, CHUNK + 1)


@pytest.mark.parametrize(("axes", "shape"), [(("x",), (2,)), (("data", "tensor"), (2, 1))])
def test_any_mesh_may_be_set(axes, shape):
    hidden, table, targets = arrays(CHUNK + 1)
    mesh = jax.make_mesh(
        shape, axes, (jax.sharding.AxisType.Auto,) * len(axes), devices=jax.devices()[:2]
    )
    with jax.set_mesh(mesh):
        nll = jax.jit(token_nll)(hidden, table, targets)
    np.testing.assert_allclose(nll, oracle(hidden, table, targets)[0], rtol=1e-5, atol=1e-6)


def test_a_shard_of_a_batch_is_not_divided_again():
    hidden, table, targets = arrays(2 * CHUNK, batch=4)
    rows = jax.sharding.PartitionSpec("data")
    with jax.set_mesh(mesh_of(2, 1, 1, 1)):
        sharded = jax.shard_map(
            token_nll,
            in_specs=(rows, jax.sharding.PartitionSpec(), rows),
            out_specs=rows,
            check_vma=False,
        )
        jaxpr = jax.make_jaxpr(sharded)(hidden, table, targets).jaxpr
    shapes = [
        getattr(variable.aval, "shape", ())
        for jaxpr in every_jaxpr(jaxpr)
        for equation in jaxpr.eqns
        for variable in equation.outvars
    ]
    # Each device has two rows, so its chunks are half as long as for one row.
    assert (2, CHUNK, 11) in shapes


@pytest.mark.parametrize("length", [7, CHUNK + 7])
def test_f5_uniform_model_loses_log_of_the_vocabulary(length):
    hidden, table, targets = arrays(length, vocab_size=1000)
    nll = token_nll(jnp.zeros_like(hidden), table, targets)
    np.testing.assert_allclose(nll, math.log(1000), rtol=1e-6)


@pytest.mark.parametrize("length", [7, CHUNK + 7])
def test_f11_bfloat16_states_give_float32_losses_of_float32_logits(length):
    hidden, table, targets = arrays(length, width=64, dtype=jnp.bfloat16)
    nll = jax.jit(token_nll)(hidden, table, targets)
    assert nll.dtype == jnp.float32
    # The oracle gets the rounded table. Logits rounded to 8 bits would be off by a hundredth.
    expected = oracle(hidden, table.astype(jnp.bfloat16), targets)[0]
    np.testing.assert_allclose(nll, expected, rtol=1e-5, atol=1e-4)
    total, count = weighted_sum(nll, jnp.ones(nll.shape, jnp.bfloat16))
    assert (total.dtype, count.dtype) == (jnp.float32, jnp.float32)


def test_large_logits_do_not_overflow():
    hidden, table, targets = arrays(5)
    (total, _), grads = gradients(1e4 * hidden, table, targets)
    assert jnp.isfinite(total)
    assert all(jnp.isfinite(grad).all() for grad in grads)


# Memory.


@pytest.mark.parametrize("devices", [1, 2])
def test_no_device_holds_more_logits_than_are_allowed(devices):
    batch, length, vocab_size = 2, 3 * CHUNK + 5, 50
    arguments = arrays(length, batch, vocab_size=vocab_size)
    chunks = math.ceil(length / (losses.MAX_CHUNK_LOGITS * devices // (batch * vocab_size)))
    size = math.ceil(length / chunks)
    logits = batch * length * vocab_size
    with jax.set_mesh(mesh_of(devices, 1, 1, 1)):
        jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1), has_aux=True))(*arguments).jaxpr
    jaxprs = list(every_jaxpr(jaxpr))
    shapes = {
        getattr(variable.aval, "shape", ())
        for jaxpr in jaxprs
        for equation in jaxpr.eqns
        for variable in (*equation.invars, *equation.outvars)
    }
    # The logits of a chunk are there, so the search also saw the body of the scan.
    assert (batch, size, vocab_size) in shapes
    assert max(map(math.prod, shapes)) < logits


def test_few_logits_are_computed_once(monkeypatch):
    arguments = arrays(2 * CHUNK)
    limit = 2 * 2 * CHUNK * 11
    for allowed, chunked in ((limit, False), (limit - 1, True)):
        monkeypatch.setattr(losses, "MAX_CHUNK_LOGITS", allowed)
        # A new lambda, because JAX would remember the trace of the same function.
        jaxpr = jax.make_jaxpr(lambda *x: jax.grad(loss, has_aux=True)(*x))(*arguments)
        assert ("scan" in str(jaxpr)) == chunked


# Weights.


@pytest.mark.parametrize("length", [6, CHUNK + 6])
def test_d2_padded_targets_do_not_count(length):
    hidden, table, targets = arrays(length)
    weights = jnp.ones((2, length)).at[1, 2:].set(0).at[0, 0].set(0)
    (total, count), grads = gradients(hidden, table, targets, weights)
    nll, d_hidden, d_table = oracle(hidden, table, targets, weights)
    np.testing.assert_allclose(total, (nll * np.asarray(weights)).sum(), rtol=1e-5)
    assert count == length + 1
    np.testing.assert_allclose(grads[0], d_hidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grads[1], d_table, rtol=1e-4, atol=1e-4)
    # Targets that do not count may be any tokens.
    others = jnp.where(weights > 0, targets, (targets + 1) % 11)
    assert gradients(hidden, table, others, weights)[0] == (total, count)


@pytest.mark.parametrize("length", [6, CHUNK + 6])
def test_d2_token_zero_is_scored(length):
    """neuralmagic/deepsparse PR#1141: real tokens of id 0 were dropped."""
    hidden, table, targets = arrays(length)
    targets = jnp.zeros_like(targets)
    nll = oracle(hidden, table, targets)[0]
    (total, count), _ = gradients(hidden, table, targets)
    np.testing.assert_allclose(total, nll.sum(), rtol=1e-5)
    assert count == 2 * length


def test_weights_scale_their_targets():
    nll = jnp.array([[1.0, 2.0, 4.0]])
    total, count = weighted_sum(nll, jnp.array([[0.5, 2.0, 0.0]]))
    assert (total, count) == (4.5, 2.5)
    assert weighted_sum(nll) == (7.0, 3.0)


def test_g3_no_weight_at_all_is_zero():
    hidden, table, targets = arrays(CHUNK + 1)
    (total, count), grads = gradients(hidden, table, targets, jnp.zeros(targets.shape))
    assert (total, count) == (0.0, 0.0)
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_g3_a_nan_without_weight_does_not_spread(bad):
    nll = jnp.array([[1.0, bad, 3.0]])
    weights = jnp.array([[1.0, 0.0, 1.0]])
    (total, count), gradient = jax.value_and_grad(weighted_sum, has_aux=True)(nll, weights)
    assert (total, count) == (4.0, 2.0)
    np.testing.assert_array_equal(gradient, weights)


def test_a_nan_with_weight_spreads():
    # Otherwise nobody would notice that a run diverged.
    total, _ = weighted_sum(jnp.array([[1.0, jnp.nan]]), jnp.ones((1, 2)))
    assert jnp.isnan(total)


def test_f11_bfloat16_gradients_are_summed_in_float32_over_chunks():
    hidden, table, targets = arrays(16 * CHUNK, batch=1, dtype=jnp.bfloat16)

    def gradient(hidden, table):
        return jax.grad(lambda table: token_nll(hidden, table, targets).sum())(table)

    exact = gradient(hidden.astype(jnp.float32), table.astype(jnp.bfloat16).astype(jnp.float32))
    error = gradient(hidden, table.astype(jnp.float32)) - exact
    # The error is the rounding of one chunk, 2^-9 relative, for any number of chunks.
    assert jnp.linalg.norm(error) < 2**-8 * jnp.linalg.norm(exact)
