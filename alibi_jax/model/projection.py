"""The matrix product of the layers: its parameters and its gradient.

Equations are in the notation of `einsum`. The axes of the mesh must be of type Auto, as
`sharding.make_mesh` makes them.
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
    """A matrix product given by an equation, with float32 parameters and float32 accumulation.

    `axes` are the logical axes of the kernel. Its initial values come from a normal distribution
    of standard deviation gain/sqrt(`fan_in`), cut off at two standard deviations. With `limits`
    they are uniform between plus and minus `limits[0]`.

    With `use_bias` a bias is added, whose axes are those that the kernel and the result share. Its
    initial values are zeros, or with `limits` uniform between plus and minus `limits[1]`.
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
        kernel_names = operands.split(",")[1]
        bias_dims = [dim for dim, name in enumerate(kernel_names) if name in out]
        bias = jnp.zeros([shape[dim] for dim in bias_dims], jnp.float32)
        if use_bias and limits is not None:
            bias = jax.random.uniform(rngs.params(), bias.shape, jnp.float32, -1, 1) * limits[1]
        bias_axes = tuple(axes[dim] for dim in bias_dims)
        self.bias = nnx.Param(bias, axes=bias_axes) if use_bias else None
        self.equation = equation
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: Array) -> Array:
        """The product, in the compute dtype."""
        bias = None if self.bias is None else self.bias[...]
        out = product(self.equation, x.astype(self.dtype), self.kernel[...], bias)
        return checkpoint_name(out, configs.PROJECTION)


def xavier_limit(fan_in: int, fan_out: int) -> float:
    """The limit of Xavier's uniform initialization (Glorot & Bengio 2010, equation 16)."""
    return math.sqrt(6 / (fan_in + fan_out))


def fairseq_limits(config: configs.Model, kernel: float, bias: float) -> tuple[float, float] | None:
    """The `limits` of a projection with fairseq's uniform initialization; None for "scaled"."""
    match config.initialization:
        case "fairseq":
            return kernel, bias
        case "scaled":
            return None
    raise ValueError(f"model.initialization={config.initialization!r} has no code here: add a case")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(
    equation: str,
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    bias: Float[Array, "..."] | None = None,
) -> Array:
    """Computes `einsum` in the dtype of `x`, accumulates in float32 and rounds the sum at the end.

    `bias` is added before the rounding; its axes are the last axes of the result.

    A float32 result that is cast afterwards is as fast on a TPU as a 16-bit result, and several
    times faster on a CPU. The gradient is explicit because JAX's own would cast the gradient of the
    result to float32 and multiply it with 16-bit numbers in float32. It would also round the
    gradients of the kernel and the bias to 16 bits.
    """
    out = jnp.einsum(equation, x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
    return (out if bias is None else out + bias).astype(x.dtype)


_Inputs = tuple[Array, Array, Array | None]


def _product_forward(
    equation: str, x: Array, kernel: Array, bias: Array | None = None
) -> tuple[Array, _Inputs]:
    return product(equation, x, kernel, bias), (x, kernel, bias)


def _product_backward(equation: str, inputs: _Inputs, out_grad: Array) -> _Inputs:
    x, kernel, bias = inputs
    operands, out_axes = equation.split("->")
    x_axes, kernel_axes = operands.split(",")
    x_grad = product(f"{out_axes},{kernel_axes}->{x_axes}", out_grad, kernel)
    # On a CPU, XLA transposes the first operand, so the smaller one comes first.
    (first, first_axes), (second, second_axes) = sorted(
        [(x, x_axes), (out_grad, out_axes)], key=lambda operand: operand[0].size
    )
    product_axes = "".join(name for name in first_axes + second_axes if name in kernel_axes)
    kernel_grad = jnp.einsum(
        f"{first_axes},{second_axes}->{product_axes}",
        first,
        second,
        preferred_element_type=jnp.float32,
    )
    if product_axes != kernel_axes:
        # Without the barrier, XLA would swap the operands instead of transposing the result.
        kernel_grad = jnp.einsum(
            f"{product_axes}->{kernel_axes}", jax.lax.optimization_barrier(kernel_grad)
        )
    bias_grad = None
    if bias is not None:
        token_dims = tuple(range(out_grad.ndim - bias.ndim))
        bias_grad = out_grad.sum(token_dims, dtype=jnp.float32).astype(bias.dtype)
    return x_grad, kernel_grad.astype(kernel.dtype), bias_grad


product.defvjp(_product_forward, _product_backward)
