"""Entropy, distance and resolution of a model's attention at one length, by layer and head."""

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
    """Means over at most `num_windows` windows of `length` tokens, as JSON values.

    The windows are spread evenly over the stream and do not overlap; a short stream has fewer
    windows. The resolution of a head (Sun et al. 2022, arXiv 2212.10554, equations 3 and 11) is
    computed from the scores averaged over all windows. The resolution of a layer is the mean over
    its heads, and that of the model is the mean over its layers. Entropies are in nats, distances
    in tokens.

    Raises:
        ValueError: where the stream is shorter than one window, or a statistic is not finite.
    """
    starts = _window_starts(len(tokens), length, num_windows)
    entropy, distance, scores = _mean_statistics(graphdef, mesh, params, tokens, length, starts)
    resolution = attention_resolution(scores)
    statistics = {"resolution": resolution, "distance": distance, "entropy": entropy}
    if not all(np.isfinite(values).all() for values in statistics.values()):
        raise ValueError(
            f"attention at length={length} is not finite: the model's outputs diverged"
        )
    num_layers, num_heads = resolution.shape
    layers = [
        {
            "layer": layer,
            "resolution": float(resolution[layer].mean()),
            "heads": [
                {name: float(values[layer, head]) for name, values in statistics.items()}
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


def _window_starts(num_tokens: int, length: int, num_windows: int) -> Int64[np.ndarray, "W"]:
    """The starts of evenly spaced windows; the last window ends with the stream."""
    if num_tokens < length:
        raise ValueError(
            f"the stream has {num_tokens} tokens, fewer than one window of length={length}: "
            "give a shorter length"
        )
    if num_windows < 1:
        raise ValueError(f"num_windows={num_windows} must be at least 1")
    count, last = min(num_windows, num_tokens // length), num_tokens - length
    return last - np.arange(count)[::-1] * last // max(count - 1, 1)


def _mean_statistics(
    graphdef: Any,
    mesh: jax.sharding.Mesh,
    params: Any,
    tokens: Integer[np.ndarray, "N"],
    length: int,
    starts: Int64[np.ndarray, "W"],
) -> list[np.ndarray]:
    """Entropy, distance and scores by layer and head: float64 means over the windows.

    The scores have a third axis, the distance in tokens.
    """
    batch_size = sharding.axis_size(mesh, "batch")
    placement = sharding.named_sharding(mesh, "batch", None)
    rows = sharding.addressable_rows(placement, batch_size)

    def statistics(params: Any, inputs: Array) -> AttentionStatistics:
        return nnx.merge(graphdef, params).attention_statistics(inputs)

    # The statistics are replicated, so that every process holds all and computes the same sums.
    compiled = jax.jit(statistics, out_shardings=sharding.named_sharding(mesh))
    inputs = jax.ShapeDtypeStruct((batch_size, length), np.int32, sharding=placement)
    sums = [np.zeros(()) for _ in AttentionStatistics._fields]
    with jax.set_mesh(mesh):
        program = compiled.lower(params, inputs).compile()
        memory.check_program_fits(
            program, f"attention over {length} tokens", "give a shorter --attention"
        )
        for first in range(0, len(starts), batch_size):
            batch_starts = starts[first : first + batch_size]
            num_real = len(batch_starts)
            # Copies of the last window pad the batch; the sums omit them.
            padded = np.pad(batch_starts, (0, batch_size - num_real), mode="edge")[rows]
            local = tokens[padded[:, None] + np.arange(length)].astype(np.int32)
            batch = program(params, sharding.make_global_array(placement, local, batch_size))
            sums = [
                total + np.asarray(values, np.float64)[:, :num_real].sum(axis=1)
                for total, values in zip(sums, batch)
            ]
    return [total / len(starts) for total in sums]
