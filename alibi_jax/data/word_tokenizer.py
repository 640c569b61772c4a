"""Word-level tokens of text that is already split into words, as WikiText's is."""

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

# The end-of-line token <eos> is stored as the word after a line's last space.
_EOS = b"\n"


class WordTokenizer(Tokenizer):
    """One token per word and one (<eos>) per line end. <eos> also separates documents.

    Lines have the form " word word \\n" or " \\n": each token stands for a space and the word after
    it.
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
        """Takes all words and <eos>, by falling frequency and then in alphabetical order.

        Raises DataError for text that is not UTF-8 or that does not have the form above.
        """
        # <eos> is in the vocabulary even if no document has a line.
        counts = collections.Counter({_EOS: 0})
        for document in documents:
            check_text(document, "a document of data.dataset")
            for number, line in enumerate(io.BytesIO(document), 1):
                counts.update(_split_line(line, number))
        ordered = sorted(counts, key=lambda word: (-counts[word], word))
        return cls([word.decode() for word in ordered])

    def encode(self, document: bytes) -> Int32[np.ndarray, "T"]:
        """The tokens. Raises DataError for an unknown word or a line of another form."""
        ids = array.array("i")
        for number, line in enumerate(io.BytesIO(document), 1):
            try:
                ids.extend(map(self._ids.__getitem__, _split_line(line, number)))
            except KeyError as missing:
                word = missing.args[0].decode(errors="replace")
                raise DataError(
                    f"data.tokenizer='words': {word!r} in line {number} is no word of the training "
                    "split: write <unk> if the training split has that word, add text with the "
                    "missing word to the training split, or use data.tokenizer='bpe'"
                ) from None
        return np.frombuffer(ids, np.int32)

    def to_dict(self) -> dict[str, Any]:
        """The words in the order of their ids."""
        return {"kind": self.kind, "words": self._words}


def _split_line(line: bytes, number: int) -> list[bytes]:
    """The words of a line and <eos>. Raises DataError unless they reproduce the line exactly."""
    words = [*line.split(), _EOS]
    if b" " + b" ".join(words) != line:
        raise DataError(
            f"data.tokenizer='words': line {number} is not of the form ' word word \\n', with one "
            "space before each word and before the line's end: write it so, as WikiText's files "
            "are, or use data.tokenizer='bpe'"
        )
    return words
