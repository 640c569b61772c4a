import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi_jax.distributed import memory


def sorted_both_ways(x):
    # Not a matrix product: XLA may call a library for it, whose memory it does not know.
    return (jnp.sort(x, axis=0) * jnp.sort(x, axis=1)).sum()


@pytest.fixture
def program():
    """A compiled program with temporaries of at least 4 MiB."""
    return (
        jax.jit(sorted_both_ways).lower(jax.ShapeDtypeStruct((1024, 1024), jnp.float32)).compile()
    )


def test_the_peak_is_that_of_the_device_that_used_most(monkeypatch):
    def devices(*peaks):
        stats = [None if n is None else {"peak_bytes_in_use": n} for n in peaks]
        return [
            types.SimpleNamespace(memory_stats=lambda device=device: device) for device in stats
        ]

    monkeypatch.setattr(jax, "local_devices", lambda: devices(5, 9, 7))
    assert memory.peak_bytes() == 9
    monkeypatch.setattr(jax, "local_devices", lambda: devices(None))
    before = memory.peak_bytes()
    held = np.ones(before // 8 + 2**24)
    assert memory.peak_bytes() >= before + held.nbytes // 8


def test_the_devices_of_a_cpu_share_its_memory():
    free = memory.available_bytes()
    assert 2**20 < free * jax.local_device_count() < 2**45


@pytest.mark.parametrize(
    ("folder", "limit", "usage", "files"),
    [
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_free_memory_of_a_container_is_its_limit_without_its_usage(
    folder, limit, usage, files, tmp_path, monkeypatch
):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    unlimited = memory.available_bytes()
    (tmp_path / folder).mkdir(exist_ok=True)
    for name, text in (
        (limit, "80000000\n"),
        (usage, "50000000\n"),
        # Cached files count as free.
        ("memory.stat", f"anon 40000000\n{files} 2000000\nx_{files} 1\n"),
    ):
        (tmp_path / folder / name).write_text(text)
    assert memory.available_bytes() == 32_000_000 // jax.local_device_count()
    (tmp_path / folder / usage).write_text("80000001")
    (tmp_path / folder / "memory.stat").write_text("anon 0\n")
    assert memory.available_bytes() == 0
    # A container without a limit.
    (tmp_path / folder / limit).write_text("max\n")
    assert memory.available_bytes() > unlimited / 2


def test_a_program_that_fits_passes(program, monkeypatch):
    memory.check_program_fits(program, "this", "that")
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    memory.check_program_fits(program, "this", "that")


def test_a_program_that_does_not_fit_is_refused_with_both_numbers(program, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**20)
    with pytest.raises(
        ValueError, match=r"^this needs 0\.00\d+ GiB of memory per device, but only 0\.000977"
    ):
        memory.check_program_fits(program, "this", "use that")
