"""The interface of every tokenizer: text to token ids and back, without loss."""

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
    # The token before each document. Documents may contain it too, for example if it also ends
    # lines: only `document_starts` says where documents start.
    separator: int = 0
    # The bytes of each token; empty for a separator that no document contains.
    byte_strings: list[bytes]

    @abc.abstractmethod
    def encode(self, document: bytes) -> Integer[np.ndarray, "T"]:
        """The tokens of a document, without the separator before it."""

    @abc.abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The whole tokenizer as JSON values, from which `from_dict` restores it."""

    @property
    def fingerprint(self) -> str:
        """A digest: two tokenizers have the same one only if they give the same tokens."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    @functools.cached_property
    def token_bytes(self) -> Int32[np.ndarray, "V"]:
        """The number of bytes of each token."""
        return np.array([len(string) for string in self.byte_strings], np.int32)

    def decode(self, ids: Integer[np.ndarray, "T"] | Sequence[int]) -> bytes:
        """The concatenated bytes of tokens."""
        return b"".join(self.byte_strings[token] for token in np.asarray(ids, int).tolist())

    def words(self, tokens: Integer[np.ndarray, "N"]) -> Int32[np.ndarray, "N"]:
        """The number of words of the raw text that begin in each token of a stream.

        A word is a maximal run of bytes other than ASCII whitespace, as in `bytes.split`. No word
        extends across a separator or from before the first token.
        """
        begins_in_word, ends_outside, begin_inside = self._word_tables
        after_break = np.concatenate([[True], ends_outside[tokens]])[:-1]
        return begin_inside[tokens] + (begins_in_word[tokens] & after_break)

    @functools.cached_property
    def _word_tables(
        self,
    ) -> tuple[Bool[np.ndarray, "V"], Bool[np.ndarray, "V"], Int32[np.ndarray, "V"]]:
        """Three tables over the vocabulary, from which `words` counts.

        They give, for each token, whether its first byte is in a word, whether it ends outside any
        word, and the number of words that begin after its first byte.
        """
        begins_in_word = np.array([string[:1].strip() != b"" for string in self.byte_strings])
        ends_outside = np.array([string[-1:].strip() == b"" for string in self.byte_strings])
        words = np.array([len(string.split()) for string in self.byte_strings], np.int32)
        return begins_in_word, ends_outside, words - begins_in_word
