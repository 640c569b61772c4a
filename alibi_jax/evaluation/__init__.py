"""Evaluates trained runs by protocol and length, and decomposes the gain of longer inputs."""

from alibi_jax.evaluation.command import evaluate
from alibi_jax.evaluation.eval_text import EvaluationText, Sample, read_text
from alibi_jax.evaluation.lengths import parse_lengths
from alibi_jax.evaluation.options import EvaluationOptions
from alibi_jax.evaluation.protocols import Protocol, parse_protocols
from alibi_jax.evaluation.run_evaluation import RunEvaluation
from alibi_jax.evaluation.run_results import evaluate_run
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
