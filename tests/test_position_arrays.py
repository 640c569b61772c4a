import jax.numpy as jnp
import numpy as np
import pytest

from alibi_jax.position_arrays import as_integer, as_positions


@pytest.mark.parametrize("position", [2**31, -(2**31) - 1, 2**32 + 1])
def test_positions_past_int32_are_refused(position):
    with pytest.raises(ValueError, match="do not fit 32 bits"):
        as_positions(np.array([0, position]))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint16, np.int64, np.uint32])
def test_integers_become_int32(dtype):
    found = as_positions(np.array([0, 100], dtype))
    assert found.dtype == jnp.int32
    assert found.tolist() == [0, 100]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_floating_point_positions_become_float32(dtype):
    found = as_positions(jnp.array([0.5, 2.0], dtype))
    assert found.dtype == jnp.float32
    assert found.tolist() == [0.5, 2.0]


@pytest.mark.parametrize(
    ("given", "expected"),
    [(3, 3), (np.int64(2**40), 2**40), (True, None), (1.5, None), ("1", None)],
)
def test_only_integers_are_integers(given, expected):
    assert as_integer(given) == expected
