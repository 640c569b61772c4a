"""Whether a compiled program fits into memory: asked before it runs, rather than found out."""

import pathlib
import resource
import sys
from typing import Any

import jax

from alibi_jax.distributed import processes

# What a container may have, what it has, and what of that are files, given back when needed:
# version 2 and version 1.
_CGROUP = pathlib.Path("/sys/fs/cgroup")
_LIMITS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def available() -> int | None:
    """Bytes that a program may still take on each device; None where the system doesn't say.

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


def check(compiled: Any, what: str, remedy: str) -> None:
    """Raises ValueError where the program for `what` needs more than there is, with both numbers.

    Its arguments are in memory already. On a CPU, XLA leaves products to libraries and doesn't know
    what they take: that is not counted.
    """
    free, analysis = available(), compiled.memory_analysis()
    if free is None or analysis is None:
        return
    needed = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    if processes.on_any(needed > free):
        raise ValueError(
            f"{what} needs {_gib(needed)} of memory a device, and {_gib(free)} are free: {remedy}"
        )


def peak() -> int:
    """The most bytes so far of one device; on a CPU, of this process."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    held = [one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one]
    # In bytes on macOS, in KiB on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    return max(held, default=unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def _host_memory() -> int | None:
    """What is free of the machine, or of what a container may have, if that is less."""
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * next(int(line.split()[1]) for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        return None
    for limit, usage, statistics, files in _LIMITS:
        try:
            most, taken = (int((_CGROUP / name).read_text()) for name in (limit, usage))
            lines = (_CGROUP / statistics).read_text().splitlines()
        except (OSError, ValueError):
            continue
        kept = next((int(line.split()[1]) for line in lines if line.startswith(f"{files} ")), 0)
        free = min(free, max(0, most - taken + kept))
    return free


def _gib(number: int) -> str:
    return f"{number / 2**30:.3g} GiB"
