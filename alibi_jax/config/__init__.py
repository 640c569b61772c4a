"""The typed configuration: one dataclass for each section, and every check that needs no device."""

from alibi_jax.config.choices import (
    ACTIVATIONS,
    DTYPES,
    FROM_PATH,
    NORMS,
    OPTIMIZERS,
    POSITIONS,
    PROJECTION,
    REMATS,
    RESCALINGS,
    SCHEDULES,
    TOKENIZERS,
)
from alibi_jax.config.config import Config, check_key, flatten, from_dict, parse_mesh
from alibi_jax.config.parts import Checkpoint, Data, Mesh, Model, Optimizer, Train
from alibi_jax.config.paths import local_path
from alibi_jax.config.section import ConfigError, fields_of, nearest

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "FROM_PATH",
    "NORMS",
    "OPTIMIZERS",
    "POSITIONS",
    "PROJECTION",
    "REMATS",
    "RESCALINGS",
    "SCHEDULES",
    "TOKENIZERS",
    "Checkpoint",
    "Config",
    "ConfigError",
    "Data",
    "Mesh",
    "Model",
    "Optimizer",
    "Train",
    "check_key",
    "fields_of",
    "flatten",
    "from_dict",
    "local_path",
    "nearest",
    "parse_mesh",
]
