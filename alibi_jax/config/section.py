"""What every part of the configuration is: fields known by name and type."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable
from typing import Any


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
