"""Longer inputs than a model was trained on, without training: which positions for which length.

Nothing is carried from one length to the next: a factor is a function of the length asked for.
"""

import dataclasses
import math

from alibi_jax.config import RESCALINGS, Config, ConfigError
from alibi_jax.rotations import dynamic_ntk_factor

NAMES = (*RESCALINGS, "dynamic_ntk")


@dataclasses.dataclass(frozen=True)
class Rescaling:
    """One of `NAMES` and its factor; by default the length over the training length.

    `linear`: positions are divided by the factor, ALiBi's slopes too (arXiv 2306.15595,
    2310.13017). `ntk`, `yarn`: arXiv 2309.00071. `dynamic_ntk`: `ntk` by a factor that grows with
    the length from 1 at the training length; its own factor says how fast.
    """

    name: str = "none"
    factor: float | None = None

    def __str__(self) -> str:
        return self.name if self.factor is None else f"{self.name}:{self.factor:g}"

    def applies_to(self, config: Config) -> bool:
        """Whether any of the model's position methods can be rescaled so."""
        kind = "ntk" if self.name == "dynamic_ntk" else self.name
        return bool(set(config.model.positions) & set(RESCALINGS[kind]))

    def factor_at(self, config: Config, length: int) -> float:
        """The factor in force for inputs of that length.

        One that follows the length is 1 up to the training length; `none` leaves what the model
        was trained with.
        """
        if self.name == "none":
            return config.model.rescaling_factor
        if self.name == "dynamic_ntk":
            return dynamic_ntk_factor(self.factor or 1.0, length, config.train.length)
        return max(1.0, length / config.train.length) if self.factor is None else self.factor

    def at(self, config: Config, length: int) -> Config:
        """The configuration of the same parameters for inputs of that length.

        Raises ConfigError for a model that can't be rescaled so, or is already.
        """
        if self.name == "none":
            return config
        if config.model.rescaling != "none":
            raise ConfigError(
                f"rescaling={self}: the model was trained with model.rescaling="
                f"{config.model.rescaling!r} already, and has the positions that it learned; "
                "give none"
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
    """From "none,linear,yarn:8". Raises ValueError that names what is wrong."""
    rescalings = []
    for part in dict.fromkeys(text.split(",")):
        name, colon, factor = part.strip().partition(":")
        try:
            value = float(factor) if colon else 1.0
        except ValueError:
            value = 0.0
        if name not in NAMES or (name == "none" and colon) or not 1 <= value < math.inf:
            raise ValueError(
                f"--rescalings={text}: {part!r} is not one; give any of {', '.join(NAMES)}, as "
                "linear for the length over the training length or linear:8 for a factor, of at "
                "least 1"
            )
        rescalings.append(Rescaling(name, value if colon else None))
    return rescalings
