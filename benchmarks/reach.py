"""How much of causal attention is left to compute: the blocks in reach, of random and real data.

    python benchmarks/reach.py [--workdir=runs/tiny] [--lengths=1024,4096,16384,65536]

Random queries and keys of head size 64 with 8 and 16 heads; and, of a run trained with linear
biases, its own queries and keys of validation text, all layers. Prints the share of the causal
blocks of `--block` queries and keys that `reach` keeps, and how far a row's own score lies below
the greatest that its norms allow.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

from alibi_jax.attention.reach import NEGLIGIBLE, reach
from alibi_jax.attention.visibility import Visibility
from alibi_jax.biases import LinearBias, alibi_slopes
from alibi_jax.data.token_streams import token_stream
from alibi_jax.evaluation import load_run
from alibi_jax.model import self_attention

_WORKDIR = flags.DEFINE_string("workdir", None, "A run trained with linear biases.")
_LENGTHS = flags.DEFINE_list("lengths", ["1024", "4096", "16384", "65536"], "Tokens a row.")
_BLOCK = flags.DEFINE_integer("block", 128, "Queries, and keys, a block.")
_TOLERANCES = {"2^-24": NEGLIGIBLE, "1e-3": 1e-3}

Heads = tuple[jax.Array, jax.Array, LinearBias]


def random_heads(length: int, num_heads: int) -> list[Heads]:
    """One layer of standard normal queries and keys."""
    rng = np.random.default_rng(0)
    query, key = (
        jnp.asarray(rng.standard_normal((1, length, num_heads, 64)), jnp.float32) for _ in range(2)
    )
    return [(query, key, LinearBias(alibi_slopes(num_heads)))]


def trained_heads(run, length: int) -> list[Heads]:
    """Each layer's queries and keys of the first so many tokens of the validation text."""
    tokens = token_stream(run.config.data, "validation", run.tokenizer)[:length]
    model = nnx.merge(run.graphdef, run.params)
    found: list[Heads] = []
    attention = self_attention.attention

    def record(query, key, value, *, bias, **rest):
        found.append((query, key, bias))
        return attention(query, key, value, bias=bias, **rest)

    # Not compiled, so that what the layers hand to their attention are numbers.
    self_attention.attention = record
    try:
        model.hidden_states(jnp.asarray(tokens[None], jnp.int32))
    finally:
        self_attention.attention = attention
    return found


def kept(heads: list[Heads], tolerance: float) -> float:
    """The share of the causal blocks that is in reach, over heads and layers."""
    block, count, whole = _BLOCK.value, 0, 0
    of = jax.jit(
        lambda *arrays: reach(*arrays, Visibility(), block_size=block, tolerance=tolerance)
    )
    for query, key, bias in heads:
        first, stop = of(query, key, bias)
        blocks = -(-query.shape[1] // block)
        count += int((stop - first).sum())
        whole += first.shape[0] * first.shape[1] * blocks * (blocks + 1) // 2
    return count / whole


def gap(heads: list[Heads]) -> tuple[float, float]:
    """Mean and greatest of |q|·K/sqrt(H) less a row's own score, K the greatest key norm."""
    gaps = []
    for query, key, _ in heads:
        query, key = (np.asarray(x, np.float64) for x in (query, key))
        key = np.repeat(key, query.shape[2] // key.shape[2], axis=2)
        query = query * query.shape[-1] ** -0.5
        most = np.linalg.norm(query, axis=-1) * np.linalg.norm(key, axis=-1).max(axis=1)[:, None]
        gaps.append(most - (query * key).sum(axis=-1))
    return float(np.mean(gaps)), float(np.max(gaps))


def sources() -> Iterator[tuple[str, dict[int, list[Heads]]]]:
    """What is measured, by name and length."""
    lengths = [int(length) for length in _LENGTHS.value]
    for num_heads in (8, 16):
        yield (
            f"random, {num_heads} heads",
            {length: random_heads(length, num_heads) for length in lengths},
        )
    if _WORKDIR.value:
        run = load_run(pathlib.Path(_WORKDIR.value))
        yield (
            f"trained, {run.config.model.num_heads} heads of {run.config.model.head_size}",
            {length: trained_heads(run, length) for length in lengths},
        )


def main(_: list[str]) -> None:
    """Prints a table in Markdown."""
    columns = [f"{int(length):,}" for length in _LENGTHS.value]
    print(
        f"| queries and keys | tolerance | {' | '.join(columns)} | gap at the longest: mean, most |"
    )
    print("|---|---|" + "---|" * (len(columns) + 1))
    for name, by_length in sources():
        mean, most = gap(by_length[max(by_length)])
        for label, tolerance in _TOLERANCES.items():
            shares = " | ".join(f"{kept(heads, tolerance):.3f}" for heads in by_length.values())
            print(f"| {name} | {label} | {shares} | {mean:.1f}, {most:.1f} |", flush=True)


if __name__ == "__main__":
    app.run(main)
