"""Checks of the configuration's values that need no device."""

import math
from typing import Any

from alibi_jax.config.parts import (
    ACTIVATIONS,
    DTYPES,
    EMBEDDED,
    INITIALIZATIONS,
    NORMS,
    OPTIMIZERS,
    POSITIONS,
    REMATS,
    RESCALINGS,
    SCHEDULES,
    TOKENIZERS,
    Data,
    Model,
)
from alibi_jax.config.section import ConfigError, nearest


def check_positions(model: Model, train_length: int) -> None:
    """Raises ConfigError for position methods that don't fit each other or the model."""
    asked = f"model.position={model.position!r}"
    for name in model.positions:
        if name not in POSITIONS:
            raise ConfigError(f"{asked}: {name!r} is not known; {nearest(name, POSITIONS)}")
        if name in EMBEDDED and len(set(model.positions)) > 1:
            raise ConfigError(
                f"{asked}: {name!r} adds to the embeddings, before all layers, and can't be one "
                "layer's: give it alone"
            )
        if name in ("rotary", "rotary_truncated", "xpos") and model.head_size % 2:
            raise ConfigError(
                f"{asked}: {name!r} rotates pairs: model.width / model.num_heads = "
                f"{model.head_size} must be even"
            )
        if name in ("sinusoidal", "shape", "randomized", "transformer_xl") and model.width % 2:
            raise ConfigError(f"{asked}: {name!r} needs an even model.width, not {model.width}")
    if model.num_layers < len(model.positions):
        raise ConfigError(
            f"{asked} names more layers than model.num_layers={model.num_layers}: "
            "raise that, or shorten the pattern"
        )
    if "randomized" in model.positions and model.randomized_range < train_length:
        raise ConfigError(
            f"model.randomized_range={model.randomized_range} is less than "
            f"train.length={train_length}: positions are drawn without repetition; raise it"
        )
    pairs = model.head_size // 2
    if "rotary_truncated" in model.positions and int(model.rotary_fraction * pairs) < 1:
        raise ConfigError(
            f"model.rotary_fraction={model.rotary_fraction} of the {pairs} pairs of a head leaves "
            f"none to rotate: give at least {1 / pairs:.4g}, or model.position='none'"
        )
    if model.rescaling == "none" and model.rescaling_factor != 1:
        raise ConfigError(
            f"model.rescaling_factor={model.rescaling_factor} with model.rescaling='none' would "
            f"change nothing: give another of {', '.join(RESCALINGS)}"
        )
    applies = RESCALINGS[model.rescaling]
    if not set(model.positions) & set(applies):
        raise ConfigError(
            f"model.rescaling={model.rescaling!r} is for {', '.join(applies)}, not for "
            f"{asked}: give model.rescaling='none'"
        )
    if model.rescaling == "ntk" and model.head_size < 4:
        raise ConfigError(
            f"model.rescaling='ntk' needs heads of at least 4 features, not {model.head_size}"
        )


def check_adaptive(model: Model, data: Data) -> None:
    """Raises ConfigError for an adaptive softmax that can't be meant."""
    asked = f"model.adaptive_cutoffs={model.adaptive_cutoffs!r}"
    narrowest = model.width // model.adaptive_factor ** len(model.cutoffs)
    if narrowest < 1:
        raise ConfigError(
            f"{asked} with model.width={model.width} and "
            f"model.adaptive_factor={model.adaptive_factor} leaves the rarest tokens no width: "
            "lower the factor, or give fewer cutoffs"
        )
    if model.cutoffs and not model.tied_embeddings:
        raise ConfigError(
            f"{asked} with model.tied_embeddings=False: adaptive input and softmax share their "
            "tables; leave it True"
        )
    # How many words there are only the text says.
    known = {"bytes": 256, "bpe": data.vocab_size}.get(data.tokenizer)
    if model.cutoffs and known is not None and model.cutoffs[-1] >= known:
        raise ConfigError(
            f"{asked} with the {known} tokens of data.tokenizer={data.tokenizer!r}: the last "
            "cutoff must be below that"
        )
    if model.adaptive_dropout and not model.cutoffs:
        raise ConfigError(
            f"model.adaptive_dropout={model.adaptive_dropout} without model.adaptive_cutoffs would "
            "change nothing: leave it 0"
        )


def divisors(number: int) -> str:
    """For a message: what divides the number."""
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


_CHOICES = {
    "model.rescaling": tuple(RESCALINGS),
    "model.activation": ACTIVATIONS,
    "model.norm": NORMS,
    "model.initialization": INITIALIZATIONS,
    "model.dtype": DTYPES,
    "model.remat": REMATS,
    "data.tokenizer": TOKENIZERS,
    "optimizer.name": OPTIMIZERS,
    "optimizer.schedule": SCHEDULES,
}
# Least values; what is not here is not bounded below.
_LEAST = {
    "data.vocab_size": 257,
    "model.num_layers": 1,
    "model.rescaling_factor": 1,
    "model.rotary_fraction": 0,
    "model.max_shift": 0,
    "model.randomized_range": 1,
    "model.width": 1,
    "model.num_heads": 1,
    "model.num_kv_heads": 1,
    "model.ff_width": 1,
    "model.dropout": 0,
    "model.attention_dropout": 0,
    "model.activation_dropout": 0,
    "model.norm_epsilon": 0,
    "model.adaptive_dropout": 0,
    "model.adaptive_factor": 1,
    "optimizer.learning_rate": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.final_fraction": 0,
    "optimizer.weight_decay": 0,
    "optimizer.beta1": 0,
    "optimizer.beta2": 0,
    "optimizer.momentum": 0,
    "optimizer.clip_norm": 0,
    "train.steps": 1,
    "train.length": 1,
    "train.batch_size": 1,
    "train.accumulation": 1,
    "train.seed": 0,
    "train.log_every": 1,
    "train.validation_every": 0,
    "train.validation_targets": 0,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
    "checkpoint.keep_every": 0,
}
# Greatest values: positions are int32, and must have room for a sequence after the shift.
_MOST = {"model.max_shift": 1 << 30, "model.randomized_range": 1 << 30}
_BELOW_ONE = (
    "model.dropout",
    "model.attention_dropout",
    "model.activation_dropout",
    "model.adaptive_dropout",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.momentum",
)


def check_ranges(values: dict[str, Any]) -> None:
    """Raises ConfigError for a value, by its dotted key, that is out of its own range."""
    for key, choices in _CHOICES.items():
        if values[key] not in choices:
            raise ConfigError(
                f"{key}={values[key]!r} is not known; {nearest(values[key], choices)}"
            )
    for key, least in _LEAST.items():
        # NaN, which compares with nothing, is refused too.
        if values[key] is not None and not least <= values[key] < math.inf:
            raise ConfigError(f"{key}={values[key]} must be a number of at least {least}")
    for key, most in _MOST.items():
        if values[key] > most:
            raise ConfigError(f"{key}={values[key]} must be at most {most}")
    for key in _BELOW_ONE:
        if not values[key] < 1:
            raise ConfigError(f"{key}={values[key]} must be below 1")
    if not values["optimizer.final_fraction"] <= 1:
        raise ConfigError(
            f"optimizer.final_fraction={values['optimizer.final_fraction']} must be at most 1"
        )
    if not 0 < values["model.rotary_fraction"] <= 1:
        raise ConfigError(
            f"model.rotary_fraction={values['model.rotary_fraction']} must be above 0 and at most 1"
        )
    for axis in ("data", "fsdp", "context", "tensor"):
        size = values[f"mesh.{axis}"]
        if size != -1 and size < 1:
            raise ConfigError(f"mesh.{axis}={size} must be a number of devices, or -1 for the rest")
