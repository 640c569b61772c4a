"""Text to token ids and back, without loss: what every tokenizer gives."""

import abc
import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32, Integer


class Tokenizer(abc.ABC):
    """A reversible map from the bytes of a document to token ids."""

    kind: str
    vocab_size: int
    # The token put before each document. It may occur in documents too, as the end of a line
    # does: where they start, only `document_starts` tells.
    separator: int = 0
    # What each token stands for; nothing, for a separator that no document holds.
    byte_strings: list[bytes]

    @abc.abstractmethod
    def encode(self, document: bytes) -> Integer[np.ndarray, "T"]:
        """The tokens of a document, without the separator before it."""

    @abc.abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """All of the tokenizer as JSON values; `from_dict` makes it again."""

    @property
    def fingerprint(self) -> str:
        """The same for two tokenizers only if they give the same tokens."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    @functools.cached_property
    def token_bytes(self) -> Int32[np.ndarray, "V"]:
        """How many bytes each token stands for."""
        return np.array([len(string) for string in self.byte_strings], np.int32)

    def decode(self, ids: Integer[np.ndarray, "T"] | Sequence[int]) -> bytes:
        """The bytes of tokens, one after another."""
        return b"".join(self.byte_strings[token] for token in np.asarray(ids, int).tolist())

    def words(self, tokens: Integer[np.ndarray, "N"]) -> Int32[np.ndarray, "N"]:
        """How many words of the raw text begin in each token of a stream.

        A word is a longest run of bytes other than ASCII whitespace, as `bytes.split` has it.
        None goes on across a separator, nor from before the first token.
        """
        begins, ends, inside = self._word_tables
        broken = np.concatenate([[True], ends[tokens]])[:-1]
        return inside[tokens] + (begins[tokens] & broken)

    @functools.cached_property
    def _word_tables(
        self,
    ) -> tuple[Bool[np.ndarray, "V"], Bool[np.ndarray, "V"], Int32[np.ndarray, "V"]]:
        """Of each token: does it begin in a word, end outside one, how many begin further in."""
        begins = np.array([string[:1].strip() != b"" for string in self.byte_strings])
        ends = np.array([string[-1:].strip() == b"" for string in self.byte_strings])
        words = np.array([len(string.split()) for string in self.byte_strings], np.int32)
        return begins, ends, words - begins
