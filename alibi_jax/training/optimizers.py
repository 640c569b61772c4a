"""Optimizers and learning rate schedules from the configuration, as Optax chains."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from alibi_jax.checkpoints.migrations import dotted_name
from alibi_jax.config import OPTIMIZERS, SCHEDULES, Optimizer
from alibi_jax.model.layer_stack import is_stacked


def make_schedule(config: Optimizer, steps: int) -> optax.Schedule:
    """The learning rate by step: linear warm-up, then cosine, linear or constant.

    Steps count from 0. The decay would reach `learning_rate * final_fraction` at step `steps`,
    one step after the last step of the run.
    """
    peak, warmup = config.learning_rate, clipped_warmup(config, steps)
    after = SCHEDULES[config.schedule].make(config, max(1, steps - warmup))
    # The first rate is peak/(warmup+1) and not 0, so that the first step changes parameters.
    ramp = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([ramp, after], [warmup]) if warmup else after


def clipped_warmup(config: Optimizer, steps: int) -> int:
    """The number of warm-up steps: `warmup_steps`, but at most `steps` if the schedule decays.

    The warm-up of a constant schedule is not clipped, because the run may be resumed with more
    steps.
    """
    decays = SCHEDULES[config.schedule].decays
    return min(config.warmup_steps, steps) if decays else config.warmup_steps


def make_optimizer(config: Optimizer, steps: int) -> optax.GradientTransformation:
    """Clipping by global norm, update direction, decoupled weight decay and learning rate.

    The direction is that of AdamW (Loshchilov & Hutter 2019), SGD with Nesterov momentum, or
    Adafactor (Shazeer & Stern 2018). Weight decay applies to matrices only and is scaled by the
    learning rate in all three. Biases do not decay, although the biases of heads have two axes.
    A parameter counts as a matrix if it has two or more axes in one layer: the axis along which
    the parameters of all layers are stacked is not counted.
    """
    choice = OPTIMIZERS[config.name]
    direction = choice.direction(config)
    if choice.clips_updates:
        direction = optax.chain(direction, optax.stateless(_clip_by_rms))

    def is_matrix(path: Any, x: Any) -> bool:
        return x.ndim - is_stacked(path) > 1 and not dotted_name(path).endswith("bias")

    def matrices(params: Any) -> Any:
        return jax.tree.map_with_path(is_matrix, params)

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        direction,
        optax.add_decayed_weights(config.weight_decay, mask=matrices),
        optax.scale_by_learning_rate(make_schedule(config, steps)),
    )


def _clip_by_rms(updates: Any, params: Any) -> Any:
    """Update clipping (Shazeer & Stern 2018, section 6).

    Scales each layer's update of each parameter to a root mean square of at most 1.
    `optax.clip_by_block_rms` would treat the stacked parameters of all layers as one.
    """

    def clip(path: Any, x: Array) -> Array:
        axes = tuple(range(int(is_stacked(path)), x.ndim))
        rms = jnp.sqrt(jnp.mean(x**2, axis=axes, keepdims=True))
        return x / jnp.maximum(1.0, rms)

    return jax.tree.map_with_path(clip, updates)
