"""What a model keeps of the tokens so far: all of their keys, or of each head the last ones."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from alibi_jax.attention.rolling_cache import RollingCache
from alibi_jax.biases import LinearBias
from alibi_jax.positions import PositionMethod


class KeyValues(NamedTuple):
    """What a layer keeps of its tokens for later queries: keys as projected, not yet rotated."""

    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K H"]
    gates: Float[Array, "B S N"] | None

    def write(self, new: "KeyValues", offset: int | Int[Array, ""]) -> "KeyValues":
        """With the entries of the next tokens from `offset` on."""
        return jax.tree.map(
            lambda old, x: jax.lax.dynamic_update_slice_in_dim(
                old, x.astype(old.dtype), offset, axis=1
            ),
            self,
            new,
        )


class KVCache(NamedTuple):
    """Keys and values of the tokens so far, in S slots of which the first `used` are taken.

    Rows share their slots and differ in their positions: a shorter row starts with padding, whose
    segment id is 0.
    """

    layers: tuple[KeyValues, ...]
    positions: Int[Array, "B S"]
    segment_ids: Int[Array, "B S"]
    used: Int[Array, ""]


class BoundedKVCache(NamedTuple):
    """Of each head the last keys and values alone, as many as its slope lets matter.

    It takes any number of tokens: `used` so far, of which `real` of a row are no padding.
    """

    layers: tuple[RollingCache, ...]
    real: Int[Array, "B"]
    used: Int[Array, ""]

    @property
    def omitted_share(self) -> Float[Array, "B"]:
        """No less than the share of its attention that a token of the row has gone without.

        The greatest of all tokens so far, layers and heads.
        """
        rings = [ring.omitted_share for layer in self.layers for ring in layer.groups]
        return jnp.stack(rings).max(axis=0)


def bounding_slopes(name: str, position: PositionMethod) -> Float[Array, "N"]:
    """The slopes of a method, of that name, that is a linear bias and nothing else.

    Numbers, also where this is traced, unless they are learned. Raises ValueError for any other
    method, with which keys may matter however far back they stand.
    """
    with jax.ensure_compile_time_eval():
        bias = position.bias()
        moved = type(position).rotate is not PositionMethod.rotate
        if not isinstance(bias, LinearBias) or moved or position.num_gates:
            raise ValueError(
                f"position={name!r} is not a linear bias alone, and keys may matter however far "
                "back: give no tolerance, for a cache of all keys"
            )
        return jnp.asarray(bias.slopes, jnp.float32)
