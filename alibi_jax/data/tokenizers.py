"""The tokenizers of the configuration, and how they are made and restored."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from alibi_jax.config import Data
from alibi_jax.data.errors import DataError
from alibi_jax.data.prepared import prepared, sealed, unsealed
from alibi_jax.data.text_files import check_text, split_point
from alibi_jax.data.tokenizer_base import Tokenizer
from alibi_jax.data.word_tokenizer import WordTokenizer
from alibi_jax.progress import Progress, on_terminal

# Bytes of text per call of the BPE library, which needs about 100 bytes of memory for each token.
_CHUNK_BYTES = 2**20


class ByteTokenizer(Tokenizer):
    """One token per byte. NUL, which text does not contain, is the separator."""

    kind = "bytes"
    vocab_size = 256
    byte_strings = [b"", *(bytes([value]) for value in range(1, 256))]  # noqa: RUF012

    def encode(self, document: bytes) -> Integer[np.ndarray, "T"]:
        """The bytes, uint8. Raises DataError for a NUL byte."""
        nul = document.find(b"\0")
        if nul >= 0:
            raise DataError(
                f"data.tokenizer='bytes' separates documents by NUL, and a document has a NUL at "
                f"byte {nul}: remove it, or use data.tokenizer='bpe'"
            )
        return np.frombuffer(document, np.uint8)

    def to_dict(self) -> dict[str, Any]:
        """The kind alone, as nothing is learned."""
        return {"kind": self.kind}


class BpeTokenizer(Tokenizer):
    """Byte-level byte pair encoding. Token 0 is the separator; the model's ids follow from 1."""

    kind = "bpe"

    def __init__(self, model: str) -> None:
        from tokenizers import Tokenizer as Model

        self._json = model
        self._model = Model.from_str(model)
        self.vocab_size = self._model.get_vocab_size() + 1
        byte_of = _byte_of_character()
        self.byte_strings = [b""] * self.vocab_size
        for token, index in self._model.get_vocab().items():
            self.byte_strings[index + 1] = bytes(byte_of[character] for character in token)

    @classmethod
    def train(cls, documents: Iterator[bytes], vocab_size: int) -> "BpeTokenizer":
        """Learns `vocab_size` tokens, separator included.

        Raises DataError if the text gives fewer.
        """
        from tokenizers import Tokenizer as Model
        from tokenizers import models, pre_tokenizers, trainers

        model = Model(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=on_terminal(),
        )
        model.train_from_iterator(
            (chunk for document in documents for chunk in _chunks(document)), trainer
        )
        tokenizer = cls(model.to_str())
        if tokenizer.vocab_size != vocab_size:
            raise DataError(
                f"data.vocab_size={vocab_size}: the training text gives {tokenizer.vocab_size} "
                "tokens: lower it to that, or give more text"
            )
        return tokenizer

    def encode(self, document: bytes) -> Integer[np.ndarray, "T"]:
        """The tokens, int32. Raises DataError for bytes that are not UTF-8."""
        encode = self._model.encode_batch_fast
        ids = [np.array(encode([chunk])[0].ids, np.int32) for chunk in _chunks(document)]
        return np.concatenate(ids) + 1

    def to_dict(self) -> dict[str, Any]:
        """The library's own JSON as a string, so that it is stored unchanged."""
        return {"kind": self.kind, "model": self._json}


# `from_dict` calls these with the entries of `to_dict` other than "kind".
_KINDS: dict[str, Callable[..., Tokenizer]] = {
    "bytes": ByteTokenizer,
    "bpe": BpeTokenizer,
    "words": WordTokenizer,
}


def from_dict(values: dict[str, Any]) -> Tokenizer:
    """Restores the tokenizer whose `to_dict` gave `values`."""
    arguments = dict(values)
    return _KINDS[arguments.pop("kind")](**arguments)


def make_tokenizer(config: Data) -> Tokenizer:
    """The tokenizer of a configuration.

    BPE and words are learned once from the training split and stored under `data_dir`.
    """
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    from alibi_jax.data.builders import data_dir, open_documents

    documents = open_documents(config, "train")
    bpe = config.tokenizer == "bpe"
    # The word tokenizer keeps all words, whatever `vocab_size`.
    settings = f"1 {config.vocab_size}" if bpe else "1"
    key = hashlib.sha256(f"{settings} {documents.fingerprint}".encode()).hexdigest()
    folder = data_dir(config) / "alibi_jax" / f"{config.tokenizer}-{key[:24]}"

    def make(staging: Path) -> None:
        shown = _with_progress(documents, len(documents))
        tokenizer = (
            BpeTokenizer.train(shown, config.vocab_size) if bpe else WordTokenizer.train(shown)
        )
        (staging / "tokenizer.json").write_text(json.dumps(sealed(tokenizer.to_dict())))

    # Read back even if it was trained here: all processes use the first tokenizer that was stored.
    return prepared(folder, _stored_tokenizer, make)


def _stored_tokenizer(folder: Path) -> Tokenizer:
    values = json.loads((folder / "tokenizer.json").read_text())
    # Earlier versions wrote no digest.
    return from_dict(unsealed(values) if "digest" in values else values)


def _with_progress(documents: Iterable[bytes], count: int) -> Iterator[bytes]:
    with Progress(count, "reading for the tokenizer", unit="document") as progress:
        for document in documents:
            yield document
            progress.update()


def _chunks(document: bytes) -> Iterator[str]:
    """A document in chunks of bounded size, cut at line ends where possible."""
    check_text(document, "a document of data.dataset")
    start = 0
    while len(document) - start > _CHUNK_BYTES:
        end = split_point(document, start, start + _CHUNK_BYTES)
        yield document[start:end].decode()
        start = end
    yield document[start:].decode()


def _byte_of_character() -> dict[str, int]:
    """The byte that each character of the library's byte-level tokens stands for.

    Printable Latin-1 characters stand for their own byte. Characters from U+0100 on stand for the
    other bytes, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {
        chr(256 + index): value for index, value in enumerate(others)
    }
