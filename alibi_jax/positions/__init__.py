"""Position methods: what tells a transformer in which order its tokens stand.

A method is up to four hooks: it adds to the embeddings, rotates queries and keys, biases the
scores by position, or gates them by what the text says. It is a Flax module because some of them
learn; those that do not hold no parameters.
"""

from alibi_jax.positions.base import PositionMethod
from alibi_jax.positions.registry import METHODS, Method, make_position_method

__all__ = ["METHODS", "Method", "PositionMethod", "make_position_method"]
