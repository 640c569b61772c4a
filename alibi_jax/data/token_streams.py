"""A split of a corpus as one flat array of tokens on disk (docs/formats.md)."""

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer, UInt

from alibi_jax.config import Data
from alibi_jax.data.errors import DataError
from alibi_jax.data.prepared import crc32, prepared, sealed, unsealed
from alibi_jax.data.tokenizer_base import Tokenizer
from alibi_jax.progress import Progress

# Increased when the layout of a stream changes, so that streams of other layouts are not used.
_FORMAT = 2
_FILES = {"tokens": "tokens.bin", "starts": "starts.bin"}


def token_stream(config: Data, split: str, tokenizer: Tokenizer) -> UInt[np.ndarray, "N"]:
    """The tokens of a split, [separator, *document] for each document, mapped from disk.

    uint16 if the vocabulary allows it, else uint32. Tokenises the split once, document by document,
    and stores the stream under `data_dir`. A stored stream is read once to verify its checksum, and
    is made again if it is damaged. Raises DataError if there is no text.
    """
    return _open(config, split, tokenizer, partial(_mapped, name="tokens"))


def document_starts(config: Data, split: str, tokenizer: Tokenizer) -> Int64[np.ndarray, "D"]:
    """The index in `token_stream` of each document's separator, mapped from disk."""
    return _open(config, split, tokenizer, partial(_mapped, name="starts"))


def _open(
    config: Data,
    split: str,
    tokenizer: Tokenizer,
    load: Callable[[Path], Integer[np.ndarray, "N"]],
) -> Integer[np.ndarray, "N"]:
    """What `load` reads from the folder of a stream, which is written first if there is none."""
    from alibi_jax.data.builders import data_dir, open_documents

    documents = open_documents(config, split)
    identity = {
        "format": _FORMAT,
        "documents": documents.fingerprint,
        "tokenizer": tokenizer.fingerprint,
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def make(folder: Path) -> None:
        sizes = _write(folder, documents, tokenizer)
        if sizes["tokens"] == len(documents):
            raise DataError(
                f"data.{split}_split of data.dataset={config.dataset!r} holds no text: choose "
                "another split"
            )
        (folder / "meta.json").write_text(json.dumps(sealed(identity | sizes), indent=1))

    return prepared(data_dir(config) / "alibi_jax" / key[:24], load, make)


def _write(folder: Path, documents: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    """Writes the arrays of a stream; returns their sizes, dtype and checksums for meta.json."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    separator = np.array([tokenizer.separator], dtype)
    tokens = 0
    with (
        (folder / "tokens.bin").open("wb") as file,
        (folder / "starts.bin").open("wb") as starts,
        Progress(
            documents.num_bytes or None, "tokenising", unit="byte", unit_scale=True
        ) as progress,
    ):
        for document in documents:
            ids = tokenizer.encode(document).astype(dtype)
            # Not `tofile`, whose error does not say that the disk is full.
            starts.write(np.array([tokens], np.int64).data)
            file.write(separator.data)
            file.write(ids.data)
            tokens += 1 + len(ids)
            progress.update(len(document))
    sizes = {"tokens": tokens, "starts": len(documents), "dtype": dtype.name}
    for part, name in _FILES.items():
        with (folder / name).open("rb") as written:
            sizes[f"{part}_crc32"] = crc32(written)
    return sizes


def _mapped(folder: Path, name: str) -> Integer[np.ndarray, "N"]:
    """The array "tokens" or "starts" of a stream, mapped from disk. Raises ValueError for damage.

    The values that are verified are those that are mapped, whatever happens to the folder later.
    """
    meta = json.loads((folder / "meta.json").read_text())
    # Earlier versions wrote neither checksums nor a digest.
    checksum = f"{name}_crc32"
    if meta.keys() & {checksum, "digest"}:
        meta = unsealed(meta)
    dtypes = {"tokens": np.dtype(meta["dtype"]), "starts": np.dtype(np.int64)}
    for part, file_name in _FILES.items():
        if (folder / file_name).stat().st_size != meta[part] * dtypes[part].itemsize:
            raise ValueError(f"{file_name} has another size than was written")
    with (folder / _FILES[name]).open("rb") as file:
        if checksum in meta and crc32(file) != meta[checksum]:
            raise ValueError(f"{_FILES[name]} has other bytes than were written")
        return np.memmap(file, mode="r", dtype=dtypes[name])
