"""Measures the share of blocks of causal attention in reach, for random and for trained models.

    python benchmarks/reach.py [--workdir=runs/tiny] [--lengths=1024,4096,16384,65536]

Random queries and keys have head size 64 and 8 or 16 heads. For a run that was trained with linear
biases, the queries and keys of all layers are computed from validation text. The table gives the
share of the causal blocks of `--block` queries and keys that `reach` keeps. The gap is the greatest
score that the norms allow a row, minus the score of the row's query with its own key.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

from alibi_jax.attention.reach import NEGLIGIBLE, reach
from alibi_jax.attention.visibility import Visibility
from alibi_jax.biases import LinearBias, alibi_slopes
from alibi_jax.config import local_path
from alibi_jax.data.token_streams import token_stream
from alibi_jax.evaluation import load_run
from alibi_jax.model import self_attention

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of a run that was trained with linear biases."
)
_LENGTHS = flags.DEFINE_list(
    "lengths", ["1024", "4096", "16384", "65536"], "Lengths of a row, in tokens."
)
_BLOCK = flags.DEFINE_integer("block", 128, "Number of queries, and of keys, in a block.")
# The tolerances to measure, by their names in the table.
_TOLERANCES = {"2^-24": NEGLIGIBLE, "1e-3": 1e-3}

# The queries, the keys and the bias of a layer.
Heads = tuple[jax.Array, jax.Array, LinearBias]


def random_heads(length: int, num_heads: int) -> list[Heads]:
    """The queries and keys of one layer, as standard normal random numbers."""
    rng = np.random.default_rng(0)
    query, key = (
        jnp.asarray(rng.standard_normal((1, length, num_heads, 64)), jnp.float32) for _ in range(2)
    )
    return [(query, key, LinearBias(alibi_slopes(num_heads)))]


def trained_heads(run, length: int) -> list[Heads]:
    """The queries and keys of each layer, for the first `length` tokens of the validation text."""
    tokens = token_stream(run.config.data, "validation", run.tokenizer)[:length]
    model = nnx.merge(run.graphdef, run.params)
    layers: list[Heads] = []
    attention = self_attention.attention

    def record(query, key, value, *, bias, **options):
        layers.append((query, key, bias))
        return attention(query, key, value, bias=bias, **options)

    # The model is not compiled, so that `record` receives concrete arrays.
    self_attention.attention = record
    try:
        model.hidden_states(jnp.asarray(tokens[None], jnp.int32))
    finally:
        self_attention.attention = attention
    return layers


def kept_share(heads: list[Heads], tolerance: float) -> float:
    """The share of the causal blocks that is in reach, over all heads and layers."""
    block, num_kept, total = _BLOCK.value, 0, 0
    key_blocks = jax.jit(
        lambda *arrays: reach(*arrays, Visibility(), block_size=block, tolerance=tolerance)
    )
    for query, key, bias in heads:
        start, stop = key_blocks(query, key, bias)
        blocks = -(-query.shape[1] // block)
        num_kept += int((stop - start).sum())
        total += start.shape[0] * start.shape[1] * blocks * (blocks + 1) // 2
    return num_kept / total


def gap(heads: list[Heads]) -> tuple[float, float]:
    """The mean and the maximum of |q|·K/sqrt(H) minus a row's own score.

    K is the greatest norm of a key.
    """
    gaps = []
    for query, key, _ in heads:
        query, key = (np.asarray(x, np.float64) for x in (query, key))
        key = np.repeat(key, query.shape[2] // key.shape[2], axis=2)
        query = query * query.shape[-1] ** -0.5
        max_scores = (
            np.linalg.norm(query, axis=-1) * np.linalg.norm(key, axis=-1).max(axis=1)[:, None]
        )
        gaps.append(max_scores - (query * key).sum(axis=-1))
    return float(np.mean(gaps)), float(np.max(gaps))


def sources() -> Iterator[tuple[str, dict[int, list[Heads]]]]:
    """The name of each source of queries and keys, and its layers by length."""
    lengths = [int(length) for length in _LENGTHS.value]
    for num_heads in (8, 16):
        yield (
            f"random, {num_heads} heads",
            {length: random_heads(length, num_heads) for length in lengths},
        )
    if _WORKDIR.value:
        run = load_run(local_path("--workdir", _WORKDIR.value))
        yield (
            f"trained, {run.config.model.num_heads} heads of {run.config.model.head_size}",
            {length: trained_heads(run, length) for length in lengths},
        )


def main(_: list[str]) -> None:
    """Prints a table in Markdown."""
    columns = [f"{int(length):,}" for length in _LENGTHS.value]
    print(
        f"| queries and keys | tolerance | {' | '.join(columns)} | gap at the longest: mean, max |"
    )
    print("|---|---|" + "---|" * (len(columns) + 1))
    for name, by_length in sources():
        mean_gap, max_gap = gap(by_length[max(by_length)])
        for label, tolerance in _TOLERANCES.items():
            shares = " | ".join(
                f"{kept_share(heads, tolerance):.3f}" for heads in by_length.values()
            )
            print(f"| {name} | {label} | {shares} | {mean_gap:.1f}, {max_gap:.1f} |", flush=True)


if __name__ == "__main__":
    app.run(main)
