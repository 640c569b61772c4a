import math

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_jax.biases import alibi_bias, alibi_bias_at, alibi_slopes

quick = settings(max_examples=25, deadline=None)


def devices_mesh(size):
    return jax.make_mesh(
        (size,),
        ("devices",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:size],
    )


# Oracles in NumPy and Python numbers, computed in a different way from the package.


def slopes_oracle(num_heads):
    """Closed form: the odd-indexed slopes of the next power of two, then the even-indexed ones."""
    power = 2 ** (math.floor(math.log2(num_heads)) + 1)
    slopes = np.exp2(-8 / power) ** np.arange(1, power + 1)
    return np.concatenate([slopes[1::2], slopes[0::2]])[:num_heads]


def alibi_oracle(slopes, query_positions, key_positions, future_slopes=None):
    bias = np.zeros((len(slopes), len(query_positions), len(key_positions)))
    for head, t, s in np.ndindex(*bias.shape):
        gap = int(query_positions[t]) - int(key_positions[s])
        use_future = gap < 0 and future_slopes is not None
        bias[head, t, s] = -abs(gap) * float((future_slopes if use_future else slopes)[head])
    return bias


def causal_softmax(scores, xp=jnp):
    t, s = scores.shape[-2:]
    scores = xp.where(xp.tri(t, s, s - t, dtype=bool), scores, -xp.inf)
    weights = xp.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


# Slopes.

ROOTS = [0.7071067812, 0.3535533906, 0.1767766953, 0.0883883476]


@pytest.mark.parametrize(
    ("num_heads", "slopes"),
    [
        (1, [0.00390625]),
        (2, [0.0625, 0.00390625]),
        (3, [0.0625, 0.00390625, 0.25]),
        (4, [0.25, 0.0625, 0.015625, 0.00390625]),
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
        (8, [2.0**-h for h in range(1, 9)]),
        (12, [2.0**-h for h in range(1, 9)] + ROOTS),
    ],
)
def test_a1_non_power_of_two_heads(num_heads, slopes):
    np.testing.assert_allclose(alibi_slopes(num_heads), slopes, rtol=1e-7)


@pytest.mark.parametrize("num_heads", [*range(1, 17), 20, 25, 40, 64, 112])
def test_a1_every_count_of_heads(num_heads):
    slopes = alibi_slopes(num_heads)
    assert slopes.shape == (num_heads,)
    assert slopes.dtype == jnp.float32
    np.testing.assert_allclose(slopes, slopes_oracle(num_heads), rtol=1e-6)


def test_a1_sixteen_heads_start_and_end():
    slopes = alibi_slopes(16)
    np.testing.assert_allclose(slopes[:3], [0.7071067812, 0.5, 0.3535533906], rtol=1e-7)
    assert slopes[-1] == 0.00390625
    np.testing.assert_array_equal(alibi_slopes(np.int64(16)), slopes)


def test_slopes_are_concrete_values_while_tracing():
    """A module that is made under `jit` keeps them."""
    kept = []
    jax.eval_shape(lambda: kept.append(alibi_slopes(8)))
    np.testing.assert_array_equal(kept[0], alibi_slopes(8))


def test_a2_exponents_start_at_one():
    slopes = alibi_slopes(8)
    assert slopes[0] == 0.5
    assert slopes[7] == 0.00390625


@pytest.mark.parametrize(
    ("num_heads", "shards", "shard", "slopes"),
    [
        (
            16,
            2,
            1,
            [
                *(0.0441941738, 0.03125, 0.0220970869, 0.015625),
                *(0.0110485435, 0.0078125, 0.0055242717, 0.00390625),
            ],
        ),
        (12, 4, 3, [0.3535533906, 0.1767766953, 0.0883883476]),
    ],
)
def test_a3_shard_has_its_global_slopes(num_heads, shards, shard, slopes):
    local = jax.shard_map(
        lambda slopes: slopes[None],
        mesh=devices_mesh(shards),
        in_specs=jax.P("devices"),
        out_specs=jax.P("devices"),
    )(alibi_slopes(num_heads))
    np.testing.assert_allclose(local[shard], slopes, rtol=1e-7)


@pytest.mark.parametrize(
    ("num_heads", "shards"), [(8, 1), (8, 2), (8, 4), (8, 8), (12, 2), (12, 4)]
)
@pytest.mark.sample(2)
def test_a3_bias_with_heads_sharded_is_the_whole_bias(num_heads, shards):
    mesh = devices_mesh(shards)
    by_shard_map = jax.shard_map(
        lambda slopes: alibi_bias(slopes, 16),
        mesh=mesh,
        in_specs=jax.P("devices"),
        out_specs=jax.P("devices"),
    )(alibi_slopes(num_heads))
    by_compiler = jax.jit(
        lambda: alibi_bias(num_heads, 16),
        out_shardings=jax.NamedSharding(mesh, jax.P("devices")),
    )()
    np.testing.assert_array_equal(by_shard_map, alibi_bias(num_heads, 16))
    np.testing.assert_array_equal(by_compiler, alibi_bias(num_heads, 16))


def test_a6_slopes_have_a_gradient():
    values = jax.random.normal(jax.random.key(0), (6,))
    targets = jax.random.normal(jax.random.key(1), (4, 6))

    def loss(slopes, bias=lambda slopes: alibi_bias(slopes, 6), xp=jnp):
        attended = causal_softmax(bias(slopes), xp) @ xp.asarray(values)
        return ((attended - xp.asarray(targets)) ** 2).sum()

    slopes = alibi_slopes(4)
    relative = jax.grad(loss)(slopes)
    key_only = jax.grad(loss)(
        slopes, lambda slopes: slopes[:, None, None] * jnp.ones((6, 1)) * jnp.arange(6)
    )
    np.testing.assert_allclose(relative, key_only, rtol=1e-5)

    def oracle(slopes):
        return loss(slopes, lambda m: alibi_oracle(m, range(6), range(6)), np)

    step = 1e-4 * np.eye(4)
    points = np.asarray(slopes, np.float64)
    numeric = [(oracle(points + d) - oracle(points - d)) / 2e-4 for d in step]
    assert np.all(np.abs(numeric) > 1e-4)
    np.testing.assert_allclose(relative, numeric, rtol=1e-3)


@pytest.mark.parametrize("num_heads", [0, -8])
def test_slopes_refuse_no_heads(num_heads):
    with pytest.raises(ValueError, match=str(num_heads)):
        alibi_slopes(num_heads)


# ALiBi.


@pytest.mark.parametrize(
    ("slope", "row"),
    [
        (0.5, [0.101536, 0.167405, 0.276004, 0.455054]),
        (1 / 256, [0.248537, 0.249510, 0.250486, 0.251467]),
    ],
)
@pytest.mark.parametrize("size", [4, 64])
@pytest.mark.sample(2)
def test_b1_b4_near_keys_are_favoured_at_any_head_size(slope, row, size):
    """With q·k = 0 only the bias acts, and 1/sqrt(head size) does not scale it."""
    key = jax.random.normal(jax.random.key(0), (1, 4, 1, size))
    value = jnp.eye(4, size)[None, :, None]
    bias = alibi_bias([slope], 4)[None]
    weights = jax.nn.dot_product_attention(jnp.zeros_like(key), key, value, bias, is_causal=True)
    np.testing.assert_allclose(weights[0, -1, 0, :4], row, atol=1e-6)


def test_b2_key_only_form_is_the_same_only_when_causal():
    slopes = alibi_slopes(8)
    relative = alibi_bias(8, 128)
    key_only = jnp.broadcast_to(slopes[:, None, None] * jnp.arange(128.0), relative.shape)
    np.testing.assert_allclose(causal_softmax(relative), causal_softmax(key_only), atol=1e-6)
    difference = jnp.abs(jax.nn.softmax(relative) - jax.nn.softmax(key_only))
    assert difference.max() > 0.1


def test_b2_bidirectional_bias_is_symmetric():
    bias = alibi_bias(8, 3)
    np.testing.assert_array_equal(bias[0], [[0, -0.5, -1], [-0.5, 0, -0.5], [-1, -0.5, 0]])
    np.testing.assert_array_equal(bias, bias.swapaxes(1, 2))


def test_b3_causal_rows():
    bias = alibi_bias([1.0], 5)[0]
    np.testing.assert_array_equal(bias[-1], [-4, -3, -2, -1, 0])
    assert bias[0, 0] == 0
    assert not np.signbit(bias[0, 0])


def test_b5_added_mask_stays_minus_infinity():
    scores = alibi_bias(8, 16) + jnp.where(jnp.tri(16, dtype=bool), 0, -jnp.inf)
    assert not jnp.isnan(scores).any()
    np.testing.assert_array_equal(jnp.isneginf(scores[3]), np.triu(np.ones((16, 16)), 1))


def test_b7_offset_is_the_position_of_the_first_query():
    step = alibi_bias(8, 1, 8, offset=7)
    assert step.shape == (8, 1, 8)
    np.testing.assert_array_equal(step[0, 0], [-3.5, -3, -2.5, -2, -1.5, -1, -0.5, 0])
    np.testing.assert_array_equal(alibi_bias(8, 3, 8, offset=5), alibi_bias(8, 8)[:, 5:8])
    np.testing.assert_array_equal(alibi_bias(8, 3, 8), alibi_bias(8, 8)[:, 5:8])


def test_b10_shape_is_what_attention_takes():
    assert alibi_bias(2, 2, 5).shape == (2, 2, 5)
    query, key = jnp.ones((1, 2, 2, 4)), jnp.ones((1, 5, 2, 4))
    out = jax.nn.dot_product_attention(query, key, key, alibi_bias(2, 2, 5)[None])
    assert out.shape == query.shape


def test_b10_wrong_number_of_slopes_names_both(monkeypatch):
    # Disable the type checker of the tests: users run without it.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    positions = jnp.arange(4)
    with pytest.raises(ValueError, match=r"6 future slopes for 8 slopes"):
        alibi_bias_at(alibi_slopes(8), positions, positions, future_slopes=alibi_slopes(6))


def test_c1_bias_is_cast_last():
    bias = alibi_bias(8, 1, 4096, dtype=jnp.bfloat16)
    assert bias.dtype == jnp.bfloat16
    np.testing.assert_array_equal(bias, alibi_bias(8, 1, 4096).astype(jnp.bfloat16))
    np.testing.assert_array_equal(bias[0, 0, -6:], [-2.5, -2, -1.5, -1, -0.5, 0])
    exact = causal_softmax(alibi_oracle(slopes_oracle(8), [4095], range(4096)), np)
    total_variation = (
        np.abs(np.asarray(causal_softmax(bias.astype(jnp.float32))) - exact).sum(-1) / 2
    )
    assert total_variation.max() < 0.01
    assert total_variation[0] < 1e-6


def test_c1_far_positions_keep_their_distances():
    near, far = jnp.arange(6), 100_000_000 + jnp.arange(6)
    slopes = alibi_slopes(4)
    np.testing.assert_array_equal(
        alibi_bias_at(slopes, far, far), alibi_bias_at(slopes, near, near)
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_c3_masked_keys_get_exactly_nothing(dtype):
    keys = jnp.arange(65536)
    past = keys <= 7

    def weights(slopes):
        bias = alibi_bias_at(slopes, jnp.array([7]), keys, dtype=dtype).astype(jnp.float32)
        return jax.nn.softmax(jnp.where(past, bias, -jnp.inf))

    slopes = alibi_slopes(8)
    assert (weights(slopes)[..., 8:] == 0).all()
    assert jnp.isfinite(jax.grad(lambda slopes: weights(slopes)[..., 0].sum())(slopes)).all()


def test_c5_slopes_and_biases_of_roots_are_float32():
    slope = alibi_slopes(12)[8]
    assert slope == np.float32(math.sqrt(0.5))
    assert slope != slope.astype(jnp.bfloat16)
    # The exact bias is rounded once: a bias of a rounded slope would differ at some distances.
    bias = alibi_bias(12, 1, 514, dtype=jnp.bfloat16)[8, 0]
    np.testing.assert_array_equal(
        bias, alibi_oracle([math.sqrt(0.5)], [513], range(514))[0, 0].astype(bias.dtype)
    )


@pytest.mark.parametrize(
    "kind", [list, np.asarray, lambda s: np.asarray(s, np.float64), jnp.asarray]
)
def test_alibi_takes_slopes_of_any_kind(kind):
    slopes = kind([0.5, 0.25, 0.125])
    bias = alibi_bias(slopes, 4)
    assert bias.dtype == jnp.float32
    np.testing.assert_array_equal(bias, alibi_oracle([0.5, 0.25, 0.125], range(4), range(4)))


positions = st.lists(st.integers(-(2**20), 2**20), min_size=1, max_size=5)


@quick
@given(st.integers(1, 9), positions, positions, st.booleans())
def test_alibi_at_positions_is_the_oracle(num_heads, queries, keys, two_sided):
    slopes = alibi_slopes(num_heads)
    future = 3 * slopes if two_sided else None
    bias = alibi_bias_at(slopes, jnp.array(queries), jnp.array(keys), future_slopes=future)
    assert bias.dtype == jnp.float32
    np.testing.assert_allclose(bias, alibi_oracle(slopes, queries, keys, future), rtol=1e-6)


def test_future_slopes_apply_to_keys_after_their_query():
    at = jnp.arange(3)
    bias = alibi_bias_at(jnp.array([1.0]), at, at, future_slopes=jnp.array([10.0]))
    np.testing.assert_array_equal(bias[0], [[0, -10, -20], [-1, 0, -10], [-2, -1, 0]])


def test_the_number_of_heads_may_be_a_numpy_integer():
    np.testing.assert_array_equal(alibi_bias(np.int64(4), 3), alibi_bias(4, 3))


@pytest.mark.parametrize("query_length", [0, 1, 4])
def test_no_offset_puts_a_query_past_int32(query_length):
    last = 2**31 - max(query_length, 1)
    assert alibi_bias(2, query_length, 3, offset=last).shape == (2, query_length, 3)
    for offset in (last + 1, 2**31 + 5, -(2**31) - 1):
        with pytest.raises(ValueError, match=r"offset=.* is out of range"):
            alibi_bias(2, query_length, 3, offset=offset)
