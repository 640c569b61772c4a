"""Methods that bias the scores."""

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
    """Attention with linear biases (Press et al. 2021, section 3): -m·|i-j|, m fixed by head.

    `factor` divides the slopes, for lengths past the training length (Al-Khateeb et al. 2023,
    arXiv 2310.13017).
    """

    def __init__(self, num_heads: int, factor: float = 1.0):
        self.num_heads = num_heads
        self.factor = factor

    def slopes(self) -> Slopes:
        """Of all heads, whatever the sharding."""
        # Numbers also where this is traced, from which it is decided what to compute.
        return np.asarray(alibi_slopes(self.num_heads)) / np.float32(self.factor)

    def bias(self) -> Bias:
        """The linear bias."""
        return LinearBias(self.slopes())


class AlibiLearned(Alibi):
    """ALiBi with slopes that are trained, from the fixed ones on (Press et al. 2021, section 3).

    Their logarithms are the parameters, so that they stay positive; all layers share them.
    """

    def __init__(self, num_heads: int, factor: float = 1.0):
        super().__init__(num_heads, factor)
        self.log_slopes = nnx.Param(jnp.log(alibi_slopes(num_heads)), axes=("heads",))

    def slopes(self) -> Float[Array, "N"]:
        """As they are by now."""
        return jnp.exp(self.log_slopes[...]) / self.factor


class T5(PositionMethod):
    """T5's relative bias (Raffel et al. 2020, section 2.1): learned by head and distance bucket.

    One table serves all layers, as in T5: 32 buckets, logarithmic from distance 16 to 128.
    """

    def __init__(self, num_heads: int, rngs: nnx.Rngs):
        table = 0.02 * jax.random.normal(rngs.params(), (32, num_heads), jnp.float32)
        self.table = nnx.Param(table, axes=(None, "heads"))

    def bias(self) -> Bias:
        """The learned bias of each pair's bucket."""
        return functools.partial(t5_bias_at, self.table[...])


# The authors' code clamps KERPLE's parameters from below at this.
_LEAST = 1e-2


class KerpleLog(PositionMethod):
    """KERPLE's logarithmic kernel (Chi et al. 2022, arXiv 2205.09921), each layer its own.

    -r1·log(1 + r2·|i-j|), drawn as in the authors' code, r1 from U(0, 2) and r2 from U(0, 1).
    Logarithms are the parameters, so that both stay positive.
    """

    def __init__(self, num_heads: int, rngs: nnx.Rngs):
        self.log_scale = _logarithms(num_heads, 2.0, rngs)
        self.log_rate = _logarithms(num_heads, 1.0, rngs)

    def bias(self) -> Bias:
        """The logarithmic bias."""
        scale, rate = jnp.exp(self.log_scale[...]), jnp.exp(self.log_rate[...])
        return functools.partial(kerple_log_bias_at, scale, rate)


class KerplePower(PositionMethod):
    """KERPLE's power kernel (Chi et al. 2022, arXiv 2205.09921), each layer its own.

    -r1·|i-j|^r2, drawn as in the authors' code, r1 from U(0, 1) and r2 from U(0, 2). The
    parameters are the logarithm of r1 and the log-odds of r2/2, so that r1 stays positive and r2
    between 0 and 2.
    """

    def __init__(self, num_heads: int, rngs: nnx.Rngs):
        self.log_scale = _logarithms(num_heads, 1.0, rngs)
        halves = jax.random.uniform(
            rngs.params(), (num_heads,), minval=_LEAST / 2, maxval=1.0 - _LEAST / 2
        )
        self.exponent_logits = nnx.Param(jax.scipy.special.logit(halves), axes=("heads",))

    def bias(self) -> Bias:
        """The power bias."""
        scale = jnp.exp(self.log_scale[...])
        exponent = 2.0 * jax.nn.sigmoid(self.exponent_logits[...])
        return functools.partial(kerple_power_bias_at, scale, exponent)


def _logarithms(num_heads: int, largest: float, rngs: nnx.Rngs) -> nnx.Param:
    drawn = jax.random.uniform(rngs.params(), (num_heads,), minval=_LEAST, maxval=largest)
    return nnx.Param(jnp.log(drawn), axes=("heads",))


class Sandwich(PositionMethod):
    """Sandwich (Chi et al. 2023, arXiv 2212.10356): the inner product of two sinusoids."""

    def __init__(self, num_heads: int):
        self.num_heads = num_heads

    def bias(self) -> Bias:
        """The bias, without parameters."""
        return functools.partial(sandwich_bias_at, sandwich_ratios(self.num_heads))


class Fire(PositionMethod):
    """FIRE (Li et al. 2023, arXiv 2310.04418), each layer its own.

    A network of 32 hidden units maps the distance, relative to the query's position, to a bias
    by head. The threshold starts at a quarter of the training length, as the paper's 512 of
    2048, and the rate at 0.1. The threshold's logarithm is the parameter, so that steps of the
    learning rate's size can move it far.
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
        """The network's bias of each pair."""
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
    """The Forgetting Transformer's gates (Lin et al. 2025, arXiv 2503.02130), each layer its own.

    A key fades by the gates of all tokens after it, up to the query: ALiBi whose slope depends
    on the text. Gates are sigmoids of a projection of the layer's inputs.
    """

    def __init__(self, width: int, num_heads: int, rngs: nnx.Rngs):
        kernel = 0.02 * jax.random.normal(rngs.params(), (width, num_heads), jnp.float32)
        self.kernel = nnx.Param(kernel, axes=("embed", "heads"))
        self.gate_bias = nnx.Param(jnp.zeros((num_heads,), jnp.float32), axes=("heads",))
        self.num_gates = num_heads

    def gates(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N"]:
        """log sigmoid(x·W + b): at most 0."""
        logits = jnp.einsum(
            "btd,dn->btn",
            x,
            self.kernel[...].astype(x.dtype),
            preferred_element_type=jnp.float32,
        )
        return jax.nn.log_sigmoid(logits + self.gate_bias[...])
