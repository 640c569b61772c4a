"""Where a result comes from: the command, the commit, the versions and the devices."""

import importlib.metadata
import pathlib
import platform
import subprocess
import sys
from typing import Any

import jax

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tensorflow-datasets")


def provenance() -> dict[str, Any]:
    """A JSON-able record of this process."""
    devices = jax.devices()
    return {
        "command": " ".join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "processes": jax.process_count(),
    }


def _commit() -> str | None:
    """The checkout's commit, marked where files differ from it; None outside a checkout."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=pathlib.Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
