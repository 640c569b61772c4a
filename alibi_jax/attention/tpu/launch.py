"""Runs a kernel over a grid. Each step works on one block of each operand."""

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
from alibi_jax.attention.tpu.kernels import KernelConfig, StepIndices, forward_kernel


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array, or the shape of an output, and the block of it that a step reads or writes.

    `block_shape` and `block_index` have the meanings of `pallas.BlockSpec`'s arguments: None in
    the shape drops an axis from the block.
    """

    array: Any
    block_shape: tuple[int | None, ...]
    block_index: Callable[[StepIndices], tuple[Any, ...]]


def launch(
    config: KernelConfig,
    kernel: Callable[..., None],
    grid: Grid,
    origin: Int[Array, "3"],
    slopes: Float[Array, "N"],
    inputs: Sequence[Operand],
    outputs: Sequence[Operand],
    *,
    features: int,
    scratch: Sequence[tuple[int, int]] = (),
    aliases: Mapping[int, int] = MappingProxyType({}),
) -> Any:
    """Runs a kernel over a grid and returns its outputs.

    `origin` holds the index of the first row, the index of the first query block, and the position
    of query 0 counted from key 0. `aliases` maps an input to the output that is written over it.
    `features` is the number of multiplications per score.
    """
    groups, capacity = grid.packed_steps.shape

    def locate(
        group: Any, step_number: Any, packed_steps: Any, origin: Any
    ) -> tuple[GridStep, StepIndices]:
        step = unpack(packed_steps[group * capacity + step_number])
        query_block, key_block = step.outer_block, step.inner_block
        if kernel is not forward_kernel:
            query_block, key_block = key_block, query_block
        launch_row = step.row * groups + group
        query_block = origin[1] + query_block
        distance = origin[2] + (query_block - key_block) * config.block_size
        return step, StepIndices(
            origin[0] + launch_row, launch_row, query_block, key_block, distance
        )

    def body(packed_steps: Any, origin: Any, slopes: Any, *refs: Any) -> None:
        step, indices = locate(pl.program_id(0), pl.program_id(1), packed_steps, origin)
        slope = slopes[jax.lax.rem(indices.row, np.int32(config.num_heads))]
        outputs_start, scratch_start = len(inputs), len(inputs) + len(outputs)
        kernel(
            config,
            step,
            indices,
            slope,
            refs[:outputs_start],
            refs[outputs_start:scratch_start],
            refs[scratch_start:],
        )

    def block_spec(operand: Operand) -> pl.BlockSpec:
        def index_map(group: Any, step_number: Any, packed_steps: Any, origin: Any, _: Any) -> Any:
            return operand.block_index(locate(group, step_number, packed_steps, origin)[1])

        return pl.BlockSpec(operand.block_shape, index_map)

    # This is an estimate, because the skipped blocks are known only at run time.
    scores = grid.packed_steps.size * config.block_size**2 // (2 if config.causal else 1)
    prefetched = grid.packed_steps.reshape(-1), origin, slopes
    return pl.pallas_call(
        body,
        name=f"alibi_{kernel.__name__}",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(groups, grid.num_steps.max()),
            in_specs=[block_spec(x) for x in inputs],
            out_specs=[block_spec(x) for x in outputs],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.array.shape, x.array.dtype) for x in outputs],
        input_output_aliases={len(prefetched) + i: out for i, out in aliases.items()},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * scores * features,
            transcendentals=scores,
            bytes_accessed=scores // config.block_size * features * inputs[0].array.dtype.itemsize,
        ),
        interpret=config.interpret,
    )(*prefetched, *(x.array for x in inputs))
