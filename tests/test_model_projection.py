"""The matrix product of the layers and its gradient, compared with NumPy's in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import every_jaxpr

from alibi_jax.config import Model
from alibi_jax.config.choices import INITIALIZATIONS
from alibi_jax.model.projection import Projection, fairseq_limits

# Inputs that are narrower than outputs, wider, and equally wide.
CASES = [
    ("btd,df->btf", (2, 5, 8), (8, 20)),
    ("btf,fd->btd", (2, 5, 20), (20, 8)),
    ("btd,dnh->btnh", (2, 5, 8), (8, 2, 3)),
    ("btd,dnh->btnh", (2, 5, 8), (8, 2, 4)),
    ("btnh,nhd->btd", (2, 5, 4, 6), (4, 6, 8)),
    ("btnh,nhd->btd", (2, 5, 2, 3), (2, 3, 8)),
]


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("equation", "shape", "kernel_shape"), CASES)
@pytest.mark.sample(9)
def test_the_gradients_are_those_of_float64(equation, shape, kernel_shape, dtype, use_bias):
    axes = (None,) * len(kernel_shape)
    layer = Projection(
        equation,
        kernel_shape,
        axes,
        fan_in=kernel_shape[0],
        dtype=dtype,
        rngs=nnx.Rngs(0),
        use_bias=use_bias,
    )
    # The kernel is exact in 16 bits, so that only the product itself rounds.
    layer.kernel.set_value(layer.kernel[...].astype(dtype).astype(jnp.float32))
    if use_bias:
        assert not layer.bias[...].any()
        layer.bias.set_value(jax.random.normal(jax.random.key(3), layer.bias.shape))
    x = jax.random.normal(jax.random.key(1), shape).astype(dtype)
    out = layer(x)
    out_grad = jax.random.normal(jax.random.key(2), out.shape).astype(dtype)

    @nnx.jit
    def total(layer, x):
        return (layer(x).astype(jnp.float32) * out_grad.astype(jnp.float32)).sum()

    layer_grad, x_grad = nnx.grad(total, argnums=(0, 1))(layer, x)
    assert out.dtype == x_grad.dtype == dtype
    assert layer_grad.kernel[...].dtype == jnp.float32

    operands, result = equation.split("->")
    left, right = operands.split(",")
    x, kernel, out_grad = (np.asarray(y, np.float64) for y in (x, layer.kernel[...], out_grad))
    rounding = 1e-6 if dtype == "float32" else 2**-8
    bias, cases = 0.0, []
    if use_bias:
        bias = np.asarray(layer.bias[...], np.float64)
        rows = tuple(range(out_grad.ndim - bias.ndim))
        cases.append((layer_grad.bias[...], out_grad.sum(rows), 1e-6))
    for got, expected, share in [
        *cases,
        (out, np.einsum(equation, x, kernel) + bias, rounding),
        (x_grad, np.einsum(f"{result},{right}->{left}", out_grad, kernel), rounding),
        # The kernel's gradient is never rounded to 16 bits.
        (layer_grad.kernel[...], np.einsum(f"{left},{result}->{right}", x, out_grad), 1e-6),
    ]:
        np.testing.assert_allclose(
            np.asarray(got, np.float64), expected, atol=share * np.abs(expected).max()
        )


def test_kernels_and_biases_within_limits():
    def drawn(**values):
        axes = (None,) * 3
        make = functools.partial(Projection, "btd,dnh->btnh", (64, 8, 64), axes, fan_in=64)
        return make(dtype="float32", rngs=nnx.Rngs(0), use_bias=True, **values)

    layer = drawn(limits=(0.5, 0.25))
    for param, limit in ((layer.kernel, 0.5), (layer.bias, 0.25)):
        assert 0.98 * limit < np.abs(param[...]).max() <= limit
        assert np.std(param[...]) == pytest.approx(limit / 3**0.5, rel=0.05)
    assert not drawn(limits=(0.5, 0.0)).bias[...].any()
    # From a normal distribution that is cut off at two standard deviations.
    assert np.std(drawn().kernel[...]) == pytest.approx(0.88 / 8, rel=0.01)
    assert not drawn().bias[...].any()


def test_projections_of_16_bits_multiply_16_bits_and_add_up_in_float32():
    """In both directions; the kernel's gradient is not rounded to 16 bits."""
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(2, 5, 8)), jnp.bfloat16)
    out_grad = jnp.asarray(random.normal(size=(2, 5, 4, 3)), jnp.bfloat16)
    project = Projection(
        "btd,dnh->btnh", (8, 4, 3), (None,) * 3, fan_in=8, dtype="bfloat16", rngs=nnx.Rngs(0)
    )
    graphdef, params = nnx.split(project)

    def pull(params, x, out_grad):
        return jax.vjp(lambda params, x: nnx.merge(graphdef, params)(x), params, x)[1](out_grad)

    products = [
        equation
        for jaxpr in every_jaxpr(jax.make_jaxpr(pull)(params, x, out_grad).jaxpr)
        for equation in jaxpr.eqns
        if equation.primitive.name == "dot_general"
    ]
    assert len(products) == 3
    for product in products:
        assert [operand.aval.dtype for operand in product.invars] == [jnp.bfloat16] * 2
        assert product.outvars[0].aval.dtype == jnp.float32
    d_params, d_x = jax.jit(pull)(params, x, out_grad)
    kernel = np.asarray(project.kernel[...].astype(jnp.bfloat16), float)
    expected = np.einsum("btd,btnh->dnh", np.asarray(x, float), np.asarray(out_grad, float))
    np.testing.assert_allclose(d_params.kernel[...], expected, rtol=1e-5, atol=1e-5)
    expected = np.einsum("btnh,dnh->btd", np.asarray(out_grad, float), kernel)
    np.testing.assert_allclose(np.asarray(d_x, float), expected, rtol=2**-8, atol=1e-5)


def test_every_initialization_has_code():
    limits = {
        name: fairseq_limits(Model(initialization=name), 0.5, 0.25) for name in INITIALIZATIONS
    }
    assert limits == {"scaled": None, "fairseq": (0.5, 0.25)}
    with pytest.raises(ValueError, match=r"model\.initialization='other' has no code"):
        fairseq_limits(Model(initialization="other"), 0.5, 0.25)
