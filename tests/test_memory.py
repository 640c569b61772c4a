import jax
import jax.numpy as jnp
import pytest

from alibi_jax import memory


def square(x):
    return jnp.sin(x @ x).sum()


@pytest.fixture
def program():
    """With a temporary of 4 MiB."""
    return jax.jit(square).lower(jax.ShapeDtypeStruct((1024, 1024), jnp.float32)).compile()


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
