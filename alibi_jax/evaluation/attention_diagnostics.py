"""How a model attends at one length: entropy, distance and resolution by layer and head."""

from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Int64, Integer

from alibi_jax.attention.statistics import AttentionStatistics, attention_resolution
from alibi_jax.distributed import memory, sharding


def attention_report(
    graphdef: Any,
    mesh: jax.sharding.Mesh,
    params: Any,
    tokens: Integer[np.ndarray, "N"],
    length: int,
    num_windows: int,
) -> dict[str, Any]:
    """Means over windows of `length` tokens, laid evenly over the stream, as JSON has them.

    A head's resolution is that of its scores averaged over all windows, not the mean of the
    windows' own (Sun et al. 2022, arXiv 2212.10554, equations 3 and 11); a layer's is the mean
    over its heads, the model's the mean over its layers. Entropies are in nats, distances in
    tokens. Windows do not overlap: of a short stream there are fewer.

    Raises:
        ValueError: where the stream has not one window, or the model's numbers are not finite.
    """
    starts = _starts(len(tokens), length, num_windows)
    entropy, distance, scores = _means(graphdef, mesh, params, tokens, length, starts)
    resolution = attention_resolution(scores)
    measured = {"resolution": resolution, "distance": distance, "entropy": entropy}
    if not all(np.isfinite(values).all() for values in measured.values()):
        raise ValueError(
            f"attention at length={length} is not finite: the model's numbers ran away"
        )
    num_layers, num_heads = resolution.shape
    layers = [
        {
            "layer": layer,
            "resolution": float(resolution[layer].mean()),
            "heads": [
                {name: float(values[layer, head]) for name, values in measured.items()}
                for head in range(num_heads)
            ],
        }
        for layer in range(num_layers)
    ]
    return {
        "length": length,
        "windows": len(starts),
        "resolution": float(resolution.mean()),
        "layers": layers,
    }


def _starts(num_tokens: int, length: int, num_windows: int) -> Int64[np.ndarray, "W"]:
    """Where windows start, evenly spaced; the last one ends with the stream."""
    if num_tokens < length:
        raise ValueError(
            f"the stream has {num_tokens} tokens, fewer than one window of length={length}: "
            "give a shorter length"
        )
    if num_windows < 1:
        raise ValueError(f"num_windows={num_windows} must be at least 1")
    count, last = min(num_windows, num_tokens // length), num_tokens - length
    return last - np.arange(count)[::-1] * last // max(count - 1, 1)


def _means(
    graphdef: Any,
    mesh: jax.sharding.Mesh,
    params: Any,
    tokens: Integer[np.ndarray, "N"],
    length: int,
    starts: Int64[np.ndarray, "W"],
) -> list[np.ndarray]:
    """Entropy and distance `[L, N]` and scores `[L, N, T]`, averaged over the windows, float64."""
    batch_size = sharding.axis_size(mesh, "batch")
    placement = sharding.named_sharding(mesh, "batch", None)
    rows = sharding.addressable_rows(placement, batch_size)

    def statistics(params: Any, inputs: Array) -> AttentionStatistics:
        return nnx.merge(graphdef, params).attention_statistics(inputs)

    # Replicated, so that every process holds all the numbers and adds them up alike.
    compiled = jax.jit(statistics, out_shardings=sharding.named_sharding(mesh))
    inputs = jax.ShapeDtypeStruct((batch_size, length), np.int32, sharding=placement)
    sums = [np.zeros(()) for _ in AttentionStatistics._fields]
    with jax.set_mesh(mesh):
        program = compiled.lower(params, inputs).compile()
        memory.check_program_fits(
            program, f"attention over {length} tokens", "give a shorter --attention"
        )
        for first in range(0, len(starts), batch_size):
            some = starts[first : first + batch_size]
            # Past the last window it is repeated, and not counted.
            filled = np.pad(some, (0, batch_size - len(some)), mode="edge")[rows]
            local = tokens[filled[:, None] + np.arange(length)].astype(np.int32)
            measured = program(params, sharding.make_global_array(placement, local, batch_size))
            sums = [
                total + np.asarray(x, np.float64)[:, : len(some)].sum(axis=1)
                for total, x in zip(sums, measured)
            ]
    return [total / len(starts) for total in sums]
