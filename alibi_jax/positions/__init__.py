"""Position methods: how a transformer learns the order of its tokens.

A method acts through one of four hooks: it adds to the token embeddings, rotates queries and keys,
adds a bias to the scores by position, or gates the scores by the content of the text. A fifth hook,
`training_positions`, is for methods that draw random positions in training. Every method is a Flax
module, because some methods have parameters.

To add a method, write its class in embedded.py, rotated.py or biased.py. Then name it in `METHODS`
(registry.py), which constructs it, and in `POSITIONS` (config/choices.py), which describes it to
the checks of the configuration.
"""

from alibi_jax.positions.base import PositionMethod
from alibi_jax.positions.registry import METHODS, MethodSpec, make_position_method

__all__ = ["METHODS", "MethodSpec", "PositionMethod", "make_position_method"]
