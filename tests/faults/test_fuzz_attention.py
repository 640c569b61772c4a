"""Random inputs of attention on every engine, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import expected, expected_gradients, visible_pairs
from attention_programs import (
    BLOCK,
    DTYPES,
    LAST,
    first_index,
    is_valid,
    make_inputs,
    program,
)
from fuzz import fuzz, inputs, one_line
from hypothesis import strategies as st

from alibi_jax.attention import attention, engines
from alibi_jax.attention.folded import folded_error
from alibi_jax.biases import LinearBias

pytestmark = pytest.mark.usefixtures("quick_compile")


@functools.cache
def compiled(number):
    """The results of a program and the gradients of a weighted sum of them, under `jit`."""
    made = program(number)
    engine = "blockwise" if made.engine == "all heads" else made.engine

    def run(arrays, given):
        def weighted(arrays):
            query, key, value, slopes, future = arrays
            results = attention(
                query,
                key,
                value,
                bias=LinearBias(slopes, future if made.future_slopes else None),
                causal=made.causal,
                window=made.window,
                offset=given["offset"] if made.offset == "traced" else made.offset,
                query_positions=given.get("query_positions"),
                key_positions=given.get("key_positions"),
                query_segment_ids=given.get("query_segment_ids"),
                key_segment_ids=given.get("key_segment_ids"),
                mask=given.get("mask"),
                implementation=engine,
                return_residual=made.residual,
            )
            out, log_sum_exp = results if made.residual else (results, None)
            total = (out.astype(jnp.float32) * given["cotangent"]).sum()
            return total, (out, log_sum_exp)

        gradients, results = jax.grad(weighted, has_aux=True)(arrays)
        return (*results, gradients)

    return jax.jit(run)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks and limits so small that short inputs reach every loop."""
    monkeypatch.setattr(engines, "_BLOCK_SIZE", {"cpu": BLOCK})
    monkeypatch.setattr(engines, "_DENSE_MAX_SCORES", 64)
    monkeypatch.setattr(engines, "_DENSE_MAX_QUERIES", 2)


@inputs(few=16, many=4_000)
def test_attention_is_the_oracle_on_every_engine(count):
    def answer(drawn):
        number, seed, scale, start = drawn
        made = program(number)
        arrays, slopes, given = make_inputs(made, seed, scale, start)
        batch, length, key_length, heads, _, size, value_size = made.shape
        name = str(made.engine)
        if is_valid(made):
            first = first_index(made, given)
            visible = visible_pairs(
                (batch, heads, length, key_length),
                causal=made.causal,
                window=made.window,
                offset=first,
                segments=(given["query_segment_ids"], given["key_segment_ids"])
                if made.segments
                else None,
                mask=given.get("mask"),
            )
        dtype = DTYPES[made.dtype]
        try:
            with pytest.MonkeyPatch.context() as patch:
                if made.engine == "all heads":
                    patch.setattr(engines, "_partitioned_by_compiler", lambda: True)
                out, log_sum_exp, gradients = compiled(number)(
                    [*(jnp.asarray(x, dtype) for x in arrays), *map(jnp.asarray, slopes)],
                    jax.tree.map(jnp.asarray, given),
                )
        except ValueError as error:
            message = one_line(error)
            assert not is_valid(made) or made.engine in ("folded", "pallas_tpu"), message
            return f"{name}: refused"
        assert is_valid(made), "arguments without a meaning are taken"
        assert out.shape == (batch, length, heads, value_size)
        assert out.dtype == dtype
        if made.positions == "none":
            positions = first + np.arange(length), np.arange(key_length)
        else:
            positions = given["query_positions"], given["key_positions"]
        eps = float(jnp.finfo(dtype).eps)
        wanted = expected(
            *arrays,
            slopes[0],
            slopes[1] if made.future_slopes else slopes[0],
            [np.broadcast_to(x, (batch, x.shape[-1])) for x in positions],
            visible,
            eps=eps,
            score_error=folded_error(slopes[0], length, dtype) if name == "folded" else 0.0,
        )
        out = np.asarray(out.astype(jnp.float32), np.float64)
        assert np.isfinite(out).all(), "the result is not finite"
        off = abs(out - wanted.out) - wanted.out_error
        assert (off <= 0).all(), f"the result is off by {off.max()} more than rounding explains"
        blind = ~visible.any(3).transpose(0, 2, 1)
        assert (out[blind] == 0).all(), "a row that sees nothing is not zero"
        if made.residual:
            found = np.asarray(log_sum_exp, np.float64)
            exact = wanted.log_sum_exp.transpose(0, 2, 1)
            assert (np.isneginf(found) == blind).all()
            close = np.log1p(2 * np.minimum(wanted.share, 0.4)) + 1e-5
            ok = wanted.share.transpose(0, 2, 1) < 0.4
            difference = abs(np.where(blind, 0, found) - np.where(blind, 0, exact))
            bound = close.transpose(0, 2, 1) + 1e-5 * abs(np.where(blind, 0, exact))
            assert (difference <= bound)[ok & ~blind].all(), "the log-sum-exp is off"
        gradients = [np.asarray(x.astype(jnp.float32), np.float64) for x in gradients]
        for of, gradient in zip(("query", "key", "value", "slopes", "future slopes"), gradients):
            assert np.isfinite(gradient).all(), f"the gradient of {of} is not finite"
        if (
            made.dtype == "float32"
            and wanted.share.max(initial=0) < 1e-3
            and size
            and name != "folded"
        ):
            slope_gradient = gradients[3] + gradients[4]
            exact, sizes = expected_gradients(*arrays, given["cotangent"], wanted)
            found = [*gradients[:3], slope_gradient]
            for of, x, y, bound in zip(("query", "key", "value", "slopes"), found, exact, sizes):
                allowed = (2e-5 + 8 * wanted.share.max(initial=0)) * bound.max(initial=0) + 1e-30
                assert (abs(x - y) <= allowed).all(), f"the gradient of {of} is off"
        return f"{name}: computed"

    drawn = st.tuples(
        st.integers(0, max(3, count // 40)),
        st.integers(0, 2**32),
        st.sampled_from([1.0, 1.0, 1e-3, 5.0, 100.0, 0.0]),
        st.sampled_from([0, 0, 1, 4096, 2**24 - 9, 2**30, LAST - 200, -50, -(2**30)]),
    )
    fuzz(drawn, answer, count)
