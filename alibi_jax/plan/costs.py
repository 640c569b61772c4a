"""What a step costs, counted from the configuration, and how long that takes at best.

Counted and not read from the compiler, which counts the body of a loop once.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from alibi_jax.config import Config
from alibi_jax.plan.hlo import Collective
from alibi_jax.plan.targets import Device


class Flops(NamedTuple):
    """Of a training step on all devices together: what it takes, and what is computed again."""

    products: float
    attention: float
    again: float

    @property
    def model(self) -> float:
        """What the model takes, however it is computed: the numerator of MFU."""
        return self.products + self.attention


def step_flops(config: Config, vocab_size: int) -> Flops:
    """Multiplications and additions of a training step, two for each product's term.

    The backward pass takes twice the forward pass. Attention is causal: half of all pairs. What a
    position method adds is left out.
    """
    model, train = config.model, config.train
    tokens = train.batch_size * train.length
    width, ff = model.width, model.ff_width or 4 * model.width
    kv_heads = model.num_kv_heads or model.num_heads
    gated = model.activation in ("swiglu", "geglu")
    heads = 2 * model.num_heads + 2 * kv_heads
    layer = 2.0 * width * (heads * model.head_size + (3 if gated else 2) * ff)
    pairs = (train.length + 1) / 2
    attention = 2.0 * 2.0 * model.num_heads * model.head_size * pairs * model.num_layers
    layers, logits = layer * model.num_layers, 2.0 * width * vocab_size
    again = {"none": 0.0, "projections": attention, "full": layers + attention}[model.remat]
    # Chunks of logits are always computed again; of what is in one chunk that is little.
    return Flops(3 * tokens * (layers + logits), 3 * tokens * attention, tokens * (again + logits))


def step_bytes(config: Config, vocab_size: int, num_params: int, mesh: jax.sharding.Mesh) -> float:
    """Bytes that a step reads and writes in each device's memory, roughly.

    Weights once a pass and micro-batch, gathered; parameters, moments and gradients once in the
    update; each layer's arrays once written and once read a pass; logits once a pass.
    """
    model, train = config.model, config.train
    size = 4 if model.dtype == "float32" else 2
    tensor, shards = mesh.shape["tensor"], mesh.shape["tensor"] * mesh.shape["fsdp"]
    tokens = train.batch_size * train.length * tensor / mesh.size
    passes = 3 if model.remat == "full" else 2
    weights = 2.0 * passes * train.accumulation * size * num_params / tensor
    moments = {"adamw": 2, "sgd": 1, "adafactor": 0}[config.optimizer.name]
    update = 4.0 * num_params / shards * (2 + 1 + 2 * moments)
    ff = model.ff_width or 4 * model.width
    arrays = 8 * model.width + (4 + 3 * ff / model.width) * model.width / tensor
    activations = 2.0 * (passes + 1) * size * tokens * arrays * model.num_layers
    logits = 2.0 * 3 * 4 * tokens * vocab_size / tensor
    return weights + update + activations + logits


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds a step: of products at the peak, of memory, and of each axis of the network."""

    compute: float
    memory: float
    network: float

    @property
    def least(self) -> float:
        """All three at the same time."""
        return max(self.compute, self.memory, self.network)

    @property
    def most(self) -> float:
        """One after the other, each at its peak."""
        return self.compute + self.memory + self.network


def roofline(
    flops: Flops, num_bytes: float, exchanges: list[Collective], mesh_size: int, device: Device
) -> Roofline:
    """How long each part of a step takes on such devices at their peaks."""
    return Roofline(
        (flops.model + flops.again) / mesh_size / device.flops,
        num_bytes / device.bandwidth,
        sum(one.moved for one in exchanges) / device.link,
    )


def bytes_on_device(tree: Any) -> int:
    """Of placed arrays, or their ShapeDtypeStructs, what one device holds."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
