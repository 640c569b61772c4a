"""Whether a compiled program fits into memory: asked before it runs, rather than found out."""

import pathlib
from typing import Any

import jax

from alibi_jax import processes

# Where a container's limit is, version 2 and version 1.
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")


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


def _host_memory() -> int | None:
    """What is free of the machine, or all that a container may have, if that is less."""
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * next(int(line.split()[1]) for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        return None
    for name in _LIMITS:
        try:
            free = min(free, int((pathlib.Path("/sys/fs/cgroup") / name).read_text()))
        except (OSError, ValueError):
            continue
    return free


def _gib(number: int) -> str:
    return f"{number / 2**30:.3g} GiB"
