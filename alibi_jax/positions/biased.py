"""Methods that add a bias to the scores."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from alibi_jax.biases import (
    Bias,
    FireWeights,
    LinearBias,
    alibi_slopes,
    fire_bias_at,
    kerple_log_bias_at,
    kerple_power_bias_at,
    sandwich_bias_at,
    sandwich_ratios,
    t5_bias_at,
)
from alibi_jax.biases.alibi import Slopes
from alibi_jax.positions.base import PositionMethod


class Alibi(PositionMethod):
    """Attention with linear biases (Press et al. 2021, section 3): -m·|i-j|, m fixed per head.

    `slope_divisor` divides the slopes, for inputs longer than the training length (Al-Khateeb et
    al. 2023, arXiv 2310.13017).
    """

    def __init__(self, num_heads: int, slope_divisor: float = 1.0):
        self.num_heads = num_heads
        self.slope_divisor = slope_divisor

    def slopes(self) -> Slopes:
        """The slopes of all heads, whatever the sharding."""
        # The slopes are concrete even under a trace: attention needs them to decide what to skip.
        return np.asarray(alibi_slopes(self.num_heads)) / np.float32(self.slope_divisor)

    def bias(self) -> Bias:
        """The linear bias."""
        return LinearBias(self.slopes())


class AlibiLearned(Alibi):
    """ALiBi with trained slopes that start at the fixed ones (Press et al. 2021, section 3).

    The parameters are the logarithms of the slopes, which keeps the slopes positive. All layers
    share them.
    """

    def __init__(self, num_heads: int, slope_divisor: float = 1.0):
        super().__init__(num_heads, slope_divisor)
        self.log_slopes = nnx.Param(jnp.log(alibi_slopes(num_heads)), axes=("heads",))

    def slopes(self) -> Float[Array, "N"]:
        """The current slopes of all heads."""
        return jnp.exp(self.log_slopes[...]) / self.slope_divisor


class T5(PositionMethod):
    """T5's relative bias (Raffel et al. 2020, section 2.1), learned per head and distance bucket.

    All layers share one table, as in T5. It has 32 buckets, logarithmic from distance 16 to 128.
    """

    def __init__(self, num_heads: int, rngs: nnx.Rngs):
        table = 0.02 * jax.random.normal(rngs.params(), (32, num_heads), jnp.float32)
        self.table = nnx.Param(table, axes=(None, "heads"))

    def bias(self) -> Bias:
        """The learned bias of the bucket of each query and key."""
        return functools.partial(t5_bias_at, self.table[...])


# The lower limit to which the authors' code clamps KERPLE's parameters.
_KERPLE_MINIMUM = 1e-2


class KerpleLog(PositionMethod):
    """KERPLE's logarithmic kernel (Chi et al. 2022, arXiv 2205.09921), with parameters per layer.

    The bias is -r1·log(1 + r2·|i-j|). The initial r1 is drawn from U(0.01, 2) and r2 from
    U(0.01, 1). The authors' code draws from U(0, 2) and U(0, 1) and clamps to at least 0.01. The
    parameters are the logarithms of r1 and r2, which keeps both positive.
    """

    def __init__(self, num_heads: int, rngs: nnx.Rngs):
        self.log_scale = _log_of_uniform(num_heads, 2.0, rngs)
        self.log_rate = _log_of_uniform(num_heads, 1.0, rngs)

    def bias(self) -> Bias:
        """The logarithmic bias."""
        scale, rate = jnp.exp(self.log_scale[...]), jnp.exp(self.log_rate[...])
        return functools.partial(kerple_log_bias_at, scale, rate)


class KerplePower(PositionMethod):
    """KERPLE's power kernel (Chi et al. 2022, arXiv 2205.09921), with parameters per layer.

    The bias is -r1·|i-j|^r2. The initial r1 is drawn from U(0.01, 1) and r2 from U(0.01, 1.99). The
    authors' code draws from U(0, 1) and U(0, 2) and clamps to at least 0.01. The parameters are the
    logarithm of r1 and the log-odds of r2/2, which keeps r1 positive and r2 between 0 and 2.
    """

    def __init__(self, num_heads: int, rngs: nnx.Rngs):
        self.log_scale = _log_of_uniform(num_heads, 1.0, rngs)
        half_exponents = jax.random.uniform(
            rngs.params(),
            (num_heads,),
            minval=_KERPLE_MINIMUM / 2,
            maxval=1.0 - _KERPLE_MINIMUM / 2,
        )
        self.exponent_logits = nnx.Param(jax.scipy.special.logit(half_exponents), axes=("heads",))

    def bias(self) -> Bias:
        """The power bias."""
        scale = jnp.exp(self.log_scale[...])
        exponent = 2.0 * jax.nn.sigmoid(self.exponent_logits[...])
        return functools.partial(kerple_power_bias_at, scale, exponent)


def _log_of_uniform(num_heads: int, maximum: float, rngs: nnx.Rngs) -> nnx.Param:
    """The logarithms of values drawn uniformly for each head, up to `maximum`."""
    drawn = jax.random.uniform(rngs.params(), (num_heads,), minval=_KERPLE_MINIMUM, maxval=maximum)
    return nnx.Param(jnp.log(drawn), axes=("heads",))


class Sandwich(PositionMethod):
    """Sandwich (Chi et al. 2023, arXiv 2212.10356): the inner product of sinusoidal embeddings."""

    def __init__(self, num_heads: int):
        self.num_heads = num_heads

    def bias(self) -> Bias:
        """Sandwich's bias, which has no parameters."""
        return functools.partial(sandwich_bias_at, sandwich_ratios(self.num_heads))


class Fire(PositionMethod):
    """FIRE (Li et al. 2023, arXiv 2310.04418), with parameters per layer.

    A network with 32 hidden units maps the distance, relative to the query's position, to the bias
    of each head. The threshold starts at a quarter of the training length, like the paper's 512 for
    2048, and the rate starts at 0.1. The parameter is the threshold's logarithm, so that steps of
    about the learning rate can change the threshold by a large amount.
    """

    def __init__(self, num_heads: int, train_length: int, rngs: nnx.Rngs):
        hidden = 32

        def uniform(shape: tuple[int, ...], fan_in: int) -> Float[Array, "..."]:
            bound = fan_in**-0.5
            return jax.random.uniform(rngs.params(), shape, minval=-bound, maxval=bound)

        self.rate = nnx.Param(jnp.float32(0.1), axes=())
        self.log_threshold = nnx.Param(jnp.log(jnp.float32(train_length / 4)), axes=())
        self.hidden_kernel = nnx.Param(uniform((hidden,), 1), axes=(None,))
        self.hidden_bias = nnx.Param(uniform((hidden,), 1), axes=(None,))
        self.out_kernel = nnx.Param(uniform((hidden, num_heads), hidden), axes=(None, "heads"))
        self.out_bias = nnx.Param(uniform((num_heads,), hidden), axes=("heads",))

    def bias(self) -> Bias:
        """The network's bias of each query and key."""
        weights = FireWeights(
            rate=self.rate[...],
            threshold=jnp.exp(self.log_threshold[...]),
            hidden_kernel=self.hidden_kernel[...],
            hidden_bias=self.hidden_bias[...],
            out_kernel=self.out_kernel[...],
            out_bias=self.out_bias[...],
        )
        return functools.partial(fire_bias_at, weights)


class Fox(PositionMethod):
    """Forgetting Transformer's gates (Lin et al. 2025, arXiv 2503.02130), parameters per layer.

    The gates are sigmoids of a projection of the layer's inputs. The score of a key gets the sum of
    the log gates of all tokens after it, up to and including the query. Log gates are at most 0, so
    the method is like ALiBi with slopes that depend on the text.
    """

    def __init__(self, width: int, num_heads: int, rngs: nnx.Rngs):
        kernel = 0.02 * jax.random.normal(rngs.params(), (width, num_heads), jnp.float32)
        self.kernel = nnx.Param(kernel, axes=("embed", "heads"))
        self.gate_bias = nnx.Param(jnp.zeros((num_heads,), jnp.float32), axes=("heads",))
        self.num_gates = num_heads

    def gates(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N"]:
        """The log gates, log sigmoid(x·W + b), which are at most 0."""
        logits = jnp.einsum(
            "btd,dn->btn",
            x,
            self.kernel[...].astype(x.dtype),
            preferred_element_type=jnp.float32,
        )
        return jax.nn.log_sigmoid(logits + self.gate_bias[...][None, None])
