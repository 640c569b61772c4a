"""Device memory: what is free, what a compiled program needs, and the peak so far."""

import pathlib
import resource
import sys
from typing import Any

import jax

from alibi_jax.distributed import processes

# Files of a container's memory controller, for cgroups of version 2 and of version 1: the limit,
# the usage, the statistics, and the statistic of cached files, which the system frees on demand.
_CGROUP = pathlib.Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def available_bytes() -> int | None:
    """Bytes that are free on each device; None if the system does not report them.

    The devices of a CPU share its memory.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        free = _host_memory()
        return None if free is None else free // jax.local_device_count()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def check_program_fits(compiled: Any, subject: str, remedy: str) -> None:
    """Raises ValueError if a compiled program needs more memory than is free on a device.

    The message says that `subject` needs too much, gives both numbers and ends with `remedy`.
    Temporaries and outputs count; the arguments are in memory already. On a CPU, XLA calls
    libraries for matrix products and does not know their memory, which is therefore not counted.
    """
    free, analysis = available_bytes(), compiled.memory_analysis()
    if free is None or analysis is None:
        return
    needed = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    if processes.any_process(needed > free):
        raise ValueError(
            f"{subject} needs {_gib(needed)} of memory per device, but only {_gib(free)} are "
            f"free: {remedy}"
        )


def peak_bytes() -> int:
    """The peak memory so far of the device that used most; on a CPU, of this process."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [device["peak_bytes_in_use"] for device in stats if "peak_bytes_in_use" in device]
    # The unit is bytes on macOS and KiB on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    return max(peaks, default=unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def _host_memory() -> int | None:
    """Free bytes of the machine, or of the container if its limit leaves fewer."""
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * next(int(line.split()[1]) for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        return None
    for limit_file, usage_file, statistics_file, key in _CGROUP_FILES:
        try:
            limit, used = (int((_CGROUP / name).read_text()) for name in (limit_file, usage_file))
            lines = (_CGROUP / statistics_file).read_text().splitlines()
        except (OSError, ValueError):
            continue
        cached = next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)
        free = min(free, max(0, limit - used + cached))
    return free


def _gib(number: int) -> str:
    return f"{number / 2**30:.3g} GiB"
