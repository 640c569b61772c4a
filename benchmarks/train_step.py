"""Tokens a second of a training step on a CPU: ours, ours with naive attention, and PyTorch.

    python benchmarks/train_step.py [--torch_python=PATH] [--lengths=1024] [--dtype=bfloat16]

6 layers of width 512, 8 heads, bytes, about 8192 tokens a step: loss, gradients, clipping and
AdamW. The same model in PyTorch, from the same weights, must give the same loss: to 1e-4 of it in
float32, 2e-2 in bfloat16, or the exit code is 1. It has fused attention, which is given the biases
as an array made beforehand, and a fused AdamW, and runs as it stands and compiled. Ours runs on
each core as one device, rows split over them; where there are too few, on one device that has all
cores as its threads, and with its heads and features split over devices.

All take turns in each of `--rounds` rounds; medians, least and greatest, of the ratio of speeds to
the faster one in PyTorch in the same round (without PyTorch: to ours), of tokens a second, and of
the share of the speed of a 2048 x 2048 x 2048 matrix product in that dtype. A token counts six
times its matrices' parameters, and what its causal attention asks for: nothing that is recomputed,
all that reach leaves out. What does not fit into memory is left out.
"""

import contextlib
import functools
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable

import _timing
import jax
import numpy as np
from absl import flags

from alibi_jax import alibi_slopes, cli
from alibi_jax.config import Config, Mesh, Model, Optimizer, Train
from alibi_jax.distributed import sharding
from alibi_jax.distributed.processes import say
from alibi_jax.training.step import Trainer

_LENGTHS = flags.DEFINE_list("lengths", ["1024", "4096", "8192"], "Of the rows, in tokens.")
_TOKENS = flags.DEFINE_integer("tokens", 8192, "Of a step, or one row if that is longer.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of activations.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds whose median is printed.")
_TORCH = flags.DEFINE_string("torch_python", sys.executable, "An interpreter that has torch.")

_MODEL = {"num_layers": 6, "width": 512, "num_heads": 8}
_VOCABULARY = 256
_RATE = 1e-4
_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
_OURS, _SPLIT, _NAIVE = "ours", "ours, heads split", "ours, naive attention"
_IN_TORCH = {"torch": "eager", "torch, compiled": "compiled"}


def main() -> int:
    """Prints a line a length and candidate."""
    jax.config.update("jax_platforms", "cpu")
    # One device a core; what they share, rows or heads, is up to each length.
    cli.start_devices(_MODEL["num_heads"])
    torch = _timing.torch_version(_TORCH.value)
    say(f"{jax.device_count()} cores, jax {jax.__version__}, torch {torch}, {_DTYPE.value}\n")
    say("| length | batch | | ratio | tokens/s | share of product | loss |")
    say("|---|---|---|---|---|---|---|")
    fine = True
    for length in map(int, _LENGTHS.value):
        fine &= _compare(length, max(1, _TOKENS.value // length), torch is not None)
    return 0 if fine else 1


def _compare(length: int, batch: int, torch: bool) -> bool:
    """Prints a line a candidate; whether their first losses agree."""
    line = f"| {length} | {batch} |"
    runs: dict[str, Callable[[], float]] = {"": _timing.product_rate(_DTYPE.value)}
    losses = {}
    tokens = np.random.default_rng(0).integers(1, _VOCABULARY, (batch, length + 1), np.int32)
    with contextlib.ExitStack() as stack:
        weights = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()), "weights.npz")
        peer = stack.enter_context(_timing.Peer(_TORCH.value)) if torch else None
        split = (_SPLIT,) if batch % jax.device_count() else ()
        for name in (_OURS, *split, _NAIVE, *(_IN_TORCH if torch else ())):
            try:
                if peer is not None and name in _IN_TORCH:
                    losses[name] = _ask(peer, name, tokens, weights)
                    runs[name] = functools.partial(peer, "seconds", name=_IN_TORCH[name])
                else:
                    step = _prepare(name, tokens, weights)
                    losses[name] = step()
                    runs[name] = functools.partial(_timing.timed, step)
            except (OSError, MemoryError) as error:
                say(f"{line} {name} | {error} | | | |")
        numbers = _timing.in_turns(runs, _ROUNDS.value)
    rates = numbers.pop("")
    peers = [name for name in numbers if name in _IN_TORCH] or [_OURS]
    best = min(peers, key=lambda name: statistics.median(numbers[name]))
    for name, seconds in numbers.items():
        shares = [100 * _flops(length) * tokens[:, 1:].size / x / r for x, r in zip(seconds, rates)]
        cells = [
            _timing.spread(_timing.ratios(numbers[best], seconds)),
            _timing.spread([tokens[:, 1:].size / x for x in seconds], ",.0f"),
            _timing.spread(shares, ".0f") + " %",
            f"{losses[name]:.6f}",
        ]
        say(f"{line} {name} | {' | '.join(cells)} |")
    allowed = _TOLERANCE[_DTYPE.value] * losses[_OURS]
    # Not a number is not within it either.
    return all(abs(loss - losses[_OURS]) <= allowed for loss in losses.values())


def _prepare(name: str, tokens: np.ndarray, weights: pathlib.Path) -> Callable[[], float]:
    """A step, which tells its loss; MemoryError where it would not fit. Writes its `weights`."""
    batch, length = tokens[:, 1:].shape
    config = Config(
        model=Model(**_MODEL, dtype=_DTYPE.value),
        optimizer=Optimizer(learning_rate=_RATE, schedule="constant", warmup_steps=0),
        train=Train(length=length, batch_size=batch),
    )
    config.check()
    trainer = Trainer(config, _VOCABULARY, _mesh(name, batch))
    state = trainer.initial_state()
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}
    np.savez(weights, **jax.tree.map(np.asarray, named))
    data = trainer.device_batch({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})
    dense = _timing.attending(implementation="dense")
    with jax.set_mesh(trainer.mesh), dense if name == _NAIVE else contextlib.nullcontext():
        compiled = trainer.train_step.lower(state, data, np.int32(0)).compile()
    _timing.check_room(trainer.mesh.size * compiled.memory_analysis().temp_size_in_bytes)

    def step() -> float:
        nonlocal state
        state, metrics = jax.block_until_ready(compiled(state, data, np.int32(0)))
        return float(metrics.nll / metrics.targets)

    return step


def _mesh(name: str, batch: int) -> jax.sharding.Mesh:
    """All cores where each has rows, or is to have heads; else one device, as in training."""
    if batch % jax.device_count() == 0:
        return sharding.make_mesh()
    if name == _SPLIT:
        return sharding.make_mesh(Mesh(data=1, tensor=-1))
    return sharding.make_mesh(devices=jax.devices()[:1])


def _ask(peer: _timing.Peer, name: str, tokens: np.ndarray, weights: pathlib.Path) -> float:
    """Makes PyTorch's step; its first loss."""
    return peer(
        "train_step",
        name=_IN_TORCH[name],
        weights=str(weights),
        tokens=tokens.tolist(),
        slopes=np.asarray(alibi_slopes(_MODEL["num_heads"])).tolist(),
        dtype=_DTYPE.value,
        rate=_RATE,
    )


def _flops(length: int) -> int:
    """Of a token: six times the parameters of the matrices, the tied table among them.

    And of the attention of each layer, causal, forward and twice that backward.
    """
    layers, width = _MODEL["num_layers"], _MODEL["width"]
    return 6 * (12 * layers * width**2 + _VOCABULARY * width) + 6 * layers * length * width


if __name__ == "__main__":
    cli.run(main)
