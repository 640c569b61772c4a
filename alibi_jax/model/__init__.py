"""The Flax NNX transformer, its parts, its caches, its vocabulary and its losses."""

from alibi_jax.model.build import (
    abstract_model,
    check_divides,
    check_model_fits,
    initial_params,
    make_model,
)
from alibi_jax.model.transformer import Transformer

__all__ = [
    "Transformer",
    "abstract_model",
    "check_divides",
    "check_model_fits",
    "initial_params",
    "make_model",
]
