"""The position methods in Flax's own attention modules: numpy references, training, decoding."""

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import optax
import oracle
import pytest
from flax import linen, nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from test_biases_alibi import devices_mesh

from alibi_jax import alibi_bias, alibi_slopes, t5_bias
from alibi_jax.attention import alibi_attention
from alibi_jax.flax_attention import alibi_attention_fn, rotary_attention_fn, t5_attention_fn
from alibi_jax.rotations import rotary

pytestmark = pytest.mark.usefixtures("quick_compile")

quick = settings(max_examples=10, deadline=None)

LENGTH, WIDTH, HEADS, SIZE, VOCABULARY = 6, 16, 4, 4, 11

kinds = pytest.mark.parametrize("kind", ["nnx", "linen"])


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


TABLE = normal(9, 32, HEADS)
# By the method's name in the oracle: the function for Flax, and the weights that it uses.
METHODS = {
    "alibi": (alibi_attention_fn(HEADS), None),
    "t5": (t5_attention_fn(TABLE), {"table": np.asarray(TABLE, np.float64)}),
    "rotary": (rotary_attention_fn(), None),
}
methods = pytest.mark.parametrize("method", METHODS)


def kernels_of(heads=HEADS, kv_heads=HEADS, size=SIZE):
    """The weights of an attention layer, by their names in both kinds of module."""
    shapes = {
        "query": (WIDTH, heads, size),
        "key": (WIDTH, kv_heads, size),
        "value": (WIDTH, kv_heads, size),
        "out": (heads, size, WIDTH),
    }
    return {
        name: {"kernel": normal(seed, *shape) / 3}
        for seed, (name, shape) in enumerate(shapes.items())
    }


def layer(kind, attention_fn, *, heads=HEADS, **options):
    """Flax's attention module with `attention_fn`, as a function of kernels and inputs."""
    options = {"use_bias": False, "attention_fn": attention_fn, **options}
    if kind == "linen":
        module = linen.MultiHeadDotProductAttention(heads, **options)
        return lambda kernels, *args, **kwargs: module.apply({"params": kernels}, *args, **kwargs)
    graphdef, params, rest = nnx.split(
        nnx.MultiHeadAttention(heads, WIDTH, decode=False, rngs=nnx.Rngs(0), **options),
        nnx.Param,
        ...,
    )

    def apply(kernels, *args, **kwargs):
        nnx.replace_by_pure_dict(params, kernels)
        return nnx.merge(graphdef, params, rest)(*args, **kwargs)

    return apply


def in_numpy(x, kernels, name, visible, positions=None, *, weights=None, kv_heads=None):
    """The same layer over `[B, T, D]`, one sequence after the other, in numpy and float64."""
    config = SimpleNamespace(
        num_heads=HEADS, num_kv_heads=kv_heads, rescaling="none", rescaling_factor=1.0
    )
    kernels = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), kernels)
    visible = np.broadcast_to(visible, (*x.shape[:2], x.shape[1]))
    if positions is None:
        positions = np.broadcast_to(np.arange(x.shape[1]), x.shape[:2])
    return np.stack(
        [
            oracle.attention(row, kernels, name, weights, config, row_positions, row_mask, None)
            for row, row_positions, row_mask in zip(np.asarray(x, np.float64), positions, visible)
        ]
    )


CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))
# Document ids, 0 for padding: one document; one after two pads; one before two pads; two of
# 4 and 2 tokens.
DOCUMENTS = np.array([[1] * 6, [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 2, 2]])
# Positions count from each document's start here, and from each row's start in the modules.
POSITIONS = np.array(
    [[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 0, 0], [0, 1, 2, 3, 0, 1]]
)
VISIBLE = CAUSAL & (DOCUMENTS[:, :, None] == DOCUMENTS[:, None, :]) & (DOCUMENTS > 0)[:, :, None]


@kinds
@methods
@pytest.mark.sample(2)
def test_d1_d3_c4_documents_in_padded_and_packed_rows_are_independent(kind, method):
    """The mask alone suffices, without positions. Rows that see nothing are zero."""
    attention_fn, weights = METHODS[method]
    apply = layer(kind, attention_fn)
    x, kernels, mask = normal(5, 4, LENGTH, WIDTH), kernels_of(), jnp.asarray(VISIBLE[:, None])
    out, pull = jax.vjp(lambda kernels, x: apply(kernels, x, mask=mask), kernels, x)
    expected = in_numpy(x, kernels, method, VISIBLE, POSITIONS, weights=weights)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_array_equal(out[DOCUMENTS == 0], 0)
    gradients, by_input = pull(jnp.ones_like(out))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    np.testing.assert_array_equal(by_input[DOCUMENTS == 0], 0)
    assert (jnp.abs(by_input[DOCUMENTS > 0]).max(axis=-1) > 0).all()


FUTURE = [0.5, 0.125, 1.0, 0.0]


def two_slopes(pair):
    """The advice of ALiBi's authors for encoders: separate slopes for keys after the query."""
    slope = FUTURE[pair.head] if pair.j > pair.i else 2.0 ** (-2 * (pair.head + 1))
    return pair.product - slope * pair.distance


def t5_both_ways(pair):
    """Raffel et al. 2020, section 2.1: a bucket per distance below 8, plus 16 for later keys."""
    bucket = pair.distance + (16 if pair.j > pair.i else 0)
    return pair.product + pair.weights["table"][bucket, pair.head]


ENCODERS = {
    oracle.alibi: alibi_attention_fn(HEADS),
    two_slopes: alibi_attention_fn(HEADS, future_slopes=FUTURE),
    t5_both_ways: t5_attention_fn(TABLE, bidirectional=True),
}


@kinds
@pytest.mark.parametrize("score", ENCODERS, ids=lambda score: score.__name__)
def test_b2_d7_an_encoder_has_distances_in_both_directions(kind, score, monkeypatch):
    monkeypatch.setitem(oracle.SCORES, score.__name__, score)
    x, kernels, weights = normal(5, 2, LENGTH, WIDTH), kernels_of(), METHODS["t5"][1]
    out = layer(kind, ENCODERS[score])(kernels, x)
    expected = in_numpy(x, kernels, score.__name__, True, weights=weights)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@methods
def test_a4_grouped_key_heads(method):
    attention_fn, weights = METHODS[method]
    x, kernels = normal(5, 2, LENGTH, WIDTH), kernels_of(kv_heads=2)
    out = layer("nnx", attention_fn, num_kv_heads=2)(kernels, x, is_causal=True)
    expected = in_numpy(x, kernels, method, CAUSAL, weights=weights, kv_heads=2)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@kinds
def test_bfloat16_modules(kind):
    """Four results are rounded, each by up to 2^-9. Biases and scores are not."""
    kernels = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), kernels_of())
    x = normal(5, 2, LENGTH, WIDTH, dtype=jnp.bfloat16)
    apply = layer(kind, alibi_attention_fn(HEADS), dtype=jnp.bfloat16)
    out = apply(kernels, x, mask=jnp.asarray(CAUSAL)[None, None])
    assert out.dtype == jnp.bfloat16
    expected = in_numpy(x, kernels, "alibi", CAUSAL)
    bound = 4 * 2**-9 * np.abs(expected).max()
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=bound)


def test_c1_scores_are_float32_in_bfloat16():
    """Scores are a little above 128, where bfloat16 represents only integers."""
    query = jnp.broadcast_to(jnp.array([16.0, 1, 0, 0]), (1, LENGTH, HEADS, SIZE))
    key = jnp.stack([jnp.array([16.0, index / 2, 0, 0]) for index in range(LENGTH)])
    key = jnp.broadcast_to(key[:, None], query.shape)
    attend = functools.partial(alibi_attention_fn(HEADS), is_causal=True)
    exact = attend(query, key, value := normal(2, *query.shape).astype(jnp.bfloat16))
    for arrays in ((query, key, value), (x.astype(jnp.bfloat16) for x in (query, key, value))):
        out = attend(*arrays, dtype=jnp.bfloat16)
        assert out.dtype == jnp.bfloat16
        np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=2**-7)


def qkv(length=LENGTH, key_length=None, heads=HEADS, batch=(2,)):
    keys = (*batch, key_length or length, heads, SIZE)
    return normal(0, *batch, length, heads, SIZE), normal(1, *keys), normal(2, *keys)


@kinds
def test_any_number_of_batch_axes(kind):
    x, kernels = normal(5, 2, 2, LENGTH, WIDTH), kernels_of()
    apply = functools.partial(layer(kind, alibi_attention_fn(HEADS)), kernels)
    mask = jnp.asarray(VISIBLE[:, None])
    rows = apply(x.reshape(4, LENGTH, WIDTH), mask=mask)
    out = apply(x, mask=mask.reshape(2, 2, 1, LENGTH, LENGTH))
    np.testing.assert_allclose(out.reshape(rows.shape), rows, atol=1e-6)
    np.testing.assert_allclose(apply(x[1, 1], mask=mask[3]), rows[3], atol=1e-6)
    mapped = jax.jit(jax.vmap(lambda x, mask: apply(x, mask=mask)))
    np.testing.assert_allclose(mapped(x.reshape(4, LENGTH, WIDTH), mask), rows, atol=1e-6)
    assert apply(x[:0]).shape == (0, 2, LENGTH, WIDTH)


def test_a_mask_broadcasts_as_in_flax():
    attend = functools.partial(alibi_attention_fn(HEADS), *qkv())
    expected = attend(is_causal=True)
    causal = jnp.asarray(CAUSAL)
    for mask in (causal, causal[None], causal[None, None], causal.astype(jnp.float32)):
        np.testing.assert_array_equal(attend(mask=mask), expected)
    by_head = jnp.stack([causal, causal, causal.T, causal.T])
    np.testing.assert_array_equal(attend(mask=by_head)[:, :, :2], expected[:, :, :2])
    backwards = attend(mask=causal.T)
    np.testing.assert_array_equal(attend(mask=by_head)[:, :, 2:], backwards[:, :, 2:])


@methods
def test_a_single_query_has_the_position_of_the_last_key_that_it_sees(method):
    attend = METHODS[method][0]
    query, key, value = qkv()

    @quick
    @given(st.integers(0, LENGTH - 1), st.lists(st.booleans(), min_size=6, max_size=6))
    def check(index, visible):
        visible = np.array(visible) & (np.arange(LENGTH) < index)
        visible[index] = True
        # In the second sequence all keys are visible, and the query is the last of them.
        mask = np.stack([visible, np.ones(LENGTH, bool)])[:, None, None].repeat(HEADS, axis=1)
        # One head does not see the query's own key. This does not change the query's position.
        mask[0, 0, 0, index] = mask[1, 0, 0, -1] = False
        mask = jnp.asarray(mask)
        single = jnp.stack([query[0, index], query[1, -1]])[:, None]
        whole = attend(query, key, value, mask=mask)
        out = attend(single, key, value, mask=mask)
        np.testing.assert_allclose(out[0, 0], whole[0, index], atol=1e-6)
        np.testing.assert_allclose(out[1, 0], whole[1, -1], atol=1e-6)

    check()
    np.testing.assert_allclose(
        attend(query[:, -1:], key, value)[:, 0], attend(query, key, value)[:, -1], atol=1e-6
    )


@methods
def test_input_positions_set_the_distances(method):
    """The newer NNX modules pass them on. Positions with a gap are those of a longer sequence."""
    attend = METHODS[method][0]
    query, key, value = qkv(length=10)
    kept = np.array([0, 1, 2, 7, 8, 9])
    visible = jnp.zeros(10, bool).at[kept].set(True)
    whole = attend(query, key, value, mask=visible[None], is_causal=True)[:, kept]
    parts = [x[:, kept] for x in (query, key, value)]
    for positions in (kept, np.stack([kept + 5, kept])):
        out = attend(*parts, is_causal=True, input_positions=jnp.asarray(positions))
        np.testing.assert_allclose(out, whole, atol=1e-5)
    with pytest.raises(ValueError, match="positions of the 6 keys in the cache"):
        attend(parts[0][:, -1:], *parts[1:], input_positions=jnp.array([9]))


@kinds
@methods
def test_d7_cross_attention_is_refused(kind, method):
    apply = layer(kind, METHODS[method][0])
    with pytest.raises(ValueError, match="3 queries over 5 keys: for self-attention"):
        apply(kernels_of(), normal(5, 2, 3, WIDTH), normal(6, 2, 5, WIDTH))


@kinds
@pytest.mark.parametrize(
    "attention_fn",
    [alibi_attention_fn(8), alibi_attention_fn([0.5] * 8), t5_attention_fn(TABLE[:, :1])],
)
def test_b10_the_number_of_heads_is_checked(kind, attention_fn):
    with pytest.raises(ValueError, match=r"biases of [18] heads do not fit 4 query heads"):
        layer(kind, attention_fn)(kernels_of(), normal(5, 2, LENGTH, WIDTH))


def test_options_of_the_functions_are_used():
    query, key, value = qkv()
    bias = t5_bias(TABLE[:8], LENGTH, bidirectional=True, max_distance=5)
    expected = jax.nn.dot_product_attention(query, key, value, bias=bias[None])
    attend = t5_attention_fn(TABLE[:8], bidirectional=True, max_distance=5)
    np.testing.assert_allclose(attend(query, key, value), expected, atol=1e-6)
    frequencies, positions = jnp.array([0.5]), jnp.arange(LENGTH)
    rotated = [rotary(x, positions, frequencies=frequencies) for x in (query, key)]
    expected = jax.nn.dot_product_attention(*rotated, value)
    attend = rotary_attention_fn(frequencies=frequencies)
    np.testing.assert_allclose(attend(query, key, value), expected, atol=1e-6)


def test_heads_may_be_a_numpy_integer():
    arrays = qkv()
    np.testing.assert_array_equal(
        alibi_attention_fn(np.int64(HEADS))(*arrays), alibi_attention_fn(HEADS)(*arrays)
    )


@kinds
def test_dropout_of_the_modules(kind):
    x, kernels, mask = normal(5, 2, LENGTH, WIDTH), kernels_of(), jnp.asarray(CAUSAL)[None, None]
    without = layer(kind, alibi_attention_fn(HEADS))(kernels, x, mask=mask)
    apply = layer(kind, alibi_attention_fn(HEADS), dropout_rate=0.5)

    def dropped(seed):
        key = jax.random.key(seed)
        rngs = nnx.Rngs(dropout=key) if kind == "nnx" else {"dropout": key}
        return apply(kernels, x, mask=mask, deterministic=False, rngs=rngs)

    np.testing.assert_array_equal(apply(kernels, x, mask=mask, deterministic=True), without)
    np.testing.assert_array_equal(dropped(0), dropped(0))
    assert (dropped(0) != dropped(1)).any()
    assert (dropped(0) != without).any()


def test_dropout_draws_for_every_score():
    """With values of 1 an output is the share of kept weights, times 1 / (1 - rate)."""
    query, key, value = (jnp.zeros((64, 1, HEADS, SIZE)), *qkv(1, 4, batch=(64,))[1:])
    attend = functools.partial(
        alibi_attention_fn([0.0] * HEADS), query, key, jnp.ones_like(value), dropout_rate=0.25
    )
    out = attend(dropout_rng=jax.random.key(3))
    shares = np.asarray(out[:, 0, :, 0] * 0.75 * 4)
    np.testing.assert_allclose(shares, shares.round(), atol=1e-6)
    # 256 draws of 4: the mean is within 5 standard errors of 3, and all heads differ.
    assert abs(shares.mean() - 3) < 5 * math.sqrt(4 * 0.25 * 0.75 / 256)
    assert len({tuple(head) for head in shares.T}) == HEADS
    np.testing.assert_array_equal(attend(dropout_rng=jax.random.PRNGKey(3)), out)
    np.testing.assert_array_equal(attend(deterministic=True), jnp.ones_like(out))


def test_dropout_without_a_key_or_with_an_invalid_rate_is_refused():
    attend = functools.partial(alibi_attention_fn(HEADS), *qkv())
    with pytest.raises(ValueError, match=r"dropout_rate=0\.5 needs a dropout_rng"):
        attend(dropout_rate=0.5)
    for rate in (-0.5, 1.0):
        with pytest.raises(ValueError, match=f"dropout_rate={rate} must be at least 0 and below 1"):
            attend(dropout_rate=rate, deterministic=True)


def sown(kind, attention_fn, kernels, x, mask, **options):
    """The output, and the intermediates that the module has sown, by path."""
    if kind == "linen":
        module = linen.MultiHeadDotProductAttention(
            HEADS, use_bias=False, attention_fn=attention_fn, **options
        )
        out, variables = module.apply(
            {"params": kernels}, x, mask=mask, sow_weights=True, mutable=["intermediates"]
        )
        return out, variables["intermediates"]
    module = nnx.MultiHeadAttention(
        HEADS,
        WIDTH,
        use_bias=False,
        attention_fn=attention_fn,
        decode=False,
        rngs=nnx.Rngs(0),
        **options,
    )
    nnx.update(module, kernels)
    out, intermediates = nnx.capture(module, nnx.Intermediate)(x, mask=mask, sow_weights=True)
    return out, nnx.to_pure_dict(intermediates)


@kinds
def test_b1_sown_weights(kind):
    """Queries of 0 make the weights depend on the bias alone, for any head size."""
    x, kernels = normal(5, 2, 4, WIDTH), kernels_of()
    kernels["query"]["kernel"] *= 0
    mask = jnp.asarray(VISIBLE[:2, None, :4, :4])
    slopes = [0.5, 0.5, 1 / 256, 1 / 256]
    out, weights = sown(kind, alibi_attention_fn(slopes), kernels, x, mask)
    np.testing.assert_allclose(
        weights["attention_weights"][0][0, ::2, -1],
        [[0.101536, 0.167405, 0.276004, 0.455054], [0.248537, 0.249510, 0.250486, 0.251467]],
        atol=1e-6,
    )
    # The second row begins with two pads.
    np.testing.assert_array_equal(weights["attention_weights"][0][1, :, :2], 0)
    without_sowing = layer(kind, alibi_attention_fn(slopes))(kernels, x, mask=mask)
    np.testing.assert_array_equal(out, without_sowing)
    default = linen.dot_product_attention if kind == "linen" else nnx.dot_product_attention
    _, flax_weights = sown(kind, default, kernels, x, mask)
    assert jax.tree.map(jnp.shape, weights) == jax.tree.map(jnp.shape, flax_weights)


@kinds
@pytest.mark.parametrize("precision", ["highest", jax.lax.Precision.HIGHEST])
def test_the_modules_precision_is_used(kind, precision):
    def products(precision):
        apply = layer(kind, alibi_attention_fn(HEADS), precision=precision)
        jaxpr = jax.make_jaxpr(apply)(kernels_of(), normal(5, 2, LENGTH, WIDTH))
        return str(jaxpr).count("precision=(Precision.HIGHEST, Precision.HIGHEST)")

    # Four projections, query times key, and weight times value.
    assert (products(precision), products(None)) == (6, 0)


PRECISIONS = [
    *("default", "fastest", "high", "highest", "bfloat16", "bfloat16_3x", "tensorfloat32"),
    jax.lax.Precision.HIGH,
    ("highest", "default"),
    ["high", "high"],
    (jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST),
    "F32_F32_F32",
    jax.lax.DotAlgorithmPreset.F32_F32_F32,
    jax.lax.DotAlgorithmPreset.DEFAULT,
]


@kinds
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.sample(10)
def test_every_precision_of_flax_is_taken(kind, precision):
    """On a CPU all of them compute in float32."""
    x = normal(5, 2, LENGTH, WIDTH)
    flax_attention = {"linen": linen, "nnx": nnx}[kind].dot_product_attention
    own = layer(kind, flax_attention, precision=precision)
    # Slopes of 0 add no bias, so that the module's own attention is the oracle.
    ours = layer(kind, alibi_attention_fn([0.0] * HEADS), precision=precision)
    np.testing.assert_allclose(ours(kernels_of(), x), own(kernels_of(), x), atol=1e-5)


@kinds
def test_the_higher_precision_of_a_pair_is_used(kind):
    apply = layer(kind, alibi_attention_fn(HEADS), precision=("highest", "default"))
    jaxpr = str(jax.make_jaxpr(apply)(kernels_of(), normal(5, 2, LENGTH, WIDTH)))
    # The projections take the pair.
    assert jaxpr.count("precision=(Precision.HIGHEST, Precision.DEFAULT)") == 4
    assert jaxpr.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == 2


def test_a_precision_without_a_name_is_refused():
    algorithm = jax.lax.DotAlgorithm(jnp.float32, jnp.float32, jnp.float32)
    query, key, value = normal(1, 3, 2, 4, 2, 8)
    with pytest.raises(ValueError, match="give one of the presets of jax"):
        alibi_attention_fn(2)(query, key, value, precision=algorithm)


def test_made_under_a_transformation_and_called_outside():
    x, kernels = normal(5, 2, LENGTH, WIDTH), kernels_of()

    def make():
        return nnx.MultiHeadAttention(
            HEADS,
            WIDTH,
            use_bias=False,
            attention_fn=alibi_attention_fn(HEADS),
            decode=False,
            rngs=nnx.Rngs(0),
        )

    expected = layer("nnx", alibi_attention_fn(HEADS))(kernels, x)
    under_jit = nnx.jit(make)()
    nnx.update(under_jit, kernels)
    np.testing.assert_array_equal(under_jit(x), expected)
    graphdef, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    nnx.replace_by_pure_dict(params, kernels)
    np.testing.assert_array_equal(nnx.merge(graphdef, params, rest)(x), expected)


class LearnedSlopes(nnx.Module):
    def __init__(self, slopes):
        self.log_slopes = nnx.Param(jnp.log(slopes))

    def __call__(self, *args, **kwargs):
        return alibi_attention_fn(jnp.exp(self.log_slopes[...]))(*args, **kwargs)


class LearnedTable(nnx.Module):
    def __init__(self, table):
        self.table = nnx.Param(table)

    def __call__(self, *args, **kwargs):
        return t5_attention_fn(self.table[...])(*args, **kwargs)


@pytest.mark.parametrize(
    "make", [lambda: LearnedSlopes(alibi_slopes(HEADS)), lambda: LearnedTable(TABLE)]
)
def test_a6_a_module_as_attention_fn_learns(make):
    """Its parameters belong to the layer, and their gradient equals the central difference."""
    module = nnx.MultiHeadAttention(
        HEADS, WIDTH, attention_fn=make(), decode=False, rngs=nnx.Rngs(0)
    )
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)
    x, cotangent = normal(5, 2, LENGTH, WIDTH), normal(6, 2, LENGTH, WIDTH)

    def loss(method_params):
        module = nnx.merge(graphdef, params | {"attention_fn": method_params}, rest)
        return (module(x, is_causal=True) * cotangent).sum()

    method_params = params["attention_fn"]
    jax.test_util.check_grads(
        jax.jit(loss), (method_params,), order=1, modes="rev", rtol=1e-2, atol=1e-2
    )
    (gradient,) = jax.tree.leaves(jax.grad(loss)(method_params))
    # For T5 these are the buckets of the distances that occur.
    assert (gradient[:LENGTH] != 0).all()


@kinds
@pytest.mark.parametrize("devices", [2, 4])
def test_a3_sharded_heads_have_their_own_slopes(kind, devices):
    """12 heads with weights sharded by head give the result of one device."""
    x, kernels = normal(5, 2, LENGTH, WIDTH), kernels_of(heads=12, kv_heads=12, size=2)
    mask = jnp.asarray(CAUSAL)[None, None]
    apply = jax.jit(layer(kind, alibi_attention_fn(12), heads=12, qkv_features=24))
    mesh = devices_mesh(devices)
    by_head = jax.tree.map(
        lambda leaf: jax.NamedSharding(
            mesh, jax.P(*("devices" if n == 12 else None for n in leaf.shape))
        ),
        kernels,
    )
    sharded = jax.device_put(kernels, by_head)
    assert {leaf.sharding.num_devices for leaf in jax.tree.leaves(sharded)} == {devices}
    out = apply(sharded, x, mask=mask)
    np.testing.assert_allclose(out, apply(kernels, x, mask=mask), atol=1e-5)


def test_a3_a_shard_takes_its_slice_of_the_slopes():
    arrays, heads = qkv(heads=12), jax.P(None, None, "devices")
    expected = alibi_attention_fn(12)(*arrays, is_causal=True)

    def attend_shard(slopes, *arrays):
        return alibi_attention_fn(slopes)(*arrays, is_causal=True)

    shard = functools.partial(
        jax.shard_map,
        mesh=devices_mesh(4),
        in_specs=(jax.P("devices"), heads, heads, heads),
        out_specs=heads,
    )
    out = jax.jit(shard(attend_shard))(alibi_slopes(12), *arrays)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    with pytest.raises(ValueError, match="biases of 12 heads do not fit 3 query heads"):
        shard(lambda slopes, *arrays: alibi_attention_fn(12)(*arrays))(alibi_slopes(12), *arrays)


@kinds
def test_an_exported_forward_pass(kind):
    """The number of rows is symbolic."""
    x, kernels = normal(5, 2, LENGTH, WIDTH), kernels_of()
    apply = jax.jit(layer(kind, alibi_attention_fn(HEADS)))
    (rows,) = jax.export.symbolic_shape("rows")
    shape = jax.ShapeDtypeStruct((rows, LENGTH, WIDTH), jnp.float32)
    exported = jax.export.export(apply)(kernels, shape)
    np.testing.assert_allclose(exported.call(kernels, x), apply(kernels, x), atol=1e-6)


def test_d4_the_bias_in_jaxs_own_attention():
    """JAX's causal flag serves equally many queries and keys, a mask serves other numbers."""
    query, key, value = qkv()
    expected = alibi_attention(query, key, value, alibi_slopes(HEADS))
    whole = jax.nn.dot_product_attention(
        query, key, value, bias=alibi_bias(HEADS, LENGTH)[None], is_causal=True
    )
    np.testing.assert_allclose(whole, expected, atol=1e-6)
    # The third and fourth tokens, with a cache of six slots.
    step = functools.partial(
        jax.nn.dot_product_attention,
        query[:, 2:4],
        key,
        value,
        bias=alibi_bias(HEADS, 2, LENGTH, offset=2)[None],
    )
    out = step(mask=jnp.asarray(CAUSAL[2:4])[None, None])
    np.testing.assert_allclose(out, expected[:, 2:4], atol=1e-6)
    # The flag aligns the first query with the first key.
    assert jnp.abs(step(is_causal=True) - expected[:, 2:4]).max() > 0.1


# Language models made only of Flax's modules.


class Layer(nnx.Module):
    def __init__(self, attention_fn, rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, attention_fn=attention_fn, decode=False, rngs=rngs
        )
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, decode):
        x = x + self.attention(self.norms[0](x), is_causal=True, decode=decode)
        return x + jax.nn.gelu(self.linear(self.norms[1](x)))


class NnxModel(nnx.Module):
    def __init__(self, make_attention_fn, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(make_attention_fn(), rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens, decode=False):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, decode)
        return self.embed.attend(self.norm(x))


class LinenModel(linen.Module):
    make_attention_fn: object
    decode: bool = False

    @linen.compact
    def __call__(self, tokens):
        embed = linen.Embed(VOCABULARY, WIDTH)
        x = embed(tokens)
        for number in range(2):
            x = x + linen.MultiHeadDotProductAttention(
                HEADS,
                attention_fn=self.make_attention_fn(self, number),
                decode=self.decode,
            )(linen.LayerNorm()(x), mask=None if self.decode else linen.make_causal_mask(tokens))
            x = x + linen.gelu(linen.Dense(WIDTH)(linen.LayerNorm()(x)))
        return embed.attend(linen.LayerNorm()(x))


# A row repeats a pair of tokens, so the next token is the one before the last.
PAIRS = np.random.default_rng(0).integers(VOCABULARY, size=(8, 2))
TOKENS = jnp.asarray(np.tile(PAIRS, 5)[:, :9])


def train(apply, params):
    """The parameters after 50 steps, and the logits of the tokens with them."""
    optimizer = optax.adam(1e-2)

    def loss_of(params):
        logits = apply(params, TOKENS[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()

    def step(carry, _):
        params, state = carry
        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(gradients, state)
        largest = jax.tree.map(lambda leaf: jnp.abs(leaf).max(), gradients)
        return (optax.apply_updates(params, updates), state), (loss, largest)

    @jax.jit
    def run(params):
        carry, logged = jax.lax.scan(step, (params, optimizer.init(params)), length=50)
        return carry[0], apply(carry[0], TOKENS), *logged

    params, logits, losses, gradients = run(params)
    assert losses[-1] < 0.5 * losses[0]
    for path, largest in jax.tree.leaves_with_path(gradients):
        assert np.isfinite(largest).all(), path
        # A bias of all keys does not change a softmax: its gradient is only rounding.
        assert largest[-1] > 1e-6 or "key" in jax.tree_util.keystr(path), path
    return params, logits


NNX_METHODS = {
    "alibi": lambda: alibi_attention_fn(HEADS),
    "t5": lambda: LearnedTable(jnp.zeros((32, HEADS))),
    "rotary": rotary_attention_fn,
}


@methods
@pytest.mark.sample(1)
def test_b8_d4_an_nnx_model_trains_and_decodes(method):
    """Decoding takes single tokens with a cache, the causal flag left on as in google/flax#5591."""
    model = NnxModel(NNX_METHODS[method], nnx.Rngs(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    params, whole = train(lambda params, tokens: nnx.merge(graphdef, params, rest)(tokens), params)
    model = nnx.merge(graphdef, params, rest)

    def decoded():
        for layer in model.layers:
            layer.attention.init_cache((*TOKENS.shape, WIDTH))
        steps = [model(token[:, None], decode=True) for token in TOKENS.T]
        return jnp.concatenate(steps, axis=1)

    np.testing.assert_allclose(decoded(), whole, atol=1e-5)
    for layer in model.layers:
        layer.attention.attention_fn = nnx.dot_product_attention
    assert jnp.abs(decoded() - whole).max() > 0.1


def linen_table(module, number):
    return t5_attention_fn(
        module.param(f"table_{number}", linen.initializers.zeros, (32, HEADS), jnp.float32)
    )


LINEN_METHODS = {
    "alibi": lambda module, number: alibi_attention_fn(HEADS),
    "t5": linen_table,
    "rotary": lambda module, number: rotary_attention_fn(),
}


@methods
@pytest.mark.sample(1)
def test_b8_a_linen_model_trains_and_decodes(method):
    make = LINEN_METHODS[method]
    model = LinenModel(make)
    params = jax.jit(model.init)(jax.random.key(0), TOKENS)["params"]
    params, whole = train(lambda params, tokens: model.apply({"params": params}, tokens), params)

    def decoded(make):
        model = LinenModel(make, decode=True)
        shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["cache"]
        cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        steps = []
        for token in TOKENS.T:
            logits, variables = model.apply(
                {"params": params, "cache": cache}, token[:, None], mutable=["cache"]
            )
            steps.append(logits)
            cache = variables["cache"]
        return jnp.concatenate(steps, axis=1)

    np.testing.assert_allclose(decoded(make), whole, atol=1e-5)
    default = decoded(lambda module, number: linen.dot_product_attention)
    assert jnp.abs(default - whole).max() > 0.1


def test_no_argument_replaces_the_position_method():
    """Flax's own function takes a `bias`, which must not replace ALiBi's here."""
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 5, HEADS, 4))
    attend = alibi_attention_fn(HEADS)
    expected = attend(query, key, value, is_causal=True)
    np.testing.assert_array_equal(attend(query, key, value, bias=None, is_causal=True), expected)
    with pytest.raises(ValueError, match="the position method sets the bias"):
        attend(query, key, value, bias=jnp.zeros((5, 5)))
    with pytest.raises(TypeError):
        attend(query, key, value, rotate=None)
