"""Results as files: JSON, CSV, figures and a page."""

import csv
import json
import pathlib
from collections.abc import Callable
from functools import partial
from typing import Any

from alibi_jax.data.atomic import atomic_file, remove_abandoned
from alibi_jax.report.figures import NAMES, draw, figure_names
from alibi_jax.report.html import page
from alibi_jax.report.tidy import COLUMNS, tidy

_SUFFIXES = ("png", "svg")
# Version 0.1 called the figure `decomposition` by this name; its files are removed too.
_FORMER_NAMES = ("split",)


def write(results: dict[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes results.json, results.csv, the figures and report.html; returns their paths.

    No file is ever incomplete. Figures that an earlier evaluation left in the folder are removed if
    these results do not have them.
    """
    remove_abandoned(folder)
    # Read before results.json is replaced.
    earlier_figures = _earlier_figures(folder)
    written = [
        _write_whole(
            folder / "results.json",
            lambda path: path.write_text(json.dumps(results, indent=1, allow_nan=False)),
        ),
        _write_whole(folder / "results.csv", lambda path: _write_csv(results, path)),
    ]
    # The numbers are on disk before anything is drawn, and everything is drawn before any figure
    # is replaced: a failure loses no numbers and leaves the old figures together.
    figures = draw(results)
    html = page(results, figures)
    for name, figure in figures.items():
        for suffix in _SUFFIXES:
            path = folder / f"{name}.{suffix}"
            written.append(_write_whole(path, partial(figure.savefig, dpi=160)))
    for name in earlier_figures - set(figures):
        for suffix in _SUFFIXES:
            (folder / f"{name}.{suffix}").unlink(missing_ok=True)
    return [
        *written,
        _write_whole(folder / "report.html", lambda path: path.write_text(html, encoding="utf-8")),
    ]


def _earlier_figures(folder: pathlib.Path) -> set[str]:
    """Names of the figures that an earlier evaluation may have written.

    There are none in a folder without results.json. The figures of unknown protocols follow from
    the earlier results.json. So no file that only looks like a figure of the report is removed.
    """
    fixed_names = {*NAMES, *_FORMER_NAMES}
    try:
        results = json.loads((folder / "results.json").read_text())
        return fixed_names | set(figure_names(results))
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, LookupError, TypeError):
        return fixed_names


def _write_whole(path: pathlib.Path, make: Callable[[pathlib.Path], Any]) -> pathlib.Path:
    """Makes the file beside its path and moves it there once it is complete."""
    with atomic_file(path) as fresh:
        make(fresh)
    return path


def _write_csv(results: dict[str, Any], path: pathlib.Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(tidy(results))
