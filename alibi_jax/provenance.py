"""Where a result comes from: the command, the commit, the versions and the devices."""

import functools
import hashlib
import importlib.metadata
import pathlib
import platform
import subprocess
import sys
import tomllib
from typing import Any

import jax

import alibi_jax

# Settings of JAX that change numbers.
_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_threefry_partitionable",
)
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tensorflow-datasets")


def provenance() -> dict[str, Any]:
    """A record of this process in JSON values (docs/formats.md)."""
    devices = jax.devices()
    return {
        "command": " ".join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": _versions(),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "processes": jax.process_count(),
    }


def installation() -> dict[str, Any]:
    """What all processes of a run must have in common besides their command, in JSON values."""
    return (
        {f"version of {name}": version for name, version in _versions().items()}
        | {"digest of alibi_jax": source_digest()[:12]}
        | {name: jax.config.values.get(name) for name in _SETTINGS}
    )


@functools.cache
def source_digest() -> str:
    """A hash of JAX's version and of every source file of the package.

    Changed code may give other numbers. The hash covers uncommitted changes too, which the commit
    of the checkout does not.
    """
    digest = hashlib.sha256(jax.__version__.encode())
    root = pathlib.Path(alibi_jax.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _versions() -> dict[str, str]:
    return {"alibi-jax": alibi_jax.__version__} | {
        name: importlib.metadata.version(name) for name in _PACKAGES
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
        commit = _git(root, "rev-parse", "HEAD")
        changes = _git(root, "status", "--porcelain", "--untracked-files=no")
        return f"{commit}-dirty" if changes else commit
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None


def _git(folder: pathlib.Path, *arguments: str) -> str:
    """The output of a git command in a folder. Raises an error if the command fails.

    Git takes no lock: a kill would leave the lock behind, and block the user's own commands.
    """
    command = ["git", "--no-optional-locks", *arguments]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()
