"""The choices of the configuration by name, and what the code must know about each choice.

This module has the only records of activations, rematerialisations, optimizers and schedules. The
checks of the configuration, the model, training, the FLOPs and the plans read them. Of the other
choices this module has only what the checks need. Their objects are in `positions.METHODS`,
`model.layer.NORMS`, `data.builders` and `data.tokenizers`. Tests compare the names.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from jaxtyping import Array


@dataclasses.dataclass(frozen=True)
class PositionChoice:
    """What the configuration must know about a position method.

    `positions.METHODS` makes the method itself.
    """

    # The method adds to the token embeddings, before all layers, and does nothing in a layer.
    embeds: bool = False
    # The method works on pairs of features of a head, or on pairs of features of the whole width.
    pairs_in_head: bool = False
    pairs_in_width: bool = False
    # The method's rescalings for inputs longer than the training length.
    rescalings: tuple[str, ...] = ()


POSITIONS = {
    "alibi": PositionChoice(rescalings=("linear",)),
    "alibi_learned": PositionChoice(rescalings=("linear",)),
    "sinusoidal": PositionChoice(embeds=True, pairs_in_width=True),
    "learned": PositionChoice(embeds=True),
    "shape": PositionChoice(embeds=True, pairs_in_width=True),
    "randomized": PositionChoice(embeds=True, pairs_in_width=True),
    "rotary": PositionChoice(pairs_in_head=True, rescalings=("linear", "ntk", "yarn")),
    "rotary_truncated": PositionChoice(pairs_in_head=True),
    "xpos": PositionChoice(pairs_in_head=True),
    "transformer_xl": PositionChoice(pairs_in_width=True),
    "t5": PositionChoice(),
    "kerple_log": PositionChoice(),
    "kerple_power": PositionChoice(),
    "sandwich": PositionChoice(),
    "fire": PositionChoice(),
    "fox": PositionChoice(),
    "none": PositionChoice(),
}

# The position methods that each rescaling applies to.
RESCALINGS: dict[str, tuple[str, ...]] = {"none": tuple(POSITIONS)} | {
    rescaling: tuple(name for name, choice in POSITIONS.items() if rescaling in choice.rescalings)
    for rescaling in dict.fromkeys(r for choice in POSITIONS.values() for r in choice.rescalings)
}


@dataclasses.dataclass(frozen=True)
class ActivationChoice:
    """The activation of a feed-forward layer."""

    function: Callable[[Array], Array]
    # A gated unit multiplies the activation by a second projection of the input.
    gated: bool = False


ACTIVATIONS = {
    "relu": ActivationChoice(jax.nn.relu),
    "gelu": ActivationChoice(jax.nn.gelu),
    "silu": ActivationChoice(jax.nn.silu),
    "swiglu": ActivationChoice(jax.nn.silu, gated=True),
    "geglu": ActivationChoice(jax.nn.gelu, gated=True),
}

# The name of the outputs of projections, by which `jax.checkpoint` decides what to keep.
PROJECTION = "projection"


@dataclasses.dataclass(frozen=True)
class RematChoice:
    """What the backward pass keeps of a layer's forward pass, and what it computes again."""

    # The names of the arrays to keep besides the layer's input. With None, JAX keeps all arrays
    # that the backward pass needs.
    keeps: tuple[str, ...] | None
    recomputes_attention: bool
    recomputes_projections: bool


REMATS = {
    "none": RematChoice(None, False, False),
    "projections": RematChoice((PROJECTION,), True, False),
    "full": RematChoice((), True, True),
}


@dataclasses.dataclass(frozen=True)
class OptimizerChoice:
    """How an optimizer turns gradients into the direction of a step.

    Gradient clipping, weight decay and the learning rate are the same for all optimizers.
    """

    # Makes the Optax transformation from gradients to the direction. The argument is the section
    # `optimizer` of the configuration.
    direction: Callable[[Any], optax.GradientTransformation]
    # Whether each layer's update of a parameter is scaled to a root mean square of at most 1
    # (Shazeer & Stern 2018, section 6).
    clips_updates: bool = False


OPTIMIZERS = {
    "adamw": OptimizerChoice(lambda config: optax.scale_by_adam(config.beta1, config.beta2)),
    "sgd": OptimizerChoice(lambda config: optax.trace(config.momentum, nesterov=True)),
    "adafactor": OptimizerChoice(lambda config: optax.scale_by_factored_rms(), clips_updates=True),
}

NORMS = ("layernorm", "rmsnorm")
INITIALIZATIONS = ("scaled", "fairseq")
DTYPES = ("float32", "bfloat16", "float16")
# The datasets that are read from `data.path`.
FROM_PATH = ("text", "wikitext")
TOKENIZERS = ("bytes", "bpe", "words")


@dataclasses.dataclass(frozen=True)
class ScheduleChoice:
    """A learning-rate schedule after the warm-up."""

    # Makes the schedule from the section `optimizer` and the number of steps after the warm-up.
    make: Callable[[Any, int], optax.Schedule]
    # A schedule that decays depends on the last step of the run.
    decays: bool = True


SCHEDULES = {
    "cosine": ScheduleChoice(
        lambda config, steps: optax.cosine_decay_schedule(
            config.learning_rate, steps, config.final_fraction
        )
    ),
    "linear": ScheduleChoice(
        lambda config, steps: optax.linear_schedule(
            config.learning_rate, config.learning_rate * config.final_fraction, steps
        )
    ),
    "constant": ScheduleChoice(
        lambda config, steps: optax.constant_schedule(config.learning_rate), decays=False
    ),
}
