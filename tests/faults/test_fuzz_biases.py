"""Random positions and parameters of every bias function, against NumPy in float64."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuzz import fuzz, inputs, one_line
from hypothesis import strategies as st
from random_positions import (
    LAST,
    assert_within,
    exact_relative,
    inputs_of,
    per_head,
    refused_broken,
)

from alibi_jax.biases import (
    FireWeights,
    alibi_bias,
    alibi_bias_at,
    fire_bias,
    fire_bias_at,
    kerple_log_bias,
    kerple_log_bias_at,
    kerple_power_bias,
    kerple_power_bias_at,
    sandwich_bias,
    sandwich_bias_at,
    t5_bias,
    t5_bias_at,
)

pytestmark = pytest.mark.usefixtures("quick_compile")

BUCKETS, MAX_DISTANCE = 32, 128


class Method(NamedTuple):
    """A bias function, and an oracle that gives the bias in float64 and its greatest error."""

    parameters: Callable[[np.random.Generator, int], Any]
    function: Callable[..., Any]
    oracle: Callable[..., tuple[np.ndarray, np.ndarray]]
    # The same function of lengths, if there is one.
    by_length: Callable[..., Any] | None = None


def scales(random, heads):
    return np.exp(random.uniform(-9, 3, heads)).astype(np.float32)


def alibi(slopes, queries, keys):
    bias = -per_head(slopes) * abs(exact_relative(queries, keys))
    return bias, 2.0**-22 * abs(bias)


def alibi_two_slopes(slopes, queries, keys):
    relative = exact_relative(queries, keys)
    past, future = map(per_head, slopes)
    bias = np.where(relative > 0, -future, -past) * abs(relative)
    return bias, 2.0**-22 * abs(bias)


def t5_bucket(distance, buckets):
    exact = buckets // 2
    ratio = np.log(np.maximum(distance, 1) / exact) / math.log(MAX_DISTANCE / exact)
    # Exactly at a boundary the logarithms are off by less than 1e-12, elsewhere by more.
    bucket = exact + np.floor(ratio * (buckets - exact) + 1e-12)
    return np.where(distance < exact, distance, np.minimum(bucket, buckets - 1)).astype(int)


def t5(bidirectional, table, queries, keys):
    relative = exact_relative(queries, keys)[..., 0, :, :]
    half = BUCKETS // 2
    if bidirectional:
        bucket = t5_bucket(abs(relative), half) + np.where(relative > 0, half, 0)
    else:
        bucket = t5_bucket(np.maximum(-relative, 0), BUCKETS)
    bias = np.moveaxis(table.astype(np.float64)[bucket], -1, -3)
    return bias, np.zeros_like(bias)


def kerple_log(parameters, queries, keys):
    scale, rate = map(per_head, parameters)
    logarithm = np.log1p(rate * abs(exact_relative(queries, keys)))
    return -scale * logarithm, scale * 1e-6 * (1 + logarithm)


def kerple_power(parameters, queries, keys):
    scale, exponent = map(per_head, parameters)
    power = scale * abs(exact_relative(queries, keys)) ** exponent
    return -power, 1e-5 * power


def sandwich(ratios, queries, keys, width=128):
    relative = exact_relative(queries, keys)[..., None]
    angles = relative * 10000.0 ** (-np.arange(0, width, 2) / width)
    bias = (np.cos(angles).sum(-1) - width / 2) / per_head(ratios)
    return bias, np.broadcast_to(3e-5 / per_head(ratios), bias.shape)


def fire(weights, queries, keys):
    rate, threshold, kernel, bias, out_kernel, out_bias = (x.astype(np.float64) for x in weights)
    limit = np.maximum(abs(threshold), queries.astype(np.float64))[..., None]
    distance = abs(exact_relative(queries, keys))[..., 0, :, :]
    ratio = np.log1p(abs(rate) * distance) / (np.log1p(abs(rate) * limit) + 1e-6)
    hidden = ratio[..., None] * kernel + bias
    value = np.maximum(hidden, 0) @ out_kernel + out_bias
    sizes = (abs(ratio[..., None] * kernel) + abs(bias)) @ abs(out_kernel) + abs(out_bias)
    return np.moveaxis(value, -1, -3), 1e-5 * np.moveaxis(sizes, -1, -3)


def fire_weights(random, heads):
    small = random.normal(size=(3, 4)).astype(np.float32)
    rate, threshold = np.exp(random.uniform(-6, 3, 2)).astype(np.float32)
    return FireWeights(
        *(np.float32(rate), np.float32(100 * threshold), small[0], small[1]),
        random.normal(size=(4, heads)).astype(np.float32),
        random.normal(size=heads).astype(np.float32),
    )


METHODS = {
    "alibi": Method(scales, alibi_bias_at, alibi, alibi_bias),
    "alibi, two slopes": Method(
        lambda random, heads: (scales(random, heads), scales(random, heads)),
        lambda slopes, *positions: alibi_bias_at(slopes[0], *positions, future_slopes=slopes[1]),
        alibi_two_slopes,
    ),
    "t5": Method(
        lambda random, heads: random.normal(size=(BUCKETS, heads)).astype(np.float32),
        t5_bias_at,
        functools.partial(t5, False),
        t5_bias,
    ),
    "t5, both directions": Method(
        lambda random, heads: random.normal(size=(BUCKETS, heads)).astype(np.float32),
        functools.partial(t5_bias_at, bidirectional=True),
        functools.partial(t5, True),
        functools.partial(t5_bias, bidirectional=True),
    ),
    "kerple_log": Method(
        lambda random, heads: (scales(random, heads), scales(random, heads)),
        lambda parameters, *positions: kerple_log_bias_at(*parameters, *positions),
        kerple_log,
        lambda parameters, *lengths, **options: kerple_log_bias(*parameters, *lengths, **options),
    ),
    "kerple_power": Method(
        lambda random, heads: (
            scales(random, heads),
            random.uniform(0.01, 2, heads).astype(np.float32),
        ),
        lambda parameters, *positions: kerple_power_bias_at(*parameters, *positions),
        kerple_power,
        lambda parameters, *lengths, **options: kerple_power_bias(*parameters, *lengths, **options),
    ),
    "sandwich": Method(scales, sandwich_bias_at, sandwich, sandwich_bias),
    "fire": Method(fire_weights, fire_bias_at, fire, fire_bias),
}


@functools.cache
def compiled(name):
    """The bias, and the gradients of a weighted sum of it in the method's parameters."""

    def run(parameters, queries, keys):
        def weighted(parameters):
            bias = METHODS[name].function(parameters, queries, keys)
            return (bias * jnp.cos(jnp.arange(bias.size).reshape(bias.shape))).sum(), bias

        gradients, bias = jax.grad(weighted, has_aux=True)(parameters)
        return bias, gradients

    return jax.jit(run)


@inputs(few=40, many=5_000)
def test_biases_are_the_oracle_at_any_positions(count):
    def answer(drawn):
        name, queries, keys, heads, seed = drawn
        method = METHODS[name]
        parameters = method.parameters(np.random.default_rng(seed), heads)
        try:
            found, gradients = compiled(name)(
                jax.tree.map(jnp.asarray, parameters), jnp.asarray(queries), jnp.asarray(keys)
            )
        except ValueError as error:
            return refused_broken(name, queries, error)
        assert found.dtype == jnp.float32
        assert_within(found, *method.oracle(parameters, queries, keys), name)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
        return name

    fuzz(inputs_of(list(METHODS), count), answer, count)


OFFSETS = st.sampled_from(
    [None, 0, 1, 3, -1, -7, 2**24, 2**31 - 9, 2**31 - 1, 2**31, -(2**31), 2**40]
) | st.sampled_from([0.5, 1.0, math.nan, True, "1", np.int64(2), np.float32(2), np.bool_(True)])


@inputs(few=12, many=2_000)
def test_biases_of_lengths_are_the_biases_of_their_positions(count):
    def answer(drawn):
        name, length, key_length, offset, traced, heads, seed = drawn
        method = METHODS[name]
        parameters = method.parameters(np.random.default_rng(seed), heads)
        whole = isinstance(offset, int | np.integer) and not isinstance(offset, bool)
        fits = whole and -(2**31) <= offset <= 2**31 - max(length, 1)
        if traced and fits:
            offset = jnp.asarray(offset, jnp.int32)
        try:
            found = method.by_length(
                jax.tree.map(jnp.asarray, parameters), length, key_length, offset=offset
            )
        except ValueError as error:
            message = one_line(error)
            assert not fits or offset is None, message
            return f"{name}: refused"
        first = (key_length or 0) - length if offset is None else int(offset)
        if key_length is None:
            key_length, first = length, 0 if offset is None else int(offset)
        assert first >= 0 or offset is not None
        assert whole or offset is None, f"offset={offset!r} acts as a whole number"
        assert fits or offset is None, f"offset={offset!r} leaves int32"
        queries, keys = first + np.arange(length), np.arange(key_length)
        if abs(exact_relative(queries, keys)).max(initial=0) > LAST:
            return f"{name}: distances beyond 2^31"
        assert_within(found, *method.oracle(parameters, queries, keys), name)
        return name

    names = [name for name, method in METHODS.items() if method.by_length]
    lengths = st.sampled_from([0, 1, 3, 7])
    drawn = st.tuples(
        *(st.sampled_from(names), lengths, st.none() | lengths, OFFSETS, st.booleans()),
        *(st.sampled_from([1, 3]), st.integers(0, 2**32)),
    )
    fuzz(drawn, answer, count)
