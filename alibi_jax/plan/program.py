"""The training and the evaluation step, compiled for devices that need not be attached."""

import dataclasses
import re
import time
from typing import Any

import jax
import numpy as np

from alibi_jax.config import Config, Mesh
from alibi_jax.distributed.sharding import axis_size, make_mesh
from alibi_jax.evaluation.scoring import Scorer
from alibi_jax.flops import step_flops
from alibi_jax.plan.costs import Roofline, bytes_on_device, roofline, step_bytes
from alibi_jax.plan.hlo import Collective, collectives
from alibi_jax.plan.targets import Target
from alibi_jax.training.step import Trainer


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled training step: the memory of one device and the collectives.

    `activation_bytes` is what the backward pass needs of the forward pass. `temporary_bytes` are
    the bytes of all arrays of the training step that are neither arguments nor results, and
    `evaluation_bytes` are those of the evaluation step. `exchanges` are the collectives. If the
    compiler refuses the program for lack of memory, `refusal` is its message, `temporary_bytes` is
    the number in that message, `evaluation_bytes` is 0 and `exchanges` is empty.
    """

    mesh: Mesh
    parameter_bytes: int
    optimizer_bytes: int
    num_params: int
    activation_bytes: int
    temporary_bytes: int = 0
    refusal: str = ""
    evaluation_bytes: int = 0
    exchanges: tuple[Collective, ...] = ()
    compile_seconds: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """Peak memory of one device. A step's outputs reuse the memory of its donated inputs."""
        temporary = max(self.temporary_bytes, self.evaluation_bytes)
        return self.parameter_bytes + self.optimizer_bytes + temporary

    def fits(self, target: Target) -> bool:
        """Whether the compiler accepts the program and its peak is within the device's memory."""
        within_memory = target.device is None or self.peak_bytes <= target.device.memory
        return not self.refusal and within_memory


def compile_for_target(
    config: Config, vocab_size: int, target: Target, *, evaluation: bool = True
) -> Program:
    """Compiles the steps of a run on the configured mesh of the target's devices."""
    mesh = make_mesh(config.mesh, devices=target.devices)
    return compile_step(config, vocab_size, mesh, evaluation=evaluation)


def compile_step(
    config: Config, vocab_size: int, mesh: jax.sharding.Mesh, *, evaluation: bool = True
) -> Program:
    """Compiles the step that training runs and, with `evaluation`, the one that evaluation runs."""
    start = time.perf_counter()
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
        activation_bytes(trainer, batch),
    )
    evaluation_bytes = 0
    try:
        with jax.set_mesh(mesh):
            lowered = trainer.train_step.lower(
                trainer.abstract_state, {"inputs": batch, "targets": batch}, np.int32(0)
            )
            train_step: Any = lowered.compile()
        if evaluation:
            rows = train.batch_size // train.accumulation
            scorer = Scorer(trainer.graphdef, mesh, rows * train.length)
            evaluation_step = scorer.lowered(params, rows, train.length, 0).compile()
            evaluation_bytes = evaluation_step.memory_analysis().temp_size_in_bytes
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        refusal = str(error).splitlines()[0]
        return dataclasses.replace(
            program,
            temporary_bytes=_requested_bytes(refusal),
            refusal=refusal,
            compile_seconds=time.perf_counter() - start,
        )
    return dataclasses.replace(
        program,
        temporary_bytes=train_step.memory_analysis().temp_size_in_bytes,
        evaluation_bytes=evaluation_bytes,
        exchanges=tuple(collectives(train_step.as_text())),
        compile_seconds=time.perf_counter() - start,
    )


def estimate_time(
    config: Config, vocab_size: int, target: Target, program: Program
) -> Roofline | None:
    """The time of a step; None if the device's peaks are unknown or the program was refused."""
    if target.device is None or program.refusal:
        return None
    mesh = make_mesh(program.mesh, devices=target.devices)
    return roofline(
        step_flops(config, vocab_size),
        step_bytes(config, vocab_size, program.num_params, program.optimizer_bytes, mesh),
        list(program.exchanges),
        len(target.devices),
        target.device,
    )


def activation_bytes(trainer: Trainer, batch: jax.ShapeDtypeStruct) -> int:
    """Bytes that one device keeps of a micro-batch's forward pass for its backward pass."""

    def residual_bytes(rows: int) -> int:
        tokens = jax.ShapeDtypeStruct((rows, batch.shape[1]), np.int32)

        def residuals(params: Any, tokens: Any) -> Any:
            batch = {"inputs": tokens, "targets": tokens}
            return jax.vjp(lambda params: trainer.loss(params, batch, jax.random.key(0)), params)[1]

        with jax.set_mesh(trainer.mesh):
            tree = jax.eval_shape(residuals, trainer.abstract_state.params, tokens)
        leaves = jax.tree.leaves(tree)
        return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)

    rows = batch.shape[0] // trainer.config.train.accumulation
    # The residuals include the parameters, whatever the number of rows. The difference between the
    # residuals of 2 · rows and of rows, returned below, therefore omits the parameters.
    # Activations are sharded along batch and sequence. Those of heads and of the feed-forward
    # network are sharded further, which is not counted.
    shards = axis_size(trainer.mesh, "batch") * axis_size(trainer.mesh, "sequence")
    return (residual_bytes(2 * rows) - residual_bytes(rows)) // shards


def _requested_bytes(refusal: str) -> int:
    """The bytes that the program needs according to the compiler's message; 0 if it gives none.

    A message is "total memory required for HLO temporaries (29.24G) exceeds available HBM" or
    "Used 29.24G of 15.75G hbm".
    """
    size = re.search(r"\(([\d.]+)([KMG])\) exceeds", refusal) or re.search(
        r"Used ([\d.]+)([KMG]) of", refusal
    )
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return int(float(size.group(1)) * units[size.group(2)]) if size else 0
