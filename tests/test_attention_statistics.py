"""Attention statistics are the oracle in float64, in chunks and over devices."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import every_jaxpr, mesh_of
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_jax.attention import statistics
from alibi_jax.attention.statistics import attention_resolution, attention_statistics
from alibi_jax.biases import (
    FireWeights,
    LinearBias,
    alibi_slopes,
    fire_bias_at,
    forget_bias_at,
    forget_decay,
    t5_bias_at,
)

BATCH, HEADS, KV_HEADS, SIZE = 2, 4, 2, 4
# Tolerance for means over dozens of queries of float32 numbers between 1 and 10.
EXACT = dict(rtol=1e-5, atol=1e-5)


def oracle(query, key, bias=None):
    """(entropy, distance, scores) in float64, one query and one key at a time.

    `bias` is `[B, N, T, T]`.
    """
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    batch, length, heads, size = query.shape
    group = heads // key.shape[2]
    entropy, distance = np.zeros((2, batch, heads))
    scores = np.zeros((batch, heads, length))
    for b in range(batch):
        for n in range(heads):
            for i in range(length):
                row = []
                for j in range(i + 1):
                    score = sum(query[b, i, n] * key[b, j, n // group]) / math.sqrt(size)
                    score += 0.0 if bias is None else float(bias[b, n, i, j])
                    scores[b, n, i - j] += score / (length - (i - j))
                    row.append(score)
                total = sum(math.exp(score) for score in row)
                for j, score in enumerate(row):
                    share = math.exp(score) / total
                    entropy[b, n] -= share * math.log(share) / length
                    distance[b, n] += share * (i - j) / length
    return entropy, distance, scores


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def queries_and_keys(length, *, batch=BATCH, heads=HEADS, kv_heads=KV_HEADS):
    return (
        normal(batch, length, heads, SIZE),
        normal(batch, length, kv_heads, SIZE, seed=1),
    )


def assert_is(measured, expected, **tolerances):
    for name, one, other in zip(measured._fields, measured, expected, strict=True):
        assert one.dtype == jnp.float32
        np.testing.assert_allclose(one, other, err_msg=name, **(EXACT | tolerances))


def in_chunks_of(chunk, monkeypatch, *, length, batch=BATCH, heads=HEADS):
    monkeypatch.setattr(statistics, "MAX_SCORES", chunk * batch * heads * length)


# Compared with the oracle.


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_statistics_are_the_oracle(kv_heads):
    query, key = queries_and_keys(9, kv_heads=kv_heads)
    assert_is(attention_statistics(query, key, bias=None), oracle(query, key))


def test_key_heads_serve_neighbouring_query_heads():
    query, key = queries_and_keys(9)
    repeated = attention_statistics(query, jnp.repeat(key, 2, axis=2), bias=None)
    assert_is(attention_statistics(query, key, bias=None), repeated)


def biases(length):
    """One bias of each kind, and its features."""
    decay = forget_decay(jax.nn.log_sigmoid(normal(BATCH, length, HEADS)))
    fire = FireWeights(0.1, 4.0, *(normal(*shape) for shape in [(8,), (8,), (8, HEADS), (HEADS,)]))
    return {
        "linear": (LinearBias(alibi_slopes(HEADS)), None),
        "t5": (functools.partial(t5_bias_at, normal(32, HEADS)), None),
        "fire": (functools.partial(fire_bias_at, fire), None),
        "fox": (lambda i, j, queries, keys: forget_bias_at(queries, keys), decay),
    }


@pytest.mark.parametrize("name", biases(1))
@pytest.mark.parametrize("chunk", [1, 4, 9])
@pytest.mark.sample(4)
def test_biases_in_chunks_are_the_oracle(name, chunk, monkeypatch):
    length = 9
    query, key = queries_and_keys(length)
    bias, features = biases(length)[name]
    positions = jnp.arange(length)
    inputs = (
        (positions, positions) if features is None else (positions, positions, features, features)
    )
    whole = np.broadcast_to(bias(*inputs), (BATCH, HEADS, length, length))
    in_chunks_of(chunk, monkeypatch, length=length)
    measured = attention_statistics(
        query, key, bias=bias, query_features=features, key_features=features
    )
    assert_is(measured, oracle(query, key, whole))


@settings(max_examples=15, deadline=None)
@given(
    length=st.integers(1, 13),
    allowed=st.integers(1, 1500),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 2),
)
@pytest.mark.slow
def test_any_shape_in_any_chunks_is_the_oracle(length, allowed, batch, kv_heads, groups):
    query, key = queries_and_keys(length, batch=batch, heads=kv_heads * groups, kv_heads=kv_heads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "MAX_SCORES", allowed)
        measured = attention_statistics(query, key, bias=None)
    assert_is(measured, oracle(query, key))


def test_bfloat16_has_float32_scores():
    query, key = (x.astype(jnp.bfloat16) for x in queries_and_keys(9))
    assert_is(attention_statistics(query, key, bias=None), oracle(query, key))


# Known values.


@pytest.mark.parametrize("length", [1, 2, 50])
@pytest.mark.parametrize("chunk", [7, 50])
@pytest.mark.sample(2)
def test_uniform_attention_is_known(length, chunk, monkeypatch):
    in_chunks_of(chunk, monkeypatch, length=length)
    query, key = queries_and_keys(length)
    measured = attention_statistics(0 * query, key, bias=None)
    entropy = np.mean(np.log(np.arange(1, length + 1)))
    distance = np.mean(np.arange(length) / 2)
    assert_is(measured, (entropy, distance, 0.0))


def test_scores_of_a_linear_bias_alone_are_the_bias():
    query, key = queries_and_keys(20)
    slopes = alibi_slopes(HEADS)
    measured = attention_statistics(0 * query, key, bias=LinearBias(slopes))
    expected = np.broadcast_to(-slopes[:, None] * np.arange(20), (BATCH, HEADS, 20))
    np.testing.assert_allclose(measured.scores, expected, rtol=1e-6)
    # Far from the start, the distances have a geometric distribution.
    far = attention_statistics(
        jnp.zeros((1, 2000, 1, 2)), jnp.zeros((1, 2000, 1, 2)), bias=LinearBias([0.5])
    )
    ratio = math.exp(-0.5)
    assert far.distance[0, 0] == pytest.approx(ratio / (1 - ratio), rel=2e-3)


def test_sharp_attention_has_no_entropy_and_no_nan():
    """Where weights underflow, 0 · log 0 is 0."""
    query, key = queries_and_keys(9)
    measured = attention_statistics(query, key, bias=LinearBias([1e6] * HEADS))
    assert not np.any(measured.entropy)
    assert not np.any(measured.distance)
    never = attention_statistics(
        query, key, bias=lambda i, j: jnp.where(i[:, None] == j, 0.0, -jnp.inf)[None]
    )
    assert not np.any(never.entropy)


def test_scores_of_the_future_are_ignored():
    query, key = queries_and_keys(9)

    def above(i, j):
        return jnp.where(i[:, None] < j, jnp.inf, 0.0)[None]

    assert_is(attention_statistics(query, key, bias=above), oracle(query, key))


def test_a_large_constant_changes_scores_only():
    query, key = queries_and_keys(9)
    expected = oracle(query, key)
    shifted = attention_statistics(query, key, bias=lambda i, j: jnp.full((1, len(i), len(j)), 1e3))
    assert_is(shifted, (*expected[:2], expected[2] + 1e3), atol=1e-4)


# Resolution.


def test_resolution_of_equal_scores_or_one_score_is_zero():
    assert attention_resolution(np.full((2, 3, 7), 4.0)).tolist() == [[0.0] * 3] * 2
    assert attention_resolution(np.array([5.0])) == 0.0


def test_resolution_of_two_scores():
    """e^0 (e^0 - e^-1) / (e^0 + e^-1)^2, as the second score has no successor."""
    expected = (1 - math.exp(-1)) / (1 + math.exp(-1)) ** 2
    assert attention_resolution(np.array([0.0, -1.0])) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("slope", [2.0, 0.5, 2**-8])
def test_resolution_of_alibi_without_content_has_a_closed_form(slope):
    """With a = e^-m: (1-a) Σ a^2n over (Σ a^n)^2, which is (1-a)^2 / (1+a) as T grows."""
    a = math.exp(-slope)
    for length in (2, 100):
        scores = -slope * np.arange(length)
        numerator = (1 - a) * (1 - a ** (2 * (length - 1))) / (1 - a**2)
        denominator = ((1 - a**length) / (1 - a)) ** 2
        expected = numerator / denominator
        assert attention_resolution(scores) == pytest.approx(expected, rel=1e-10)
    whole = attention_resolution(-slope * np.arange(100_000))
    assert whole == pytest.approx((1 - a) ** 2 / (1 + a), rel=1e-10)


def test_resolution_does_not_change_with_a_shift():
    scores = np.random.default_rng(0).normal(size=(2, 5))
    expected = attention_resolution(scores)
    assert np.ptp(expected) > 0.01
    for shift in (-1e4, 3.0, 1e4):
        np.testing.assert_allclose(attention_resolution(scores + shift), expected, rtol=1e-9)


def test_resolution_is_less_where_scores_rise_with_the_distance():
    assert attention_resolution(np.arange(5.0)) < 0 < attention_resolution(-np.arange(5.0))


def test_resolution_of_float32_scores_is_float64():
    assert attention_resolution(np.zeros((2, 4), np.float32)).dtype == np.float64


# Memory and devices.

LONG = 4096


def measure(query, key, num_shards=1):
    bias = LinearBias(alibi_slopes(8))
    return attention_statistics(query, key, bias=bias, num_shards=num_shards)


def test_no_array_of_a_long_input_has_all_scores():
    of_queries, of_keys = (jax.ShapeDtypeStruct((1, LONG, n, 16), np.float32) for n in (8, 2))
    traced = jax.jit(measure).trace(of_queries, of_keys)
    shapes = {
        getattr(variable.aval, "shape", ())
        for jaxpr in every_jaxpr(traced.jaxpr.jaxpr)
        for equation in jaxpr.eqns
        for variable in (*equation.invars, *equation.outvars)
    }
    # The scores of a chunk are found, so that the search covers the body of the loop.
    assert (1, 8, statistics.MAX_SCORES // (8 * LONG), LONG) in shapes
    assert max(map(math.prod, shapes)) < LONG * LONG
    temporary = traced.lower().compile().memory_analysis().temp_size_in_bytes
    assert temporary < 4 * 8 * LONG * LONG / 4


def test_a_device_holds_its_shard_of_rows_and_heads(monkeypatch):
    arrays = queries_and_keys(64, batch=4, heads=8, kv_heads=2)
    one = measure(*arrays)
    monkeypatch.setattr(statistics, "MAX_SCORES", 2 * 4 * 64 * 10)
    sharded = jax.jit(functools.partial(measure, num_shards=4))
    with jax.set_mesh(mesh_of(2, 1, 1, 2)):
        traced = sharded.trace(*arrays)
        several = sharded(*arrays)
    assert "4,8,10,64" in str(traced.jaxpr)
    assert_is(several, one, rtol=1e-6, atol=1e-6)
