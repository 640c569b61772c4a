"""Numbers that are not finite reach exactly the queries that see them, in every engine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_jax.attention import alibi_attention, attention, engines
from alibi_jax.biases import alibi_slopes, forget_bias_at, forget_decay
from alibi_jax.config import Config
from alibi_jax.model import make_model

BATCH, LENGTH, HEADS, KV_HEADS, SIZE = 2, 12, 4, 2, 8

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(params=["dense", "head_by_head", "all_heads", "folded"])
def engine(request, monkeypatch):
    """An engine, or one of blockwise's two loops, with blocks of four queries and keys."""
    return use_engine(monkeypatch, request.param)


def use_engine(patch, name):
    patch.setattr(engines, "_BLOCK_SIZE", {"cpu": 128 if name == "pallas_tpu" else 4})
    patch.setattr(engines, "_partitioned_by_compiler", lambda: name == "all_heads")
    return "blockwise" if name in ("head_by_head", "all_heads") else name


def arrays(seed=0, length=LENGTH, key_length=LENGTH):
    random = np.random.default_rng(seed)
    shapes = (length, HEADS), (key_length, KV_HEADS), (key_length, KV_HEADS), (length, HEADS)
    return [random.normal(size=(BATCH, *x, SIZE)).astype(np.float32) for x in shapes]


def visible(length, key_length, offset, causal=True, window=None, ids=None, mask=None):
    """True where a query sees a key, `[B, N, T, S]`, in NumPy alone."""
    relative = np.arange(key_length) - (np.arange(length)[:, None] + offset)
    seen = np.broadcast_to((relative <= 0) | (not causal), (BATCH, HEADS, *relative.shape))
    if window is not None:
        seen = seen & (np.abs(relative) < window)
    if ids is not None:
        queries, keys = (np.asarray(x)[:, None] for x in ids)
        seen = seen & (queries[..., None] == keys[:, :, None]) & (queries[..., None] != 0)
    return seen if mask is None else seen & np.asarray(mask)


def with_gradients(query, key, value, cotangent, implementation, **options):
    @jax.jit
    def run(*inputs):
        attend = functools.partial(alibi_attention, implementation=implementation, **options)
        out, pull = jax.vjp(attend, *inputs)
        return out, *pull(jnp.asarray(cotangent))

    return [np.asarray(x) for x in run(query, key, value, alibi_slopes(HEADS))]


def spoil(numbers, rows, kind):
    numbers = numbers.copy()
    numbers[rows] = kind
    return numbers


def assert_unseen_tokens_add_nothing(implementation, inputs, seen, kind, options):
    """NaN and infinities in the tokens that see nothing, or are not seen, act as zeros do."""
    query, key, value, cotangent = inputs
    queries = ~seen.any(3).swapaxes(1, 2)
    keys = ~seen.any(2).reshape(BATCH, KV_HEADS, -1, key.shape[1]).any(2).swapaxes(1, 2)
    results = [
        with_gradients(
            spoil(query, queries, number),
            spoil(key, keys, number),
            spoil(value, keys, number),
            cotangent,
            implementation,
            **options,
        )
        for number in (0.0, kind)
    ]
    for zeros, spoilt in zip(*results):
        assert np.isfinite(spoilt).all()
        np.testing.assert_array_equal(spoilt, zeros)
    out, d_query, d_key, d_value, _ = results[1]
    assert not out[queries].any()
    assert not d_query[queries].any()
    assert not d_key[keys].any()
    assert not d_value[keys].any()


SEGMENTS = np.array([[0, 0, 1, 1, 1, 2, 2, 2, 0, 3, 3, 0], [1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]])


@pytest.mark.parametrize("kind", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["dense", "head_by_head", "all_heads", "pallas_tpu"])
def test_unseen_tokens_of_padded_rows_add_nothing(name, kind, monkeypatch):
    implementation = use_engine(monkeypatch, name)
    ids = jnp.asarray(SEGMENTS)
    options = {"query_segment_ids": ids, "key_segment_ids": ids}
    seen = visible(LENGTH, LENGTH, 0, ids=(SEGMENTS, SEGMENTS))
    assert_unseen_tokens_add_nothing(implementation, arrays(), seen, kind, options)


@pytest.mark.parametrize("name", ["dense", "head_by_head", "all_heads", "pallas_tpu"])
@pytest.mark.parametrize("options", [{"offset": 3}, {"causal": False, "window": 2, "offset": 5}])
def test_unused_slots_of_a_cache_add_nothing(name, options, monkeypatch):
    implementation = use_engine(monkeypatch, name)
    inputs = arrays(length=4)
    seen = visible(4, LENGTH, **options)
    assert not seen.any((0, 1, 2)).all()
    assert_unseen_tokens_add_nothing(implementation, inputs, seen, np.nan, options)


@pytest.mark.parametrize("name", ["dense", "head_by_head", "all_heads"])
@given(data=st.data())
@settings(max_examples=4, deadline=None)
def test_unseen_tokens_of_any_input_add_nothing(name, data):
    length, more = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 5))
    causal = data.draw(st.booleans())
    offset = data.draw(st.integers(0, more) if causal else st.integers(-9, 20))
    window = data.draw(st.none() | st.integers(1, 12) | st.just(2**31 - 1))
    random = np.random.default_rng(data.draw(st.integers(0, 9)))
    ids = [random.integers(0, 3, (BATCH, x)) for x in (length, length + more)]
    heads = data.draw(st.sampled_from([1, HEADS]))
    mask = random.random((1, heads, length, length + more)) < 0.5
    fields = {"causal": causal, "window": window, "offset": offset}
    options = dict(fields)
    if data.draw(st.booleans()):
        fields["ids"] = ids
        options["query_segment_ids"], options["key_segment_ids"] = map(jnp.asarray, ids)
    if data.draw(st.booleans()):
        fields["mask"], options["mask"] = mask, jnp.asarray(mask)
    with pytest.MonkeyPatch.context() as patch:
        assert_unseen_tokens_add_nothing(
            use_engine(patch, name),
            arrays(length=length, key_length=length + more),
            visible(length, length + more, **fields),
            np.nan,
            options,
        )


@pytest.mark.parametrize("segments", [False, True])
def test_a_number_reaches_exactly_the_queries_that_see_it(engine, segments):
    """A later token, another document and another head change nothing, bit for bit."""
    if segments and engine == "folded":
        return
    query, key, value, cotangent = arrays()
    ids = np.where(np.arange(LENGTH) < 7, 1, 2)[None].repeat(BATCH, 0)
    options = {}
    if segments:
        options = {"query_segment_ids": jnp.asarray(ids), "key_segment_ids": jnp.asarray(ids)}
    seen = visible(LENGTH, LENGTH, 0, ids=(ids, ids) if segments else None)
    spoilt_query, spoilt_key, spoilt_value = query.copy(), key.copy(), value.copy()
    spoilt_key[0, 4, 0, 1], spoilt_value[1, 8, 1, 0], spoilt_query[1, 2, 3, 5] = (
        np.nan,
        -np.inf,
        np.inf,
    )
    bad = np.zeros((BATCH, HEADS, LENGTH), bool)
    bad[0, :2, 4] = bad[1, 2:, 8] = True
    reached = (seen & bad[:, :, None]).any(3).swapaxes(1, 2)
    reached[1, 2, 3] = True
    got = with_gradients(spoilt_query, spoilt_key, spoilt_value, cotangent, engine, **options)
    np.testing.assert_array_equal(np.isnan(got[0]).any(-1), reached)
    np.testing.assert_array_equal(np.isnan(got[0]).all(-1), reached)
    # Everything else is what it is without the cotangents of those queries.
    zeros = [np.where(np.isfinite(x), x, 0) for x in (spoilt_query, spoilt_key, spoilt_value)]
    zeros[1][0, 4, 0] = zeros[2][0, 4, 0] = zeros[1][1, 8, 1] = zeros[2][1, 8, 1] = 0
    zeros[0][1, 2, 3] = 0
    expected = with_gradients(*zeros, spoil(cotangent, reached, 0), engine, **options)
    np.testing.assert_array_equal(got[0][~reached], expected[0][~reached])
    spoilt_rows = [None, (1, 2, 3), (0, 4, 0), (1, 8, 1)]
    for x, y, row in zip(got[1:4], expected[1:4], spoilt_rows[1:]):
        assert np.isfinite(x).all()
        y = y.copy()
        y[row] = x[row]
        np.testing.assert_array_equal(x, y)
        assert not x[row].any() or row == (1, 8, 1)


@pytest.mark.parametrize("name", ["dense", "all_heads"])
def test_gates_of_unseen_tokens_add_nothing(name, monkeypatch):
    implementation = use_engine(monkeypatch, name)
    query, key, value, cotangent = arrays()
    ids = jnp.asarray(SEGMENTS)
    gates = -np.abs(np.random.default_rng(4).normal(size=(BATCH, LENGTH, HEADS))).astype("f")

    def attend(query, key, value, gates):
        decay = forget_decay(gates, ids)
        return attention(
            query,
            key,
            value,
            bias=lambda _, __, one, other: forget_bias_at(one, other),
            query_segment_ids=ids,
            key_segment_ids=ids,
            query_features=decay,
            key_features=decay,
            implementation=implementation,
        )

    results = []
    for number in (0.0, np.nan):
        padded = [spoil(x, SEGMENTS == 0, number) for x in (query, key, value, gates)]
        out, pull = jax.vjp(attend, *map(jnp.asarray, padded))
        results.append((out, *pull(jnp.asarray(cotangent))))
    for zeros, spoilt in zip(*results):
        assert np.isfinite(spoilt).all()
        np.testing.assert_array_equal(spoilt, zeros)


def test_the_log_sum_exp_of_a_row_that_sees_such_a_number_is_nan(monkeypatch):
    query, key, value, _ = arrays()
    value[0, 5] = np.nan
    for name in ("dense", "head_by_head"):
        _, log_sum_exp = attention(
            *map(jnp.asarray, (query, key, value)),
            implementation=use_engine(monkeypatch, name),
            return_residual=True,
        )
        bad = np.isnan(log_sum_exp)
        assert bad[0, 5:].all()
        assert not bad[0, :5].any()
        assert not bad[1].any()


def test_scores_that_overflow_keep_their_meaning():
    """Finite numbers whose product is -infinity have a weight of 0, as before."""
    query, key, value, _ = arrays()
    query[:], key[:, 3] = 1e30, -1e30
    out = alibi_attention(
        *map(jnp.asarray, (query, key * 1e-20, value)), alibi_slopes(HEADS), implementation="dense"
    )
    assert np.isfinite(out).all()


@pytest.mark.parametrize("position", ["alibi", "t5", "fox", "rotary"])
def test_the_unused_end_of_a_models_cache_adds_nothing(position):
    config = Config()
    config.model.position, config.model.num_layers = position, 2
    config.model.width, config.model.num_heads = 16, 2
    model = make_model(config, vocab_size=16, rngs=nnx.Rngs(0))
    tokens = jnp.arange(8).reshape(2, 4)
    clean = model.init_cache(2, 9)
    spoilt = clean._replace(
        layers=jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), clean.layers)
    )
    mask = jnp.array([[False, True, True, True], [True] * 4])
    results = []
    for cache in (clean, spoilt):
        hidden, cache = model.hidden_states_with_cache(tokens, cache, token_mask=mask)
        last, _ = model.hidden_states_with_cache(tokens[:, :1], cache)
        results.append((hidden, last))
    assert all(np.isfinite(x).all() for x in results[1])
    for one, other in zip(*results):
        np.testing.assert_array_equal(one, other)
