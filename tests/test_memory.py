import jax
import jax.numpy as jnp
import pytest

from alibi_jax import memory


def sorted_both_ways(x):
    # Products won't do: XLA may hand them to a library of which it doesn't know what it takes.
    return (jnp.sort(x, axis=0) * jnp.sort(x, axis=1)).sum()


@pytest.fixture
def program():
    """With temporaries of 4 MiB and more."""
    return (
        jax.jit(sorted_both_ways).lower(jax.ShapeDtypeStruct((1024, 1024), jnp.float32)).compile()
    )


def test_the_devices_of_a_cpu_share_its_memory():
    free = memory.available()
    assert 2**20 < free * jax.local_device_count() < 2**45


def test_what_fits_is_no_matter(program, monkeypatch):
    memory.check(program, "this", "that")
    monkeypatch.setattr(memory, "available", lambda: None)
    memory.check(program, "this", "that")


def test_what_does_not_fit_is_told_with_both_numbers(program, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 2**20)
    with pytest.raises(
        ValueError, match=r"^this needs 0\.00\d+ GiB of memory a device, and 0\.000977"
    ):
        memory.check(program, "this", "use that")
