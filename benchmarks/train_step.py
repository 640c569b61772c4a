"""Measures training steps on a CPU: ours, ours with naive attention, and PyTorch.

    python benchmarks/train_step.py [--torch_python=PATH] [--lengths=1024] [--dtype=bfloat16]

The model has 6 layers of width 512 and 8 heads, on bytes. A step has about 8192 tokens and computes
the loss, the gradients, clipping and AdamW. The same model in PyTorch starts from the same weights
and must give the same loss, with a relative error of at most 1e-4 in float32 and 2e-2 in bfloat16;
otherwise the exit code is 1. In PyTorch the model has fused attention, whose biases are an array
that is made in advance, and a fused AdamW. It runs both eagerly and compiled. Ours has one device
per core and shards the rows over the devices. If there are too few rows, ours runs on one device
that uses all cores as threads, and also with heads and features sharded over the devices.

All implementations take turns in each of `--rounds` rounds. The table gives the median, the minimum
and the maximum of three numbers: the ratio of the speed to the speed of the faster PyTorch model in
the same round (to ours without PyTorch), the tokens per second, and the achieved share of the
FLOP/s of a 2048 x 2048 x 2048 matrix product in the same dtype. The FLOPs of a token are six times
the parameters of its matrices, and the FLOPs of full causal attention. They do not count
recomputation, and they count the keys that reach leaves out. An implementation is skipped if it
does not fit into memory.
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

_LENGTHS = flags.DEFINE_list("lengths", ["1024", "4096", "8192"], "Lengths of a row, in tokens.")
_TOKENS = flags.DEFINE_integer("tokens", 8192, "Tokens of a step; at least one row.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Dtype of the activations.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Number of rounds; their median is printed.")
_TORCH = flags.DEFINE_string("torch_python", sys.executable, "A Python interpreter with torch.")

_MODEL = {"num_layers": 6, "width": 512, "num_heads": 8}
_VOCABULARY = 256
_LEARNING_RATE = 1e-4
_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
_OURS, _HEADS_SHARDED, _NAIVE = "ours", "ours, heads sharded", "ours, naive attention"
_TORCH_NAMES = {"torch": "eager", "torch, compiled": "compiled"}


def main() -> int:
    """Prints one table row per length and implementation."""
    jax.config.update("jax_platforms", "cpu")
    # One device per core. Whether rows or heads are sharded depends on the length.
    cli.start_devices(_MODEL["num_heads"])
    torch = _timing.torch_version(_TORCH.value)
    say(f"{jax.device_count()} cores, jax {jax.__version__}, torch {torch}, {_DTYPE.value}\n")
    say("| length | batch | | speed / PyTorch | tokens/s | share of product | loss |")
    say("|---|---|---|---|---|---|---|")
    all_agree = True
    for length in map(int, _LENGTHS.value):
        all_agree &= _compare(length, max(1, _TOKENS.value // length), torch is not None)
    return 0 if all_agree else 1


def _compare(length: int, batch: int, torch: bool) -> bool:
    """Prints one table row per implementation; returns whether their first losses agree."""
    prefix = f"| {length} | {batch} |"
    runs: dict[str, Callable[[], float]] = {
        _timing.PRODUCT_RATE: _timing.product_rate(_DTYPE.value)
    }
    losses = {}
    tokens = np.random.default_rng(0).integers(1, _VOCABULARY, (batch, length + 1), np.int32)
    with contextlib.ExitStack() as stack:
        weights = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()), "weights.npz")
        torch_process = stack.enter_context(_timing.TorchProcess(_TORCH.value)) if torch else None
        heads_sharded = (_HEADS_SHARDED,) if batch % jax.device_count() else ()
        for name in (_OURS, *heads_sharded, _NAIVE, *(_TORCH_NAMES if torch else ())):
            try:
                if torch_process is not None and name in _TORCH_NAMES:
                    losses[name] = _prepare_in_torch(torch_process, name, tokens, weights)
                    runs[name] = functools.partial(
                        torch_process, "seconds", name=_TORCH_NAMES[name]
                    )
                else:
                    step = _prepare(name, tokens, weights)
                    losses[name] = step()
                    runs[name] = functools.partial(_timing.seconds_per_call, step)
            except (OSError, MemoryError) as error:
                say(f"{prefix} {name} | {error} | | | |")
        numbers = _timing.alternate(runs, _ROUNDS.value)
    rates = numbers.pop(_timing.PRODUCT_RATE)
    references = [name for name in numbers if name in _TORCH_NAMES] or [_OURS]
    fastest = min(references, key=lambda name: statistics.median(numbers[name]))
    for name, seconds in numbers.items():
        shares = [
            100 * _flops(length) * tokens[:, 1:].size / x / product_rate
            for x, product_rate in zip(seconds, rates)
        ]
        cells = [
            _timing.median_and_range(_timing.ratios(numbers[fastest], seconds)),
            _timing.median_and_range([tokens[:, 1:].size / x for x in seconds], ",.0f"),
            _timing.median_and_range(shares, ".0f") + " %",
            f"{losses[name]:.6f}",
        ]
        say(f"{prefix} {name} | {' | '.join(cells)} |")
    allowed = _TOLERANCE[_DTYPE.value] * losses[_OURS]
    # Written so that NaN does not count as agreement.
    return all(abs(loss - losses[_OURS]) <= allowed for loss in losses.values())


def _prepare(name: str, tokens: np.ndarray, weights: pathlib.Path) -> Callable[[], float]:
    """A compiled step that returns its loss; the weights are written to the file `weights`.

    Raises MemoryError if the step would not fit.
    """
    batch, length = tokens[:, 1:].shape
    config = Config(
        model=Model(**_MODEL, dtype=_DTYPE.value),
        optimizer=Optimizer(learning_rate=_LEARNING_RATE, schedule="constant", warmup_steps=0),
        train=Train(length=length, batch_size=batch),
    )
    config.check()
    trainer = Trainer(config, _VOCABULARY, _mesh(name, batch))
    state = trainer.initial_state()
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}
    np.savez(weights, **jax.tree.map(np.asarray, named))
    data = trainer.device_batch({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})
    dense = _timing.attention_options(implementation="dense")
    with jax.set_mesh(trainer.mesh), dense if name == _NAIVE else contextlib.nullcontext():
        compiled = trainer.train_step.lower(state, data, np.int32(0)).compile()
    _timing.check_memory(trainer.mesh.size * compiled.memory_analysis().temp_size_in_bytes)

    def step() -> float:
        nonlocal state
        state, metrics = jax.block_until_ready(compiled(state, data, np.int32(0)))
        return float(metrics.nll / metrics.targets)

    return step


def _mesh(name: str, batch: int) -> jax.sharding.Mesh:
    """A mesh of all devices if rows or heads are sharded, otherwise of one device."""
    if batch % jax.device_count() == 0:
        return sharding.make_mesh()
    if name == _HEADS_SHARDED:
        return sharding.make_mesh(Mesh(data=1, tensor=-1))
    return sharding.make_mesh(devices=jax.devices()[:1])


def _prepare_in_torch(
    torch_process: _timing.TorchProcess, name: str, tokens: np.ndarray, weights: pathlib.Path
) -> float:
    """Prepares the step of a model in PyTorch, and returns its first loss."""
    return torch_process(
        "train_step",
        name=_TORCH_NAMES[name],
        weights=str(weights),
        tokens=tokens.tolist(),
        slopes=np.asarray(alibi_slopes(_MODEL["num_heads"])).tolist(),
        dtype=_DTYPE.value,
        learning_rate=_LEARNING_RATE,
    )


def _flops(length: int) -> int:
    """The FLOPs of a token in a training step.

    They are six times the parameters of the matrices, with the tied table, and the FLOPs of full
    causal attention in each layer. The backward pass counts twice as much as the forward pass.
    """
    layers, width = _MODEL["num_layers"], _MODEL["width"]
    return 6 * (12 * layers * width**2 + _VOCABULARY * width) + 6 * layers * length * width


if __name__ == "__main__":
    cli.run(main)
