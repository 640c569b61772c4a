"""The forget gate's bias: what the gates between a key and its query let through."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


def forget_decay(log_gates: Float[Array, "... S N"]) -> Float[Array, "... S N"]:
    """How much each head has forgotten up to each token: the sum of its log gates so far.

    Float32, in the shape given; a token's own gate is in its sum. `log_gates` are log f, at most
    0, with f a sigmoid of the inputs. To continue a cache, add the decay of its last token.

    Lin et al. 2025 (Forgetting Transformer), section 3.
    """
    return jnp.cumsum(jnp.asarray(log_gates, jnp.float32), axis=-2)


def forget_bias_at(
    query_decay: Float[Array, "... T N"], key_decay: Float[Array, "... S N"]
) -> Float[Array, "... N T S"]:
    """The forget gate's bias, Σ log f over the tokens after key j up to query i.

    Float32 `[..., N, T, S]`; the leading axes of the decays broadcast. Decays are of
    `forget_decay`, over one sequence. For causal attention alone: a key after its query would be
    rewarded, not forgotten. With every gate of a head alike it is ALiBi of slope −log f.

    Lin et al. 2025 (Forgetting Transformer), section 3.
    """
    queries = jnp.swapaxes(jnp.asarray(query_decay, jnp.float32), -1, -2)
    keys = jnp.swapaxes(jnp.asarray(key_decay, jnp.float32), -1, -2)
    return queries[..., :, None] - keys[..., None, :]
