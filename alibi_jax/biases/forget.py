"""The forget gate's bias: what the gates between a key and its query let through."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int


class Decay(NamedTuple):
    """The logarithms of the gates so far, summed, as a float32 and what it is short of.

    Near tokens late in a long text differ by little between two large sums, of which a single
    float32 would keep nothing: at 4096 tokens it is off by 3e-4.
    """

    high: Float[Array, "... S N"]
    low: Float[Array, "... S N"]


def forget_decay(
    log_gates: Float[Array, "... S N"], segment_ids: Int[Array, "... S"] | None = None
) -> Decay:
    """How much each head has forgotten up to each token: the sum of its log gates so far.

    Two float32 of the shape given; a token's own gate is in its sum. `log_gates` are log f, at
    most 0, with f a sigmoid of the inputs. Sums start anew with each run of equal segment ids, so
    that nothing of one document, or of padding, reaches another's.

    Lin et al. 2025 (Forgetting Transformer), section 3.
    """
    high = jnp.asarray(log_gates, jnp.float32)
    starts = jnp.zeros((*high.shape[:-1], 1), bool)
    if segment_ids is not None:
        changes = segment_ids[..., 1:] != segment_ids[..., :-1]
        starts = starts.at[..., 1:, :].set(changes[..., None])
    high, low, _ = jax.lax.associative_scan(_add, (high, jnp.zeros_like(high), starts), axis=-2)
    return Decay(high, low)


_Part = tuple[Float[Array, "..."], Float[Array, "..."], Bool[Array, "..."]]


def _add(before: _Part, after: _Part) -> _Part:
    """The sum of two runs of tokens; of the later one alone, if a segment starts in it."""
    high, low, start = before
    more, more_low, more_start = after
    total = high + more
    # What the rounding of the total left out (Knuth 1969, theorem 4.2.2 B).
    taken = total - high
    missed = (high - (total - taken)) + (more - taken)
    return (
        jnp.where(more_start, more, total),
        jnp.where(more_start, more_low, low + more_low + missed),
        start | more_start,
    )


def forget_bias_at(query_decay: Decay, key_decay: Decay) -> Float[Array, "... N T S"]:
    """The forget gate's bias, Σ log f over the tokens after key j up to query i.

    Float32 `[..., N, T, S]`; the leading axes of the decays broadcast. Decays are of
    `forget_decay`, over one sequence: `[..., T, N]` of the queries' own tokens and `[..., S, N]`.
    For causal attention alone, within a segment: a key after its query would be rewarded, not
    forgotten. With every gate of a head alike it is ALiBi of slope −log f.

    Lin et al. 2025 (Forgetting Transformer), section 3.
    """

    def differences(queries: Array, keys: Array) -> Array:
        queries, keys = (jnp.swapaxes(x, -1, -2) for x in (queries, keys))
        return queries[..., :, None] - keys[..., None, :]

    return differences(query_decay.high, key_decay.high) + differences(
        query_decay.low, key_decay.low
    )
