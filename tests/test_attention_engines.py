"""Each engine is the oracle, forward and backward, and each is chosen where it should be."""

import functools
import math

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from alibi_jax.attention import alibi_attention, attention, engines
from alibi_jax.attention.tpu import attention as tpu_attention
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

pytestmark = pytest.mark.usefixtures("quick_compile")

PATHS = ["dense", "head_by_head", "all_heads", "folded"]


def use_path(patch, path, block):
    """Sets up an engine, or one of blockwise's two loops, and returns the `implementation`."""
    patch.setattr(engines, "_BLOCK_SIZE", {"cpu": block})
    if path in ("dense", "folded"):
        return path
    patch.setattr(engines, "_partitioned_by_compiler", lambda: path == "all_heads")
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
    """Attention in numpy and float64, all scores at once: the output and all gradients.

    `ids` are the segment ids of queries and of keys. Weights are multiplied by `kept`.
    """
    query, key, value, cotangent, slopes = (
        np.asarray(x, np.float64) for x in (query, key, value, cotangent, slopes)
    )
    (batch, length, heads, size), (key_length, kv_heads) = query.shape, key.shape[1:3]
    groups = heads // kv_heads
    wide_key, wide_value = np.repeat(key, groups, axis=2), np.repeat(value, groups, axis=2)
    query_indices = np.arange(length)[:, None] + (key_length - length if offset is None else offset)
    relative = np.arange(key_length) - query_indices
    scores = np.einsum("btnh,bsnh->bnts", query, wide_key) / math.sqrt(size)
    scores -= slopes[:, None, None] * np.abs(relative)
    seen = np.broadcast_to((relative <= 0) | (not causal), (batch, 1, length, key_length))
    if window is not None:
        seen = seen & (np.abs(relative) < window)
    if ids is not None:
        query_ids, key_ids = (np.asarray(x)[:, None] for x in ids)
        same = query_ids[..., :, None] == key_ids[..., None, :]
        seen = seen & same & (query_ids != 0)[..., None]
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(-1, keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    d_weights = np.einsum("btnv,bsnv->bnts", cotangent, wide_value) * kept
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True))

    def sum_groups(x):
        return x.reshape(batch, key_length, kv_heads, groups, -1).sum(3)

    return (
        np.einsum("bnts,bsnv->btnv", weights * kept, wide_value),
        np.einsum("bnts,bsnh->btnh", d_scores, wide_key) / math.sqrt(size),
        sum_groups(np.einsum("bnts,btnh->bsnh", d_scores, query) / math.sqrt(size)),
        sum_groups(np.einsum("bnts,btnv->bsnv", weights * kept, cotangent)),
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
    """The tolerance is absolute, or relative to the largest number if that is above 1."""
    for got, wanted in zip(actual, expected, strict=True):
        got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
        np.testing.assert_allclose(
            got, wanted, rtol=0, atol=tolerance * max(1.0, np.abs(wanted).max())
        )


# Compared with the oracle.


def segments(key_length):
    """Three documents of 55 tokens, and padding at the end."""
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
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.sample(12)
def test_d9_every_engine_is_the_oracle(
    path, length, more, heads, kv_heads, size, block, kwargs, monkeypatch
):
    """jax-ml/jax#24491 and #27224: more keys than queries, lengths that no block size divides."""
    if path == "folded" and (more or "causal" in kwargs):
        pytest.skip("folding is for causal self-attention")
    if path == "folded" and size > 122:
        pytest.skip("folding has columns for head sizes up to 122")
    given_arrays = arrays(length, length + more, heads, kv_heads, size)
    kwargs["implementation"] = use_path(monkeypatch, path, block)
    outputs = with_gradients(*given_arrays, **kwargs)
    del kwargs["implementation"]
    # Folded scores are rounded to float32 at the size of slope times length.
    tolerance = 1e-4 if path == "folded" and length > 512 else 1e-5
    assert_all_close(outputs, oracle(*given_arrays, **kwargs), tolerance)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("path", ["dense", "head_by_head", "all_heads"])
@pytest.mark.sample(2)
def test_d4_traced_offsets_and_segments_are_the_oracle(path, window, monkeypatch):
    given_arrays = arrays(100, 200, 4, 2, 8)
    ids = segments(200)
    outputs = with_gradients(
        *given_arrays,
        traced=jnp.int32(83),
        window=window,
        query_segment_ids=ids[:, 83:183],
        key_segment_ids=ids,
        implementation=use_path(monkeypatch, path, 32),
    )
    expected = oracle(*given_arrays, window=window, offset=83, ids=(ids[:, 83:183], ids))
    assert_all_close(outputs, expected, 1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_bfloat16_is_the_oracle(path, monkeypatch):
    given_arrays = arrays(200, 200, 12, 4, 64, dtype=jnp.bfloat16)
    outputs = with_gradients(*given_arrays, implementation=use_path(monkeypatch, path, 64))
    assert [x.dtype for x in outputs] == [jnp.bfloat16] * 4 + [jnp.float32]
    output, *gradients = oracle(*given_arrays)
    # Weights and outputs have 8 bits each.
    np.testing.assert_allclose(np.asarray(outputs[0], np.float64), output, atol=1e-2, rtol=1e-2)
    assert_all_close(outputs[1:], gradients, 1e-2)


@settings(max_examples=5, deadline=None)
@given(
    path=st.sampled_from(["head_by_head", "all_heads"]),
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
    path, length, more, kv_heads, groups, size, block, causal, window, data
):
    given_arrays = arrays(length, length + more, kv_heads * groups, kv_heads, size, batch=2)
    offset = data.draw(st.integers(0, more))
    with pytest.MonkeyPatch.context() as patch:
        outputs = with_gradients(
            *given_arrays,
            offset=offset,
            causal=causal,
            window=window,
            implementation=use_path(patch, path, block),
        )
    expected = oracle(*given_arrays, offset=offset, causal=causal, window=window)
    assert_all_close(outputs, expected, 1e-5)


def test_dropout_in_blocks_is_the_oracle_with_the_same_weights_dropped(monkeypatch):
    implementation = use_path(monkeypatch, "head_by_head", 16)
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

    # The values are the rows of a unit matrix, so that the output is the weights.
    unit_values = jnp.broadcast_to(jnp.eye(length)[:, None], value.shape)
    kept = np.asarray(run(query, key, unit_values)[0]).transpose(0, 2, 1, 3) != 0
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
    """The forget gate, times a factor that is a parameter."""
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
    """Gradients of a weighted sum of the outputs by query, key, value, parameters and gates."""
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
    """Maps the layer over two batch rows, each with its own parameters."""

    def run(query, key, value, parameters, gates):
        inputs = [jnp.stack([x, 0.5 * x]) for x in (query, key, value)]
        both = jax.tree.map(lambda x: jnp.stack([x, 1.5 * x]), parameters)
        return jax.vmap(layer)(*inputs, both, jnp.stack([gates, 2 * gates])).sum(0)

    return run


def scanned(layer):
    """Scans two layers, each with its own parameters."""

    def run(query, key, value, parameters, gates):
        both = jax.tree.map(lambda x: jnp.stack([x, 1.5 * x]), parameters)

        def step(x, parameters):
            return x + layer(x, key, value, parameters, gates), None

        return jax.lax.scan(step, query, both)[0]

    return run


@pytest.mark.parametrize("method", PARAMETERS, ids=lambda method: method.__name__)
@pytest.mark.sample(2)
def test_parameters_of_a_bias_have_the_gradients_of_dense_attention(method, monkeypatch):
    expected = gradients_of(method, "dense")
    # The block size does not divide the length.
    blockwise = gradients_of(method, use_path(monkeypatch, "head_by_head", 16))
    assert_all_close(*map(jax.tree.leaves, (blockwise, expected)), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("transform", [jax.checkpoint, mapped, scanned])
@pytest.mark.parametrize("method", [t5, fox], ids=lambda method: method.__name__)
def test_transformed_biases_have_the_gradients_of_dense_attention(method, transform, monkeypatch):
    expected = gradients_of(method, "dense", transform)
    blockwise = gradients_of(method, use_path(monkeypatch, "head_by_head", 16), transform)
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
    """NVIDIA/TransformerEngine#1046: the first query of a shard is not query 0."""
    monkeypatch.setattr(engines, "_BLOCK_SIZE", {"cpu": 8})
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
    sharding = NamedSharding(mesh, PartitionSpec("data", None, "model"))
    with jax.set_mesh(mesh):
        assert engines._partitioned_by_compiler()
        on_mesh = [jax.device_put(x, sharding) for x in (query, key, value, cotangent)]
        outputs = with_gradients(*on_mesh, slopes)
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
    """The loop over heads keeps its inputs for the gradient, and no copy of them."""
    mesh = jax.make_mesh((2,), ("heads",), (AxisType.Auto,), devices=jax.devices()[:2])
    by_head = PartitionSpec(None, None, "heads")
    sharded = jax.shard_map(
        alibi_attention,
        mesh=mesh,
        in_specs=(by_head, by_head, by_head, PartitionSpec("heads")),
        out_specs=by_head,
        check_vma=check_vma,
    )
    array = jax.ShapeDtypeStruct(
        (1, 4096, 8, 64), jnp.float32, sharding=NamedSharding(mesh, by_head)
    )
    total = jax.grad(lambda *x: sharded(*x, alibi_slopes(8)).sum(), argnums=(0, 1, 2))
    compiled = jax.jit(total).lower(array, array, array).compile()
    # Queries, keys, values, the result and three gradients are 7 arrays; less than one is extra.
    assert 2 * compiled.memory_analysis().temp_size_in_bytes < 8 * array.size * 4


# The choice of an engine.


class Chosen(Exception):
    """The name of the engine that was chosen."""


@pytest.fixture
def chosen(monkeypatch):
    """`chosen("gpu", 300, dtype=..., causal=...)` is the engine that the platform would use."""

    def stand_in(name):
        def engine(*args, **kwargs):
            raise Chosen(name)

        return engine

    for name in ("dense", "blockwise", "folded"):
        monkeypatch.setattr(engines, name, stand_in(name))
    monkeypatch.setattr(tpu_attention, "pallas_tpu", stand_in("pallas_tpu"))

    def choose(platform, length=300, key_length=None, dtype=jnp.bfloat16, size=8, **kwargs):
        monkeypatch.setattr(engines, "_platform", lambda _: platform)
        *inputs, _, slopes = arrays(length, key_length or length, 2, 1, size, dtype=dtype)
        kwargs = {"bias": LinearBias(slopes)} | kwargs
        with pytest.raises(Chosen) as error:
            jax.eval_shape(functools.partial(attention, **kwargs), *inputs)
        return str(error.value)

    return choose


INDEX = jnp.arange(300, dtype=jnp.int32)
ONES = jnp.ones((1, 300), jnp.int32)
# Arguments that no engine with built-in linear biases serves.
UNSERVED = {
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
def test_small_inputs_are_dense(chosen, platform):
    assert chosen(platform, 256) == "dense"
    assert chosen(platform, 257) != "dense"
    # As in decoding.
    assert chosen(platform, 16, 10000) == "dense"
    assert chosen(platform, 17, 10000) != "dense"


def test_a_cpu_uses_blocks(chosen):
    assert chosen("cpu") == chosen("cpu", dtype=jnp.float32) == "blockwise"


def test_a_tpu_uses_its_kernel_where_it_serves(chosen):
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
        assert chosen("tpu", **kwargs) == "pallas_tpu", kwargs
    for name, kwargs in UNSERVED.items():
        assert chosen("tpu", **kwargs) == "blockwise", name
    # The compiler cannot partition the kernel over devices.
    with jax.set_mesh(jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])):
        assert chosen("tpu") == "blockwise"


def test_a_gpu_folds_16_bit_arrays_where_folding_serves(chosen):
    for kwargs in ({}, {"dtype": jnp.float16}, {"window": 9}, {"size": 122}):
        assert chosen("gpu", **kwargs) == "folded", kwargs
    for kwargs in (
        *UNSERVED.values(),
        {"dtype": jnp.float32},
        {"causal": False},
        {"size": 123},
        {"key_length": 400},
        {"query_segment_ids": ONES, "key_segment_ids": ONES},
        # Not exact enough in 16 bits.
        {"bias": LinearBias(jnp.array([1.0, 200.0]))},
    ):
        assert chosen("gpu", **kwargs) == "blockwise", kwargs


@pytest.mark.parametrize("engine", ["pallas_tpu", "folded"])
def test_an_engine_that_cannot_serve_is_refused_by_name(engine):
    query, key, value, _, slopes = arrays(300, 300, 2, 1, 8)
    for kwargs, message in zip(
        UNSERVED.values(),
        ["linear biases only"] * 2
        + ["no slopes for future keys"]
        + ["indices as positions"] * 2
        + ["no mask, no dropout"] * 2,
        strict=True,
    ):
        kwargs = {"bias": LinearBias(slopes)} | kwargs
        with pytest.raises(ValueError, match=f"implementation='{engine}' .*{message}.*'blockwise'"):
            attention(query, key, value, implementation=engine, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"causal": False}, "causal self-attention of one segment"),
        (
            {"query_segment_ids": ONES, "key_segment_ids": ONES},
            "causal self-attention of one segment",
        ),
        ({"bias": LinearBias(jnp.array([1.0, 200.0]))}, "slopes up to 200 .* 'blockwise'"),
    ],
)
def test_folding_refuses_what_it_cannot_serve(kwargs, message):
    query, key, value, _, slopes = arrays(300, 300, 2, 1, 8)
    kwargs = {"bias": LinearBias(slopes)} | kwargs
    with pytest.raises(ValueError, match=f"'folded'.*{message}"):
        attention(query, key, value, implementation="folded", **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"implementation": "flash"},
            "implementation='flash' is unknown: give 'dense', 'blockwise'",
        ),
        ({"window": 0}, "window=0 must be at least 1"),
        ({"tolerance": 1.0}, r"tolerance=1\.0 must be at least 0 and below 1"),
        ({"tolerance": -1.0}, r"tolerance=-1\.0 must be at least 0"),
        ({"tolerance": math.nan}, "tolerance=nan must be"),
    ],
)
def test_invalid_options_are_refused(kwargs, message):
    query, key, value, _, slopes = arrays(5, 5, 2, 1, 8)
    with pytest.raises(ValueError, match=message):
        alibi_attention(query, key, value, slopes, **kwargs)


# Arrays that do not fit together.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value": (1, 300, 2, 8)}, "do not fit together"),
        ({"value": (1, 384, 1, 8)}, "do not fit together"),
        ({"key": (2, 384, 2, 8)}, "do not fit together"),
        ({"key": (1, 384, 2, 16)}, "do not fit together"),
        (
            {"query_positions": (300,)},
            r"query_positions has shape \(300,\): give \(384,\), \(1, 384\) or",
        ),
        ({"key_positions": (2, 384)}, r"key_positions has shape \(2, 384\)"),
        ({"query_segment_ids": (1, 384), "key_segment_ids": (1, 300)}, "key_segment_ids"),
        ({"mask": (1, 1, 384, 300)}, r"mask has shape \(1, 1, 384, 300\): give \(1, 4, 384, 384\)"),
        ({"window": 2.5}, r"window=2.5 must be an integer"),
        ({"offset": 3.0}, r"offset=3.0 must be an integer"),
        ({"future_slopes": (3,)}, r"future_slopes has shape \(3,\): .* the 4 query heads"),
        ({"slopes": 0.5}, r"slopes has shape \(\): give one slope for each of the 4"),
        ({"query": (384, 4, 8)}, "do not fit together"),
        ({"key": (1, 384, 0, 8), "value": (1, 384, 0, 8)}, "key has 0 heads and query has 4"),
        (
            {"query": np.ones((1, 384, 4, 8), int)},
            "int64, float32, float32: give floating-point arrays",
        ),
    ],
)
def test_shapes_that_do_not_fit_together_are_refused(options, message, monkeypatch):
    # Without the type checks of the tests, as for users.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    kinds = {"mask": bool, "query_positions": int, "key_positions": int}
    kinds |= {"query_segment_ids": int, "key_segment_ids": int}
    made = {"query": (1, 384, 4, 8), "key": (1, 384, 2, 8), "value": (1, 384, 2, 8)} | options
    made = {
        name: jnp.ones(x, kinds.get(name, float)) if isinstance(x, tuple) else x
        for name, x in made.items()
    }
    with pytest.raises(ValueError, match=message):
        alibi_attention(**{"slopes": alibi_slopes(4)} | made)


@pytest.mark.parametrize("length", [20, 300])
def test_numpy_arrays_are_accepted(length, monkeypatch):
    # Without the type checks of the tests, as for users.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    *inputs, _, slopes = arrays(length, length, 2, 1, 8)
    out = alibi_attention(*(np.asarray(x) for x in inputs), np.asarray(slopes))
    np.testing.assert_array_equal(out, alibi_attention(*inputs, slopes))


@pytest.mark.parametrize("engine", ["dense", "blockwise", "pallas_tpu"])
def test_segment_ids_of_one_row_serve_all_rows(engine, monkeypatch):
    # Without the type checks of the tests, as for users.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    *inputs, _, slopes = arrays(20, 20, 2, 1, 8, batch=2)
    ids = 1 + jnp.arange(20) // 7
    attend = functools.partial(alibi_attention, *inputs, slopes, implementation=engine)
    shapes = (20,), (1, 20), (2, 20)
    broadcast = (jnp.broadcast_to(ids, shape) for shape in shapes)
    outs = [attend(query_segment_ids=x, key_segment_ids=x) for x in broadcast]
    for out in outs[:-1]:
        np.testing.assert_array_equal(out, outs[-1])


@pytest.mark.parametrize("rate", [-0.5, 1.0, math.nan])
def test_dropout_rates_out_of_range_are_refused(rate):
    *inputs, _, _ = arrays(5, 5, 2, 1, 8)
    with pytest.raises(ValueError, match=f"dropout_rate={rate} must be at least 0 and below 1"):
        attention(*inputs, dropout_rate=rate, dropout_key=jax.random.key(0))


@pytest.mark.parametrize("length", [129, 257, 385])
def test_d9_a_last_query_block_of_one_query(length):
    """The query's own key is the only key of its block."""
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


def test_64_bit_arrays_are_accepted():
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
