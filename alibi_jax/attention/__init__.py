"""Softmax attention with a bias given by positions: one entry, four engines behind it."""

from alibi_jax.attention.api import alibi_attention, attention
from alibi_jax.biases import Bias

__all__ = ["Bias", "alibi_attention", "attention"]
