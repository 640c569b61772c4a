"""Names of folders that the libraries for checkpoints do not take literally."""

import pathlib

from alibi_jax.config import ConfigError

# Orbax searches the folder of a new checkpoint with a pattern, and does not escape the folder's own
# path. Where it finds nothing, it writes no index, without an error.
_PATTERN = "*?["
# TensorStore takes a backslash for a slash.
_SEPARATOR = "\\"


def check_path(workdir: pathlib.Path, *, saving: bool) -> None:
    """Raises ConfigError if checkpoints in this folder could not be read, or saved, if `saving`.

    The names of all folders above it count too.
    """
    path = workdir.absolute()
    refused = [c for c in _SEPARATOR + (_PATTERN if saving else "") if c in str(path)]
    # Orbax takes a folder for the address of a bucket if its name ends so.
    if any(part.endswith(":") for part in path.parts):
        refused.append(":/")
    if refused:
        raise ConfigError(
            f"--workdir={workdir}: checkpoints can't be {'saved' if saving else 'read'} in {path}, "
            f"whose name has {' and '.join(refused)}: give a folder without it"
        )
