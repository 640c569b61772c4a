"""The training and the evaluation step, compiled for devices that need not be here."""

import dataclasses
import re
import time
from typing import Any

import jax
import numpy as np

from alibi_jax.config import Config, Mesh
from alibi_jax.distributed.sharding import axis_size
from alibi_jax.evaluation.scoring import Scorer
from alibi_jax.plan.costs import bytes_on_device
from alibi_jax.plan.hlo import Collective, collectives
from alibi_jax.training.step import Trainer


@dataclasses.dataclass(frozen=True)
class Program:
    """What the compiler says of a training step; bytes are of one device.

    `activations` are what the backward pass needs of the forward pass, `temporaries` all that
    is neither an argument nor a result. Where they did not fit, they are those asked for, `refusal`
    has the compiler's words, and what follows is empty.
    """

    mesh: Mesh
    parameters: int
    optimizer: int
    num_params: int
    activations: int
    temporaries: int = 0
    refusal: str = ""
    evaluation: int = 0
    exchanges: tuple[Collective, ...] = ()
    seconds: float = 0.0

    @property
    def total(self) -> int:
        """The most at a time; what a step returns takes the place of what it was given."""
        return self.parameters + self.optimizer + max(self.temporaries, self.evaluation)


def compile_step(
    config: Config, vocab_size: int, mesh: jax.sharding.Mesh, *, evaluation: bool = True
) -> Program:
    """Compiles the very step that training runs, and the one that evaluation does."""
    begun = time.perf_counter()
    trainer = Trainer(config, vocab_size, mesh)
    params, train = trainer.abstract_state.params, config.train
    batch = jax.ShapeDtypeStruct(
        (train.batch_size, train.length), np.int32, sharding=trainer.batch_sharding
    )
    program = Program(
        Mesh(**mesh.shape),
        bytes_on_device(params),
        bytes_on_device(trainer.abstract_state.optimizer),
        sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params)),
        kept_activations(trainer, batch),
    )
    batches = {"inputs": batch, "targets": batch}
    evaluating = 0
    try:
        with jax.set_mesh(mesh):
            lowered = trainer.train_step.lower(trainer.abstract_state, batches, np.int32(0))
            compiled: Any = lowered.compile()
        if evaluation:
            rows = train.batch_size // train.accumulation
            scorer = Scorer(trainer.graphdef, mesh, rows * train.length)
            scored = scorer.lowered(params, rows, train.length, 0).compile()
            evaluating = scored.memory_analysis().temp_size_in_bytes
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        refusal = str(error).splitlines()[0]
        return dataclasses.replace(
            program,
            temporaries=_asked_for(refusal),
            refusal=refusal,
            seconds=time.perf_counter() - begun,
        )
    return dataclasses.replace(
        program,
        temporaries=compiled.memory_analysis().temp_size_in_bytes,
        evaluation=evaluating,
        exchanges=tuple(collectives(compiled.as_text())),
        seconds=time.perf_counter() - begun,
    )


def kept_activations(trainer: Trainer, batch: jax.ShapeDtypeStruct) -> int:
    """Bytes of a device that the backward pass needs of a micro-batch's forward pass."""

    def kept(rows: int) -> int:
        tokens = jax.ShapeDtypeStruct((rows, batch.shape[1]), np.int32)

        def backward(params: Any, tokens: Any) -> Any:
            batch = {"inputs": tokens, "targets": tokens}
            return jax.vjp(lambda params: trainer.loss(params, batch, jax.random.key(0)), params)[1]

        with jax.set_mesh(trainer.mesh):
            tree = jax.eval_shape(backward, trainer.abstract_state.params, tokens)
        leaves = jax.tree.leaves(tree)
        return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)

    rows = batch.shape[0] // trainer.config.train.accumulation
    # The difference, for the parameters are kept too, of however many rows. These are split as the
    # batch and the sequence are; heads and feed-forward further.
    shards = axis_size(trainer.mesh, "batch") * axis_size(trainer.mesh, "sequence")
    return (kept(2 * rows) - kept(rows)) // shards


def _asked_for(refusal: str) -> int:
    """Bytes, of "total memory required for HLO temporaries (29.24G) exceeds available HBM"."""
    asked = re.search(r"\(([\d.]+)([KMG])\) exceeds", refusal) or re.search(
        r"Used ([\d.]+)([KMG]) of", refusal
    )
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return int(float(asked.group(1)) * units[asked.group(2)]) if asked else 0
