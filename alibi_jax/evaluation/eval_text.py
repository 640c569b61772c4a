"""A split prepared for scoring: tokens, text and document boundaries, words and bytes per token."""

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

# The sample supports a length only if at least this many targets can have that much context.
_MIN_SAMPLED = 30


@dataclasses.dataclass(frozen=True)
class Sample:
    """Sampled targets, as indices in the stream, and the longest context that all of them have."""

    targets: Int64[np.ndarray, "M"]
    max_context: int


@dataclasses.dataclass(frozen=True)
class EvaluationText:
    """The tokens of a split under a tokenizer.

    No window crosses one of the `bounds`. They are either the bounds of the documents, or the two
    ends of the whole stream, in which documents follow one another (fairseq's `sample-break-mode
    none`). A "text" is the stretch between two bounds.
    """

    tokens: Integer[np.ndarray, "N"]
    bounds: Int64[np.ndarray, "bounds"]
    document_starts: Int64[np.ndarray, "E"]
    tokenizer: Tokenizer
    # Counts in the raw text, per token. A word is counted at the token in which it begins.
    words: Integer[np.ndarray, "N"]
    num_bytes: Integer[np.ndarray, "N"]

    @property
    def max_context(self) -> int:
        """The largest number of context tokens that any target has."""
        return int(np.diff(self.bounds).max()) - 1

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the tokens: equal for two texts only if their tokens are equal."""
        return hashlib.sha256(self.tokens.data).hexdigest()

    def summary(self) -> dict[str, Any]:
        """The numbers of documents, tokens, words and bytes."""
        return {
            "documents": len(self.document_starts),
            "tokens": len(self.tokens),
            "words": int(self.words.sum()),
            "bytes": int(self.num_bytes.sum()),
        }

    def sample(self, lengths: Sequence[int], count: int, seed: int) -> Sample:
        """Samples at most `count` targets, all with enough context for every supported length.

        A length is supported if enough targets can have that much context: `_MIN_SAMPLED`, or
        `count` if that is less. If no length is supported, the sample is empty.
        """
        minimum = min(count, _MIN_SAMPLED)
        supported = [n for n in lengths if num_eligible(self.bounds, n).sum() >= minimum]
        if not supported:
            return Sample(np.zeros(0, np.int64), 0)
        longest = max(supported)
        return Sample(sample_targets(self.bounds, longest, count, seed), longest)


def read_text(config: Data, split: str, tokenizer: Tokenizer, documents: bool) -> EvaluationText:
    """Reads a split. With `documents`, each window stays inside one document."""
    tokens = token_stream(config, split, tokenizer)
    starts = document_starts(config, split, tokenizer)
    bounds = np.append(starts, len(tokens)) if documents else np.array([0, len(tokens)])
    num_bytes = tokenizer.token_bytes[tokens]
    # A separator stands for no text, even where the same token also ends lines.
    num_bytes[starts] = 0
    return EvaluationText(tokens, bounds, starts, tokenizer, tokenizer.words(tokens), num_bytes)
