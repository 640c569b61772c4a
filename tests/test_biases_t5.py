from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_jax.biases import t5_bias, t5_bias_at, t5_buckets

quick = settings(max_examples=25, deadline=None)


def bucket_oracle(relative, bidirectional, num_buckets=32, max_distance=128):
    """T5's definition, in rational numbers, for one relative position."""
    first = 0
    if bidirectional:
        num_buckets //= 2
        first = num_buckets if relative > 0 else 0
        distance = abs(relative)
    else:
        distance = max(0, -relative)
    exact = num_buckets // 2
    if distance < exact:
        return first + distance
    ratio = Fraction(distance, exact) ** (num_buckets - exact)
    step = Fraction(max_distance, exact)
    bucket = exact
    while bucket < num_buckets - 1 and ratio >= step ** (bucket + 1 - exact):
        bucket += 1
    return first + bucket


STARTS = [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
FAR_STARTS = [16, 22, 30, 40, 54, 73, 99, 134, 182, 246, 332, 450, 609, 825, 1117, 1513]
SIDE_STARTS = [8, 12, 16, 23, 32, 46, 64, 91]


@pytest.mark.parametrize(("max_distance", "starts"), [(128, STARTS), (2048, FAR_STARTS)])
def test_e1_causal_bucket_starts(max_distance, starts):
    distance = jnp.arange(2048)
    buckets = t5_buckets(-distance, bidirectional=False, max_distance=max_distance)
    np.testing.assert_array_equal(buckets[:16], np.arange(16))
    np.testing.assert_array_equal(np.searchsorted(buckets, np.arange(16, 32)), starts)


def test_e1_causal_ends():
    buckets = t5_buckets(-jnp.array([112, 113, 128, 10_000]), bidirectional=False)
    np.testing.assert_array_equal(buckets, [30, 31, 31, 31])
    np.testing.assert_array_equal(t5_buckets(jnp.array([1, 99, 9999]), bidirectional=False), 0)


def test_e1_bidirectional_bucket_starts():
    distance = jnp.arange(1, 200)
    past = t5_buckets(-distance, bidirectional=True)
    np.testing.assert_array_equal(np.searchsorted(past, np.arange(8, 16)) + 1, SIDE_STARTS)
    future = t5_buckets(distance, bidirectional=True)
    np.testing.assert_array_equal(future, past + 16)
    assert future[0] == 17
    assert future[90] == 31


def test_e1_bidirectional_rows():
    at = jnp.arange(10)
    buckets = t5_buckets(at[None] - at[:, None], bidirectional=True)
    np.testing.assert_array_equal(buckets[0], [0, 17, 18, 19, 20, 21, 22, 23, 24, 24])
    np.testing.assert_array_equal(buckets[9], [8, 8, 7, 6, 5, 4, 3, 2, 1, 0])


def test_e1_decoding_step():
    table = jnp.arange(32.0)[:, None]
    np.testing.assert_array_equal(t5_bias(table, 1, 8)[0, 0], [7, 6, 5, 4, 3, 2, 1, 0])


@pytest.mark.parametrize("bidirectional", [False, True])
def test_e1_every_near_distance_is_the_rational_one(bidirectional):
    relative = range(-2000, 200)
    np.testing.assert_array_equal(
        t5_buckets(jnp.array(relative), bidirectional=bidirectional),
        [bucket_oracle(at, bidirectional) for at in relative],
    )


@quick
@given(
    st.lists(st.integers(-(10**6), 10**6), min_size=4, max_size=4),
    st.booleans(),
    st.integers(2, 20),
    st.integers(1, 10**5),
)
def test_t5_buckets_are_the_oracle(relative, bidirectional, per_direction, beyond):
    num_buckets = per_direction * (2 if bidirectional else 1)
    sizes = {"num_buckets": num_buckets, "max_distance": per_direction // 2 + beyond}
    buckets = t5_buckets(jnp.array(relative), bidirectional=bidirectional, **sizes)
    assert buckets.dtype == jnp.int32
    expected = [bucket_oracle(at, bidirectional, **sizes) for at in relative]
    np.testing.assert_array_equal(buckets, expected)


@pytest.mark.parametrize(
    ("bidirectional", "num_buckets", "max_distance", "message"),
    [
        (False, 1, 128, "num_buckets=1 "),
        (True, 2, 128, "num_buckets=2 "),
        (True, 31, 128, "num_buckets=31 "),
        (False, 32, 16, "max_distance=16 .* 16"),
        (True, 32, 8, "max_distance=8 .* 8"),
    ],
)
def test_t5_refuses_invalid_buckets(bidirectional, num_buckets, max_distance, message):
    with pytest.raises(ValueError, match=message):
        t5_buckets(
            jnp.arange(3),
            bidirectional=bidirectional,
            num_buckets=num_buckets,
            max_distance=max_distance,
        )


@pytest.mark.parametrize("bidirectional", [False, True])
def test_t5_bias_is_the_table_row_of_the_bucket(bidirectional):
    table = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    options = {"bidirectional": bidirectional, "max_distance": 12}
    bias = t5_bias(jnp.asarray(table), 5, 20, **options)
    assert bias.shape == (3, 5, 20)
    for t, s in np.ndindex(5, 20):
        bucket = bucket_oracle(s - (15 + t), bidirectional, 8, 12)
        np.testing.assert_array_equal(bias[:, t, s], table[bucket])
    np.testing.assert_array_equal(
        bias, t5_bias_at(jnp.asarray(table), jnp.arange(15, 20), jnp.arange(20), **options)
    )


def test_t5_gradient_counts_the_pairs_of_each_bucket():
    counts = jax.grad(lambda table: t5_bias(table, 40).sum())(jnp.zeros((32, 2)))
    gaps = [bucket_oracle(s - t, False) for t in range(40) for s in range(40)]
    np.testing.assert_array_equal(counts[:, 0], np.bincount(gaps, minlength=32))
    np.testing.assert_array_equal(counts[:, 1], counts[:, 0])
