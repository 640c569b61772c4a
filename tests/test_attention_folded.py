import functools
import math

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from alibi_jax.attention.folded import fold, folded, folded_error, folded_refusal
from alibi_jax.biases import alibi_slopes

pytestmark = pytest.mark.usefixtures("quick_compile")


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def arrays(length, heads, kv_heads, size, batch=1, value_size=None, dtype=jnp.float32):
    """Random queries, keys, values, a cotangent, and ALiBi's slopes."""
    value_size = value_size or size
    return (
        normal(0, batch, length, heads, size, dtype=dtype),
        normal(1, batch, length, kv_heads, size, dtype=dtype),
        normal(2, batch, length, kv_heads, value_size, dtype=dtype),
        normal(3, batch, length, heads, value_size, dtype=dtype),
        alibi_slopes(heads),
    )


def oracle(query, key, value, cotangent, slopes, window=None):
    """Output and all gradients of causal attention in numpy and float64, from all scores."""
    query, key, value, cotangent, slopes = (
        np.asarray(x, np.float64) for x in (query, key, value, cotangent, slopes)
    )
    (batch, length, heads, size), kv_heads = query.shape, key.shape[2]
    groups = heads // kv_heads
    wide_key, wide_value = np.repeat(key, groups, axis=2), np.repeat(value, groups, axis=2)
    distance = np.arange(length)[:, None] - np.arange(length)
    scores = np.einsum("btnh,bsnh->bnts", query, wide_key) / math.sqrt(size)
    scores -= slopes[:, None, None] * distance
    visible = (distance >= 0) & (distance < (window or length))
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    d_weights = np.einsum("btnv,bsnv->bnts", cotangent, wide_value)
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True))

    def sum_query_heads(x):
        return x.reshape(batch, length, kv_heads, groups, -1).sum(3)

    return (
        np.einsum("bnts,bsnv->btnv", weights, wide_value),
        np.einsum("bnts,bsnh->btnh", d_scores, wide_key) / math.sqrt(size),
        sum_query_heads(np.einsum("bnts,btnh->bsnh", d_scores, query) / math.sqrt(size)),
        sum_query_heads(np.einsum("bnts,btnv->bsnv", weights, cotangent)),
        -(d_scores * distance).sum((0, 2, 3)),
    )


@functools.partial(jax.jit, static_argnames=("window", "implementation"))
def with_gradients(query, key, value, cotangent, slopes, window=None, implementation=None):
    """Output and gradients of `folded`, in the order of `oracle`."""
    attend = functools.partial(folded, window=window, implementation=implementation)
    output, pull = jax.vjp(attend, query, key, value, slopes)
    return output, *pull(cotangent)


def assert_all_close(actual, expected, atol, rtol=0.0):
    """Compares outputs with an absolute tolerance.

    The tolerance of a gradient is relative to its maximum, or 1, because gradients grow with the
    length.
    """
    (output, *gradients), (wanted_output, *wanted_gradients) = (
        [np.asarray(x, np.float64) for x in arrays] for arrays in (actual, expected)
    )
    np.testing.assert_allclose(output, wanted_output, atol=atol, rtol=rtol)
    for x, wanted in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(x, wanted, atol=atol * max(1.0, np.abs(wanted).max()), rtol=0)


# Comparison with the oracle.


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "size"),
    [
        (1, 3, 1, 32),
        (7, 16, 4, 64),
        (64, 12, 4, 128),
        (192, 8, 2, 64),
        (200, 1, 1, 32),
        (257, 3, 3, 64),
    ],
)
@pytest.mark.sample(2)
def test_d9_folded_and_its_gradients_equal_the_oracle(length, heads, kv_heads, size):
    """jax-ml/jax#27224: lengths that are no multiple of a block."""
    inputs = arrays(length, heads, kv_heads, size, batch=2)
    assert_all_close(with_gradients(*inputs), oracle(*inputs), atol=1e-5)


def test_long_rows_equal_the_oracle_up_to_the_stated_error():
    inputs = arrays(1024, 4, 1, 32)
    stated = folded_error(inputs[-1], 1024, jnp.float32)
    assert 1e-4 < stated < 1.3e-4
    # The relative error of a weight is the error of its score, and values are of size 1.
    assert_all_close(with_gradients(*inputs), oracle(*inputs), atol=stated)


@pytest.mark.parametrize(("length", "heads", "size"), [(200, 12, 64), (1024, 4, 32)])
def test_bfloat16_equals_the_oracle(length, heads, size):
    inputs = arrays(length, heads, 2, size, dtype=jnp.bfloat16)
    outputs = with_gradients(*inputs)
    assert [x.dtype for x in outputs] == [jnp.bfloat16] * 4 + [jnp.float32]
    # Weights and outputs have 8 bits each.
    assert_all_close(outputs, oracle(*inputs), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("window", [1, 8, 64, 1000])
def test_window_equals_the_oracle(window):
    inputs = arrays(65, 4, 2, 16)
    assert_all_close(with_gradients(*inputs, window=window), oracle(*inputs, window=window), 1e-5)


@pytest.mark.parametrize(("size", "value_size"), [(16, 8), (8, 40), (5, 3)])
def test_values_may_have_another_size(size, value_size):
    inputs = arrays(20, 4, 2, size, value_size=value_size)
    assert_all_close(with_gradients(*inputs), oracle(*inputs), atol=1e-5)


@settings(max_examples=6, deadline=None)
@given(
    length=st.integers(1, 70),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    size=st.integers(1, 20),
    window=st.none() | st.integers(1, 80),
)
def test_any_shape_equals_the_oracle(length, kv_heads, groups, size, window):
    inputs = arrays(length, kv_heads * groups, kv_heads, size)
    output = with_gradients(*inputs, window=window)
    assert_all_close(output, oracle(*inputs, window=window), atol=1e-5)


def test_slopes_may_be_any_numbers():
    """Learned slopes may be zero, steep or negative."""
    query, key, value, cotangent, _ = arrays(40, 4, 4, 16)
    slopes = jnp.array([0.3, 0.0, 7.123, -0.11])
    inputs = (query, key, value, cotangent, slopes)
    assert_all_close(with_gradients(*inputs), oracle(*inputs), atol=1e-5)


# The columns.


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("length", [1, 257, 131072])
def test_columns_are_exact(length, dtype):
    """Slopes use all 24 bits. Lengths go up to the greatest. `jit` keeps the rounding to 8 bits."""
    slopes = jnp.asarray(np.random.default_rng(0).uniform(0.01, 1, 5), jnp.float32)
    query, key = jax.jit(fold)(
        jnp.zeros((1, 1, 5, 2), dtype), jnp.zeros((1, length, 1, 2), dtype), slopes
    )
    assert (query.dtype, key.dtype, query.shape[-1]) == (dtype, dtype, 8)
    query, key = (np.asarray(x, np.float64)[0] for x in (query, key))
    positions = np.arange(length) - length // 2
    products = np.einsum("nw,sw->ns", query[0], key[:, 0])
    # In float64 the sums of products of 8-bit numbers are exact. Float16 ends at 2^-24.
    lost = 3 * 2.0**-29 if dtype == jnp.float16 else 0
    np.testing.assert_allclose(
        products,
        np.asarray(slopes, np.float64)[:, None] * positions,
        atol=lost * max(1, length // 2),
        rtol=0,
    )
    # The columns are exact in bfloat16, because a TPU multiplies float32 as bfloat16.
    if dtype != jnp.float16:
        for columns in (query, key):
            np.testing.assert_array_equal(columns.astype(jnp.bfloat16), columns)


@pytest.mark.parametrize(("size", "width"), [(1, 8), (2, 8), (3, 16), (64, 72), (122, 128)])
def test_width_is_a_multiple_of_eight(size, width):
    """cuDNN's kernels require it."""
    query, key, *_ = arrays(3, 2, 1, size)
    wide_query, wide_key = fold(query, key, alibi_slopes(2))
    assert wide_query.shape == (1, 3, 2, width)
    assert wide_key.shape == (1, 3, 1, width)
    np.testing.assert_array_equal(wide_query[..., :size], query)
    np.testing.assert_array_equal(wide_key[..., :size], key)


def test_slopes_have_their_gradient_once():
    """Dao-AILab/flash-attention#1977: only one of the three parts of a slope has a gradient."""
    query, key, *_, slopes = arrays(300, 3, 1, 4)

    def product_of_one_pair(slopes):
        wide_query, wide_key = fold(query, key, slopes)
        return jnp.einsum("nh,h->n", wide_query[0, 0], wide_key[0, 299, 0])

    # Positions count from the middle: 299 - 150.
    np.testing.assert_array_equal(jax.jacobian(product_of_one_pair)(slopes), 149 * np.eye(3))


@pytest.mark.parametrize("fused", [True, False])
def test_other_kernels_take_folded_queries_and_keys(fused):
    """A TPU's splash attention, interpreted: it has neither biases nor a scale."""
    length, heads, size = 128, 2, 122
    query, key, value, cotangent, slopes = arrays(length, heads, heads, size, value_size=128)
    blocks = dict.fromkeys(
        ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), length
    )
    if not fused:
        blocks |= {"block_q_dq": length, "block_kv_dq": length}
    kernel = splash_attention_kernel.make_splash_mha_single_device(
        splash_attention_mask.MultiHeadMask(
            [splash_attention_mask.CausalMask((length, length))] * heads
        ),
        block_sizes=splash_attention_kernel.BlockSizes(**blocks, use_fused_bwd_kernel=fused),
        interpret=True,
    )

    @jax.jit
    def run(query, key, value, cotangent, slopes):
        def attend(query, key, value, slopes):
            folded_arrays = (*fold(query * size**-0.5, key, slopes), value)
            return kernel(*(x[0].transpose(1, 0, 2) for x in folded_arrays)).transpose(1, 0, 2)[
                None
            ]

        output, pull = jax.vjp(attend, query, key, value, slopes)
        return output, *pull(cotangent)

    inputs = (query, key, value, cotangent, slopes)
    assert_all_close(run(*inputs), oracle(*inputs), atol=1e-5)


# The error.


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("length", "size"), [(64, 20), (1024, 64), (8192, 64)])
@pytest.mark.sample(3)
def test_error_of_scores_is_bounded(length, size, dtype):
    heads = 12
    slopes = alibi_slopes(heads)
    query = normal(0, 1, 8, heads, size, dtype=dtype)
    key = normal(1, 1, length, 1, size, dtype=dtype)

    @jax.jit
    def scores(query, key, slopes):
        query, key = fold(query, key, slopes * size**0.5)
        products = jnp.einsum(
            "tnh,sh->nts", query[0], key[0, :, 0], preferred_element_type=jnp.float32
        )
        return products * size**-0.5

    products = np.einsum(
        "tnh,sh->nts", *(np.asarray(x, np.float64)[0] for x in (query, key[:, :, 0]))
    ) / math.sqrt(size)
    biases = np.asarray(slopes, np.float64)[:, None, None] * np.arange(length)
    error = np.asarray(scores(query, key, slopes), np.float64) - products - biases
    # A shift of a row does not matter: the best shift leaves an error of half the range.
    error = np.ptp(error, axis=(-1)).max(-1) / 2
    error_of_products = 16 * 2.0**-24 * np.abs(products).max()
    bounds = np.array([folded_error([slope], length, dtype) for slope in slopes.tolist()])
    assert (error <= bounds + error_of_products).all()
    # The bound is useful: it is less than twenty times the actual error.
    assert error.max() > bounds.max() / 20
    assert folded_error(slopes, length, dtype) == bounds.max()


def test_error_is_proportional_to_slope_and_length():
    assert folded_error([0.5, 0.25], 8192, jnp.bfloat16) == 0.5 * 8192 / 2**21
    assert folded_error([-0.5], 4096, jnp.float32) == 0.5 * 4096 / 2**21
    assert folded_error([0.5], 8192, jnp.float16) == 0.5 * 8192 / 2**21 + 3 * 8192 / 2**30


@pytest.mark.parametrize(
    ("dtype", "longest"), [(jnp.float32, 4194), (jnp.bfloat16, 83886), (jnp.float16, 82914)]
)
def test_lengths_of_too_large_an_error_are_refused(dtype, longest):
    """The steepest slope of eight heads is 1/2. A traced slope may be 1."""
    slopes = np.asarray(alibi_slopes(8))

    def shape_of(length, *traced_slopes):
        array = jax.ShapeDtypeStruct((1, length, 8, 8), dtype)
        attend = folded if traced_slopes else functools.partial(folded, slopes=slopes)
        return jax.eval_shape(attend, array, array, array, *traced_slopes).shape

    def refusal(steepest, length):
        return rf"up to {steepest} into {dtype.dtype} rows of {length} tokens, .* use 'blockwise'"

    assert shape_of(longest) == (1, longest, 8, 8)
    assert folded_refusal(slopes, longest, dtype) == ""
    assert "use 'blockwise'" in folded_refusal(slopes, longest + 1, dtype)
    with pytest.raises(ValueError, match=refusal("0.5", longest + 1)):
        shape_of(longest + 1)
    traced = jax.ShapeDtypeStruct((8,), jnp.float32)
    assert shape_of(longest // 2, traced) == (1, longest // 2, 8, 8)
    with pytest.raises(ValueError, match=refusal("1", longest // 2 + 300)):
        shape_of(longest // 2 + 300, traced)


# Refused arguments.


def test_d4_queries_must_be_the_keys():
    """The causal mask of jax.nn.dot_product_attention aligns the first query with key 0."""
    query, key, value, _, slopes = arrays(5, 2, 2, 8)
    with pytest.raises(ValueError, match="2 queries, 5 keys"):
        folded(query[:, 3:], key, value, slopes)


@pytest.mark.parametrize("num_slopes", [1, 4])
def test_b10_wrong_number_of_slopes_names_both(num_slopes, monkeypatch):
    # Users run without the type checker of the tests.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    query, key, value, *_ = arrays(5, 2, 2, 8)
    for refuse in (
        lambda slopes: folded(query, key, value, slopes),
        functools.partial(fold, query, key),
    ):
        with pytest.raises(ValueError, match=f"{num_slopes} slopes for 2 query heads"):
            refuse(alibi_slopes(num_slopes))


def test_empty_windows_and_long_rows_are_refused():
    query, key, value, _, slopes = arrays(5, 2, 2, 8)
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        folded(query, key, value, slopes, window=0)
    long = jax.ShapeDtypeStruct((1, 131073, 2, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match="131073 keys"):
        jax.eval_shape(functools.partial(fold, slopes=slopes), long, long)
    with pytest.raises(
        ValueError, match="rows of 131073 tokens, because a score could be off by inf"
    ):
        jax.eval_shape(functools.partial(folded, slopes=slopes / 1000), long, long, long)


# On a GPU.


@pytest.fixture
def gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("cuDNN's kernels need a GPU")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("window", [None, 32])
def test_c7_d10_cudnn_is_xla_with_finite_gradients(gpu, window, dtype):
    """jax-ml/jax#32242: NaN gradients. #30593: bias gradients only for a batch of one."""
    inputs = arrays(128, 4, 2, 64, batch=2, dtype=dtype)
    outputs = with_gradients(*inputs, window=window, implementation="cudnn")
    assert all(jnp.isfinite(x).all() for x in outputs)
    plain = with_gradients(*inputs, window=window, implementation="xla")
    np.testing.assert_allclose(
        np.asarray(outputs[0], np.float64), np.asarray(plain[0], np.float64), atol=2e-2
    )
    assert_all_close(outputs, oracle(*inputs, window=window), atol=2e-2)
    # cuDNN is also the default.
    np.testing.assert_array_equal(with_gradients(*inputs, window=window)[0], outputs[0])
