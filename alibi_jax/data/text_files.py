"""A folder of text: which files are documents, what they hold, and the split of each document."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from alibi_jax.data.errors import DataError

SPLITS = ("train", "validation", "test")
# WikiText's file names, in the order of SPLITS.
_WIKITEXT = ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")
# With fewer documents, assigning whole documents would leave a split empty.
_MIN_WHOLE_DOCUMENTS = 20
# A document is stored as one serialized protocol buffer, whose limit is 2 GiB.
_MAX_DOCUMENT_BYTES = 2**31 - 2**16


def split_of(number: int) -> str:
    """The split of a document by its number in the order of names, counted from 1."""
    return {10: "validation", 0: "test"}.get(number % 20, "train")


def list_documents(root: Path) -> list[Path]:
    """The files with text under `root` (or `root` itself), sorted by relative name.

    Hidden files and empty files are not documents. Raises DataError for a missing path, for a
    path without any text, and for a file too large for one document.
    """
    if not root.exists():
        raise DataError(f"data.path={str(root)!r} does not exist: give a text file or a folder")
    if root.is_file():
        files = [root]
    else:
        files = sorted(
            (
                path
                for path in root.rglob("*")
                if path.is_file() and not _is_hidden(path.relative_to(root))
            ),
            key=lambda path: path.relative_to(root).as_posix(),
        )
    documents = [path for path in files if path.stat().st_size]
    if not documents:
        raise DataError(f"data.path={str(root)!r} holds no text: give files that are not empty")
    for path in documents:
        if path.stat().st_size > _MAX_DOCUMENT_BYTES:
            raise DataError(
                f"data.path: {str(path)!r} has {path.stat().st_size} bytes, more than the "
                f"{_MAX_DOCUMENT_BYTES} of one document: split it into several files"
            )
    return documents


def fingerprint(*roots: Path) -> str:
    """A digest of the relative names and the bytes of all documents."""
    digest = hashlib.sha256()
    for root in roots:
        for path in list_documents(root):
            data = path.read_bytes()
            digest.update(f"{_relative_name(path, root)}\0{len(data)}\0".encode())
            digest.update(data)
    return digest.hexdigest()[:24]


def split_documents(root: Path) -> dict[str, Iterator[tuple[str, bytes]]]:
    """The documents of each split as (name, text), read during iteration.

    If `root` has the folders `train/` and `validation/` (`test/` may be missing), they are the
    splits. Otherwise, if there are 20 or more documents, each goes to one split as a whole; if
    there are fewer, each is cut in three. Raises DataError, also during iteration, for a file that
    is not UTF-8 text and for a split that holds nothing.
    """
    folders = {split: root / split for split in SPLITS if (root / split).is_dir()}
    if "train" in folders:
        if "validation" not in folders:
            # If train/ and test/ were read as ordinary folders, test text would be trained on.
            raise DataError(
                f"data.path={str(root)!r} has train/ but no validation/: add validation/ (it may "
                "be there under another name), or rename train/"
            )
        return {
            split: _read_documents(list_documents(folder), folder)
            for split, folder in folders.items()
        }
    documents = list_documents(root)
    if len(documents) < _MIN_WHOLE_DOCUMENTS:
        return {split: _cut_documents(documents, root, split) for split in SPLITS}
    return {
        split: _read_documents(
            [p for i, p in enumerate(documents, 1) if split_of(i) == split], root
        )
        for split in SPLITS
    }


def wikitext_files(root: Path) -> dict[str, Path]:
    """The existing file of each split of WikiText.

    The test file may be missing. Raises DataError for another missing file.
    """
    files = {split: root / name for split, name in zip(SPLITS, _WIKITEXT)}
    for path in (files["train"], files["validation"]):
        if not path.is_file():
            raise DataError(
                f"data.path={str(root)!r} has no {path.name}: give the folder of WikiText-2 or "
                "WikiText-103 (Merity et al. 2016), unpacked from the word-level archive, not "
                "the raw one"
            )
    return {split: path for split, path in files.items() if path.is_file()}


def wikitext_documents(root: Path) -> dict[str, Iterator[tuple[str, bytes]]]:
    """Each split of WikiText as one document. Raises DataError as `split_documents` does."""
    return {
        split: _read_documents(list_documents(path), path)
        for split, path in wikitext_files(root).items()
    }


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


def _read_documents(documents: list[Path], root: Path) -> Iterator[tuple[str, bytes]]:
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


def _cut_documents(documents: list[Path], root: Path, split: str) -> Iterator[tuple[str, bytes]]:
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


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _relative_name(path: Path, root: Path) -> str:
    return path.name if path == root else path.relative_to(root).as_posix()
