import time
import types

import jax
import jax.numpy as jnp
import pytest
from helpers import mesh_of

from alibi_jax.config import Config
from alibi_jax.flops import PEAKS, peak_flops, step_flops
from alibi_jax.training import throughput as throughput_module
from alibi_jax.training.throughput import THROUGHPUT_METRICS, ThroughputMeter

VOCAB = 256


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(throughput_module.time, "perf_counter", lambda: now.seconds)
    return now


@pytest.fixture
def meter(clock):
    config = Config()
    config.train.batch_size, config.train.length = 4, 50
    with ThroughputMeter(config, VOCAB, mesh_of(2, 1, 1, 1)) as meter:
        yield meter


def run(meter, clock, seconds):
    for step_seconds in seconds:
        clock.seconds += step_seconds
        meter.end_step()


def test_slowest_and_median_step_are_reported(meter, clock):
    run(meter, clock, [1.0, 1.5, 9.0, 1.0, 1.5])
    measured = meter.metrics()
    assert measured["step_seconds"] == 1.5
    assert measured["slowest_step_seconds"] == 9.0
    assert measured["tokens_per_second"] == pytest.approx(5 * 200 / 14)


def test_a_save_counts_for_the_interval_and_for_no_step(meter, clock):
    run(meter, clock, [1.0, 1.0])
    clock.seconds += 7.0
    meter.begin_step()
    run(meter, clock, [1.0])
    measured = meter.metrics()
    assert measured["slowest_step_seconds"] == 1.0
    assert measured["tokens_per_second"] == pytest.approx(3 * 200 / 10)


def test_untimed_work_counts_for_nothing(meter, clock):
    run(meter, clock, [1.0])
    with meter.untimed():
        clock.seconds += 30.0
    run(meter, clock, [1.0])
    measured = meter.metrics()
    assert measured["slowest_step_seconds"] == 1.0
    assert measured["tokens_per_second"] == 200.0


def test_a_new_interval_forgets_earlier_steps(meter, clock):
    run(meter, clock, [50.0])
    meter.begin_interval()
    run(meter, clock, [2.0])
    assert meter.metrics()["step_seconds"] == meter.metrics()["slowest_step_seconds"] == 2.0
    assert meter.metrics()["tokens_per_second"] == 100.0


def test_mfu_is_relative_to_the_peak_of_all_devices(clock, monkeypatch):
    config, mesh = Config(), mesh_of(2, 1, 1, 1)
    monkeypatch.setattr(throughput_module, "peak_flops", lambda kind: 1e9)
    with ThroughputMeter(config, VOCAB, mesh) as meter:
        run(meter, clock, [2.0, 2.0])
        measured = meter.metrics()
    assert measured["mfu"] == pytest.approx(step_flops(config, VOCAB).model / 2e9 / 2.0)
    assert set(measured) == set(THROUGHPUT_METRICS)


def test_no_mfu_without_a_known_peak(meter, clock):
    run(meter, clock, [1.0])
    assert set(meter.metrics()) == set(THROUGHPUT_METRICS) - {"mfu"}


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
def test_peak_flops_by_device_kind(kind, peak):
    assert peak_flops(kind) == peak
    # A name that is a prefix of another name comes after it.
    names = list(PEAKS)
    for number, name in enumerate(names):
        assert not any(later.startswith(name) for later in names[number + 1 :])


def test_compile_time_is_reported_once(meter, clock):
    @jax.jit
    def fresh(x):
        return jnp.sin(x) + 17.25

    run(meter, clock, [1.0])
    meter.metrics()
    start = time.monotonic()
    fresh(jnp.ones(3)).block_until_ready()
    elapsed = time.monotonic() - start
    assert 0 < meter.metrics()["compile_seconds"] <= elapsed
    assert meter.metrics()["compile_seconds"] == 0.0


def test_peak_memory_of_this_process(meter, clock):
    run(meter, clock, [1.0])
    assert 2**26 < meter.metrics()["peak_memory_bytes"] < 2**40
