import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi_jax.distributed import memory


def sorted_both_ways(x):
    # Products won't do: XLA may hand them to a library of which it doesn't know what it takes.
    return (jnp.sort(x, axis=0) * jnp.sort(x, axis=1)).sum()


@pytest.fixture
def program():
    """With temporaries of 4 MiB and more."""
    return (
        jax.jit(sorted_both_ways).lower(jax.ShapeDtypeStruct((1024, 1024), jnp.float32)).compile()
    )


def test_the_peak_is_that_of_the_fullest_device(monkeypatch):
    def devices(*peaks):
        stats = [None if n is None else {"peak_bytes_in_use": n} for n in peaks]
        return [types.SimpleNamespace(memory_stats=lambda one=one: one) for one in stats]

    monkeypatch.setattr(jax, "local_devices", lambda: devices(5, 9, 7))
    assert memory.peak() == 9
    monkeypatch.setattr(jax, "local_devices", lambda: devices(None))
    before = memory.peak()
    held = np.ones(before // 8 + 2**24)
    assert memory.peak() >= before + held.nbytes // 8


def test_the_devices_of_a_cpu_share_its_memory():
    free = memory.available()
    assert 2**20 < free * jax.local_device_count() < 2**45


@pytest.mark.parametrize(
    ("folder", "limit", "usage", "files"),
    [
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_a_container_has_what_it_may_have_less_what_it_has(
    folder, limit, usage, files, tmp_path, monkeypatch
):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    unlimited = memory.available()
    (tmp_path / folder).mkdir(exist_ok=True)
    for name, text in (
        (limit, "80000000\n"),
        (usage, "50000000\n"),
        # Files that were read take no memory away.
        ("memory.stat", f"anon 40000000\n{files} 2000000\nx_{files} 1\n"),
    ):
        (tmp_path / folder / name).write_text(text)
    assert memory.available() == 32_000_000 // jax.local_device_count()
    (tmp_path / folder / usage).write_text("80000001")
    (tmp_path / folder / "memory.stat").write_text("anon 0\n")
    assert memory.available() == 0
    # As where there is no limit.
    (tmp_path / folder / limit).write_text("max\n")
    assert memory.available() > unlimited / 2


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
