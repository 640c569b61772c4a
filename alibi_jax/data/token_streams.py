"""A split of a corpus as one flat array of tokens on disk (docs/formats.md)."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt

from alibi_jax.config import Data
from alibi_jax.data.atomic import atomic_directory, discard
from alibi_jax.data.errors import DataError
from alibi_jax.data.tokenizer_base import Tokenizer
from alibi_jax.progress import Progress

# Increased when the layout of a stream changes, so that streams of other layouts are not used.
_FORMAT = 2


def token_stream(config: Data, split: str, tokenizer: Tokenizer) -> UInt[np.ndarray, "N"]:
    """The tokens of a split, [separator, *document] for each document, mapped from disk.

    uint16 if the vocabulary allows it, else uint32. Tokenises the split once, document by document,
    and stores the stream under `data_dir`. Raises DataError if there is no text.
    """
    folder = _prepare(config, split, tokenizer)
    meta = json.loads((folder / "meta.json").read_text())
    return np.memmap(folder / "tokens.bin", mode="r", dtype=meta["dtype"])


def document_starts(config: Data, split: str, tokenizer: Tokenizer) -> Int64[np.ndarray, "D"]:
    """The index in `token_stream` of each document's separator, mapped from disk."""
    return np.memmap(_prepare(config, split, tokenizer) / "starts.bin", mode="r", dtype=np.int64)


def _prepare(config: Data, split: str, tokenizer: Tokenizer) -> Path:
    """The folder of a stream. Writes the stream first if there is no complete one."""
    from alibi_jax.data.builders import data_dir, open_documents

    documents = open_documents(config, split)
    identity = {
        "format": _FORMAT,
        "documents": documents.fingerprint,
        "tokenizer": tokenizer.fingerprint,
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    folder = data_dir(config) / "alibi_jax" / key[:24]
    if folder.exists() and not _is_complete(folder):
        discard(folder)
    if not folder.exists():
        with atomic_directory(folder) as staging:
            sizes = _write(staging, documents, tokenizer)
            if sizes["tokens"] == len(documents):
                raise DataError(
                    f"data.{split}_split of data.dataset={config.dataset!r} holds no text: choose "
                    "another split"
                )
            (staging / "meta.json").write_text(json.dumps(identity | sizes, indent=1))
    return folder


def _write(folder: Path, documents: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    """Writes the arrays of a stream and returns their sizes and dtype for meta.json."""
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
            np.array([tokens], np.int64).tofile(starts)
            separator.tofile(file)
            ids.tofile(file)
            tokens += 1 + len(ids)
            progress.update(len(document))
    return {"tokens": tokens, "starts": len(documents), "dtype": dtype.name}


def _is_complete(folder: Path) -> bool:
    """Whether the arrays of a stream have the sizes that its meta.json gives."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        sizes = {
            "tokens.bin": meta["tokens"] * np.dtype(meta["dtype"]).itemsize,
            "starts.bin": meta["starts"] * np.dtype(np.int64).itemsize,
        }
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False
