"""The files under a folder, with symbolic links followed."""

import os
from pathlib import Path

from alibi_jax.data.errors import DataError


def files_under(root: Path) -> dict[Path, str]:
    """The real path of each file under a folder by each of its names.

    Names without links come first. Hidden files and folders are left out. A folder that links reach
    again, as in a loop, is not searched again. Raises DataError for a link to nothing.
    """
    names: dict[Path, str] = {}
    links: list[Path] = []
    # Pairs of a folder's name and its real path.
    folders = [(root, os.path.realpath(root))]
    searched = set()
    while folders or links:
        if not folders:
            link = links.pop(0)
            real = os.path.realpath(link)
            if not link.exists():
                raise DataError(
                    f"data.path: {str(link)!r} is a link to {os.readlink(link)!r}, which does not "
                    "exist: remove the link, or restore that file"
                )
            if link.is_file():
                names[link] = real
            elif real in searched:
                inside = os.path.join(real, "")
                names |= {
                    link / path.removeprefix(inside): path
                    for path in dict.fromkeys(names.values())
                    if path.startswith(inside)
                }
            elif link.is_dir():
                folders.append((link, real))
            continue
        folder, real = folders.pop()
        if real in searched:
            continue
        searched.add(real)
        for entry in os.scandir(folder):
            path, inner = folder / entry.name, os.path.join(real, entry.name)
            if entry.name.startswith("."):
                continue
            if entry.is_symlink():
                links.append(path)
            elif entry.is_dir():
                folders.append((path, inner))
            elif entry.is_file():
                names[path] = inner
        links.sort()
    return names
