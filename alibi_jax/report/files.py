"""Results as files: JSON, CSV, figures and a page."""

import csv
import json
import os
import pathlib
from collections.abc import Callable
from functools import partial
from typing import Any

from alibi_jax.report.figures import NAMES, draw
from alibi_jax.report.html import page
from alibi_jax.report.tidy import COLUMNS, tidy


def write(results: dict[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes results.json, results.csv, the figures and report.html; each appears whole.

    Figures of an earlier evaluation in the folder that this one does not have are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [
        _whole(
            folder / "results.json",
            lambda path: path.write_text(json.dumps(results, indent=1)),
        ),
        _whole(folder / "results.csv", lambda path: _write_csv(results, path)),
    ]
    # The numbers are on disk before anything is drawn, all is drawn before a figure is replaced.
    figures = draw(results)
    html = page(results, figures)
    for name, figure in figures.items():
        for suffix in ("png", "svg"):
            written.append(_whole(folder / f"{name}.{suffix}", partial(figure.savefig, dpi=160)))
    for name in set(NAMES) - set(figures):
        for suffix in ("png", "svg"):
            (folder / f"{name}.{suffix}").unlink(missing_ok=True)
    return [
        *written,
        _whole(folder / "report.html", lambda path: path.write_text(html, encoding="utf-8")),
    ]


def _whole(path: pathlib.Path, make: Callable[[pathlib.Path], Any]) -> pathlib.Path:
    fresh = path.with_name(f".{path.name}.new{path.suffix}")
    make(fresh)
    os.replace(fresh, path)
    return path


def _write_csv(results: dict[str, Any], path: pathlib.Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(tidy(results))
