"""One training step: jitted and sharded, with a donated state and gradient accumulation."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from alibi_jax.checkpoints import all_finite
from alibi_jax.config import Config
from alibi_jax.distributed import sharding
from alibi_jax.model import abstract_model, check_divides, check_model_fits, initial_params
from alibi_jax.model.losses import weighted_sum
from alibi_jax.training.optimizers import make_optimizer

Batch = dict[str, Array]


class TrainState(NamedTuple):
    """The state that a step takes and returns. The loop keeps the step number."""

    params: Any
    optimizer: Any


class StepMetrics(NamedTuple):
    """Metrics of one step. `nll` is a sum over targets, `targets` the sum of their weights.

    `finite` is whether the loss, the gradient norm and every number of the state after the step are
    finite.
    """

    nll: Float[Array, ""]
    targets: Float[Array, ""]
    grad_norm: Float[Array, ""]
    finite: Bool[Array, ""]


def summed_gradients(
    loss: Callable[[Any, Batch, Int[Array, ""]], tuple[Array, Array]],
    params: Any,
    batch: Batch,
    accumulation: int,
) -> tuple[Array, Array, Any]:
    """Returns (sum of losses, sum of weights, gradient of the sum of losses) over micro-batches.

    `loss(params, micro_batch, index)` returns a sum of losses and a sum of weights. Nothing is
    divided here, so that micro-batches with unequal weights count as they would in one batch.
    """
    gradient = jax.value_and_grad(loss, has_aux=True)
    if accumulation == 1:
        (total, count), grads = gradient(params, batch, jnp.int32(0))
        return total, count, grads

    def to_micro_batches(x: Array) -> Array:
        # Neighbouring rows go to different micro-batches, so that each device keeps its own rows.
        return x.reshape(x.shape[0] // accumulation, accumulation, *x.shape[1:]).swapaxes(0, 1)

    def accumulate(sums: Any, micro_batch: tuple[Batch, Array]) -> tuple[Any, None]:
        (total, count), grads = gradient(params, *micro_batch)
        return jax.tree.map(jnp.add, sums, (total, count, grads)), None

    zeros = (jnp.float32(0), jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
    indices = jnp.arange(accumulation, dtype=jnp.int32)
    micro_batches = (jax.tree.map(to_micro_batches, batch), indices)
    (total, count, grads), _ = jax.lax.scan(accumulate, zeros, micro_batches)
    return total, count, grads


def check_fits(config: Config, mesh: jax.sharding.Mesh) -> None:
    """Raises ConfigError unless the mesh divides all sizes of the model and of training."""
    check_model_fits(config.model, mesh)
    train = config.train
    rows = train.batch_size // train.accumulation
    check_divides(f"train.batch_size/train.accumulation={rows}", rows, "batch", mesh)
    check_divides(f"train.length={train.length}", train.length, "sequence", mesh)


@dataclasses.dataclass
class Trainer:
    """The jitted functions that train a configuration on a mesh."""

    config: Config
    vocab_size: int
    mesh: jax.sharding.Mesh

    def __post_init__(self) -> None:
        config = self.config
        check_fits(config, self.mesh)
        self.graphdef, abstract_params = abstract_model(config, self.vocab_size, self.mesh)
        self.tx = make_optimizer(config.optimizer, config.train.steps)
        replicated = sharding.named_sharding(self.mesh)

        def sharded_moment(moment: Any, param: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                moment.shape, moment.dtype, sharding=sharding.moment_sharding(param, moment.shape)
            )

        # Without explicit shardings the compiler replicates moments and compiles the second step
        # again.
        abstract_optimizer = optax.tree.map_params(
            self.tx,
            sharded_moment,
            jax.eval_shape(self.tx.init, abstract_params),
            abstract_params,
            transform_non_params=lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=replicated
            ),
        )
        self.abstract_state = TrainState(abstract_params, abstract_optimizer)
        placement = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        self._init = jax.jit(self._initial_state, out_shardings=placement)
        self.train_step = jax.jit(
            self._train_step, donate_argnums=0, out_shardings=(placement, replicated)
        )
        self.batch_sharding = sharding.named_sharding(self.mesh, "batch", None)

    def initial_state(self) -> TrainState:
        """Initial parameters and moments, created on the devices that hold them."""
        with jax.set_mesh(self.mesh):
            return self._init(jax.random.key(self.config.train.seed))

    def device_batch(self, local: dict[str, np.ndarray]) -> Batch:
        """The global batch, from the rows of this process."""
        return {
            name: sharding.make_global_array(self.batch_sharding, x, self.config.train.batch_size)
            for name, x in local.items()
        }

    def loss(
        self, params: Any, batch: Batch, training_key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Returns (sum of losses, sum of their weights) of a batch, with dropout."""
        model = nnx.merge(self.graphdef, params)
        hidden = model.hidden_states(batch["inputs"], training_key=training_key)
        nll = model.token_nll(hidden, batch["targets"], training_key=training_key)
        return weighted_sum(nll, batch.get("weights"))

    def _initial_state(self, key: Array) -> TrainState:
        params = initial_params(self.config, self.vocab_size, key)
        return TrainState(params, self.tx.init(params))

    def _train_step(
        self, state: TrainState, batch: Batch, step: Int[Array, ""]
    ) -> tuple[TrainState, StepMetrics]:
        # The first fold keeps the keys of all steps apart from the key of the initial parameters.
        key = jax.random.fold_in(jax.random.key(self.config.train.seed), 1)
        key = jax.random.fold_in(key, step)

        def loss(params: Any, batch: Batch, micro_batch: Array) -> tuple[Array, Array]:
            return self.loss(params, batch, jax.random.fold_in(key, micro_batch))

        total, count, grads = summed_gradients(
            loss, state.params, batch, self.config.train.accumulation
        )
        grads = jax.tree.map(lambda grad: grad / jnp.maximum(count, 1.0), grads)
        grad_norm = optax.tree.norm(grads)
        updates, optimizer = self.tx.update(grads, state.optimizer, state.params)
        updated = TrainState(optax.apply_updates(state.params, updates), optimizer)
        finite = all_finite((total, grad_norm, updated))
        if self.config.train.max_skipped_steps:
            # The step is skipped: the optimizer's own count of steps stays the same too.
            updated = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state)
        return updated, StepMetrics(total, count, grad_norm, finite)
