"""Rescaled positions: how a trained model reads inputs longer than its training length.

The results at one evaluation length do not depend on the other lengths that are evaluated: each
length has its own factor.
"""

import dataclasses
import math

from alibi_jax.config import RESCALINGS, Config, ConfigError
from alibi_jax.rotations import dynamic_ntk_factor

NAMES = (*RESCALINGS, "dynamic_ntk")


def methods_with(rescaling: str) -> tuple[str, ...]:
    """The position methods that have a rescaling, one of `NAMES`."""
    return RESCALINGS["ntk" if rescaling == "dynamic_ntk" else rescaling]


@dataclasses.dataclass(frozen=True)
class Rescaling:
    """A rescaling, one of `NAMES`, and its factor.

    The default factor is the evaluation length divided by the training length. `linear` divides
    positions, or ALiBi's slopes, by the factor (arXiv 2306.15595, 2310.13017). `ntk` and `yarn` are
    the methods of these names in arXiv 2309.00071. `dynamic_ntk` is `ntk` with a factor that grows
    with the length, from 1 at the training length. The field `factor` sets how fast it grows.
    """

    name: str = "none"
    factor: float | None = None

    def __str__(self) -> str:
        return self.name if self.factor is None else f"{self.name}:{self.factor:g}"

    def applies_to(self, config: Config) -> bool:
        """Whether the rescaling is defined for one of the model's position methods."""
        return bool(set(config.model.positions) & set(methods_with(self.name)))

    def factor_at(self, config: Config, length: int) -> float:
        """The factor for inputs of that length.

        A factor that depends on the length is 1 up to the training length. `none` keeps the factor
        that the model was trained with.
        """
        if self.name == "none":
            return config.model.rescaling_factor
        if self.name == "dynamic_ntk":
            return dynamic_ntk_factor(self.factor or 1.0, length, config.train.length)
        return max(1.0, length / config.train.length) if self.factor is None else self.factor

    def at(self, config: Config, length: int) -> Config:
        """The configuration that applies the rescaling at that length to the same parameters.

        Raises ConfigError where the rescaling is not defined for the model, or where the model was
        trained with one.
        """
        if self.name == "none":
            return config
        if config.model.rescaling != "none":
            raise ConfigError(
                f"rescaling={self}: the model was trained with model.rescaling="
                f"{config.model.rescaling!r} already and keeps those positions; give "
                "--rescalings=none"
            )
        model = dataclasses.replace(
            config.model,
            rescaling="ntk" if self.name == "dynamic_ntk" else self.name,
            rescaling_factor=self.factor_at(config, length),
        )
        rescaled = dataclasses.replace(config, model=model)
        rescaled.check()
        return rescaled


UNSCALED = Rescaling()


def parse_rescalings(text: str) -> list[Rescaling]:
    """Parses "none,linear,yarn:8". Raises ValueError, which names the wrong part."""
    rescalings = []
    for part in dict.fromkeys(text.split(",")):
        name, colon, factor = part.strip().partition(":")
        try:
            value = float(factor) if colon else 1.0
        except ValueError:
            value = 0.0
        if name not in NAMES or (name == "none" and colon) or not 1 <= value < math.inf:
            raise ValueError(
                f"--rescalings={text}: {part!r} is not a rescaling; give one or several of "
                f"{', '.join(NAMES)}, separated by commas: linear for the evaluation length "
                "divided by the training length, linear:8 for a factor of at least 1"
            )
        rescalings.append(Rescaling(name, value if colon else None))
    return rescalings
