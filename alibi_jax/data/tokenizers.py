"""The tokenizers that can be chosen, and one way to make any of them."""

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Integer

from alibi_jax.config import Data
from alibi_jax.data.atomic import atomic_directory
from alibi_jax.data.errors import DataError
from alibi_jax.data.text_files import check_text, split_point
from alibi_jax.data.tokenizer_base import Tokenizer
from alibi_jax.data.word_tokenizer import WordTokenizer

# The library keeps some 100 bytes for each token of what it encodes at once.
_PIECE = 2**20


class ByteTokenizer(Tokenizer):
    """A token a byte. NUL, which text does not hold, is the separator."""

    kind = "bytes"
    vocab_size = 256
    byte_strings = [b"", *(bytes([value]) for value in range(1, 256))]  # noqa: RUF012

    def encode(self, document: bytes) -> Integer[np.ndarray, "T"]:
        """The bytes, uint8. Raises DataError for a NUL byte."""
        nul = document.find(b"\0")
        if nul >= 0:
            raise DataError(
                f"data.tokenizer='bytes' keeps NUL to separate documents, and one has a NUL at "
                f"byte {nul}: remove it, or use data.tokenizer='bpe'"
            )
        return np.frombuffer(document, np.uint8)

    def to_dict(self) -> dict[str, Any]:
        """Its kind says it all."""
        return {"kind": self.kind}


class BpeTokenizer(Tokenizer):
    """Byte-level byte pair encoding; the separator is put before the model's own ids."""

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
        """Learns `vocab_size` tokens, separator included. Raises DataError if there are fewer."""
        from tokenizers import Tokenizer as Model
        from tokenizers import models, pre_tokenizers, trainers

        model = Model(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=True,
        )
        model.train_from_iterator(
            (piece for document in documents for piece in _pieces(document)), trainer
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
        ids = [np.array(encode([piece])[0].ids, np.int32) for piece in _pieces(document)]
        return np.concatenate(ids) + 1

    def to_dict(self) -> dict[str, Any]:
        """The library's own JSON, kept as a string so that it stays as it is."""
        return {"kind": self.kind, "model": self._json}


# What is called with the other values of `to_dict`.
_KINDS: dict[str, Callable[..., Tokenizer]] = {
    "bytes": ByteTokenizer,
    "bpe": BpeTokenizer,
    "words": WordTokenizer,
}


def from_dict(values: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `to_dict` wrote."""
    arguments = dict(values)
    return _KINDS[arguments.pop("kind")](**arguments)


def make_tokenizer(config: Data) -> Tokenizer:
    """The tokenizer of a configuration; BPE and words are of the training split, learned once."""
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    from tqdm import tqdm

    from alibi_jax.data.builders import data_dir, open_documents

    documents = open_documents(config, "train")
    bpe = config.tokenizer == "bpe"
    # Words are all kept, whatever `vocab_size`.
    shaped = f"1 {config.vocab_size}" if bpe else "1"
    key = hashlib.sha256(f"{shaped} {documents.fingerprint}".encode()).hexdigest()
    kept = data_dir(config) / "alibi_jax" / f"{config.tokenizer}-{key[:24]}"
    if not kept.is_dir():
        with atomic_directory(kept) as staging:
            progress = iter(tqdm(documents, desc="reading for the tokenizer", unit=" documents"))
            tokenizer = (
                BpeTokenizer.train(progress, config.vocab_size)
                if bpe
                else WordTokenizer.train(progress)
            )
            (staging / "tokenizer.json").write_text(json.dumps(tokenizer.to_dict()))
    # Read back also by the process that trained it: all of them use the first one kept.
    return from_dict(json.loads((kept / "tokenizer.json").read_text()))


def _pieces(document: bytes) -> Iterator[str]:
    """A document in pieces of bounded size, cut at line ends where there are any."""
    check_text(document, "a document of data.dataset")
    start = 0
    while len(document) - start > _PIECE:
        end = split_point(document, start, start + _PIECE)
        yield document[start:end].decode()
        start = end
    yield document[start:].decode()


def _byte_of_character() -> dict[str, int]:
    """The byte that each character of the library's byte-level tokens stands for.

    Printable Latin-1 characters are their own byte; the others follow from U+0100 on.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in own]
    return {chr(value): value for value in own} | {
        chr(256 + index): value for index, value in enumerate(others)
    }
