"""Evaluates trained runs at many input lengths: `python eval.py --workdir=runs/tiny`.

Writes report.html, results.json, results.csv and the figures to <workdir>/eval, and prints the
tables and a summary in sentences. Several --workdir flags, or a pattern such as 'runs/*', compare
runs. After an interruption the same command continues where it stopped. README.md explains more.
"""

import dataclasses
from typing import Any

from absl import flags

from alibi_jax import cli
from alibi_jax.config import local_path
from alibi_jax.evaluation import EvaluationOptions, evaluate


def _define_flag(option: dataclasses.Field[Any]) -> flags.FlagHolder[Any]:
    """The flag of one field of EvaluationOptions: same name, default and meaning."""
    default: Any = option.default
    meaning, choices = option.metadata["meaning"], option.metadata["choices"]
    if choices is not None:
        return flags.DEFINE_enum(option.name, default, choices, meaning)
    if option.type is bool:
        return flags.DEFINE_bool(option.name, default, meaning)
    if option.type in (int, int | None):
        return flags.DEFINE_integer(option.name, default, meaning)
    return flags.DEFINE_string(option.name, default, meaning)


_WORKDIR = flags.DEFINE_multi_string(
    "workdir", None, "Folder of a run to evaluate, or a pattern such as runs/*"
)
_OUT = flags.DEFINE_string(
    "out", None, "Folder for the results; default: eval/ in the first workdir."
)
_OPTIONS = {option.name: _define_flag(option) for option in dataclasses.fields(EvaluationOptions)}


def main() -> int:
    """Builds the options from the flags and evaluates the runs."""
    options = EvaluationOptions(**{name: flag.value for name, flag in _OPTIONS.items()})
    cli.start_devices(sizes=dataclasses.astuple(options.parsed_mesh))
    out = None if _OUT.value is None else local_path("--out", _OUT.value)
    return evaluate(_WORKDIR.value or [], options, out)


if __name__ == "__main__":
    cli.run(main)
