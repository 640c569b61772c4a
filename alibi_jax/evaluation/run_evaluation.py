"""The losses of one run under one rescaling, on the text and the sample that it is scored on."""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from alibi_jax.data.windows import EvaluationWindows, fixed_context_windows
from alibi_jax.evaluation.eval_text import EvaluationText, Sample
from alibi_jax.evaluation.options import EvaluationOptions
from alibi_jax.evaluation.protocols import FIXED, Protocol
from alibi_jax.evaluation.rescaling import Rescaling
from alibi_jax.evaluation.runs import Run
from alibi_jax.evaluation.scoring import Scorer, Scores
from alibi_jax.evaluation.unfinished import UnfinishedLosses
from alibi_jax.model import abstract_model


class RunEvaluation:
    """Scores a run under one rescaling.

    Losses go to `unfinished` while they are computed, and those found there are not computed again.
    `should_stop` is called after each batch.
    """

    def __init__(
        self,
        run: Run,
        rescaling: Rescaling,
        options: EvaluationOptions,
        text: EvaluationText,
        sample: Sample,
        unfinished: UnfinishedLosses,
        should_stop: Callable[[], bool] = lambda: False,
    ):
        self.run, self.rescaling, self.options = run, rescaling, options
        self.text, self.sample = text, sample
        self._unfinished, self._should_stop = unfinished, should_stop
        self._scorers: dict[int, Scorer] = {}
        self._sample_scores: dict[tuple[Protocol, int], tuple[Scores, EvaluationWindows]] = {}

    def graphdef(self, length: int) -> Any:
        """The model for inputs of that length. A rescaling does not change its parameters."""
        config = self.rescaling.at(self.run.config, length)
        return abstract_model(config, self.run.metadata.vocab_size, self.run.mesh)[0]

    def score(self, protocol: Protocol, length: int) -> tuple[Scores, EvaluationWindows]:
        """The scores and their windows.

        Scores of the sample are cached, since several parts of the results need them. Raises
        ValueError where the text or the model does not allow the length.
        """
        if (protocol, length) in self._sample_scores:
            return self._sample_scores[protocol, length]
        windows = protocol.windows(self.text, length, self.sample, self._bos)
        scores = self._score(windows, str(protocol))
        if protocol.spec.scores_sample:
            self._sample_scores[protocol, length] = scores, windows
        return scores, windows

    def sample_losses(self, context: int) -> Float32[np.ndarray, "M"]:
        """The losses of the sampled targets, each with exactly `context` tokens of context."""
        return self.score(Protocol(FIXED.name), context)[0].nll

    def losses(self, targets: Int64[np.ndarray, "P"], context: int) -> Float32[np.ndarray, "P"]:
        """The losses of the passage `targets`, each with exactly `context` tokens of context."""
        return self._score(fixed_context_windows(targets, context, self._bos), "passage").nll

    @property
    def _bos(self) -> int | None:
        return self.run.tokenizer.separator if self.options.bos else None

    def _score(self, windows: EvaluationWindows, name: str) -> Scores:
        run, options, length = self.run, self.options, windows.length
        if length not in self._scorers:
            self._scorers[length] = Scorer(self.graphdef(length), run.mesh, options.batch_tokens)
        # The identity has everything that determines the losses, except the package's code and
        # JAX's version, which `UnfinishedLosses` adds.
        identity = {
            "workdir": str(run.workdir.resolve()),
            "step": run.metadata.step,
            "trained_by": run.metadata.provenance,
            "saved": run.saved_ns,
            "rescaling": str(self.rescaling),
            "split": options.split,
            "text": self.text.digest,
            "targets": hashlib.sha256(windows.targets.data).hexdigest(),
            "windows": [name, length, options.documents, options.bos],
        }
        scores = self._scorers[length](
            run.params,
            self.text.tokens,
            windows,
            f"{run.workdir.name} {name} at {length}",
            self._unfinished.load(identity, int(windows.num_scored.sum())),
            lambda losses: self._unfinished.save(identity, losses),
            self._should_stop,
        )
        self._unfinished.save(identity, scores.nll)
        return scores
