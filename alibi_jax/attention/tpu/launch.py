"""Runs a kernel over a schedule of steps, each on blocks of its operands."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from alibi_jax.attention.tpu.grid import Grid, GridStep, unpack
from alibi_jax.attention.tpu.kernels import Call, Place, forward_kernel


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array in blocks of a shape, None being one without its axis, and which one a step has."""

    array: Any
    shape: tuple[int | None, ...]
    index: Callable[[Place], tuple[Any, ...]]


def launch(
    call: Call,
    kernel: Callable[..., None],
    plan: Grid,
    numbers: Int[Array, "3"],
    slopes: Float[Array, "N"],
    inputs: Sequence[Operand],
    outputs: Sequence[Operand],
    *,
    features: int,
    scratch: Sequence[tuple[int, int]] = (),
    aliases: Mapping[int, int] = MappingProxyType({}),
) -> Any:
    """Runs a kernel over a plan; `numbers` are the first row, the first query block, the offset.

    `aliases` are from inputs to the outputs that take their place, and `features` what a score
    costs, in multiplications.
    """
    groups, capacity = plan.words.shape

    def locate(group: Any, at: Any, words: Any, numbers: Any) -> tuple[GridStep, Place]:
        step = unpack(words[group * capacity + at])
        pair = (step.outer, step.inner) if kernel is forward_kernel else (step.inner, step.outer)
        local = step.row * groups + group
        query_block = numbers[1] + pair[0]
        ahead = numbers[2] + (query_block - pair[1]) * call.block
        return step, Place(numbers[0] + local, local, query_block, pair[1], ahead)

    def body(words: Any, numbers: Any, slopes: Any, *refs: Any) -> None:
        step, place = locate(pl.program_id(0), pl.program_id(1), words, numbers)
        ends = len(inputs), len(inputs) + len(outputs)
        sides = refs[: ends[0]], refs[ends[0] : ends[1]], refs[ends[1] :]
        kernel(call, step, place, slopes[jax.lax.rem(place.row, np.int32(call.num_heads))], *sides)

    def spec(operand: Operand) -> pl.BlockSpec:
        def index(group: Any, at: Any, words: Any, numbers: Any, _: Any) -> Any:
            return operand.index(locate(group, at, words, numbers)[1])

        return pl.BlockSpec(operand.shape, index)

    # An upper bound: what is skipped is known when it runs.
    scores = plan.words.size * call.block**2 // (2 if call.causal else 1)
    prefetched = plan.words.reshape(-1), numbers, slopes
    return pl.pallas_call(
        body,
        name=f"alibi_{kernel.__name__}",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(groups, plan.counts.max()),
            in_specs=[spec(x) for x in inputs],
            out_specs=[spec(x) for x in outputs],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.array.shape, x.array.dtype) for x in outputs],
        input_output_aliases={len(prefetched) + i: out for i, out in aliases.items()},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * scores * features,
            transcendentals=scores,
            bytes_accessed=scores // call.block * features * inputs[0].array.dtype.itemsize,
        ),
        interpret=call.interpret,
    )(*prefetched, *(x.array for x in inputs))
