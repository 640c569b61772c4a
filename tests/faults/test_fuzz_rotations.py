"""Random positions for embeddings, rotations and forget gates, against NumPy in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuzz import fuzz, inputs
from random_positions import LAST, assert_within, exact_relative, inputs_of, refused_broken

from alibi_jax.biases import forget_bias_at, forget_decay
from alibi_jax.embeddings import sinusoidal
from alibi_jax.rotations import rotary, rotary_frequencies, transformer_xl, xpos

pytestmark = pytest.mark.usefixtures("quick_compile")

HEAD_SIZE, WIDTH = 8, 12


def rotated(x, positions, frequencies):
    """Su et al. 2021, equation 34, in float64: features k and k + H/2 are one complex number."""
    x, half = x.astype(np.float64), x.shape[-1] // 2
    turn = np.exp(1j * (positions.astype(np.float64)[..., None] * frequencies))[..., None, :]
    pairs = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def scores(query, key):
    """The products of queries and keys, `[..., N, T, S]` in float64."""
    query, key = (np.asarray(x, np.float64) for x in (query, key))
    return np.einsum("...tnh,...snh->...nts", query, key)


def check_sinusoidal(random, queries, keys, heads):
    found = jax.jit(sinusoidal, static_argnums=1)(jnp.asarray(queries), WIDTH)
    angles = queries.astype(np.float64)[..., None] * 10000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH)
    wanted = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(*queries.shape, WIDTH)
    assert_within(found, wanted, 5e-6)


def check_rotary(random, queries, keys, heads):
    x = random.normal(size=(*queries.shape, heads, HEAD_SIZE)).astype(np.float32)
    dtype = [np.float32, jnp.bfloat16, np.float16][int(random.integers(3))]
    found = jax.jit(rotary)(jnp.asarray(x, dtype), jnp.asarray(queries))
    assert found.dtype == dtype
    wanted = rotated(
        np.asarray(jnp.asarray(x, dtype).astype(jnp.float32)),
        queries,
        np.asarray(rotary_frequencies(HEAD_SIZE), np.float64),
    )
    norm = np.sqrt(wanted**2 + np.roll(wanted, HEAD_SIZE // 2, axis=-1) ** 2)
    assert_within(found.astype(jnp.float32), wanted, norm * (1e-5 + float(jnp.finfo(dtype).eps)))


def random_query_and_key(random, queries, keys, heads):
    query = random.normal(size=(*queries.shape, heads, HEAD_SIZE)).astype(np.float32)
    return query, random.normal(size=(*keys.shape, heads, HEAD_SIZE)).astype(np.float32)


def check_xpos(random, queries, keys, heads):
    span = max(queries.max(initial=0), keys.max(initial=0)) - min(
        queries.min(initial=LAST), keys.min(initial=LAST)
    )
    if queries.shape[:-1] != keys.shape[:-1] or span > 65_536:
        return
    query, key = random_query_and_key(random, queries, keys, heads)
    found = scores(*jax.jit(xpos)(query, key, jnp.asarray(queries), jnp.asarray(keys)))
    half = HEAD_SIZE // 2
    relative = -exact_relative(queries, keys)
    decay = (np.arange(half) / half + 0.4) / 1.4
    frequencies = 10000.0 ** (-np.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
    complex_query, complex_key = (x[..., :half] + 1j * x[..., half:] for x in (query, key))
    terms = np.einsum("...tnk,...snk->...ntsk", complex_query, complex_key.conj())
    terms = terms * decay ** (relative[..., None] / 512)
    wanted = (terms * np.exp(1j * relative[..., None] * frequencies)).real.sum(-1)
    assert_within(found, wanted, 1e-4 * abs(terms).sum(-1))


def check_transformer_xl(random, queries, keys, heads):
    if queries.shape[:-1] != keys.shape[:-1]:
        return
    query, key = random_query_and_key(random, queries, keys, heads)
    content, position = random.normal(size=(2, heads, HEAD_SIZE)).astype(np.float32)
    kernel = random.normal(size=(WIDTH, heads, HEAD_SIZE)).astype(np.float32)
    arrays = (query, key, jnp.asarray(queries), jnp.asarray(keys), content, position, kernel)
    found = scores(*jax.jit(transformer_xl)(*arrays)) / math.sqrt(HEAD_SIZE + WIDTH)
    query, key, content, position, kernel = (
        x.astype(np.float64) for x in (query, key, content, position, kernel)
    )
    angles = -exact_relative(queries, keys)[..., 0, :, :, None] * 10000.0 ** (
        -np.arange(0, WIDTH, 2) / WIDTH
    )
    waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    projected = np.einsum("...tnh,dnh->...ntd", query + position, kernel)
    wanted = scores(query + content, key) + np.einsum("...ntd,...tsd->...nts", projected, waves)
    sizes = scores(abs(query + content), abs(key)) + abs(projected).sum(-1)[..., None]
    assert_within(found, wanted / math.sqrt(HEAD_SIZE), 2e-5 * sizes)


def check_forget(random, queries, keys, heads):
    lead, length = keys.shape[:-1], keys.shape[-1]
    gates = -np.exp(random.uniform(-12, 6, (*lead, length, heads))).astype(np.float32)
    segments = np.sort(random.integers(0, 3, (*lead, length)), axis=-1).astype(np.int32)
    decay = jax.jit(forget_decay)(gates, segments)
    found = jax.jit(forget_bias_at)(decay, decay)
    sums = np.cumsum(gates.astype(np.float64), axis=-2)
    wanted = np.moveaxis(sums[..., :, None, :] - sums[..., None, :, :], -1, -3)
    same = segments[..., :, None] == segments[..., None, :]
    visible = (same & np.tri(length, dtype=bool))[..., None, :, :]
    found, wanted = (np.where(visible, x, 0.0) for x in (found, wanted))
    assert_within(found, wanted, 1e-6 * abs(wanted) + 1e-30)


OTHERS = {
    "sinusoidal": check_sinusoidal,
    "rotary": check_rotary,
    "xpos": check_xpos,
    "transformer_xl": check_transformer_xl,
    "forget": check_forget,
}


@inputs(few=20, many=3_000)
def test_embeddings_rotations_and_gates_are_the_oracle_at_any_positions(count):
    def answer(drawn):
        name, queries, keys, heads, seed = drawn
        try:
            OTHERS[name](np.random.default_rng(seed), queries, keys, heads)
        except ValueError as error:
            return refused_broken(name, queries, error)
        return name

    fuzz(inputs_of(list(OTHERS), count), answer, count)
