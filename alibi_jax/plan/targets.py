"""The devices of a plan, which need not be attached, and their peaks."""

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
    """Memory size and peaks of a device, from the manufacturer.

    `memory` is in bytes. `flops` is the peak of bfloat16 matrix products in FLOP/s, `bandwidth` the
    memory bandwidth in bytes/s. `link` is the bytes/s that the device can send along one axis of
    the network, the sum over both directions of a ring.
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
    """The devices of a plan, which `text` names; `device` is None if their peaks are unknown."""

    text: str
    devices: Sequence[jax.Device]
    device: Device | None


def open_target(text: str) -> Target:
    """The devices that `text` names.

    These are the devices of a TPU slice, as "v5e:16x16" (or v4, v5p, v6e), of two slices, as
    "2*v5e:16x16", or of a CPU, as "cpu:8". Call it before anything asks JAX for its devices. Raises
    ConfigError for invalid text, and if the TPU compiler is not installed.
    """
    count, star, slice_text = text.rpartition("*")
    kind, _, shape = slice_text.partition(":")
    if kind == "cpu" and shape.isdecimal() and int(shape) > 0 and not star:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", int(shape))
        return Target(text, jax.devices(), None)
    sizes = shape.split("x")
    valid_count = not star or (count.isdecimal() and int(count) > 0)
    if kind not in DEVICES or not all(size.isdecimal() for size in sizes) or not valid_count:
        raise ConfigError(
            f"--plan={text}: give a TPU and the shape of its slice, such as v5e:16x16 or v4:4x4x4 "
            f"(known: {', '.join(DEVICES)}), 2*v5e:16x16 for two slices, or cpu:8"
        )
    # Only the compiler is used: neither a TPU of this machine nor the metadata server that would
    # describe one. The compiler needs some machine type and worker, whichever they are.
    jax.config.update("jax_platforms", "cpu")
    # A program for devices that are not attached can be written to the cache but not read back.
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
        # The two cores of a v4 chip are one device, as at run time.
        options["chip_config_name"] = "megacore"
    try:
        devices = topologies.get_topology_desc(slice_text, platform="tpu", **options).devices
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(f"--plan={text}: there is no such slice ({error})") from None
    return Target(text, devices, DEVICES[kind])
