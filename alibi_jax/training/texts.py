"""The tokens that a run is trained and validated on."""

import dataclasses
from typing import Any

import numpy as np

from alibi_jax.config import Config
from alibi_jax.data.builders import open_documents
from alibi_jax.data.token_streams import token_stream
from alibi_jax.data.tokenizers import Tokenizer, make_tokenizer
from alibi_jax.distributed.agreement import digest


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """The tokens of the training split, and of the validation split if the run validates."""

    # Identifies the training text.
    fingerprint: str
    tokenizer: Tokenizer
    tokens: np.ndarray
    validation_tokens: np.ndarray | None

    def facts(self) -> dict[str, Any]:
        """What all processes must have in common; reads all tokens."""
        streams = {"training": self.tokens, "validation": self.validation_tokens}
        return {
            "digest of the training text": digest(self.fingerprint),
            "digest of the tokenizer": digest(self.tokenizer.fingerprint),
            "size of the vocabulary": self.tokenizer.vocab_size,
        } | {
            f"{name} tokens": f"{len(tokens)}, digest {digest(tokens)}"
            for name, tokens in streams.items()
            if tokens is not None
        }


def prepare_data(config: Config) -> TrainingData:
    """Reads the data of a run, and prepares it at its first use."""
    tokenizer = make_tokenizer(config.data)
    return TrainingData(
        open_documents(config.data, "train").fingerprint,
        tokenizer,
        token_stream(config.data, "train", tokenizer),
        token_stream(config.data, "validation", tokenizer)
        if config.train.validation_every
        else None,
    )
