"""Every engine is the oracle, forward and backward, and each is taken where it should be."""

import functools
import importlib
import math

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from alibi_jax.attention import alibi_attention, attention
from alibi_jax.biases import (
    FireWeights,
    LinearBias,
    alibi_slopes,
    fire_bias_at,
    forget_bias_at,
    forget_decay,
    kerple_log_bias_at,
    t5_bias_at,
)

# The package gives the function the name of its module.
engines = importlib.import_module("alibi_jax.attention.engines")

pytestmark = pytest.mark.usefixtures("quick_compile")

WAYS = ["dense", "head_by_head", "all_heads", "folded"]


def take(patch, way, block):
    """The implementation to ask for, its blocks of that size."""
    patch.setattr(engines, "_BLOCK", {"cpu": block})
    if way in ("dense", "folded"):
        return way
    patch.setattr(engines, "_partitioned", lambda: way == "all_heads")
    return "blockwise"


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def arrays(length, key_length, heads, kv_heads, size, batch=1, dtype=jnp.float32):
    """Random queries, keys, values, a cotangent, and ALiBi's slopes."""
    return (
        normal(0, batch, length, heads, size, dtype=dtype),
        normal(1, batch, key_length, kv_heads, size, dtype=dtype),
        normal(2, batch, key_length, kv_heads, size, dtype=dtype),
        normal(3, batch, length, heads, size, dtype=dtype),
        alibi_slopes(heads),
    )


def oracle(
    query, key, value, cotangent, slopes, *, causal=True, window=None, offset=None, ids=None, kept=1
):
    """Attention in numpy and float64, every score at once: output and all gradients.

    `ids` are the segment ids of queries and of keys; weights are multiplied by `kept`.
    """
    query, key, value, cotangent, slopes = (
        np.asarray(x, np.float64) for x in (query, key, value, cotangent, slopes)
    )
    (batch, length, heads, size), (key_length, kv_heads) = query.shape, key.shape[1:3]
    groups = heads // kv_heads
    wide_key, wide_value = np.repeat(key, groups, axis=2), np.repeat(value, groups, axis=2)
    own = np.arange(length)[:, None] + (key_length - length if offset is None else offset)
    relative = np.arange(key_length) - own
    scores = np.einsum("btnh,bsnh->bnts", query, wide_key) / math.sqrt(size)
    scores -= slopes[:, None, None] * np.abs(relative)
    seen = np.broadcast_to((relative <= 0) | (not causal), (batch, 1, length, key_length))
    if window is not None:
        seen = seen & (np.abs(relative) < window)
    if ids is not None:
        one, other = (np.asarray(x)[:, None] for x in ids)
        seen = seen & (one[..., :, None] == other[..., None, :]) & (one != 0)[..., None]
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(-1, keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    d_weights = np.einsum("btnv,bsnv->bnts", cotangent, wide_value) * kept
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True))

    def of_groups(x):
        return x.reshape(batch, key_length, kv_heads, groups, -1).sum(3)

    return (
        np.einsum("bnts,bsnv->btnv", weights * kept, wide_value),
        np.einsum("bnts,bsnh->btnh", d_scores, wide_key) / math.sqrt(size),
        of_groups(np.einsum("bnts,btnh->bsnh", d_scores, query) / math.sqrt(size)),
        of_groups(np.einsum("bnts,btnv->bsnv", weights * kept, cotangent)),
        -(d_scores * np.abs(relative)).sum((0, 2, 3)),
    )


def with_gradients(query, key, value, cotangent, slopes, offset=None, traced=None, **known):
    """Output of `alibi_attention` and its gradients, as `oracle` returns them."""

    @jax.jit
    def run(query, key, value, slopes, cotangent, traced):
        attend = functools.partial(
            alibi_attention, offset=offset if traced is None else traced, **known
        )
        output, pull = jax.vjp(attend, query, key, value, slopes)
        return output, *pull(cotangent)

    return run(query, key, value, slopes, cotangent, traced)


def assert_all_close(actual, expected, tolerance):
    """Absolute for outputs; for gradients, which grow with the length, of the largest."""
    for one, other in zip(actual, expected, strict=True):
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        np.testing.assert_allclose(
            one, other, rtol=0, atol=tolerance * max(1.0, np.abs(other).max())
        )


# Against the oracle.


def segments(key_length):
    """Documents of 50, 60 and more tokens, and padding at the end."""
    ids = np.arange(key_length) // 55 + 1
    return jnp.asarray(np.where(ids < 4, ids, 0), jnp.int32)[None]


@pytest.mark.parametrize(
    ("length", "more", "heads", "kv_heads", "size", "block", "kwargs"),
    [
        (1, 0, 8, 8, 32, 64, {}),
        (7, 150, 1, 1, 64, 64, {}),
        (64, 0, 3, 1, 128, 64, {"window": 20}),
        (192, 0, 12, 4, 64, 128, {}),
        (200, 57, 2, 2, 32, 64, {"offset": 11}),
        (200, 57, 2, 1, 32, 64, {"causal": False, "offset": 30, "window": 70}),
        (257, 0, 16, 4, 32, 128, {"causal": False}),
        pytest.param(1024, 0, 2, 1, 32, 128, {}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_d9_every_engine_is_the_oracle(
    way, length, more, heads, kv_heads, size, block, kwargs, monkeypatch
):
    """jax-ml/jax#24491 and #27224: queries that are not the keys, lengths no block divides."""
    if way == "folded" and (more or "causal" in kwargs):
        pytest.skip("folding is for causal attention of a sequence over itself")
    if way == "folded" and size > 122:
        pytest.skip("folding has columns for head sizes up to 122")
    given_arrays = arrays(length, length + more, heads, kv_heads, size)
    kwargs["implementation"] = take(monkeypatch, way, block)
    outputs = with_gradients(*given_arrays, **kwargs)
    del kwargs["implementation"]
    # Folded scores round to float32 at a size of slope times length.
    tolerance = 1e-4 if way == "folded" and length > 512 else 1e-5
    assert_all_close(outputs, oracle(*given_arrays, **kwargs), tolerance)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("way", ["dense", "head_by_head", "all_heads"])
def test_d4_traced_offsets_and_segments_are_the_oracle(way, window, monkeypatch):
    given_arrays = arrays(100, 200, 4, 2, 8)
    ids = segments(200)
    outputs = with_gradients(
        *given_arrays,
        traced=jnp.int32(83),
        window=window,
        query_segment_ids=ids[:, 83:183],
        key_segment_ids=ids,
        implementation=take(monkeypatch, way, 32),
    )
    expected = oracle(*given_arrays, window=window, offset=83, ids=(ids[:, 83:183], ids))
    assert_all_close(outputs, expected, 1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_is_the_oracle(way, monkeypatch):
    given_arrays = arrays(200, 200, 12, 4, 64, dtype=jnp.bfloat16)
    outputs = with_gradients(*given_arrays, implementation=take(monkeypatch, way, 64))
    assert [x.dtype for x in outputs] == [jnp.bfloat16] * 4 + [jnp.float32]
    output, *gradients = oracle(*given_arrays)
    # Weights and outputs have 8 bits each.
    np.testing.assert_allclose(np.asarray(outputs[0], np.float64), output, atol=1e-2, rtol=1e-2)
    assert_all_close(outputs[1:], gradients, 1e-2)


@settings(max_examples=5, deadline=None)
@given(
    way=st.sampled_from(["head_by_head", "all_heads"]),
    length=st.integers(1, 50),
    more=st.integers(0, 30),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    size=st.integers(1, 9),
    block=st.integers(1, 20),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 60),
    data=st.data(),
)
def test_any_shape_and_its_gradients_are_the_oracle(
    way, length, more, kv_heads, groups, size, block, causal, window, data
):
    given_arrays = arrays(length, length + more, kv_heads * groups, kv_heads, size, batch=2)
    offset = data.draw(st.integers(0, more))
    with pytest.MonkeyPatch.context() as patch:
        outputs = with_gradients(
            *given_arrays,
            offset=offset,
            causal=causal,
            window=window,
            implementation=take(patch, way, block),
        )
    expected = oracle(*given_arrays, offset=offset, causal=causal, window=window)
    assert_all_close(outputs, expected, 1e-5)


def test_dropout_in_blocks_is_the_oracle_with_the_same_weights_dropped(monkeypatch):
    implementation = take(monkeypatch, "head_by_head", 16)
    length, rate = 40, 0.25
    query, key, value, cotangent, slopes = arrays(length, length, 2, 2, 40)

    @jax.jit
    def run(query, key, value):
        attend = functools.partial(
            attention,
            bias=LinearBias(slopes),
            causal=False,
            implementation=implementation,
            dropout_rate=rate,
            dropout_key=jax.random.key(0),
        )
        output, pull = jax.vjp(attend, query, key, value)
        return output, *pull(cotangent)

    # Values that tell which keys there are: what comes out are the weights themselves.
    each = jnp.broadcast_to(jnp.eye(length)[:, None], value.shape)
    kept = np.asarray(run(query, key, each)[0]).transpose(0, 2, 1, 3) != 0
    assert 0.7 < kept.mean() < 0.8
    expected = oracle(query, key, value, cotangent, slopes, causal=False, kept=kept / (1.0 - rate))
    assert_all_close(run(query, key, value), expected[:4], 1e-5)


# Biases that are functions with parameters.

HEADS, LENGTH = 4, 40


def t5(parameters, features):
    return {"bias": functools.partial(t5_bias_at, parameters)}


def kerple(parameters, features):
    return {"bias": functools.partial(kerple_log_bias_at, *parameters)}


def fire(parameters, features):
    return {"bias": functools.partial(fire_bias_at, parameters)}


def fox(parameters, features):
    """The forget gate, and a factor as a parameter besides."""
    decay = forget_decay(features)

    def bias(query_positions, key_positions, queries, keys):
        return parameters[:, None, None] * forget_bias_at(queries, keys)

    return {"bias": bias, "query_features": decay, "key_features": decay}


PARAMETERS = {
    t5: lambda: normal(5, 32, HEADS),
    kerple: lambda: (jnp.exp(normal(5, HEADS)), jnp.exp(normal(6, HEADS))),
    fire: lambda: FireWeights(
        hidden_kernel=normal(5, 8),
        hidden_bias=normal(6, 8),
        out_kernel=normal(7, 8, HEADS),
        out_bias=normal(8, HEADS),
        rate=jnp.float32(0.3),
        threshold=jnp.float32(9.0),
    ),
    fox: lambda: jnp.exp(0.1 * normal(5, HEADS)),
}


def gradients_of(method, implementation, transform=lambda layer: layer):
    """Of a sum over the outputs, by queries, keys, values, parameters and gates."""
    query, key, value, cotangent, _ = arrays(LENGTH, LENGTH, HEADS, 2, 8)
    gates = jax.nn.log_sigmoid(normal(9, 1, LENGTH, HEADS))

    def layer(query, key, value, parameters, gates):
        return attention(
            query, key, value, implementation=implementation, **method(parameters, gates)
        )

    def total(*arrays):
        return (transform(layer)(*arrays) * cotangent).sum()

    gradient = jax.grad(total, argnums=tuple(range(5)))
    return jax.jit(gradient)(query, key, value, PARAMETERS[method](), gates)


def mapped(layer):
    """Each row of a batch of two with parameters of its own."""

    def run(query, key, value, parameters, gates):
        inputs = [jnp.stack([x, 0.5 * x]) for x in (query, key, value)]
        both = jax.tree.map(lambda x: jnp.stack([x, 1.5 * x]), parameters)
        return jax.vmap(layer)(*inputs, both, jnp.stack([gates, 2 * gates])).sum(0)

    return run


def scanned(layer):
    """Two layers one after the other, each with parameters of its own."""

    def run(query, key, value, parameters, gates):
        both = jax.tree.map(lambda x: jnp.stack([x, 1.5 * x]), parameters)

        def step(x, parameters):
            return x + layer(x, key, value, parameters, gates), None

        return jax.lax.scan(step, query, both)[0]

    return run


@pytest.mark.parametrize("method", PARAMETERS, ids=lambda method: method.__name__)
def test_parameters_of_a_bias_have_the_gradients_of_dense_attention(method, monkeypatch):
    expected = gradients_of(method, "dense")
    # In blocks that do not divide the length.
    blockwise = gradients_of(method, take(monkeypatch, "head_by_head", 16))
    assert_all_close(*map(jax.tree.leaves, (blockwise, expected)), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("transform", [jax.checkpoint, mapped, scanned])
@pytest.mark.parametrize("method", [t5, fox], ids=lambda method: method.__name__)
def test_transformed_biases_have_the_gradients_of_dense_attention(method, transform, monkeypatch):
    expected = gradients_of(method, "dense", transform)
    blockwise = gradients_of(method, take(monkeypatch, "head_by_head", 16), transform)
    assert_all_close(*map(jax.tree.leaves, (blockwise, expected)), 1e-5)


@pytest.mark.parametrize("order", ["forward", "twice"])
def test_second_derivatives_are_for_dense_attention(order):
    query, key, value, _, slopes = arrays(8, 8, 2, 2, 4)

    def derivative(implementation):
        def total(query):
            return alibi_attention(query, key, value, slopes, implementation=implementation).sum()

        def forward(query):
            return jax.jvp(total, (query,), (query,))[1]

        def twice(query):
            return jax.grad(lambda query: (jax.grad(total)(query) ** 2).sum())(query)

        return jax.jit({"forward": forward, "twice": twice}[order])(query)

    assert jnp.isfinite(derivative("dense")).all()
    with pytest.raises((TypeError, ValueError), match=r"forward-mode|Reverse-mode"):
        derivative("blockwise")


# Several devices.


def test_d8_sequence_sharded_over_devices_is_the_whole(monkeypatch):
    """NVIDIA/TransformerEngine#1046: a shard's queries begin at an index of their own."""
    monkeypatch.setattr(engines, "_BLOCK", {"cpu": 8})
    query, key, value, cotangent, slopes = arrays(64, 64, HEADS, 2, 8, batch=2)
    ids = jnp.asarray(np.repeat([[1, 2, 3, 0], [1, 1, 1, 2]], [13, 20, 25, 6], axis=1), jnp.int32)
    mesh = jax.make_mesh((4,), ("sequence",), (AxisType.Auto,), devices=jax.devices()[:4])
    along = PartitionSpec(None, "sequence")

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(along,) * 4 + (PartitionSpec(),),
        out_specs=along,
        check_vma=False,
    )
    def shard(query, key, value, ids, slopes):
        gather = functools.partial(jax.lax.all_gather, axis_name="sequence", axis=1, tiled=True)
        return alibi_attention(
            query,
            gather(key),
            gather(value),
            slopes,
            offset=jax.lax.axis_index("sequence") * query.shape[1],
            query_segment_ids=ids,
            key_segment_ids=gather(ids),
            implementation="blockwise",
        )

    @jax.jit
    def run(query, key, value, slopes):
        output, pull = jax.vjp(
            lambda query, key, value, slopes: shard(query, key, value, ids, slopes),
            query,
            key,
            value,
            slopes,
        )
        return output, *pull(cotangent)

    expected = oracle(query, key, value, cotangent, slopes, ids=(ids, ids))
    assert_all_close(run(query, key, value, slopes), expected, 1e-5)


def test_d8_heads_and_rows_split_by_the_compiler_are_the_whole():
    given_arrays = query, key, value, cotangent, slopes = arrays(300, 300, 8, 4, 8, batch=2)
    mesh = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)
    split = NamedSharding(mesh, PartitionSpec("data", None, "model"))
    with jax.set_mesh(mesh):
        assert engines._partitioned()
        placed = [jax.device_put(x, split) for x in (query, key, value, cotangent)]
        outputs = with_gradients(*placed, slopes)
    assert len(outputs[0].sharding.device_set) == 8
    assert_all_close(outputs, oracle(*given_arrays), 1e-5)


# Memory.


@pytest.mark.parametrize(("length", "mebibytes"), [(4096, 100), (16384, 200)])
@pytest.mark.parametrize("backward", [False, True])
def test_b11_memory_grows_with_the_length_alone(length, mebibytes, backward):
    """pytorch/pytorch#107959: at 16384 tokens the bias alone would be 8 GiB."""
    array = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.float32)
    slopes = jax.ShapeDtypeStruct((8,), jnp.float32)

    def total(*arrays):
        return alibi_attention(*arrays).sum()

    function = jax.grad(total, argnums=(0, 1, 2, 3)) if backward else alibi_attention
    compiled = jax.jit(function).lower(array, array, array, slopes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < mebibytes * 2**20


@pytest.mark.parametrize("check_vma", [False, True])
def test_devices_that_split_the_heads_take_no_more_memory_together(check_vma):
    """The loop over heads keeps what went into it for its gradient, and no copy of that."""
    mesh = jax.make_mesh((2,), ("heads",), (AxisType.Auto,), devices=jax.devices()[:2])
    by_head = PartitionSpec(None, None, "heads")
    split = jax.shard_map(
        alibi_attention,
        mesh=mesh,
        in_specs=(by_head, by_head, by_head, PartitionSpec("heads")),
        out_specs=by_head,
        check_vma=check_vma,
    )
    array = jax.ShapeDtypeStruct(
        (1, 4096, 8, 64), jnp.float32, sharding=NamedSharding(mesh, by_head)
    )
    total = jax.grad(lambda *x: split(*x, alibi_slopes(8)).sum(), argnums=(0, 1, 2))
    compiled = jax.jit(total).lower(array, array, array).compile()
    # Queries, keys, values, the result, three gradients, and less than one more.
    assert 2 * compiled.memory_analysis().temp_size_in_bytes < 8 * array.size * 4


# The choice.


class Taken(Exception):
    """Which engine was taken."""


@pytest.fixture
def taken(monkeypatch):
    """`taken("gpu", 300, dtype=..., causal=...)`: the engine for it, had we the platform."""

    def stand_in(name):
        def take(*args, **kwargs):
            raise Taken(name)

        return take

    for name in ("dense", "blockwise", "folded"):
        monkeypatch.setattr(engines, name, stand_in(name))
    pallas = importlib.import_module("alibi_jax.attention.tpu.attention")
    monkeypatch.setattr(pallas, "pallas_tpu", stand_in("pallas_tpu"))

    def ask(platform, length=300, key_length=None, dtype=jnp.bfloat16, size=8, **kwargs):
        monkeypatch.setattr(engines, "_platform", lambda _: platform)
        *inputs, _, slopes = arrays(length, key_length or length, 2, 1, size, dtype=dtype)
        kwargs = {"bias": LinearBias(slopes)} | kwargs
        with pytest.raises(Taken) as error:
            jax.eval_shape(functools.partial(attention, **kwargs), *inputs)
        return str(error.value)

    return ask


INDEX = jnp.arange(300, dtype=jnp.int32)
ONES = jnp.ones((1, 300), jnp.int32)
# What an engine that has linear biases built in does not know.
OTHERS = {
    "no bias": {"bias": None},
    "a function": {"bias": lambda i, j: jnp.zeros((2, 1, 1))},
    "slopes for the future": {
        "bias": LinearBias(jnp.ones(2), 2 * jnp.ones(2)),
        "causal": False,
    },
    "query positions": {"query_positions": INDEX},
    "key positions": {"key_positions": INDEX},
    "mask": {"mask": jnp.ones((1, 1, 300, 300), bool)},
    "dropout": {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
}


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_what_is_small_is_dense(taken, platform):
    assert taken(platform, 256) == "dense"
    assert taken(platform, 257) != "dense"
    # As in decoding.
    assert taken(platform, 16, 10000) == "dense"
    assert taken(platform, 17, 10000) != "dense"


def test_a_cpu_takes_blocks(taken):
    assert taken("cpu") == taken("cpu", dtype=jnp.float32) == "blockwise"


def test_a_tpu_takes_its_kernel_where_that_serves(taken):
    for kwargs in (
        {},
        {"dtype": jnp.float32},
        {"causal": False},
        {"window": 9},
        {"size": 256},
        {"key_length": 400},
        {"query_segment_ids": ONES, "key_segment_ids": ONES},
        {"bias": LinearBias(jnp.ones(2), 2 * jnp.ones(2))},
        {"dropout_rate": 0.0, "dropout_key": jax.random.key(0)},
    ):
        assert taken("tpu", **kwargs) == "pallas_tpu", kwargs
    for name, kwargs in OTHERS.items():
        assert taken("tpu", **kwargs) == "blockwise", name
    # Which the compiler cannot split over devices.
    with jax.set_mesh(jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])):
        assert taken("tpu") == "blockwise"


def test_a_gpu_folds_16_bits_where_that_serves(taken):
    for kwargs in ({}, {"dtype": jnp.float16}, {"window": 9}, {"size": 122}):
        assert taken("gpu", **kwargs) == "folded", kwargs
    for kwargs in (
        *OTHERS.values(),
        {"dtype": jnp.float32},
        {"causal": False},
        {"size": 123},
        {"key_length": 400},
        {"query_segment_ids": ONES, "key_segment_ids": ONES},
        # Not exact enough in 16 bits.
        {"bias": LinearBias(jnp.array([1.0, 200.0]))},
    ):
        assert taken("gpu", **kwargs) == "blockwise", kwargs


@pytest.mark.parametrize("engine", ["pallas_tpu", "folded"])
def test_an_engine_that_cannot_serve_is_refused_by_name(engine):
    query, key, value, _, slopes = arrays(300, 300, 2, 1, 8)
    for kwargs, why in zip(
        OTHERS.values(),
        ["linear biases only"] * 2
        + ["no slopes for future keys"]
        + ["indices for positions"] * 2
        + ["no mask, no dropout"] * 2,
        strict=True,
    ):
        kwargs = {"bias": LinearBias(slopes)} | kwargs
        with pytest.raises(ValueError, match=f"implementation='{engine}' .*{why}.*'blockwise'"):
            attention(query, key, value, implementation=engine, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "why"),
    [
        ({"causal": False}, "causal attention of one segment"),
        ({"query_segment_ids": ONES, "key_segment_ids": ONES}, "causal attention of one segment"),
        ({"bias": LinearBias(jnp.array([1.0, 200.0]))}, "slopes up to 200 .* blockwise"),
    ],
)
def test_folding_what_it_cannot_is_refused(kwargs, why):
    query, key, value, _, slopes = arrays(300, 300, 2, 1, 8)
    kwargs = {"bias": LinearBias(slopes)} | kwargs
    with pytest.raises(ValueError, match=f"'folded'.*{why}"):
        attention(query, key, value, implementation="folded", **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "why"),
    [
        ({"implementation": "flash"}, "'flash': no such engine; there are dense, blockwise"),
        ({"window": 0}, "window=0 must be at least 1"),
        ({"tolerance": 1.0}, r"tolerance=1\.0 must be at least 0 and below 1"),
        ({"tolerance": -1.0}, r"tolerance=-1\.0 must be at least 0"),
        ({"tolerance": math.nan}, "tolerance=nan must be"),
    ],
)
def test_what_cannot_be_meant_is_refused(kwargs, why):
    query, key, value, _, slopes = arrays(5, 5, 2, 1, 8)
    with pytest.raises(ValueError, match=why):
        alibi_attention(query, key, value, slopes, **kwargs)


# What does not belong together.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"value": (1, 300, 2, 8)}, "do not belong together"),
        ({"value": (1, 384, 1, 8)}, "do not belong together"),
        ({"key": (2, 384, 2, 8)}, "do not belong together"),
        ({"key": (1, 384, 2, 16)}, "do not belong together"),
        ({"query_positions": (300,)}, r"query_positions \(300,\) are not of 1 rows of 384"),
        ({"key_positions": (2, 384)}, r"key_positions \(2, 384\)"),
        ({"query_segment_ids": (1, 384), "key_segment_ids": (1, 300)}, "key_segment_ids"),
        ({"mask": (1, 1, 384, 300)}, r"mask \(1, 1, 384, 300\) must be"),
        ({"window": 2.5}, r"window=2.5 must be a whole number"),
        ({"offset": 3.0}, r"offset=3.0 must be a whole number"),
        ({"future_slopes": (3,)}, "3 future slopes for 4 query heads"),
        ({"slopes": 0.5}, "slopes 0.5 must be one a query head: 4"),
        ({"query": (384, 4, 8)}, "do not belong together"),
        ({"key": (1, 384, 0, 8), "value": (1, 384, 0, 8)}, "0 key heads do not divide 4"),
        ({"query": np.ones((1, 384, 4, 8), int)}, "int64, float32, float32: give floats"),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(options, said, monkeypatch):
    # Without the checker of the tests, as users run it.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    kinds = {"mask": bool, "query_positions": int, "key_positions": int}
    kinds |= {"query_segment_ids": int, "key_segment_ids": int}
    made = {"query": (1, 384, 4, 8), "key": (1, 384, 2, 8), "value": (1, 384, 2, 8)} | options
    made = {
        name: jnp.ones(x, kinds.get(name, float)) if isinstance(x, tuple) else x
        for name, x in made.items()
    }
    with pytest.raises(ValueError, match=said):
        alibi_attention(**{"slopes": alibi_slopes(4)} | made)


@pytest.mark.parametrize("length", [20, 300])
def test_arrays_of_numpy_are_taken(length, monkeypatch):
    # Without the checker of the tests, as users run it.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    *inputs, _, slopes = arrays(length, length, 2, 1, 8)
    out = alibi_attention(*(np.asarray(x) for x in inputs), np.asarray(slopes))
    np.testing.assert_array_equal(out, alibi_attention(*inputs, slopes))


@pytest.mark.parametrize("engine", ["dense", "blockwise", "pallas_tpu"])
def test_segment_ids_of_one_row_are_those_of_all(engine, monkeypatch):
    # Without the checker of the tests, as users run it.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    *inputs, _, slopes = arrays(20, 20, 2, 1, 8, batch=2)
    ids = 1 + jnp.arange(20) // 7
    attend = functools.partial(alibi_attention, *inputs, slopes, implementation=engine)
    shapes = (20,), (1, 20), (2, 20)
    each = (jnp.broadcast_to(ids, shape) for shape in shapes)
    outs = [attend(query_segment_ids=x, key_segment_ids=x) for x in each]
    for out in outs[:-1]:
        np.testing.assert_array_equal(out, outs[-1])


@pytest.mark.parametrize("rate", [-0.5, 1.0, math.nan])
def test_dropout_of_no_share_is_refused(rate):
    *inputs, _, _ = arrays(5, 5, 2, 1, 8)
    with pytest.raises(ValueError, match=f"dropout_rate={rate} must be at least 0 and below 1"):
        attention(*inputs, dropout_rate=rate, dropout_key=jax.random.key(0))


@pytest.mark.parametrize("length", [129, 257, 385])
def test_d9_a_last_query_block_of_one_query(length):
    """Its own key is the first, and only, one of its key block."""
    arrays = [normal(seed, 1, length, 2, 8) for seed in range(3)]
    for window in (None, 129):
        expected, *outs = (
            jax.jit(
                functools.partial(alibi_attention, window=window, implementation=implementation)
            )(*arrays, alibi_slopes(2))
            for implementation in ("dense", "blockwise", "pallas_tpu")
        )
        for out in outs:
            np.testing.assert_allclose(out, expected, atol=1e-5)


def test_numbers_of_64_bits_are_taken():
    """float64 arrays and integers of 64 bits, as with jax_enable_x64."""
    with jax.enable_x64(True):
        query, key, value = (jnp.asarray(normal(seed, 1, 300, 2, 8)) for seed in range(3))
        slopes = alibi_slopes(2)
        dense, blocks, kernel = (
            jax.jit(functools.partial(alibi_attention, implementation=implementation))(
                query, key, value, slopes, offset=jnp.asarray(0)
            )
            for implementation in ("dense", "blockwise", "pallas_tpu")
        )
        np.testing.assert_allclose(blocks, dense, atol=1e-5)
        np.testing.assert_allclose(kernel, dense, atol=1e-5)
        exact = alibi_attention(*(x.astype(jnp.float64) for x in (query, key, value)), slopes)
        assert exact.dtype == jnp.float64
        np.testing.assert_allclose(dense, exact, atol=1e-5)
