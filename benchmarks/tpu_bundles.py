"""Counts the instructions of attention on a TPU, ours and splash attention, without a TPU.

    python benchmarks/tpu_bundles.py [--chip=v5e:2x2] [--length=8192] [--head_size=64]

Compiles the project's kernels and JAX's splash attention. Splash attention has no biases, so they
are folded into its queries and keys. The script reads, from the compiler's own listing, the number
of bundles of instructions that each kernel needs for a block of 512 queries and 512 keys. A TPU
issues one bundle per cycle, so fewer bundles are faster. The listing does not include memory
transfers and the overhead of each grid step. Our kernels have two loops, one for blocks that need a
mask and one for the other blocks, which are the most frequent. Needs libtpu, but no TPU.
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

_CHIP = flags.DEFINE_string("chip", "v5e:2x2", "Topology to compile for.")
_LENGTH = flags.DEFINE_integer("length", 8192, "Length of the row, in tokens.")
_HEADS = flags.DEFINE_integer("heads", 8, "Number of query heads and of key heads.")
_SIZE = flags.DEFINE_integer("head_size", 64, "Features per head.")
_COMPILE = flags.DEFINE_enum(
    "compile",
    None,
    ["ours", "splash"],
    "Only compiles this kernel; the script starts itself with this flag.",
)

_BLOCK = 512
# Shorter loops are not the loop over a block: they start or end rows.
_MIN_BUNDLES = 300


class Loop(NamedTuple):
    """A loop of a kernel: its bundles, and the share of the matrix units' slots that are used."""

    bundles: int
    matrix_units: float


def main() -> int:
    """Prints one table row per pass."""
    if _COMPILE.value:
        _compile(_ours if _COMPILE.value == "ours" else _splash)
        return 0
    shape = f"[1, {_LENGTH.value}, {_HEADS.value}, {_SIZE.value}]"
    say(f"{_CHIP.value}, jax {jax.__version__}, {shape}, bfloat16, blocks of {_BLOCK}\n")
    ours, splash = (_loops(name) for name in ("ours", "splash"))
    say(
        "| pass | ours / splash | ours masked / splash | ours | ours masked | splash "
        "| matrix units used: ours, splash |"
    )
    say("|---|---|---|---|---|---|---|")
    for name, (masked, unmasked), (splash_loop,) in zip(("forward", "backward"), ours, splash):
        ratios = [f"{x.bundles / splash_loop.bundles:.2f}" for x in (unmasked, masked)]
        bundles = [str(x.bundles) for x in (unmasked, masked, splash_loop)]
        shares = ", ".join(f"{x.matrix_units:.0%}" for x in (unmasked, splash_loop))
        say(f"| {' | '.join([name, *ratios, *bundles, shares])} |")
    return 0


def _ours(query: Array, key: Array, value: Array) -> Array:
    """Attention with the project's kernel, over all causal blocks."""
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
    """Splash attention with the biases folded into queries and keys."""
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
    """Compiles the gradient, which runs the forward and the backward kernel."""
    device = topologies.get_topology_desc(_CHIP.value, platform="tpu").devices[0]
    shape = (1, _LENGTH.value, _HEADS.value, _SIZE.value)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=SingleDeviceSharding(device))

    def loss(*inputs: Array) -> Array:
        return (attend(*inputs).astype(jnp.float32) ** 2).sum()

    jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()


def _loops(name: str) -> list[list[Loop]]:
    """The loops with matrix products of each kernel, in the order of compilation."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true",
        }
        result = subprocess.run(
            [sys.executable, *sys.argv, f"--compile={name}"],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            raise RuntimeError(f"{name} does not compile: {result.stderr.strip().splitlines()[-1]}")
        listings = [
            path
            for path in sorted(pathlib.Path(folder).glob("*final_bundles.txt"))
            if re.search(r"-(alibi|splash)_.*-\d+-final_bundles", path.name)
        ]
        return [_read_loops(path) for path in listings]


def _read_loops(listing: pathlib.Path) -> list[Loop]:
    """The innermost loops with matrix products in the listing of a kernel."""
    kernel = listing.name.rsplit("-", 2)[0]
    (counts,) = listing.parent.glob(f"{kernel}-*-final_hlo-static-per-bundle-utilization.txt")
    head, _, rows = counts.read_text().partition("== UTILIZATION:\n")
    # The first column is the matrix units. The last line above the table has the number of units.
    units = int(head.splitlines()[-1].split()[0])
    used_units = [int(row.split()[0]) for row in rows.splitlines() if row.strip()]
    regions, starts, address = [], {}, 0
    for line in listing.read_text(errors="replace").splitlines():
        if match := re.match(r"\s*(0x[0-9a-f]+|0)\s", line):
            address = int(match.group(1), 16)
        for kind, number in re.findall(r"(Start|End) region (\d+)", line):
            if kind == "Start":
                starts[number] = address
            elif number in starts:
                regions.append(range(starts[number], address + 1))
    loops = [x for x in regions if len(x) >= _MIN_BUNDLES and any(used_units[x.start : x.stop])]
    innermost = [x for x in loops if not any(x != y and y[0] in x and y[-1] in x for y in loops)]
    return [
        Loop(len(x), sum(used_units[x.start : x.stop]) / units / len(x))
        for x in sorted(innermost, key=lambda x: x.start)
    ]


if __name__ == "__main__":
    cli.run(main)
