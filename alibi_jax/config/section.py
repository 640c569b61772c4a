"""The base class of a section of the configuration: keys with types and valid values."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

# The smallest and the largest positive numbers of float32, without the subnormal ones.
_SMALLEST, _LARGEST = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127


class ConfigError(ValueError):
    """An invalid configuration: the message names the key, the value and the remedy."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The remedy for an unknown name: the closest known name, or all known names."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def fields_of(section: Any) -> dict[str, Any]:
    """The names and the types of a section's fields."""
    return {field.name: field.type for field in dataclasses.fields(section)}


def number(
    default: Any,
    *,
    least: int | float | None = None,
    above: int | float | None = None,
    most: int | float | None = None,
    below: int | float | None = None,
) -> Any:
    """A dataclass field whose value must be finite and within the bounds given, or None."""
    bounds = {"least": least, "above": above, "most": most, "below": below}
    return dataclasses.field(default=default, metadata={"bounds": bounds})


def choice(default: str, choices: Iterable[str]) -> Any:
    """A dataclass field whose value must be one of `choices`."""
    return dataclasses.field(default=default, metadata={"choices": tuple(choices)})


def check_value(key: str, value: Any, metadata: Mapping[str, Any]) -> None:
    """Raises ConfigError unless a value is among its field's choices and within its bounds."""
    choices = metadata.get("choices")
    if choices is not None and value not in choices:
        raise ConfigError(f"{key}={value!r} is not known; {nearest(value, choices)}")
    bounds = metadata.get("bounds")
    if bounds is None or value is None:
        return
    # Written so that NaN, with which every comparison is false, fails too. Training computes in
    # float32, in which a larger number is infinite and a smaller one is 0.
    fits = (
        (value == 0 or _SMALLEST <= abs(value) <= _LARGEST)
        and (bounds["least"] is None or value >= bounds["least"])
        and (bounds["above"] is None or value > bounds["above"])
        and (bounds["most"] is None or value <= bounds["most"])
        and (bounds["below"] is None or value < bounds["below"])
    )
    if not fits:
        words = {"least": "at least", "above": "above", "most": "at most", "below": "below"}
        wanted = [f"{words[name]} {bound}" for name, bound in bounds.items() if bound is not None]
        kind = "finite number in float32" if isinstance(value, float) else "finite number"
        raise ConfigError(f"{key}={value} must be a {kind}, {' and '.join(wanted)}")


def _matches(value: Any, annotation: Any) -> bool:
    if isinstance(annotation, types.UnionType):
        return any(_matches(value, choice) for choice in typing.get_args(annotation))
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)


class Section:
    """A section of the configuration, which refuses unknown names and values of a wrong type."""

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
        if annotation is float:
            # A whole number is stored as a float, so that it is written as a float.
            try:
                value = float(value)
            except OverflowError:
                value = math.inf if value > 0 else -math.inf
        super().__setattr__(name, value)

    @classmethod
    def _check_name(cls, name: str) -> None:
        known = fields_of(cls)
        if name not in known:
            raise ConfigError(f"{cls.__name__.lower()}.{name}: no such key; {nearest(name, known)}")
