"""A split as one flat array of tokens on disk."""

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

# Raised when the layout of a stream changes, so that older ones are left alone.
_FORMAT = 2


def token_stream(config: Data, split: str, tokenizer: Tokenizer) -> UInt[np.ndarray, "N"]:
    """The tokens of a split, [separator, *document] for each document, mapped from disk.

    uint16 where the vocabulary allows, else uint32. Tokenised once, document by document, and
    kept under `data_dir`. Raises DataError if there is no text.
    """
    kept = _prepare(config, split, tokenizer)
    meta = json.loads((kept / "meta.json").read_text())
    return np.memmap(kept / "tokens.bin", mode="r", dtype=meta["dtype"])


def document_starts(config: Data, split: str, tokenizer: Tokenizer) -> Int64[np.ndarray, "D"]:
    """Where in `token_stream` each document's separator is, mapped from disk."""
    return np.memmap(_prepare(config, split, tokenizer) / "starts.bin", mode="r", dtype=np.int64)


def _prepare(config: Data, split: str, tokenizer: Tokenizer) -> Path:
    """The folder of a stream, made where there is none that is whole."""
    from alibi_jax.data.builders import data_dir, open_documents

    documents = open_documents(config, split)
    identity = {
        "format": _FORMAT,
        "documents": documents.fingerprint,
        "tokenizer": tokenizer.fingerprint,
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    kept = data_dir(config) / "alibi_jax" / key[:24]
    if kept.exists() and not _whole(kept):
        discard(kept)
    if not kept.exists():
        with atomic_directory(kept) as staging:
            described = _write(staging, documents, tokenizer)
            if described["tokens"] == len(documents):
                raise DataError(
                    f"data.{split}_split of data.dataset={config.dataset!r} holds no text: choose "
                    "another split"
                )
            (staging / "meta.json").write_text(json.dumps(identity | described, indent=1))
    return kept


def _write(folder: Path, documents: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    from tqdm import tqdm

    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    separator = np.array([tokenizer.separator], dtype)
    tokens = 0
    with (
        (folder / "tokens.bin").open("wb") as file,
        (folder / "starts.bin").open("wb") as starts,
        tqdm(
            total=documents.num_bytes or None,
            desc="tokenising",
            unit="B",
            unit_scale=True,
            mininterval=1,
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


def _whole(kept: Path) -> bool:
    """Whether a stream is what its description says."""
    try:
        meta = json.loads((kept / "meta.json").read_text())
        sizes = {
            "tokens.bin": meta["tokens"] * np.dtype(meta["dtype"]).itemsize,
            "starts.bin": meta["starts"] * np.dtype(np.int64).itemsize,
        }
        return all((kept / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False
