"""Trained runs scored by protocol and length, and what the extra length bought."""

from alibi_jax.evaluation.command import evaluate
from alibi_jax.evaluation.eval_text import EvaluationText, Sample, read_text
from alibi_jax.evaluation.protocols import Protocol, parse_lengths, parse_protocols
from alibi_jax.evaluation.run_results import EvaluationOptions, RunEvaluation, evaluate_run
from alibi_jax.evaluation.runs import Run, load_run

__all__ = [
    "EvaluationOptions",
    "EvaluationText",
    "Protocol",
    "Run",
    "RunEvaluation",
    "Sample",
    "evaluate",
    "evaluate_run",
    "load_run",
    "parse_lengths",
    "parse_protocols",
    "read_text",
]
