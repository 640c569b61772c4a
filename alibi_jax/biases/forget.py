"""The forget gate's bias: the sum of the log gates between a key and its query."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from alibi_jax.biases.distances import same_rank


class Decay(NamedTuple):
    """The sum of the log gates up to each token, as a float32 `high` and its rounding error `low`.

    The bias of two nearby tokens late in a long text is a small difference of two large sums.
    With sums in a single float32, the bias would be off by 3e-4 at 4096 tokens.
    """

    high: Float[Array, "... S N"]
    low: Float[Array, "... S N"]


def forget_decay(
    log_gates: Float[Array, "... S N"], segment_ids: Int[Array, "... S"] | None = None
) -> Decay:
    """The sum of each head's log gates up to each token: how much the head has forgotten by then.

    Two float32 arrays in the shape of `log_gates`. The sum of a token includes its own gate.
    `log_gates` are log f, at most 0, where f is a sigmoid of the inputs. Each run of equal segment
    ids starts a new sum, so that no document, and no padding, affects another document.

    Lin et al. 2025 (Forgetting Transformer), section 3.
    """
    high = jnp.asarray(log_gates, jnp.float32)
    starts = jnp.zeros((*high.shape[:-1], 1), bool)
    if segment_ids is not None:
        changes = segment_ids[..., 1:] != segment_ids[..., :-1]
        starts = starts.at[..., 1:, :].set(changes[..., None])
    high, low, _ = jax.lax.associative_scan(_combine, (high, jnp.zeros_like(high), starts), axis=-2)
    return Decay(high, low)


# The log gates of a run of tokens: the high and low parts of their sum, and whether a segment
# starts in the run.
_RunSum = tuple[Float[Array, "..."], Float[Array, "..."], Bool[Array, "..."]]


def _combine(left: _RunSum, right: _RunSum) -> _RunSum:
    """The sum of two neighbouring runs, or only of the right one if a segment starts in it."""
    left_high, left_low, left_starts = left
    right_high, right_low, right_starts = right
    total = left_high + right_high
    # The rounding error of the total (Knuth 1969, theorem 4.2.2 B).
    rounded_right = total - left_high
    error = (left_high - (total - rounded_right)) + (right_high - rounded_right)
    return (
        jnp.where(right_starts, right_high, total),
        jnp.where(right_starts, right_low, left_low + right_low + error),
        left_starts | right_starts,
    )


def forget_bias_at(query_decay: Decay, key_decay: Decay) -> Float[Array, "... N T S"]:
    """The forget gate's bias, Σ log f over the tokens after key j, up to and including query i.

    Float32 `[..., N, T, S]`; the leading axes of the decays broadcast. Both decays come from one
    `forget_decay` over the whole sequence: `query_decay` has the rows of the query tokens,
    `[..., T, N]`, and `key_decay` has the rows of the key tokens, `[..., S, N]`. The bias is for
    causal attention within a segment only: it would reward a key after its query instead of
    forgetting it. If all gates of a head are equal, it is ALiBi with slope −log f.

    Lin et al. 2025 (Forgetting Transformer), section 3.
    """

    def differences(queries: Array, keys: Array) -> Array:
        queries, keys = (jnp.swapaxes(sums, -1, -2) for sums in (queries, keys))
        queries, keys = same_rank(queries[..., :, None], keys[..., None, :])
        return queries - keys

    return differences(query_decay.high, key_decay.high) + differences(
        query_decay.low, key_decay.low
    )
