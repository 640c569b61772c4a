"""The typed configuration: one dataclass for each section, and every check that needs no device.

A configuration file is a Python file with `get_config() -> Config`. A value comes from such a
file, from `--config.SECTION.KEY=VALUE` or from a checkpoint. In each case it passes through
`Section.__setattr__`, which refuses an unknown name or a value of the wrong type.
"""

import dataclasses
import re
from typing import Any

from alibi_jax.config.checks import check_adaptive, check_positions, check_sizes, divisors
from alibi_jax.config.choices import FROM_PATH
from alibi_jax.config.parts import Checkpoint, Data, Mesh, Model, Optimizer, Train
from alibi_jax.config.section import ConfigError, Section, check_value, fields_of


@dataclasses.dataclass
class Config(Section):
    """The whole configuration of a run."""

    data: Data = dataclasses.field(default_factory=Data)
    model: Model = dataclasses.field(default_factory=Model)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    train: Train = dataclasses.field(default_factory=Train)
    checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)
    mesh: Mesh = dataclasses.field(default_factory=Mesh)

    def check(self) -> None:
        """Raises ConfigError for values out of range or that do not fit each other."""
        for part in dataclasses.fields(self):
            section = getattr(self, part.name)
            for field in dataclasses.fields(section):
                value = getattr(section, field.name)
                check_value(f"{part.name}.{field.name}", value, field.metadata)
        for axis, size in dataclasses.asdict(self.mesh).items():
            if size != -1 and size < 1:
                raise ConfigError(
                    f"mesh.{axis}={size} must be a number of devices, or -1 for the rest"
                )
        model, train, data = self.model, self.train, self.data
        if model.width % model.num_heads:
            raise ConfigError(
                f"model.num_heads={model.num_heads} does not divide model.width={model.width}: "
                f"choose one of {divisors(model.width, model.num_heads)}"
            )
        check_positions(model, train.length)
        check_adaptive(model, data)
        if model.num_kv_heads is not None and model.num_heads % model.num_kv_heads:
            raise ConfigError(
                f"model.num_kv_heads={model.num_kv_heads} does not divide "
                f"model.num_heads={model.num_heads}: choose one of "
                f"{divisors(model.num_heads, model.num_kv_heads)}"
            )
        if train.batch_size % train.accumulation:
            raise ConfigError(
                f"train.accumulation={train.accumulation} does not divide "
                f"train.batch_size={train.batch_size}: choose one of "
                f"{divisors(train.batch_size, train.accumulation)}"
            )
        check_sizes(model, train)
        if (data.dataset in FROM_PATH) != bool(data.path):
            raise ConfigError(
                f"data.dataset={data.dataset!r} with data.path={data.path!r}: for your own text "
                "give both data.dataset='text' and data.path, for WikiText 'wikitext' and its "
                "folder"
            )


def flatten(config: Config) -> dict[str, Any]:
    """Every value by its dotted key, as on a command line: `model.width`."""
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


def parse_mesh(text: str) -> Mesh:
    """Parses "fsdp=4,context=2" to a mesh. Raises ConfigError, which names the wrong part."""
    mesh = Mesh()
    for part in filter(None, text.split(",")):
        axis, _, size = part.partition("=")
        if axis.strip() not in fields_of(Mesh) or not re.fullmatch(r"-1|[1-9]\d*", size.strip()):
            raise ConfigError(
                f"--mesh={text}: {part!r} is not AXIS=DEVICES; axes are "
                f"{', '.join(fields_of(Mesh))}, and -1 takes all devices that the others leave"
            )
        setattr(mesh, axis.strip(), int(size))
    return mesh


def check_key(key: str) -> None:
    """Raises ConfigError unless `key`, as in `--config.KEY=VALUE`, names a value."""
    part, _, name = key.partition(".")
    Config._check_name(part)
    section = fields_of(Config)[part]
    if not name:
        raise ConfigError(
            f"{key} is a whole section: name one of its keys: {', '.join(fields_of(section))}"
        )
    section._check_name(name)
