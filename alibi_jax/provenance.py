"""Where a result comes from: the command, the commit, the versions and the devices."""

import importlib.metadata
import pathlib
import platform
import subprocess
import sys
import tomllib
from typing import Any

import jax

import alibi_jax

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tensorflow-datasets")


def provenance() -> dict[str, Any]:
    """A record of this process in JSON values (docs/formats.md)."""
    devices = jax.devices()
    return {
        "command": " ".join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {"alibi-jax": alibi_jax.__version__}
        | {name: importlib.metadata.version(name) for name in _PACKAGES},
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "processes": jax.process_count(),
    }


def _commit() -> str | None:
    """The commit of the checkout that this package lies in, plus "-dirty" if files differ from it.

    None outside a checkout of this repository. An installed package may lie in a checkout of
    another repository, such as the user's own. That repository's commit says nothing about this
    code.
    """
    file = pathlib.Path(__file__).resolve()
    root = file.parents[1]
    try:
        if not pathlib.Path(_git(root, "rev-parse", "--show-toplevel")).samefile(root):
            return None
        _git(root, "ls-files", "--error-unmatch", "--", str(file))
        project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
        if project["project"]["name"] != "alibi-jax":
            return None
        return _git(root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None


def _git(folder: pathlib.Path, *arguments: str) -> str:
    """The output of a git command in a folder. Raises an error if the command fails."""
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()
