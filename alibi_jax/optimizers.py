"""Optax chains from the configuration."""

from typing import Any

import jax
import optax

from alibi_jax.config import Optimizer


def make_schedule(config: Optimizer, steps: int) -> optax.Schedule:
    """The learning rate by step: linear warm-up, then cosine, linear or constant.

    The decay ends at `learning_rate * final_fraction` on step `steps`.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    after: optax.Schedule
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, steps - warmup, config.final_fraction)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, peak * config.final_fraction, steps - warmup)
    else:
        after = optax.constant_schedule(peak)
    # From peak/(warmup+1) rather than 0, so that the first step already moves.
    ramp = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([ramp, after], [warmup]) if warmup else after


def make_optimizer(config: Optimizer, steps: int) -> optax.GradientTransformation:
    """Clipping by global norm, the optimizer's direction, decoupled weight decay, the rate.

    AdamW (Loshchilov & Hutter 2019), SGD with Nesterov momentum, or Adafactor (Shazeer &
    Stern 2018). Weight decay is of matrices only, in all three scaled by the rate.
    """
    directions = {
        "adamw": lambda: optax.scale_by_adam(config.beta1, config.beta2),
        "sgd": lambda: optax.trace(config.momentum, nesterov=True),
        "adafactor": lambda: optax.chain(
            optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)
        ),
    }

    def matrices(params: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        directions[config.name](),
        optax.add_decayed_weights(config.weight_decay, mask=matrices),
        optax.scale_by_learning_rate(make_schedule(config, steps)),
    )
