"""What a block of attention costs on a TPU, in instructions, without one: ours against splash.

    python benchmarks/tpu_bundles.py [--chip=v5e:2x2] [--length=8192] [--head_size=64]

Compiles the project's kernels and JAX's splash attention, which has no biases and is given them
folded into queries and keys, and reads from the compiler's own listing how many bundles of
instructions each takes for a block of 512 queries by 512 keys: a bundle issues in a cycle, so
fewer are faster, but for what the listing does not know (memory, and what a step costs before
and after). Ours has two such loops: most blocks need no mask. Needs libtpu, and no TPU.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl import flags
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    MultiHeadMask,
    make_splash_mha,
)
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array

from alibi_jax import alibi_slopes, cli
from alibi_jax.attention.folded import fold
from alibi_jax.attention.reach import KeyBlocks
from alibi_jax.attention.tpu.attention import pallas_tpu
from alibi_jax.distributed.processes import say

_CHIP = flags.DEFINE_string("chip", "v5e:2x2", "The topology to compile for.")
_LENGTH = flags.DEFINE_integer("length", 8192, "Of the row, in tokens.")
_HEADS = flags.DEFINE_integer("heads", 8, "Of queries and of keys.")
_SIZE = flags.DEFINE_integer("head_size", 64, "Features a head.")
_COMPILE = flags.DEFINE_enum(
    "compile", None, ["ours", "splash"], "Only compile; the script starts itself so."
)

_BLOCK = 512
# Loops shorter than this start and end rows.
_LEAST = 300


class Loop(NamedTuple):
    """A loop of a kernel: its bundles, and the share of the matrix units' slots that are used."""

    bundles: int
    matrix_units: float


def main() -> int:
    """Prints a line a kernel."""
    if _COMPILE.value:
        _compile(_ours if _COMPILE.value == "ours" else _splash)
        return 0
    shape = f"[1, {_LENGTH.value}, {_HEADS.value}, {_SIZE.value}]"
    say(f"{_CHIP.value}, jax {jax.__version__}, {shape}, bfloat16, blocks of {_BLOCK}\n")
    ours, splash = (_loops(name) for name in ("ours", "splash"))
    say(
        "| pass | ours / splash | where masked | ours | masked | splash | matrix units used: both |"
    )
    say("|---|---|---|---|---|---|---|")
    for name, (masked, plain), (peer,) in zip(("forward", "backward"), ours, splash):
        ratios = [f"{x.bundles / peer.bundles:.2f}" for x in (plain, masked)]
        bundles = [str(x.bundles) for x in (plain, masked, peer)]
        shares = ", ".join(f"{x.matrix_units:.0%}" for x in (plain, peer))
        say(f"| {' | '.join([name, *ratios, *bundles, shares])} |")
    return 0


def _ours(query: Array, key: Array, value: Array) -> Array:
    blocks = -(-_LENGTH.value // _BLOCK)
    shape = (1, _HEADS.value, blocks)
    stop = jnp.broadcast_to(jnp.arange(1, blocks + 1, dtype=jnp.int32), shape)
    return pallas_tpu(
        query,
        key,
        value,
        alibi_slopes(_HEADS.value),
        KeyBlocks(jnp.zeros(shape, jnp.int32), stop),
        causal=True,
        offset=0,
        window=None,
        query_segment_ids=None,
        key_segment_ids=None,
        block_size=_BLOCK,
    )


def _splash(query: Array, key: Array, value: Array) -> Array:
    forward = dict.fromkeys(("block_q", "block_kv", "block_kv_compute"), _BLOCK)
    backward = {f"{name}_dkv": _BLOCK for name in ("block_q", "block_kv")}
    kernel = make_splash_mha(
        MultiHeadMask([CausalMask((_LENGTH.value,) * 2)] * _HEADS.value),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=BlockSizes(
            **forward, **backward, block_kv_dkv_compute=_BLOCK, use_fused_bwd_kernel=True
        ),
    )
    query, key = fold(query * _SIZE.value**-0.5, key, alibi_slopes(_HEADS.value))
    heads_first = (x.swapaxes(1, 2) for x in (query, key, value))
    return jax.vmap(kernel)(*heads_first).swapaxes(1, 2)


def _compile(attend: Callable[..., Array]) -> None:
    """The gradient, which runs both kernels."""
    device = topologies.get_topology_desc(_CHIP.value, platform="tpu").devices[0]
    shape = (1, _LENGTH.value, _HEADS.value, _SIZE.value)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=SingleDeviceSharding(device))

    def loss(*inputs: Array) -> Array:
        return (attend(*inputs).astype(jnp.float32) ** 2).sum()

    jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()


def _loops(name: str) -> list[list[Loop]]:
    """Of each kernel, in the order compiled, the loops with matrix products."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true",
        }
        done = subprocess.run(
            [sys.executable, *sys.argv, f"--compile={name}"],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{name} does not compile: {done.stderr.strip().splitlines()[-1]}")
        listings = [
            path
            for path in sorted(pathlib.Path(folder).glob("*final_bundles.txt"))
            if re.search(r"-(alibi|splash)_.*-\d+-final_bundles", path.name)
        ]
        return [_loops_of(path) for path in listings]


def _loops_of(listing: pathlib.Path) -> list[Loop]:
    kernel = listing.name.rsplit("-", 2)[0]
    (counts,) = listing.parent.glob(f"{kernel}-*-final_hlo-static-per-bundle-utilization.txt")
    head, _, rows = counts.read_text().partition("== UTILIZATION:\n")
    # The first of the units counted are the matrix units; their number is in the second line.
    units = int(head.splitlines()[-1].split()[0])
    used = [int(row.split()[0]) for row in rows.splitlines() if row.strip()]
    regions, starts, address = [], {}, 0
    for line in listing.read_text(errors="replace").splitlines():
        if found := re.match(r"\s*(0x[0-9a-f]+|0)\s", line):
            address = int(found.group(1), 16)
        for kind, number in re.findall(r"(Start|End) region (\d+)", line):
            if kind == "Start":
                starts[number] = address
            elif number in starts:
                regions.append(range(starts[number], address + 1))
    loops = [x for x in regions if len(x) >= _LEAST and any(used[x.start : x.stop])]
    inner = [x for x in loops if not any(x != y and y[0] in x and y[-1] in x for y in loops)]
    return [
        Loop(len(x), sum(used[x.start : x.stop]) / units / len(x))
        for x in sorted(inner, key=lambda x: x.start)
    ]


if __name__ == "__main__":
    cli.run(main)
