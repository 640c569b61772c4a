"""Checks of values that must fit each other; none of them needs a device."""

import math

from alibi_jax.config.choices import POSITIONS, RESCALINGS
from alibi_jax.config.parts import Data, Model, Train
from alibi_jax.config.section import ConfigError, nearest


def check_positions(model: Model, train_length: int) -> None:
    """Raises ConfigError for position methods that don't fit each other or the model."""
    given = f"model.position={model.position!r}"
    for name in model.positions:
        if name not in POSITIONS:
            raise ConfigError(f"{given}: {name!r} is not known; {nearest(name, POSITIONS)}")
        choice = POSITIONS[name]
        if choice.embeds and len(set(model.positions)) > 1:
            raise ConfigError(
                f"{given}: {name!r} adds to the token embeddings before all layers, so it can't be "
                "the method of some layers only: give it alone"
            )
        if choice.pairs_in_head and model.head_size % 2:
            raise ConfigError(
                f"{given}: {name!r} rotates pairs of features: model.width / model.num_heads = "
                f"{model.head_size} must be even"
            )
        if choice.pairs_in_width and model.width % 2:
            raise ConfigError(f"{given}: {name!r} needs an even model.width, not {model.width}")
    if model.num_layers < len(model.positions):
        raise ConfigError(
            f"{given} names more layers than model.num_layers={model.num_layers}: "
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
            f"change nothing: set model.rescaling to another of {', '.join(RESCALINGS)}"
        )
    applies = RESCALINGS[model.rescaling]
    if not set(model.positions) & set(applies):
        raise ConfigError(
            f"model.rescaling={model.rescaling!r} is for {', '.join(applies)}, not for "
            f"{given}: give model.rescaling='none'"
        )
    if model.rescaling == "ntk" and model.head_size < 4:
        raise ConfigError(
            f"model.rescaling='ntk' needs heads of at least 4 features, not {model.head_size}"
        )


def check_adaptive(model: Model, data: Data) -> None:
    """Raises ConfigError for an adaptive softmax that does not fit the model or the vocabulary."""
    given = f"model.adaptive_cutoffs={model.adaptive_cutoffs!r}"
    narrowest = model.width // model.adaptive_factor ** len(model.cutoffs)
    if narrowest < 1:
        raise ConfigError(
            f"{given} with model.width={model.width} and "
            f"model.adaptive_factor={model.adaptive_factor} leaves the rarest tokens no width: "
            "lower the factor, or give fewer cutoffs"
        )
    if model.cutoffs and not model.tied_embeddings:
        raise ConfigError(
            f"{given} with model.tied_embeddings=False: adaptive input and softmax share their "
            "tables; leave it True"
        )
    # The number of words is known only from the text.
    known = {"bytes": 256, "bpe": data.vocab_size}.get(data.tokenizer)
    if model.cutoffs and known is not None and model.cutoffs[-1] >= known:
        raise ConfigError(
            f"{given} with the {known} tokens of data.tokenizer={data.tokenizer!r}: the last "
            "cutoff must be below that"
        )
    if model.adaptive_dropout and not model.cutoffs:
        raise ConfigError(
            f"model.adaptive_dropout={model.adaptive_dropout} without model.adaptive_cutoffs would "
            "change nothing: leave it 0"
        )


def check_sizes(model: Model, train: Train) -> None:
    """Raises ConfigError for a model or a batch that is too large for any machine to start on."""
    ff_width = 4 * model.width if model.ff_width is None else model.ff_width
    numbers = model.num_layers * model.width * max(model.width, ff_width)
    if numbers >= 1 << 60:
        raise ConfigError(
            f"model.num_layers={model.num_layers}, model.width={model.width} and a feed-forward "
            f"width of {ff_width} make kernels of {numbers} numbers, more than memory has "
            "addresses: lower one of them"
        )
    tokens = train.batch_size * train.length
    if tokens >= 1 << 31:
        raise ConfigError(
            f"train.batch_size={train.batch_size} with train.length={train.length} makes {tokens} "
            "tokens in a step, which int32 can't count: lower one of them"
        )


def divisors(number: int, near: int) -> str:
    """The divisors of a number, as a message lists them: at most the twelve nearest to `near`."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    every = {*small, *(number // d for d in small)}
    nearest_first = sorted(every, key=lambda d: abs(d - near))
    return ", ".join(str(d) for d in sorted(nearest_first[:12]))
