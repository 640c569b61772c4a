"""The splits that the names of files and folders give: train.txt, wiki.valid.tokens, test/."""

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from alibi_jax.data.errors import DataError

# The words that name a split, in a name of any case.
_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
    "test": "test",
    "testing": "test",
    "heldout": "test",
}
_WORD = re.compile(rf"(?<![a-z])(?:{'|'.join(_WORDS)})(?![a-z])")
# Files with one of these words in their names tell about the text and belong to no split.
_ABOUT = re.compile(r"(?<![a-z])(?:readme|license|licence|citation)(?![a-z])")


def splits_by_name(
    root: Path, documents: Iterable[PurePosixPath]
) -> dict[str, list[PurePosixPath]]:
    """The documents of each split, if names give the splits; else nothing.

    A file or folder names a split if its name is a word for it, apart from numbers and the
    extension (`train-00001.txt`, `dev/`), or differs from another name in the same folder by that
    word alone (`ptb.train.txt`, `ptb.test.txt`). A folder's split holds for all in it. Names give
    the splits if they name a validation or test split and every document has a split. Files such
    as README are no documents then. `documents` are relative to `root`.

    Raises DataError if a name in `root` itself is that of a validation or test split, and some
    document has no split or there is no training split.
    """
    documents = list(documents)
    named = _assign([(path, path.parts) for path in documents])
    rest = [
        path for path in documents if path not in named and not _ABOUT.search(str(path).lower())
    ]
    splits = {
        split: [path for path in documents if named.get(path) == split]
        for split in dict.fromkeys(_WORDS.values())
        if split in named.values()
    }
    if splits.keys() <= {"train"}:
        return {}
    if not rest and "train" in splits:
        return splits
    held_out = {
        part: split
        for part, split in _names({path.parts[0] for path in documents}).items()
        if split != "train"
    }
    if not held_out:
        return {}
    name, split = min(held_out.items())
    remedy = "name all files and folders there after their splits, such as train.txt and valid.txt"
    lacks = f"{str(rest[0])!r} has no split" if rest else "there is no training split"
    raise DataError(
        f"data.path={str(root)!r}: {name!r} is the name of a {split} split, but {lacks}: {remedy}, "
        f"or move or rename {name!r}"
    )


def _assign(
    paths: list[tuple[PurePosixPath, tuple[str, ...]]],
) -> dict[PurePosixPath, str]:
    """The split of each document that has one. Documents come with the rest of their paths."""
    by_name = defaultdict(list)
    for path, (name, *rest) in paths:
        by_name[name].append((path, tuple(rest)))
    splits = _names(by_name)
    named: dict[PurePosixPath, str] = {}
    for name, inside in by_name.items():
        if name in splits:
            named |= {path: splits[name] for path, _ in inside}
        elif all(rest for _, rest in inside):
            named |= _assign(inside)
    return named


def _names(names: Iterable[str]) -> dict[str, str]:
    """The splits that the names in one folder give, by name."""
    splits, patterns, named_in = {}, {}, defaultdict(set)
    for name in names:
        lower = name.lower()
        words = {_WORDS[word] for word in _WORD.findall(lower)}
        if len(words) == 1:
            (splits[name],) = words
            pattern = re.sub(r"\d+", "#", _WORD.sub("{}", lower))
            patterns[name] = re.sub(r"\.[^.{}]*$", "", pattern)
            named_in[patterns[name]].add(splits[name])
    return {
        name: split
        for name, split in splits.items()
        if len(named_in[patterns[name]]) > 1 or re.sub("of|[^a-z{}]", "", patterns[name]) == "{}"
    }
