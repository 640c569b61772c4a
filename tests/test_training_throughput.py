import time
import types

import jax
import jax.numpy as jnp
import pytest
from helpers import mesh_of

from alibi_jax.config import Config
from alibi_jax.flops import PEAKS, peak_flops, step_flops
from alibi_jax.training import throughput as pacing
from alibi_jax.training.throughput import MEASURED, ThroughputMeter

VOCAB = 256


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(pacing.time, "perf_counter", lambda: now.seconds)
    return now


@pytest.fixture
def pace(clock):
    config = Config()
    config.train.batch_size, config.train.length = 4, 50
    with ThroughputMeter(config, VOCAB, mesh_of(2, 1, 1, 1)) as pace:
        yield pace


def run(pace, clock, seconds):
    for one in seconds:
        clock.seconds += one
        pace.step()


def test_a_slow_step_is_seen_beside_the_usual_one(pace, clock):
    run(pace, clock, [1.0, 1.5, 9.0, 1.0, 1.5])
    measured = pace.measured()
    assert measured["step_seconds"] == 1.5
    assert measured["slowest_step_seconds"] == 9.0
    assert measured["tokens_per_second"] == pytest.approx(5 * 200 / 14)


def test_a_save_is_no_step_but_takes_time(pace, clock):
    run(pace, clock, [1.0, 1.0])
    clock.seconds += 7.0
    pace.pause()
    run(pace, clock, [1.0])
    measured = pace.measured()
    assert measured["slowest_step_seconds"] == 1.0
    assert measured["tokens_per_second"] == pytest.approx(3 * 200 / 10)


def test_what_is_done_aside_takes_no_time(pace, clock):
    run(pace, clock, [1.0])
    with pace.aside():
        clock.seconds += 30.0
    run(pace, clock, [1.0])
    measured = pace.measured()
    assert measured["slowest_step_seconds"] == 1.0
    assert measured["tokens_per_second"] == 200.0


def test_what_came_before_a_restart_does_not_count(pace, clock):
    run(pace, clock, [50.0])
    pace.restart()
    run(pace, clock, [2.0])
    assert pace.measured()["step_seconds"] == pace.measured()["slowest_step_seconds"] == 2.0
    assert pace.measured()["tokens_per_second"] == 100.0


def test_mfu_is_of_the_peak_of_all_devices(clock, monkeypatch):
    config, mesh = Config(), mesh_of(2, 1, 1, 1)
    monkeypatch.setattr(pacing, "peak_flops", lambda kind: 1e9)
    with ThroughputMeter(config, VOCAB, mesh) as pace:
        run(pace, clock, [2.0, 2.0])
        measured = pace.measured()
    assert measured["mfu"] == pytest.approx(step_flops(config, VOCAB).model / 2e9 / 2.0)
    assert set(measured) == set(MEASURED)


def test_there_is_no_mfu_where_the_peak_is_not_known(pace, clock):
    run(pace, clock, [1.0])
    assert set(pace.measured()) == set(MEASURED) - {"mfu"}


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("TPU v4 lite", 138e12),
        ("cpu", None),
    ],
)
def test_peaks_by_the_name_of_the_device(kind, peak):
    assert peak_flops(kind) == peak
    # No name stands before one that begins with it.
    names = list(PEAKS)
    for number, name in enumerate(names):
        assert not any(later.startswith(name) for later in names[number + 1 :])


def test_what_the_compiler_took_is_told_once(pace, clock):
    @jax.jit
    def fresh(x):
        return jnp.sin(x) + 17.25

    run(pace, clock, [1.0])
    pace.measured()
    begun = time.monotonic()
    fresh(jnp.ones(3)).block_until_ready()
    took = time.monotonic() - begun
    assert 0 < pace.measured()["compile_seconds"] <= took
    assert pace.measured()["compile_seconds"] == 0.0


def test_the_memory_of_this_process(pace, clock):
    run(pace, clock, [1.0])
    assert 2**26 < pace.measured()["peak_memory_bytes"] < 2**40
