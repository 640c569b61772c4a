import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers import mesh_of
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_jax.config import Config, ConfigError, Mesh
from alibi_jax.distributed.sharding import (
    addressable_rows,
    axis_size,
    constrain,
    make_global_array,
    make_mesh,
    moment_sharding,
    named_sharding,
)
from alibi_jax.training.step import check_fits


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ((-1, 1, 1, 1), (8, 1, 1, 1)),
        ((-1, 2, 1, 2), (2, 2, 1, 2)),
        ((2, -1, 1, 2), (2, 2, 1, 2)),
        ((1, 1, 1, -1), (1, 1, 1, 8)),
        ((4, 2, 1, 1), (4, 2, 1, 1)),
        ((1, 2, -1, 1), (1, 2, 4, 1)),
    ],
)
def test_a_mesh_covers_all_devices(requested, expected):
    mesh = make_mesh(Mesh(*requested))
    assert tuple(mesh.shape.values()) == expected
    assert set(mesh.devices.flat) == set(jax.devices())


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ((-1, -1, 1, 1), "mesh.data=-1 x mesh.fsdp=-1 x mesh.context=1 x mesh.tensor=1: only"),
        ((-1, 3, 1, 1), "mesh.fsdp=3 .* does not cover 8 devices"),
        ((-1, 16, 1, 1), "mesh.fsdp=16 .* does not cover 8 devices"),
        ((2, 2, 1, 1), "mesh.data=2 .* does not cover 8 devices"),
        ((4, 4, 1, 1), "mesh.data=4 .* does not cover 8 devices"),
    ],
)
def test_a_mesh_that_does_not_cover_the_devices_is_refused(requested, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(Mesh(*requested))


def divisible_config():
    config = Config()
    config.model.width, config.model.num_heads, config.train.batch_size = 16, 8, 16
    return config


@pytest.mark.parametrize(
    ("mesh", "key", "value", "message"),
    [
        ((8, 1, 1, 1), "train.batch_size", 12, "accumulation=12 .* 8 devices"),
        ((4, 2, 1, 1), "train.batch_size", 12, "12 .* mesh.data=4 x mesh.fsdp=2"),
        ((8, 1, 1, 1), "train.accumulation", 4, "accumulation=4 .* 8 devices"),
        ((1, 8, 1, 1), "model.width", 20, "model.width=20 .* 8 devices of mesh.fsdp=8"),
        ((1, 1, 1, 8), "model.num_heads", 4, "model.num_heads=4 .* 8 devices of mesh.tensor=8"),
        ((1, 1, 1, 8), "model.num_kv_heads", 2, "model.num_kv_heads=2 .* 8 devices"),
        ((1, 1, 1, 8), "model.ff_width", 12, "model.ff_width=12 .* 8 devices"),
        ((1, 1, 8, 1), "train.length", 12, "train.length=12 .* 8 devices of mesh.context=8"),
    ],
)
def test_sizes_that_do_not_split_evenly_are_refused(mesh, key, value, message):
    config = divisible_config()
    check_fits(config, mesh_of(*mesh))
    section, name = key.split(".")
    setattr(getattr(config, section), name, value)
    with pytest.raises(ConfigError, match=message):
        check_fits(config, mesh_of(*mesh))


def test_a_vocabulary_that_does_not_divide_by_the_devices_is_refused():
    config = divisible_config()
    config.model.width, config.model.num_heads = 48, 12
    with pytest.raises(ConfigError, match=r"the vocabulary in multiples of 128 .* 3 devices"):
        check_fits(config, mesh_of(1, 1, 1, 3))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([(1, 1, 1, 1), (8, 1, 1, 1), (2, 2, 1, 2), (1, 1, 1, 8)]), st.integers(1, 4))
def test_rows_go_to_the_devices_and_come_back(sizes, rows_a_device):
    mesh = mesh_of(*sizes)
    placement = named_sharding(mesh, "batch", None)
    batch = np.arange(rows_a_device * axis_size(mesh, "batch") * 3).reshape(-1, 3)
    rows = addressable_rows(placement, len(batch))
    # A single process holds a part of every row.
    np.testing.assert_array_equal(rows, np.arange(len(batch)))
    placed = make_global_array(placement, batch[rows], len(batch))
    assert placed.sharding == placement
    assert {shard.data.shape for shard in placed.addressable_shards} == {(rows_a_device, 3)}
    np.testing.assert_array_equal(placed, batch)


def test_moments_are_sharded_like_their_parameter():
    mesh = mesh_of(1, 2, 2, 2)
    placement = named_sharding(mesh, "layers", "embed", "ff")
    param = jax.ShapeDtypeStruct((6, 4, 8), np.float32, sharding=placement)
    assert moment_sharding(param, (6, 4, 8)) == placement
    # Each factor of a matrix has one of its two axes.
    assert moment_sharding(param, (6, 4)).spec == jax.P(None, "fsdp")
    assert moment_sharding(param, (6, 8)).spec == jax.P(None, "tensor")
    assert moment_sharding(param, (1,)).is_fully_replicated
    assert moment_sharding(param, ()).is_fully_replicated


def test_a_constraint_does_not_shard_an_axis_that_does_not_divide():
    constrained = jax.jit(lambda x: constrain(x, "batch", "sequence", "heads"))
    with jax.set_mesh(mesh_of(2, 1, 2, 2)):
        assert constrained(np.zeros((4, 3, 6))).sharding.shard_shape((4, 3, 6)) == (2, 3, 3)


def test_a_constraint_has_no_effect_without_a_mesh():
    mesh, x = mesh_of(2, 2, 1, 2), np.zeros((8, 4, 8), np.float32)
    constrained = jax.jit(lambda x: constrain(x, "batch", None, "heads"))
    assert constrained(x).sharding.is_fully_replicated
    with jax.set_mesh(mesh):
        assert constrained(x).sharding.shard_shape(x.shape) == (2, 4, 4)


# From (cores, rows, mesh sizes, processes) to the number of devices of each process.
CPU_DEVICES = {
    (6, 32, (-1, 1, 1), 1): 4,
    (6, 12, (-1, 1, 1), 1): 6,
    (6, 7, (-1, 1, 1), 1): 1,
    (6, 8, (-1, 2, 1), 1): 4,
    (6, 12, (-1, 3, 1), 1): 6,
    (6, 0, (-1,), 1): 6,
    (1, 32, (-1, 1, 1), 1): 1,
    (6, 32, (-1, 2, 1), 2): 4,
    (6, 32, (-1, 4, 4), 2): 8,
    # A mesh without a -1 gets the devices that it names, whatever the number of cores.
    (2, 8, (2, 2, 2), 1): 8,
    (6, 8, (1, 1, 1), 1): 1,
    (6, 8, (2, 2, 2), 2): 4,
    # No number of devices is valid here: `make_mesh` raises the error later.
    (6, 5, (-1, 2, 1), 1): 2,
    (3, 12, (-1, 1, 1), 1): 3,
}
# Prints the chosen number for each case, and at the end the number of devices.
CHOOSE_DEVICES = """
import json, os, sys
import jax
from alibi_jax.distributed.sharding import use_cpu_cores
for cores, rows, mesh, processes in json.loads(sys.argv[1]):
    os.sched_getaffinity = lambda process: set(range(cores))
    use_cpu_cores(rows, mesh, processes)
    chosen = jax.config.values["jax_num_cpu_devices"]
    print(chosen)
    jax.config.update("jax_num_cpu_devices", -1)
jax.config.update("jax_num_cpu_devices", chosen)
print(jax.device_count())
"""


def choose_devices(cases, **environment):
    """The numbers that CHOOSE_DEVICES prints in a new process, where JAX has no devices yet."""
    unset = {"JAX_NUM_CPU_DEVICES", "XLA_FLAGS"}
    inherited = {key: value for key, value in os.environ.items() if key not in unset}
    done = subprocess.run(
        [sys.executable, "-c", CHOOSE_DEVICES, json.dumps(list(cases))],
        env=inherited | {"JAX_PLATFORMS": "cpu"} | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [int(line) for line in done.stdout.split()]


def test_cpu_cores_become_devices_as_far_as_they_divide_the_work():
    *chosen, devices = choose_devices(CPU_DEVICES)
    assert chosen == list(CPU_DEVICES.values())
    assert devices == chosen[-1]


@pytest.mark.parametrize(
    "environment",
    [{"JAX_NUM_CPU_DEVICES": "3"}, {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}],
)
def test_a_configured_number_of_devices_is_kept(environment):
    assert choose_devices([(6, 32, (-1,), 1)], **environment)[-1] == 3
