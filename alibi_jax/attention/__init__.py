"""Softmax attention with a bias that is a function of positions; four engines compute it."""

from alibi_jax.attention.api import alibi_attention, attention
from alibi_jax.biases import Bias

__all__ = ["Bias", "alibi_attention", "attention"]
