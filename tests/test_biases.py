"""The properties that all biases of positions share."""

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_biases_alibi import alibi_oracle, devices_mesh
from test_biases_fire import fire_oracle, fire_weights
from test_biases_kerple import log_oracle, power_oracle
from test_biases_sandwich import sandwich_oracle
from test_biases_t5 import bucket_oracle

import alibi_jax
from alibi_jax import biases
from alibi_jax.biases import FireWeights, alibi_slopes, sandwich_ratios

pytestmark = pytest.mark.usefixtures("quick_compile")

quick = settings(max_examples=10, deadline=None)

HEADS = jax.P("devices")


def t5_oracle(table, query_positions, key_positions):
    return np.array(
        [
            [table[bucket_oracle(int(j) - int(i), False)] for j in key_positions]
            for i in query_positions
        ]
    ).transpose(2, 0, 1)


class BiasCase(NamedTuple):
    by_length: Callable[..., Any]
    at: Callable[..., Any]
    oracle: Callable[..., Any]
    weights: tuple[Any, ...]  # the arguments before lengths or positions, for eight heads
    shards: tuple[Any, ...]  # the sharding of the weights by heads
    tolerance: dict[str, float]  # the float32 rounding of the formula


BIASES = {
    "alibi": BiasCase(
        biases.alibi_bias,
        biases.alibi_bias_at,
        alibi_oracle,
        (alibi_slopes(8),),
        (HEADS,),
        {"rtol": 1e-7},
    ),
    "t5": BiasCase(
        biases.t5_bias,
        biases.t5_bias_at,
        t5_oracle,
        (jnp.sin(jnp.arange(1.0, 257)).reshape(32, 8),),
        (jax.P(None, "devices"),),
        {"rtol": 0},
    ),
    "kerple_log": BiasCase(
        biases.kerple_log_bias,
        biases.kerple_log_bias_at,
        log_oracle,
        (jnp.linspace(0.1, 2, 8), jnp.linspace(1, 0.01, 8)),
        (HEADS, HEADS),
        {"rtol": 5e-7},
    ),
    "kerple_power": BiasCase(
        biases.kerple_power_bias,
        biases.kerple_power_bias_at,
        power_oracle,
        (jnp.linspace(0.1, 2, 8), jnp.linspace(2, 0.1, 8)),
        (HEADS, HEADS),
        {"rtol": 2e-6},
    ),
    "sandwich": BiasCase(
        biases.sandwich_bias,
        biases.sandwich_bias_at,
        sandwich_oracle,
        (sandwich_ratios(8),),
        (HEADS,),
        {"rtol": 0, "atol": 5e-5},
    ),
    "fire": BiasCase(
        biases.fire_bias,
        biases.fire_bias_at,
        fire_oracle,
        (fire_weights(8),),
        (FireWeights(jax.P(), jax.P(), jax.P(), jax.P(), jax.P(None, "devices"), HEADS),),
        {"rtol": 0, "atol": 3e-6},
    ),
}


@pytest.fixture(params=BIASES)
def bias(request):
    return BIASES[request.param]


def test_every_bias_is_imported_from_the_package():
    others = {"__version__", "alibi_attention"}
    assert set(alibi_jax.__all__) == set(biases.__all__) | others
    assert all(getattr(alibi_jax, name) is getattr(biases, name) for name in biases.__all__)


@quick
@given(
    st.integers(0, 10**6),
    st.lists(st.integers(-2048, 2048), min_size=3, max_size=3),
    st.lists(st.integers(-2048, 2048), min_size=8, max_size=8),
)
def test_bias_at_positions_is_the_oracle(first, queries, keys):
    # The first key has the position of the first query.
    queries, keys = first + np.array(queries), first + np.array([queries[0], *keys[1:]])
    for bias in BIASES.values():
        actual = bias.at(*bias.weights, jnp.asarray(queries), jnp.asarray(keys))
        assert actual.dtype == jnp.float32
        np.testing.assert_allclose(
            actual, bias.oracle(*bias.weights, queries, keys), **bias.tolerance
        )


@pytest.mark.parametrize("offset", [None, -100, 3000])
def test_b7_bias_by_length_is_the_bias_at_positions(bias, offset):
    queries = jnp.arange(3) + (5 if offset is None else offset)
    np.testing.assert_array_equal(
        bias.by_length(*bias.weights, 3, 8, offset=offset),
        bias.at(*bias.weights, queries, jnp.arange(8)),
    )


def test_queries_that_do_not_fit_are_refused(bias):
    with pytest.raises(ValueError, match=r"5 queries .* 3 keys"):
        bias.by_length(*bias.weights, 5, 3)
    assert bias.by_length(*bias.weights, 5, 3, offset=0).shape == (8, 5, 3)


@pytest.mark.parametrize("chunks", [[8], [1] * 8, [3, 5], [1, 7]])
@pytest.mark.sample(8)
def test_b8_decoding_steps_are_rows_of_the_whole_bias(bias, chunks):
    step = jax.jit(bias.by_length, static_argnames=("query_length", "key_length"))
    steps = [
        step(*bias.weights, query_length=chunk, key_length=8, offset=at)
        for chunk, at in zip(chunks, np.cumsum([0, *chunks[:-1]]))
    ]
    assert all(jnp.any(step_bias != 0) for step_bias in steps)
    whole = bias.by_length(*bias.weights, 8)
    np.testing.assert_allclose(jnp.concatenate(steps, axis=1), whole, **bias.tolerance)


def test_d1_left_padding_changes_no_bias_of_real_tokens(bias):
    padded = jnp.array([0, 0, 0, 1, 2])
    whole = bias.at(*bias.weights, padded, padded)
    alone = bias.by_length(*bias.weights, 3)
    np.testing.assert_allclose(whole[:, 2:, 2:], alone, **bias.tolerance)


def test_d3_packed_positions_give_each_document_its_own_bias(bias):
    packed = jnp.array([0, 1, 2, 3, 4, 0, 1, 2])
    whole = bias.at(*bias.weights, packed, packed)
    first, second = bias.by_length(*bias.weights, 5), bias.by_length(*bias.weights, 3)
    np.testing.assert_allclose(whole[:, :5, :5], first, **bias.tolerance)
    np.testing.assert_allclose(whole[:, 5:, 5:], second, **bias.tolerance)


@pytest.mark.sample(3)
def test_a3_bias_with_heads_sharded_is_the_whole_bias(bias):
    by_shard = jax.shard_map(
        lambda *weights: bias.by_length(*weights, 8),
        mesh=devices_mesh(8),
        in_specs=bias.shards,
        out_specs=HEADS,
    )(*bias.weights)
    np.testing.assert_allclose(by_shard, bias.by_length(*bias.weights, 8), **bias.tolerance)


@pytest.mark.sample(3)
def test_d8_bias_of_a_shard_is_its_rows_of_the_whole(bias):
    size = 8
    rows = jax.shard_map(
        lambda: bias.by_length(
            *bias.weights, size, 64, offset=jax.lax.axis_index("devices") * size
        ),
        mesh=devices_mesh(8),
        in_specs=(),
        out_specs=jax.P(None, "devices"),
    )()
    np.testing.assert_allclose(rows, bias.by_length(*bias.weights, 64), **bias.tolerance)


def test_batches_by_broadcasting_and_by_vmap(bias):
    queries, keys = jnp.array([[0, 1, 2], [50, 60, 90]]), 40 + jnp.arange(8)
    whole = bias.at(*bias.weights, queries, keys)
    assert whole.shape == (2, 8, 3, 8)
    for row, row_queries in zip(whole, queries):
        np.testing.assert_allclose(row, bias.at(*bias.weights, row_queries, keys), **bias.tolerance)
    by_vmap = jax.jit(jax.vmap(lambda queries: bias.at(*bias.weights, queries, keys)))(queries)
    np.testing.assert_allclose(by_vmap, whole, **bias.tolerance)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64])
@pytest.mark.sample(4)
def test_c1_weights_of_any_dtype_are_computed_in_float32(bias, dtype):
    with jax.enable_x64(True):
        given = jax.tree.map(lambda weight: weight.astype(dtype), bias.weights)
        whole = bias.by_length(*given, 8)
    assert whole.dtype == jnp.float32
    exact = jax.tree.map(lambda weight: weight.astype(jnp.float32), given)
    np.testing.assert_array_equal(whole, bias.by_length(*exact, 8))


def test_a6_gradient_is_the_slope_of_the_oracle(bias):
    """Along a random direction of the weights, for distances from 0 to 6."""
    rng = np.random.default_rng(zlib.crc32(bias.at.__name__.encode()))
    cotangent = rng.normal(size=(8, 3, 8))
    gradient = jax.grad(
        lambda weights: (bias.by_length(*weights, 3, 8, offset=1) * jnp.asarray(cotangent)).sum()
    )(bias.weights)
    leaves, tree = jax.tree.flatten(bias.weights)
    direction = [rng.normal(size=leaf.shape) for leaf in leaves]

    def oracle(step):
        moved = [np.asarray(leaf, np.float64) + step * d for leaf, d in zip(leaves, direction)]
        at = range(1, 4), range(8)
        return (bias.oracle(*jax.tree.unflatten(tree, moved), *at) * cotangent).sum()

    numeric = (oracle(1e-6) - oracle(-1e-6)) / 2e-6
    assert abs(numeric) > 0.1
    along = sum((np.asarray(g) * d).sum() for g, d in zip(jax.tree.leaves(gradient), direction))
    np.testing.assert_allclose(along, numeric, rtol=1e-4)


def test_bias_is_exported_for_any_number_of_keys(bias):
    (num_keys,) = jax.export.symbolic_shape("keys")
    shapes = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (3, num_keys)]
    exported = jax.export.export(jax.jit(lambda *at: bias.at(*bias.weights, *at)))(*shapes)
    queries, keys = jnp.arange(2, 5, dtype=jnp.int32), jnp.arange(8, dtype=jnp.int32)
    np.testing.assert_allclose(
        exported.call(queries, keys), bias.at(*bias.weights, queries, keys), **bias.tolerance
    )
