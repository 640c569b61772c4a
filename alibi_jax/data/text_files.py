"""A folder of text: which files are documents, what they hold, and the split of each document."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from alibi_jax.data.errors import DataError
from alibi_jax.data.folders import files_under
from alibi_jax.data.split_names import splits_by_name

SPLITS = ("train", "validation", "test")
# The names that WikiText's files have in its archives and in copies of them, without the split.
_WIKITEXT = ("wiki.{}.tokens", "wiki.{}.raw", "{}.txt")
# With fewer documents, assigning whole documents would leave a split empty.
_MIN_WHOLE_DOCUMENTS = 20
# A document is stored as one serialized protocol buffer, whose limit is 2 GiB.
_MAX_DOCUMENT_BYTES = 2**31 - 2**16


def split_of(number: int) -> str:
    """The split of a document by its number in the order of names, counted from 1."""
    return {10: "validation", 0: "test"}.get(number % 20, "train")


def list_documents(root: Path) -> list[Path]:
    """The files with text under `root` (or `root` itself), sorted by relative name.

    Hidden files and empty files are not documents. Symbolic links are followed, and a file that has
    several names by links is one document. Raises DataError for a missing path, for a link to
    nothing, for a path without any text, and for a file too large for one document.
    """
    once: dict[str, Path] = {}
    for path, real in _names_of_documents(root).items():
        once.setdefault(real, path)
    return sorted(once.values(), key=lambda path: _relative_name(path, root))


def _names_of_documents(root: Path) -> dict[Path, str]:
    """The real path of each document by each of its names; names by links come last.

    Raises DataError as `list_documents` does.
    """
    if not root.exists():
        raise DataError(f"data.path={str(root)!r} does not exist: give a text file or a folder")
    names = {root: os.path.realpath(root)} if root.is_file() else files_under(root)
    sizes = {path: path.stat().st_size for path in names}
    if not any(sizes.values()):
        raise DataError(f"data.path={str(root)!r} holds no text: give files that are not empty")
    for path, size in sizes.items():
        if size > _MAX_DOCUMENT_BYTES:
            raise DataError(
                f"data.path: {str(path)!r} has {size} bytes, more than the {_MAX_DOCUMENT_BYTES} "
                "of one document: split it into several files"
            )
    return {path: real for path, real in names.items() if sizes[path]}


def fingerprint(*roots: Path) -> str:
    """A digest of the relative names and the bytes of all documents, and of how they are split."""
    digest = hashlib.sha256()
    for root in roots:
        for path in list_documents(root):
            data = path.read_bytes()
            digest.update(_relative_name(path, root) + f"\0{len(data)}\0".encode())
            digest.update(data)
        if root.is_dir() and named_splits(root):
            # Earlier versions gave the documents of this folder to other splits.
            digest.update(b"splits by name")
    return digest.hexdigest()[:24]


def split_documents(root: Path) -> dict[str, Iterator[tuple[bytes, bytes]]]:
    """The documents of each split as (name, text), read during iteration.

    If `root` has the folders `train/` and `validation/` (`test/` may be missing), they are the
    splits. Otherwise the names of files and folders may give the splits, as `splits_by_name` says.
    Otherwise, if there are 20 or more documents, each goes to one split as a whole; if there are
    fewer, each is cut in three. Raises DataError, also during iteration, for a file that is not
    UTF-8 text, for a split that holds nothing, and for a file that is in the training split and in
    another one.
    """
    if folders := _split_folders(root):
        splits = {split: list_documents(folder) for split, folder in folders.items()}
        _check_held_out(splits)
        return {
            split: _read_documents(documents, folders[split]) for split, documents in splits.items()
        }
    if splits := named_splits(root):
        _check_held_out(splits)
        return {split: _read_documents(documents, root) for split, documents in splits.items()}
    documents = list_documents(root)
    if len(documents) < _MIN_WHOLE_DOCUMENTS:
        return {split: _cut_documents(documents, root, split) for split in SPLITS}
    return {
        split: _read_documents(
            [p for i, p in enumerate(documents, 1) if split_of(i) == split], root
        )
        for split in SPLITS
    }


def named_splits(root: Path) -> dict[str, list[Path]]:
    """The documents of each split if names other than `train/` and `validation/` give the splits.

    Raises DataError as `splits_by_name` does, and for a folder `train/` without held-out text.
    """
    if root.is_file() or _split_folders(root):
        return {}
    names = _names_of_documents(root)
    ordered = sorted(names, key=lambda path: _relative_name(path, root))
    relative = {PurePosixPath(path.relative_to(root)): path for path in ordered}
    splits = splits_by_name(root, relative)
    if not splits and (root / "train").is_dir():
        # If train/ and the rest were read as ordinary folders, test text could be trained on.
        raise DataError(
            f"data.path={str(root)!r} has train/ but no validation/: add validation/ (it may "
            "be there under another name), or rename train/"
        )
    return {
        split: list({names[path]: path for path in (relative[name] for name in named)}.values())
        for split, named in splits.items()
    }


def _split_folders(root: Path) -> dict[str, Path]:
    """The folders of the splits if there are at least `train/` and `validation/`; else nothing."""
    folders = {split: root / split for split in SPLITS if (root / split).is_dir()}
    return folders if {"train", "validation"} <= folders.keys() else {}


def _check_held_out(splits: dict[str, list[Path]]) -> None:
    """Raises DataError if a document of another split is also one of the training split."""
    identity = {path: os.stat(path)[1:3] for documents in splits.values() for path in documents}
    training = {identity[path]: path for path in splits["train"]}
    for split, documents in splits.items():
        for path in documents:
            if split != "train" and identity[path] in training:
                raise DataError(
                    f"data.path: {str(path)!r} of the {split} split is the same file as "
                    f"{str(training[identity[path]])!r} of the train split: remove one of them"
                )


def wikitext_files(root: Path) -> dict[str, Path]:
    """The existing file of each split of WikiText, by the first naming that has a training file.

    The test file may be missing. Raises DataError for another missing file.
    """
    splits = dict(zip(SPLITS, ("train", "valid", "test")))
    naming = next((name for name in _WIKITEXT if (root / name.format("train")).is_file()), None)
    files = {s: root / (naming or _WIKITEXT[0]).format(word) for s, word in splits.items()}
    for path in (files["train"], files["validation"]):
        if not path.is_file():
            others = "" if naming else " (nor wiki.train.raw or train.txt)"
            raise DataError(
                f"data.path={str(root)!r} has no {path.name}{others}: give the unpacked folder of "
                "WikiText-2 or WikiText-103 (Merity et al. 2016), which holds wiki.train.tokens "
                "and wiki.valid.tokens"
            )
    return {split: path for split, path in files.items() if path.is_file()}


def wikitext_documents(root: Path) -> dict[str, Iterator[tuple[bytes, bytes]]]:
    """Each split of WikiText as one document. Raises DataError as `split_documents` does."""
    files = wikitext_files(root)
    splits = {split: list_documents(path) for split, path in files.items()}
    _check_held_out(splits)
    return {split: _read_documents(documents, files[split]) for split, documents in splits.items()}


def split_point(text: bytes, low: int, high: int) -> int:
    """The offset at which to cut `text`: the last one in (low, high] that follows a line end.

    If there is none, the offset is the last start of a character up to `high`. Needs UTF-8 and
    low <= high < len(text).
    """
    line_end = text.rfind(b"\n", low, high)
    if line_end >= 0:
        return line_end + 1
    while text[high] & 0xC0 == 0x80:
        high -= 1
    return high


def check_text(text: bytes, name: str) -> None:
    """Raises DataError, with the byte offset, unless `text` is UTF-8."""
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} is not UTF-8 at byte {error.start}: convert it (iconv -t UTF-8), or remove "
            "it if it is binary"
        ) from None


def _read_documents(documents: list[Path], root: Path) -> Iterator[tuple[bytes, bytes]]:
    for path in documents:
        text = path.read_bytes()
        check_text(text, f"data.path: {str(path)!r}")
        nul = text.find(b"\0")
        if nul >= 0:
            raise DataError(
                f"data.path: {str(path)!r} has a NUL byte at byte {nul}: remove it, or the file "
                "if it is binary"
            )
        yield _relative_name(path, root), text


def _cut_documents(documents: list[Path], root: Path, split: str) -> Iterator[tuple[bytes, bytes]]:
    """The part of each document for one split: the first 90 %, the next 5 % or the last 5 %.

    A cut moves back to a line end if there is one in the 5 % before it.
    """
    empty = True
    for name, text in _read_documents(documents, root):
        size = len(text)
        marks = [size * share // 100 for share in (85, 90, 95)]
        first, second = split_point(text, marks[0], marks[1]), split_point(text, marks[1], marks[2])
        part = dict(zip(SPLITS, (text[:first], text[first:second], text[second:])))[split]
        if part:
            empty = False
            yield name, part
    if empty:
        raise DataError(
            f"data.path={str(root)!r} is too short to cut into train, validation and test: give "
            "more text"
        )


def _relative_name(path: Path, root: Path) -> bytes:
    """The name under `root` as the file system has it, which need not be UTF-8."""
    return os.fsencode(path.name if path == root else path.relative_to(root).as_posix())
