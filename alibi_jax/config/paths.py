"""Paths that a flag or a key of the configuration gives."""

import errno
import pathlib

from alibi_jax.config.section import ConfigError

# Errors of writing to a disk, a quota or a file that is full.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def local_path(name: str, value: str) -> pathlib.Path:
    """The file or folder `value` of the flag or key `name`; a leading `~` is the home folder.

    Raises ConfigError for an empty value, for the address of a bucket, for a name that is not UTF-8
    (the libraries behind checkpoints and datasets cannot open it), and for `~` where the system
    knows no home folder.
    """
    if not value:
        raise ConfigError(
            f"{name}= is empty, no such file or folder: give a path, or leave {name} out"
        )
    if "://" in value:
        raise ConfigError(
            f"{name}={value} is an address, not a path: mount the bucket on all machines, and give "
            "the path where it is mounted"
        )
    try:
        path = pathlib.Path(value)
        # "./~" is a folder of that name, though its Path is the same as that of "~".
        path = path.expanduser() if value.startswith("~") else path
        str(path.absolute()).encode()
    except RuntimeError:
        raise ConfigError(
            f"{name}={value}: the system knows no such home folder: set HOME, or give a path "
            "without ~"
        ) from None
    except UnicodeEncodeError:
        raise ConfigError(
            f"{name}={value} is {str(path.absolute())!r}, whose name is not UTF-8: rename it"
        ) from None
    return path
