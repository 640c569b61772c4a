"""Trained runs scored by protocol and length, and what the extra length bought."""

from alibi_jax.evaluation.command import evaluate
from alibi_jax.evaluation.entries import Asked, Subject, evaluate_run
from alibi_jax.evaluation.protocols import Protocol, parse_lengths, parse_protocols
from alibi_jax.evaluation.runs import Run, load_run
from alibi_jax.evaluation.texts import Sample, Text, read_text

__all__ = [
    "Asked",
    "Protocol",
    "Run",
    "Sample",
    "Subject",
    "Text",
    "evaluate",
    "evaluate_run",
    "load_run",
    "parse_lengths",
    "parse_protocols",
    "read_text",
]
