"""The devices to plan for, which need not be here, and what is known of them."""

import dataclasses
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import jax

from alibi_jax.config import ConfigError
from alibi_jax.flops import PEAKS


@dataclasses.dataclass(frozen=True)
class Device:
    """What one device of a kind can do, as its maker says.

    `flops` of bfloat16 products and `bandwidth` of its memory are per second; so is `link`, the
    bytes that it can send along one axis of the network, both ways round a ring together.
    """

    name: str
    memory: int
    flops: float
    bandwidth: float
    link: float


_GIB = 2**30
# Cloud TPU documentation, "TPU v4", "v5e", "v5p", "v6e"; links as in "How to Scale Your Model"
# (Austin et al. 2025), chapter 2.
DEVICES = {
    "v4": Device("TPU v4", 32 * _GIB, PEAKS["TPU v4"], 1228e9, 90e9),
    "v5e": Device("TPU v5e", 16 * _GIB, PEAKS["TPU v5 lite"], 819e9, 90e9),
    "v5p": Device("TPU v5p", 95 * _GIB, PEAKS["TPU v5"], 2765e9, 180e9),
    "v6e": Device("TPU v6e", 32 * _GIB, PEAKS["TPU v6 lite"], 1640e9, 180e9),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """Where a run is planned for: its devices, and what one of them can do, where that is known."""

    text: str
    devices: Sequence[jax.Device]
    device: Device | None


def open_target(text: str) -> Target:
    """The devices of "v5e:16x16" (or v4, v5p, v6e), of two such slices "2*v5e:16x16", or "cpu:8".

    Must come before anything asks JAX for its devices. Raises ConfigError that says what is wrong.
    """
    count, star, rest = text.rpartition("*")
    kind, _, shape = rest.partition(":")
    if kind == "cpu" and shape.isdigit() and int(shape) > 0 and not star:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", int(shape))
        return Target(text, jax.devices(), None)
    sizes = shape.split("x")
    counted = not star or (count.isdigit() and int(count) > 0)
    if kind not in DEVICES or not all(x.isdigit() for x in sizes) or not counted:
        raise ConfigError(
            f"--plan={text}: give a TPU and the shape of a slice of it, as v5e:16x16 or v4:4x4x4 "
            f"(known: {', '.join(DEVICES)}), 2*v5e:16x16 for two slices, or cpu:8"
        )
    # The compiler alone is asked: no TPU of this machine, nor what would tell of one. Any type of
    # machine and worker will do, and without them it complains.
    jax.config.update("jax_platforms", "cpu")
    # What is compiled for devices that are not here could be kept, but not read back.
    jax.config.update("jax_enable_compilation_cache", False)
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
    }
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"--plan={text} needs the TPU compiler, which runs on any Linux machine: "
            "pip install '.[tpu]'"
        )
    from jax.experimental import topologies

    options: dict[str, Any] = {"num_slices": int(count)} if star else {}
    if kind == "v4":
        # A chip's two cores as one device, as they are where it runs.
        options["chip_config_name"] = "megacore"
    try:
        devices = topologies.get_topology_desc(rest, platform="tpu", **options).devices
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(f"--plan={text}: there is no such slice ({error})") from None
    return Target(text, devices, DEVICES[kind])
