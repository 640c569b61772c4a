"""A split as it is scored: its tokens, where its texts begin and end, its words and bytes."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer

from alibi_jax.config import Data
from alibi_jax.data.token_streams import document_starts, token_stream
from alibi_jax.data.tokenizers import Tokenizer
from alibi_jax.data.windows import num_eligible, sample_targets

# With fewer targets than this that could be given it, a length is no part of a sample.
_ENOUGH = 30


@dataclasses.dataclass(frozen=True)
class Sample:
    """Targets, by their indices in the stream, and the most context that each can be given."""

    targets: Int64[np.ndarray, "M"]
    longest: int


@dataclasses.dataclass(frozen=True)
class EvaluationText:
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

    def sample(self, lengths: Sequence[int], count: int, seed: int) -> Sample:
        """Targets that can be given each of those lengths of context that enough targets can."""
        enough = min(count, _ENOUGH)
        served = [n for n in lengths if num_eligible(self.bounds, n).sum() >= enough]
        if not served:
            return Sample(np.zeros(0, np.int64), 0)
        return Sample(sample_targets(self.bounds, max(served), count, seed), max(served))


def read_text(config: Data, split: str, tokenizer: Tokenizer, documents: bool) -> EvaluationText:
    """The text of a split; `documents`: windows stay within one document each."""
    tokens = token_stream(config, split, tokenizer)
    starts = document_starts(config, split, tokenizer)
    bounds = np.append(starts, len(tokens)) if documents else np.array([0, len(tokens)])
    num_bytes = tokenizer.token_bytes[tokens]
    # A separator is no text, also where the same token ends lines.
    num_bytes[starts] = 0
    return EvaluationText(tokens, bounds, starts, tokenizer, tokenizer.words(tokens), num_bytes)
