"""A run's entry of results.json: rows by protocol and length, and what follows from them."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32, Int64

from alibi_jax.data.windows import EvaluationWindows, fixed_context_windows
from alibi_jax.evaluation.attention_diagnostics import attention_report
from alibi_jax.evaluation.bootstrap import clusters
from alibi_jax.evaluation.decomposition import decompose
from alibi_jax.evaluation.eval_text import EvaluationText, Sample
from alibi_jax.evaluation.gains import gain_report, key_targets, largest_gains, long_ppl, passage
from alibi_jax.evaluation.protocols import Protocol
from alibi_jax.evaluation.rescaling import Rescaling
from alibi_jax.evaluation.row_metrics import early_token, numbers, position_curve
from alibi_jax.evaluation.runs import Run
from alibi_jax.evaluation.scoring import Scorer, Scores
from alibi_jax.evaluation.unfinished import Unfinished
from alibi_jax.model import abstract_model

FIXED = Protocol("fixed")
# Windows whose attention is looked at: so many, or as many as have so many tokens.
_WINDOWS, _WINDOW_TOKENS = 16, 32768
# What a length that can't be served raises, in this code or in the compiled program.
_REFUSALS = (ValueError, jax.errors.JaxRuntimeError)


@dataclasses.dataclass(frozen=True)
class EvaluationOptions:
    """What is asked of every run alike."""

    protocols: tuple[Protocol, ...] = (Protocol("nonoverlapping"), FIXED)
    split: str = "validation"
    documents: bool = False
    bos: bool = False
    # How many targets `fixed` samples, and how many in a row are shown as a passage.
    targets: int = 512
    passage: int = 200
    seed: int = 0
    batch_tokens: int = 8192


class RunEvaluation:
    """A run under one rescaling, and the text and the sample of targets that it is scored on."""

    def __init__(
        self,
        run: Run,
        rescaling: Rescaling,
        asked: EvaluationOptions,
        text: EvaluationText,
        sample: Sample,
        unfinished: Unfinished,
        stopping: Callable[[], bool] = lambda: False,
    ):
        self.run, self.rescaling, self.asked = run, rescaling, asked
        self.text, self.sample = text, sample
        self._unfinished, self._stopping = unfinished, stopping
        self._scorers: dict[int, Scorer] = {}
        self._fixed: dict[int, Scores] = {}

    def graphdef(self, length: int) -> Any:
        """The model for inputs of that length: parameters are the run's, whatever the rescaling."""
        config = self.rescaling.at(self.run.config, length)
        return abstract_model(config, self.run.metadata.vocab_size, self.run.mesh)[0]

    def score(self, protocol: Protocol, length: int) -> tuple[Scores, EvaluationWindows]:
        """Raises ValueError where the text or the model cannot serve the length."""
        windows = protocol.windows(self.text, length, self.sample, self._bos)
        if protocol == FIXED:
            return self.fixed(length), windows
        return self._score(windows, str(protocol)), windows

    def fixed(self, length: int) -> Scores:
        """Of the sampled targets with exactly so much context; kept, as several ask for it."""
        if length not in self._fixed:
            windows = FIXED.windows(self.text, length, self.sample, self._bos)
            self._fixed[length] = self._score(windows, "fixed")
        return self._fixed[length]

    def given(self, targets: Int64[np.ndarray, "P"], length: int) -> Float32[np.ndarray, "P"]:
        """Losses of other targets with exactly so much context."""
        return self._score(fixed_context_windows(targets, length, self._bos), "passage").nll

    @property
    def _bos(self) -> int | None:
        return self.run.tokenizer.separator if self.asked.bos else None

    def _score(self, windows: EvaluationWindows, what: str) -> Scores:
        run, length = self.run, windows.length
        if length not in self._scorers:
            self._scorers[length] = Scorer(self.graphdef(length), run.mesh, self.asked.batch_tokens)
        identity = {
            "workdir": str(run.workdir.resolve()),
            "step": run.metadata.step,
            "trained_by": run.metadata.provenance,
            "saved": run.saved,
            "rescaling": str(self.rescaling),
            "split": self.asked.split,
            "text": self.text.digest,
            "targets": hashlib.sha256(windows.targets.data).hexdigest(),
            "windows": [what, length, self.asked.documents, self.asked.bos],
        }
        kept = self._unfinished.load(identity, int(windows.num_scored.sum()))
        scores = self._scorers[length](
            run.params,
            self.text.tokens,
            windows,
            f"{run.workdir.name} {what} at {length}",
            kept,
            lambda losses: self._unfinished.save(identity, losses),
            self._stopping,
        )
        self._unfinished.save(identity, scores.nll)
        return scores


def evaluate_run(
    subject: RunEvaluation,
    lengths: Sequence[int],
    attention_lengths: Sequence[int] = (),
    judge: RunEvaluation | None = None,
) -> dict[str, Any]:
    """A run's entry of results.json.

    A length that the model, the text or the memory cannot serve gives a row that says why, under
    "error", and the others go on.
    """
    run, text, asked = subject.run, subject.text, subject.asked
    rows: list[dict[str, Any]] = []
    curves: dict[str, Any] = {}
    # Losses of the sampled targets, by length.
    sample = subject.sample.targets
    nonoverlapping: dict[int, np.ndarray] = {}
    contexts: dict[int, np.ndarray] = {}
    fixed: dict[int, np.ndarray] = {}
    for protocol in asked.protocols:
        for length in lengths:
            row: dict[str, Any] = {
                "protocol": protocol.name,
                "length": length,
                "stride": protocol.stride_at(length),
                "rescaling_factor": subject.rescaling.factor_at(run.config, length),
            }
            rows.append(row)
            try:
                scores, windows = subject.score(protocol, length)
                row |= numbers(scores, text, asked.seed, sampled=protocol == FIXED)
            except _REFUSALS as error:
                row["error"] = _first_line(error)
                continue
            row["min_context"] = windows.min_context
            if protocol == FIXED:
                fixed[length] = scores.nll
            if protocol.name == "nonoverlapping":
                curves[str(length)] = position_curve(scores)
                among_all = np.searchsorted(scores.targets, sample)
                nonoverlapping[length] = scores.nll[among_all]
                contexts[length] = scores.contexts[among_all]
    base = run.config.train.length
    both = sorted(nonoverlapping.keys() & fixed.keys())
    return {
        "workdir": str(run.workdir),
        "position": run.config.model.position,
        "rescaling": str(subject.rescaling),
        "train_length": base,
        "step": run.metadata.step,
        "split": asked.split,
        "config": run.metadata.config,
        "trained_by": run.metadata.provenance,
        "corpus": {"dataset": run.config.data.dataset, "split": asked.split} | text.summary(),
        "rows": rows,
        "position_nll": curves,
        "early_token": early_token(rows),
        "decomposition": decompose(
            nonoverlapping,
            contexts,
            fixed,
            base if base in both else both[0],
            clusters(sample, text.starts, asked.seed),
        )
        if both
        else None,
        "attention": [_attention(subject, length) for length in attention_lengths],
        "gain": _gain(subject, sorted(fixed), judge or subject),
    }


def _attention(subject: RunEvaluation, length: int) -> dict[str, Any]:
    windows = max(1, min(_WINDOWS, _WINDOW_TOKENS // length))
    run = subject.run
    try:
        return attention_report(
            subject.graphdef(length), run.mesh, run.params, subject.text.tokens, length, windows
        )
    except _REFUSALS as error:
        return {"length": length, "error": _first_line(error)}


def _gain(
    subject: RunEvaluation, lengths: list[int], judge: RunEvaluation
) -> dict[str, Any] | None:
    """From the training length, or the shortest, to the longest with a number."""
    train_length = subject.run.config.train.length
    short = train_length if train_length in lengths else min(lengths, default=0)
    long = max(lengths, default=0)
    if short == long:
        return None
    text, sample = subject.text, subject.sample.targets
    before, after = subject.fixed(short).nll, subject.fixed(long).nll
    report: dict[str, Any] = {"short": short, "long": long}
    report |= gain_report(before, after, clusters(sample, text.starts, subject.asked.seed))
    name = str(judge.run.workdir)
    try:
        key = key_targets(judge.fixed(short).nll, judge.fixed(long).nll)
        report["long_ppl"] = long_ppl(after, key, name)
    except _REFUSALS as error:
        report["long_ppl"] = {"judge": name, "error": _first_line(error)}
    report["largest"] = largest_gains(text, sample, before, after)
    report["passage"] = _passage(subject, short, long)
    return report


def _passage(subject: RunEvaluation, short: int, long: int) -> dict[str, Any] | None:
    """Around the middle of the sample: the same for all runs, chosen for nothing that they say."""
    text, sample = subject.text, subject.sample.targets
    middle = sample[len(sample) // 2]
    after = np.searchsorted(text.bounds, middle, side="right")
    start, stop = text.bounds[after - 1], text.bounds[after]
    first = max(start + long, min(middle, stop - subject.asked.passage))
    targets = np.arange(first, min(first + subject.asked.passage, stop))
    if not len(targets):
        return None
    try:
        losses = [subject.given(targets, length) for length in (short, long)]
    except _REFUSALS as error:
        return {"error": _first_line(error)}
    return passage(text, targets, *losses)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
