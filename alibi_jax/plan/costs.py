"""Memory traffic of a training step, and a roofline estimate of its time."""

import dataclasses
from typing import Any

import jax
import numpy as np

from alibi_jax.config import REMATS, Config
from alibi_jax.distributed.sharding import axis_size
from alibi_jax.flops import Flops, vocabulary_rows
from alibi_jax.plan.hlo import Collective
from alibi_jax.plan.targets import Device


def step_bytes(
    config: Config,
    vocab_size: int,
    num_params: int,
    optimizer_bytes: int,
    mesh: jax.sharding.Mesh,
) -> float:
    """An estimate of the bytes that a step reads and writes in each device's memory.

    Each pass over a micro-batch writes and reads the gathered weights once. It also writes and
    reads the arrays of each layer once, and the backward pass does so twice. A step writes and
    reads the logits three times. The update reads and writes the parameters and the optimizer
    state, `optimizer_bytes` on each device, and reads the gradients.
    """
    model, train = config.model, config.train
    size = np.dtype(model.dtype).itemsize
    tensor = axis_size(mesh, "heads")
    parameter_bytes = 4.0 * num_params / (tensor * axis_size(mesh, "embed"))
    tokens = train.batch_size * train.length * tensor / mesh.size
    passes = 3 if REMATS[model.remat].recomputes_projections else 2
    weights = 2.0 * passes * train.accumulation * size * num_params / tensor
    update = 3 * parameter_bytes + 2 * optimizer_bytes
    ff = model.ff_width or 4 * model.width
    arrays = 8 * model.width + (4 + 3 * ff / model.width) * model.width / tensor
    activations = 2.0 * (passes + 1) * size * tokens * arrays * model.num_layers
    logits = 2.0 * 3 * 4 * tokens * vocabulary_rows(model, vocab_size) / tensor
    return weights + update + activations + logits


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of a step in computation, in memory traffic and on the network, each at its peak."""

    compute: float
    memory: float
    network: float

    @property
    def overlapped(self) -> float:
        """Seconds of a step in which all three overlap completely."""
        return max(self.compute, self.memory, self.network)

    @property
    def sequential(self) -> float:
        """Seconds of a step in which the three run one after the other."""
        return self.compute + self.memory + self.network


def roofline(
    flops: Flops, num_bytes: float, exchanges: list[Collective], mesh_size: int, device: Device
) -> Roofline:
    """The roofline of a step on `mesh_size` devices.

    `num_bytes` is the memory traffic of each device, and `exchanges` are the collectives of a step.
    """
    return Roofline(
        (flops.model + flops.recomputed) / mesh_size / device.flops,
        num_bytes / device.bandwidth,
        sum(collective.bytes_sent for collective in exchanges) / device.link,
    )


def bytes_on_device(tree: Any) -> int:
    """Bytes that one device holds of a tree of sharded arrays or ShapeDtypeStructs."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
