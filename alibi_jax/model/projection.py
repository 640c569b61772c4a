"""The matrix product of the layers, its parameters and its gradient.

Equations are those of `einsum`; meshes' axes are automatic, as `sharding.make_mesh` has them.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from alibi_jax import config as configs


class Projection(nnx.Module):
    """A matrix product over named axes: float32 parameters, accumulated in float32.

    Drawn from a normal distribution of standard deviation gain/sqrt(`fan_in`), or evenly from
    within a limit. With `use_bias` a vector is added to what comes out, of those of its axes that
    are the kernel's: zeros, or within a limit of its own.
    """

    def __init__(
        self,
        equation: str,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        *,
        fan_in: int,
        dtype: str,
        rngs: nnx.Rngs,
        gain: float = 1.0,
        use_bias: bool = False,
        limits: tuple[float, float] | None = None,
    ):
        key = rngs.params()
        if limits is None:
            kernel = jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)
            kernel *= gain * fan_in**-0.5
        else:
            kernel = jax.random.uniform(key, shape, jnp.float32, -limits[0], limits[0])
        self.kernel = nnx.Param(kernel, axes=axes)
        operands, out = equation.split("->")
        kept = [number for number, name in enumerate(operands.split(",")[1]) if name in out]
        bias = jnp.zeros([shape[number] for number in kept], jnp.float32)
        if use_bias and limits is not None:
            bias = jax.random.uniform(rngs.params(), bias.shape, jnp.float32, -1, 1) * limits[1]
        self.bias = (
            nnx.Param(bias, axes=tuple(axes[number] for number in kept)) if use_bias else None
        )
        self.equation = equation
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: Array) -> Array:
        """The product, in the compute dtype."""
        bias = None if self.bias is None else self.bias[...]
        out = product(self.equation, x.astype(self.dtype), self.kernel[...], bias)
        return checkpoint_name(out, configs.PROJECTION)


def xavier_limit(fan_in: int, fan_out: int) -> float:
    """The limit of Glorot & Bengio 2010, equation 16."""
    return math.sqrt(6 / (fan_in + fan_out))


def fairseq_limits(config: configs.Model, kernel: float, bias: float) -> tuple[float, float] | None:
    """Of a projection's kernel and bias, which fairseq draws evenly from within them."""
    return (kernel, bias) if config.initialization == "fairseq" else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(
    equation: str,
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    bias: Float[Array, "..."] | None = None,
) -> Array:
    """`einsum`, the kernel and the result in the dtype of `x`, accumulated in float32.

    `bias` is added before that is rounded; its axes are the last of the result.

    Asking for float32 and casting after is as fast on a TPU, and several times faster on a CPU.
    The gradient is written down because JAX's own would multiply what was cast back to float32
    with numbers of 16 bits, in float32; and round the kernel's, and the bias's, to 16 bits.
    """
    out = jnp.einsum(equation, x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
    return (out if bias is None else out + bias).astype(x.dtype)


_Inputs = tuple[Array, Array, Array | None]


def _product_forward(
    equation: str, x: Array, kernel: Array, bias: Array | None = None
) -> tuple[Array, _Inputs]:
    return product(equation, x, kernel, bias), (x, kernel, bias)


def _product_backward(equation: str, inputs: _Inputs, bar: Array) -> _Inputs:
    x, kernel, bias = inputs
    operands, out = equation.split("->")
    left, right = operands.split(",")
    x_bar = product(f"{out},{right}->{left}", bar, kernel)
    # The first operand is the one that is transposed on a CPU: the smaller.
    narrow, wide = sorted([(x, left), (bar, out)], key=lambda each: each[0].size)
    axes = [name for _, names in (narrow, wide) for name in names if name in right]
    turned = "".join(axes)
    kernel_bar = jnp.einsum(
        f"{narrow[1]},{wide[1]}->{turned}", narrow[0], wide[0], preferred_element_type=jnp.float32
    )
    if turned != right:
        # XLA would otherwise turn the product around, and not its result.
        kernel_bar = jnp.einsum(f"{turned}->{right}", jax.lax.optimization_barrier(kernel_bar))
    bias_bar = None
    if bias is not None:
        rows = tuple(range(bar.ndim - bias.ndim))
        bias_bar = bar.sum(rows, dtype=jnp.float32).astype(bias.dtype)
    return x_bar, kernel_bar.astype(kernel.dtype), bias_bar


product.defvjp(_product_forward, _product_backward)
