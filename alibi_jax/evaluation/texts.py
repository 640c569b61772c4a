"""A split as it is scored: its tokens, where its texts begin and end, its words and bytes."""

import dataclasses
import functools
import hashlib
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer

from alibi_jax.config import Data
from alibi_jax.data.streams import document_starts, token_stream
from alibi_jax.data.tokenizers import Tokenizer
from alibi_jax.data.windows import sample_targets


@dataclasses.dataclass(frozen=True)
class Text:
    """The tokens of a split under a tokenizer.

    `bounds`: no window reaches over one of them. They are those of the documents, or the ends of
    the whole stream, in which documents follow one another (fairseq's `sample-break-mode none`).
    """

    tokens: Integer[np.ndarray, "N"]
    bounds: Int64[np.ndarray, "bounds"]
    starts: Int64[np.ndarray, "E"]
    tokenizer: Tokenizer
    # Of raw text, by token: whole words are counted where they begin.
    words: Integer[np.ndarray, "N"]
    num_bytes: Integer[np.ndarray, "N"]

    @property
    def longest(self) -> int:
        """The most tokens of context that any target has."""
        return int(np.diff(self.bounds).max()) - 1

    @functools.cached_property
    def digest(self) -> str:
        """The same for two texts only if they have the same tokens."""
        return hashlib.sha256(self.tokens.data).hexdigest()

    def summary(self) -> dict[str, Any]:
        """How much text it is."""
        return {
            "documents": len(self.starts),
            "tokens": len(self.tokens),
            "words": int(self.words.sum()),
            "bytes": int(self.num_bytes.sum()),
        }

    def sample(self, lengths: list[int], count: int, seed: int) -> Int64[np.ndarray, "M"]:
        """Targets that can be given each of those lengths of context that any target can."""
        context = max((length for length in lengths if length <= self.longest), default=1)
        return sample_targets(self.bounds, context, count, seed)


def read_text(config: Data, split: str, tokenizer: Tokenizer, documents: bool) -> Text:
    """The text of a split; `documents`: windows stay within one document each."""
    tokens = token_stream(config, split, tokenizer)
    starts = document_starts(config, split, tokenizer)
    bounds = np.append(starts, len(tokens)) if documents else np.array([0, len(tokens)])
    num_bytes = tokenizer.token_bytes[tokens]
    # A separator is no text, also where the same token ends lines.
    num_bytes[starts] = 0
    return Text(tokens, bounds, starts, tokenizer, tokenizer.words(tokens), num_bytes)
