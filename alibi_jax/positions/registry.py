"""Every position method by its name in the configuration."""

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
class Method:
    """How a method is made from the configuration and the training length.

    `per_layer`: each layer has one of its own; otherwise one serves all layers.
    """

    make: Callable[[Model, int, nnx.Rngs], PositionMethod]
    per_layer: bool = False


def _rotary(config: Model, train_length: int, rngs: nnx.Rngs) -> Rotary:
    size, factor = config.head_size, config.rescaling_factor
    # Numbers, also where the model is made under a transformation.
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


def _alibi_factor(config: Model) -> float:
    return config.rescaling_factor if config.rescaling == "linear" else 1.0


METHODS: dict[str, Method] = {
    "alibi": Method(lambda c, length, rngs: Alibi(c.num_heads, _alibi_factor(c))),
    "alibi_learned": Method(lambda c, length, rngs: AlibiLearned(c.num_heads, _alibi_factor(c))),
    "sinusoidal": Method(lambda c, length, rngs: Sinusoidal()),
    "learned": Method(lambda c, length, rngs: Learned(length, c.width, rngs)),
    "shape": Method(lambda c, length, rngs: Shape(c.max_shift)),
    "randomized": Method(lambda c, length, rngs: Randomized(c.randomized_range)),
    "rotary": Method(_rotary),
    "rotary_truncated": Method(_rotary_truncated),
    "xpos": Method(lambda c, length, rngs: XPos()),
    "transformer_xl": Method(
        lambda c, length, rngs: TransformerXL(c.width, c.num_heads, rngs), per_layer=True
    ),
    "t5": Method(lambda c, length, rngs: T5(c.num_heads, rngs)),
    "kerple_log": Method(lambda c, length, rngs: KerpleLog(c.num_heads, rngs), per_layer=True),
    "kerple_power": Method(lambda c, length, rngs: KerplePower(c.num_heads, rngs), per_layer=True),
    "sandwich": Method(lambda c, length, rngs: Sandwich(c.num_heads)),
    "fire": Method(lambda c, length, rngs: Fire(c.num_heads, length, rngs), per_layer=True),
    "fox": Method(lambda c, length, rngs: Fox(c.width, c.num_heads, rngs), per_layer=True),
    "none": Method(lambda c, length, rngs: PositionMethod()),
}


def make_position_method(
    name: str, config: Model, *, train_length: int, rngs: nnx.Rngs
) -> PositionMethod:
    """The method of that name; a learned table reaches to the training length."""
    return METHODS[name].make(config, train_length, rngs)
