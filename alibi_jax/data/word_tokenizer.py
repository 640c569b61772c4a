"""Word-level tokens of text that is split into words already, as WikiText's is."""

import array
import collections
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int32

from alibi_jax.data.errors import DataError
from alibi_jax.data.text_files import check_text
from alibi_jax.data.tokenizer_base import Tokenizer

# The end of a line, <eos>, is kept as what follows a line's last space.
_EOS = b"\n"


class WordTokenizer(Tokenizer):
    """A token a word, and one (<eos>) a line end, which also separates documents.

    Lines are of the form " word word \\n" or " \\n": each token stands for a space and its word.
    """

    kind = "words"

    def __init__(self, words: list[str]) -> None:
        vocabulary = [word.encode() for word in words]
        self._words = words
        self._ids = {word: token for token, word in enumerate(vocabulary)}
        self.vocab_size = len(words)
        self.separator = self._ids[_EOS]
        self.byte_strings = [b" " + word for word in vocabulary]

    @classmethod
    def train(cls, documents: Iterator[bytes]) -> "WordTokenizer":
        """All words and <eos>, the most frequent first, those alike in that by alphabet.

        Raises DataError for text that is not UTF-8 or has other white space than it may.
        """
        # Also there where no document has a line.
        counts = collections.Counter({_EOS: 0})
        for document in documents:
            check_text(document, "a document of data.dataset")
            for number, line in enumerate(io.BytesIO(document), 1):
                counts.update(_split(line, number))
        ordered = sorted(counts, key=lambda word: (-counts[word], word))
        return cls([word.decode() for word in ordered])

    def encode(self, document: bytes) -> Int32[np.ndarray, "T"]:
        """The tokens. Raises DataError for a word or white space that they cannot give back."""
        ids = array.array("i")
        for number, line in enumerate(io.BytesIO(document), 1):
            try:
                ids.extend(map(self._ids.__getitem__, _split(line, number)))
            except KeyError as missing:
                word = missing.args[0].decode(errors="replace")
                raise DataError(
                    f"data.tokenizer='words': {word!r} in line {number} is no word of the training "
                    "split: write <unk> where that is one, add text with the word to the training "
                    "split, or use data.tokenizer='bpe'"
                ) from None
        return np.frombuffer(ids, np.int32)

    def to_dict(self) -> dict[str, Any]:
        """Its words in the order of their ids."""
        return {"kind": self.kind, "words": self._words}


def _split(line: bytes, number: int) -> list[bytes]:
    """The words of a line and <eos>. Raises DataError unless they give back the line."""
    words = [*line.split(), _EOS]
    if b" " + b" ".join(words) != line:
        raise DataError(
            f"data.tokenizer='words': line {number} is not of the form ' word word \\n', with one "
            "space before each word and before the line's end: write it so, as WikiText's files "
            "are, or use data.tokenizer='bpe'"
        )
    return words
