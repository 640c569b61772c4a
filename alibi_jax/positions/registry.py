"""The constructor of every position method, by its name in the configuration.

`config.POSITIONS` has the same names and holds what the checks of the configuration must know.
"""

import dataclasses
from collections.abc import Callable

import jax
from flax import nnx

from alibi_jax.config import Model
from alibi_jax.positions.base import PositionMethod
from alibi_jax.positions.biased import (
    T5,
    Alibi,
    AlibiLearned,
    Fire,
    Fox,
    KerpleLog,
    KerplePower,
    Sandwich,
)
from alibi_jax.positions.embedded import Learned, Randomized, Shape, Sinusoidal
from alibi_jax.positions.rotated import Rotary, TransformerXL, XPos
from alibi_jax.rotations import (
    interpolated_frequencies,
    ntk_frequencies,
    rotary_frequencies,
    truncated_frequencies,
    yarn_frequencies,
    yarn_temperature,
)


@dataclasses.dataclass(frozen=True)
class MethodSpec:
    """How a position method is made, and whether layers share it.

    `make` takes the configuration of the model, the training length and random keys. With
    `per_layer` each layer has a method of its own; otherwise all layers share one.
    """

    make: Callable[[Model, int, nnx.Rngs], PositionMethod]
    per_layer: bool = False


def _rotary(config: Model, train_length: int, rngs: nnx.Rngs) -> Rotary:
    size, factor = config.head_size, config.rescaling_factor
    # `Rotary` needs concrete frequencies even where the model is made under a transformation.
    with jax.ensure_compile_time_eval():
        match config.rescaling:
            case "linear":
                return Rotary(interpolated_frequencies(size, factor))
            case "ntk":
                return Rotary(ntk_frequencies(size, factor))
            case "yarn":
                frequencies = yarn_frequencies(size, factor, train_length)
                return Rotary(frequencies, yarn_temperature(factor))
        return Rotary(rotary_frequencies(size))


def _rotary_truncated(config: Model, train_length: int, rngs: nnx.Rngs) -> Rotary:
    with jax.ensure_compile_time_eval():
        return Rotary(truncated_frequencies(config.head_size, config.rotary_fraction))


def _slope_divisor(config: Model) -> float:
    """The number by which ALiBi's slopes are divided."""
    return config.rescaling_factor if config.rescaling == "linear" else 1.0


METHODS: dict[str, MethodSpec] = {
    "alibi": MethodSpec(
        lambda config, train_length, rngs: Alibi(config.num_heads, _slope_divisor(config))
    ),
    "alibi_learned": MethodSpec(
        lambda config, train_length, rngs: AlibiLearned(config.num_heads, _slope_divisor(config))
    ),
    "sinusoidal": MethodSpec(lambda config, train_length, rngs: Sinusoidal()),
    "learned": MethodSpec(
        lambda config, train_length, rngs: Learned(train_length, config.width, rngs)
    ),
    "shape": MethodSpec(lambda config, train_length, rngs: Shape(config.max_shift)),
    "randomized": MethodSpec(
        lambda config, train_length, rngs: Randomized(config.randomized_range)
    ),
    "rotary": MethodSpec(_rotary),
    "rotary_truncated": MethodSpec(_rotary_truncated),
    "xpos": MethodSpec(lambda config, train_length, rngs: XPos()),
    "transformer_xl": MethodSpec(
        lambda config, train_length, rngs: TransformerXL(config.width, config.num_heads, rngs),
        per_layer=True,
    ),
    "t5": MethodSpec(lambda config, train_length, rngs: T5(config.num_heads, rngs)),
    "kerple_log": MethodSpec(
        lambda config, train_length, rngs: KerpleLog(config.num_heads, rngs), per_layer=True
    ),
    "kerple_power": MethodSpec(
        lambda config, train_length, rngs: KerplePower(config.num_heads, rngs), per_layer=True
    ),
    "sandwich": MethodSpec(lambda config, train_length, rngs: Sandwich(config.num_heads)),
    "fire": MethodSpec(
        lambda config, train_length, rngs: Fire(config.num_heads, train_length, rngs),
        per_layer=True,
    ),
    "fox": MethodSpec(
        lambda config, train_length, rngs: Fox(config.width, config.num_heads, rngs), per_layer=True
    ),
    "none": MethodSpec(lambda config, train_length, rngs: PositionMethod()),
}


def make_position_method(
    name: str, config: Model, *, train_length: int, rngs: nnx.Rngs
) -> PositionMethod:
    """The position method with this name; a learned table has `train_length` rows.

    The model uses `embed`, `training_positions` and `max_length` only for methods that all layers
    share. Raises ValueError if a method with `per_layer` overrides one of them.
    """
    spec = METHODS[name]
    method = spec.make(config, train_length, rngs)
    if spec.per_layer:
        overridden = [
            hook
            for hook in ("embed", "training_positions")
            if getattr(type(method), hook) is not getattr(PositionMethod, hook)
        ]
        if method.max_length is not None:
            overridden.append("max_length")
        if overridden:
            raise ValueError(
                f"the position method {name!r} has per_layer=True and overrides "
                f"{', '.join(overridden)}, which the model uses only for methods that all layers "
                "share: give it per_layer=False"
            )
    return method
