"""Random inputs of attention on eight simulated devices, against NumPy in float64."""

import functools
import random
from typing import NamedTuple

import jax
import numpy as np
import pytest
from attention_oracle import expected, expected_gradients, visible_pairs
from fuzz import fuzz, inputs
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from alibi_jax.attention import attention, engines
from alibi_jax.attention.context_parallel import context_attention, short_range_heads
from alibi_jax.biases import LinearBias, alibi_slopes

pytestmark = pytest.mark.usefixtures("quick_compile")

SIZE = 4
# Batch rows, tokens, heads and key heads; eight devices divide the rows, or the heads, or the
# tokens. The first has a few blocks, the second is short.
SHAPES = [(8, 40, 8, 8), (8, 8, 8, 8), (1, 64, 4, 2), (2, 16, 8, 8)]
SPECS = {"rows": P("x"), "heads": P(None, None, "x"), "tokens": P(None, "x")}


class Program(NamedTuple):
    """What is compiled once and then runs for many inputs."""

    shape: tuple[int, int, int, int]
    # What the eight devices divide, and how the function is told: by `jax.shard_map`, or by a mesh
    # of axes that JAX calls Auto or Explicit.
    divided: str
    how: str
    segments: bool
    positions: bool


# All that `SHAPES` allow: of attention over tokens only the function for sharded sequences.
PROGRAMS = [
    Program(shape, divided, how, segments, positions)
    for divided, shapes in {
        "rows": SHAPES[:2],
        "heads": [SHAPES[0], SHAPES[3]],
        "tokens": SHAPES,
    }.items()
    for shape in shapes
    for how in (("shard_map",) if divided == "tokens" else ("shard_map", "auto", "explicit"))
    for segments in (False, True)
    for positions in (False, True)
]


@functools.cache
def compiled(program):
    """Attention and the gradients of a weighted sum of it, on eight devices."""
    kind = AxisType.Explicit if program.how == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((8,), ("x",), (kind,))
    spec = SPECS[program.divided]
    slope_spec = P("x") if program.divided == "heads" else P()
    token_spec = {"rows": P("x"), "heads": P(), "tokens": P(None, "x")}[program.divided]
    _, length, heads, kv_heads = program.shape
    short = (
        () if program.positions else short_range_heads(alibi_slopes(heads), kv_heads, length // 8)
    )

    def local(query, key, value, slopes, ids, positions):
        if program.divided == "tokens":
            return context_attention(
                *(query, key, value, slopes),
                axes=("x",),
                short_range=short,
                positions=positions,
                segment_ids=ids,
            )
        return attention(
            *(query, key, value),
            bias=LinearBias(slopes),
            query_positions=positions,
            key_positions=positions,
            query_segment_ids=ids,
            key_segment_ids=ids,
        )

    specs = (spec, spec, spec, slope_spec, token_spec, token_spec)
    present = (True, True, True, True, program.segments, program.positions)
    specs = tuple(spec if there else None for spec, there in zip(specs, present))
    function = local
    if program.how == "shard_map":
        function = jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=program.divided != "tokens"
        )

    def run(arrays, ids, positions, cotangent):
        def weighted(arrays):
            out = function(*arrays, ids, positions)
            return (out * cotangent).sum(), out

        gradients, out = jax.grad(weighted, has_aux=True)(arrays)
        return out, gradients

    def place(x, spec):
        return None if x is None else jax.device_put(x, jax.NamedSharding(mesh, spec))

    jitted = jax.jit(run)

    def call(arrays, ids, positions, cotangent):
        given = [place(x, y) for x, y in zip((*arrays, ids, positions, cotangent), (*specs, spec))]
        with jax.set_mesh(mesh):
            return jitted(given[:4], *given[4:])

    return call


@inputs(few=2, many=1_000)
def test_attention_on_eight_devices_is_the_oracle(count, monkeypatch):
    monkeypatch.setattr(engines, "_BLOCK_SIZE", {"cpu": 8})
    monkeypatch.setattr(engines, "_DENSE_MAX_SCORES", 64)
    monkeypatch.setattr(engines, "_DENSE_MAX_QUERIES", 2)
    programs = PROGRAMS if count > 10 else random.Random(0).sample(PROGRAMS, 1)

    def answer(drawn):
        program, seed, scale, start, sharpness = drawn
        batch, length, heads, kv_heads = program.shape
        draw = np.random.default_rng(seed)
        query, key, value, cotangent = (
            draw.normal(size=(batch, length, n, SIZE)).astype(np.float32) * np.float32(scale)
            for n in (heads, kv_heads, kv_heads, heads)
        )
        slopes = np.asarray(alibi_slopes(heads)) * np.float32(sharpness)
        ids = positions = None
        if program.segments:
            ids = np.sort(draw.integers(0, 4, (batch, length)), axis=1).astype(np.int32)
        if program.positions:
            row = start + np.sort(draw.integers(0, 3 * length, (batch, length)), axis=1)
            positions = row.astype(np.int32)
        visible = visible_pairs(
            (batch, heads, length, length),
            causal=True,
            window=None,
            offset=0,
            segments=None if ids is None else (ids, ids),
            mask=None,
        )
        arrays = query, key, value
        out, gradients = compiled(program)((*arrays, slopes), ids, positions, cotangent)
        where = (
            np.broadcast_to(np.arange(length), (batch, length)) if positions is None else positions
        )
        wanted = expected(
            *(*arrays, slopes, slopes, (where, where), visible), eps=2.0**-24, score_error=0.0
        )
        off = abs(np.asarray(out, np.float64) - wanted.out) - wanted.out_error
        assert (off <= 0).all(), f"the result is off by {off.max()} more than rounding explains"
        exact, sizes = expected_gradients(*arrays, cotangent, wanted)
        for of, x, y, bound in zip(("query", "key", "value", "slopes"), gradients, exact, sizes):
            assert np.isfinite(x).all(), f"the gradient of {of} is not finite"
            if wanted.share.max() < 1e-3:
                allowed = (2e-5 + 8 * wanted.share.max()) * bound.max() + 1e-30
                assert (abs(np.asarray(x, np.float64) - y) <= allowed).all(), (
                    f"the gradient of {of} is off"
                )
        return f"{program.divided} by {program.how}"

    drawn = st.tuples(
        st.sampled_from(programs),
        st.integers(0, 2**32),
        st.sampled_from([1.0, 1.0, 1e-3, 5.0]),
        st.sampled_from([0, 1, 4096, 2**24 - 9, 2**30, 2**31 - 300]),
        st.sampled_from([1.0, 1.0, 0.0, 30.0]),
    )
    fuzz(drawn, answer, count)
