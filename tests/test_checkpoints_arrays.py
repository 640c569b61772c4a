import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh_of

from alibi_jax.checkpoints.arrays import _checksums, described, shapes_of
from alibi_jax.distributed.sharding import named_sharding


def mix(x):
    """The last step of MurmurHash3, in whole numbers of Python."""
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def oracle(array):
    """The checksum of an array, element by element."""
    array = np.ascontiguousarray(array)
    words = array.reshape(-1).view(f"u{min(array.dtype.itemsize, 4)}").tolist()
    halves = [
        sum(mix(word ^ mix(index ^ seed)) for index, word in enumerate(words)) % 2**32
        for seed in (0x9E3779B9, 0x7F4A7C15)
    ]
    return "".join(f"{half:08x}" for half in halves)


def checksum(array):
    return described({"x": array})["x"]["checksum"]


def some_values(dtype, shape):
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4, 5), (0, 3)])
@pytest.mark.parametrize("dtype", ["float32", jnp.bfloat16, "float16", "int32", "uint8", "bool"])
def test_the_sums_are_those_of_the_definition(dtype, shape):
    values = some_values(dtype, shape)
    assert checksum(jnp.asarray(values)) == oracle(values)


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_numbers_of_64_bits_count_as_two_words(dtype):
    values = some_values(dtype, (3, 5))
    with jax.enable_x64(True):
        assert checksum(jnp.asarray(values)) == oracle(values)
        assert checksum(jnp.ones(3)) != checksum(jnp.ones(3) + 1e-15)


def test_every_flipped_bit_changes_both_halves():
    values = some_values("float32", (3, 5))
    good = checksum(values)
    bits = values.view(np.uint32)
    for index in np.ndindex(values.shape):
        for bit in range(32):
            bits[index] ^= np.uint32(1 << bit)
            changed = checksum(values)
            assert changed[:8] != good[:8]
            assert changed[8:] != good[8:]
            bits[index] ^= np.uint32(1 << bit)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: -x,
        lambda x: x[::-1],
        lambda x: x * np.where(np.arange(64) < 2, -1, 1).astype(np.float32),
        lambda x: np.roll(x, 1),
        np.zeros_like,
        np.sort,
    ],
)
def test_other_changes_change_it_too(change):
    values = some_values("float32", (64,))
    assert checksum(np.ascontiguousarray(change(values))) != checksum(values)


@pytest.mark.parametrize("sizes", [(2, 1, 1, 1), (1, 4, 1, 2), (1, 8, 1, 1), (2, 2, 1, 2)])
def test_it_does_not_depend_on_the_placement(sizes):
    values = some_values("float32", (16, 24))
    mesh = mesh_of(*sizes)
    for axes in (("embed", "ff"), (None, "embed"), (None, None)):
        placed = jax.device_put(values, named_sharding(mesh, *axes))
        assert checksum(placed) == oracle(values)


def test_it_needs_no_memory_of_the_size_of_the_arrays():
    for sizes in ((1, 1, 1, 1), (1, 4, 1, 2)):
        placement = named_sharding(mesh_of(*sizes), "embed", "ff")
        array = jax.ShapeDtypeStruct((1024, 1024), np.float32, sharding=placement)
        memory = _checksums.lower({"one": array, "other": array}).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 4096


def test_shapes_are_named_by_their_paths():
    tree = {"a": {0: jnp.ones((2, 3))}, "b": (jnp.ones(()), [])}
    assert shapes_of(tree) == {"a.0": (2, 3), "b.0": ()}
    assert {name: array["shape"] for name, array in described(tree).items()} == {
        "a.0": [2, 3],
        "b.0": [],
    }
