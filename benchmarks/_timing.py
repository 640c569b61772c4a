"""Shared functions of the benchmarks: time, memory, and a process that runs PyTorch.

Only functions that say so need JAX, because `torch_peer.py` may run without JAX.
"""

import contextlib
import ctypes
import json
import pathlib
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

# A measurement repeats its call for at least this number of seconds.
_MIN_SECONDS = 0.1
# The matrices of `product_rate` have this number of rows and of columns.
_PRODUCT_SIZE = 2048
# The name of `product_rate` among the runs that take turns.
PRODUCT_RATE = "product rate"
# M_MMAP_THRESHOLD of glibc's malloc.h.
_MMAP_THRESHOLD = -3


def seconds_per_call(run: Callable[[], Any]) -> float:
    """The mean seconds of a call, over calls that together take at least a tenth of a second.

    `run` must wait for its results.
    """
    start, calls = time.perf_counter(), 0
    while True:
        run()
        calls += 1
        seconds = time.perf_counter() - start
        if seconds >= _MIN_SECONDS:
            return seconds / calls


def alternate(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The number that each run returns in each round.

    The runs take turns, so that other load on the machine slows down all of them.
    """
    numbers: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            numbers[name].append(run())
    return numbers


def median_and_range(numbers: Sequence[float], format_spec: str = ".2f") -> str:
    """The median, the minimum and the maximum, as text."""
    median, minimum, maximum = (f(numbers) for f in (statistics.median, min, max))
    return f"{median:{format_spec}} ({minimum:{format_spec}} to {maximum:{format_spec}})"


def ratios(numbers: Sequence[float], others: Sequence[float]) -> list[float]:
    """The ratio of two numbers in each round."""
    return [number / other for number, other in zip(numbers, others)]


def peak_memory(run: Callable[[], Any]) -> float:
    """The MiB of memory that a call needs at its peak, in addition to the memory before the call.

    The second call is measured, because the first call makes arrays that remain. Works only with
    Linux and glibc. The peak of `getrusage` does not serve: it cannot be reset, and a process
    inherits the peak of its parent.
    """
    # Large allocations are then returned to the system, not kept for the next call.
    c = ctypes.CDLL(None)
    c.mallopt(_MMAP_THRESHOLD, 2**16)
    run()
    # JAX frees temporary memory a moment after the results are ready.
    time.sleep(0.5)
    c.malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = _kilobytes("/proc/self/status", "VmRSS")
    run()
    return (_kilobytes("/proc/self/status", "VmHWM") - before) / 2**10


def check_memory(size: float) -> None:
    """Raises MemoryError if `size` bytes cannot be allocated without swapping. Linux only."""
    if size > 2**10 * _kilobytes("/proc/meminfo", "MemAvailable"):
        raise MemoryError(f"needs {size / 2**30:.0f} GiB, more than is available")


def _kilobytes(path: str, name: str) -> int:
    """The number in the line `name` of a file in /proc."""
    lines = pathlib.Path(path).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def normal_arrays(count: int, length: int, heads: int, size: int) -> np.ndarray:
    """Normal random numbers, float32 `[count, 1, length, heads, size]`, equal in all processes."""
    shape = (count, 1, length, heads, size)
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def sample(results: Sequence[np.ndarray]) -> np.ndarray:
    """Some of the numbers of arrays `[B, T, N, H]`: enough to compare the arrays."""
    return np.stack([x[:, :: max(1, x.shape[1] // 16), :, ::16] for x in results])


@contextlib.contextmanager
def attention_options(**options: Any) -> Iterator[None]:
    """Makes models that are traced in this context call `attention` with `options`. Needs JAX."""
    import functools

    from alibi_jax.model import self_attention

    plain = self_attention.attention
    self_attention.attention = functools.partial(plain, **options)
    try:
        yield
    finally:
        self_attention.attention = plain


def product_rate(dtype: str) -> Callable[[], float]:
    """A run that returns the FLOP/s of a 2048 x 2048 x 2048 matrix product. Needs JAX."""
    import jax
    import jax.numpy as jnp

    square = jnp.ones((_PRODUCT_SIZE, _PRODUCT_SIZE), dtype)
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    compiled = product.lower(square).compile()
    jax.block_until_ready(compiled(square))
    return lambda: (
        2 * _PRODUCT_SIZE**3 / seconds_per_call(lambda: jax.block_until_ready(compiled(square)))
    )


def torch_version(python: str) -> str | None:
    """The version of PyTorch in an interpreter; None, with a printed message, without PyTorch."""
    command = [python, "-c", "import torch; print(torch.__version__)"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        print(
            f"{python} has no torch, so PyTorch is not measured: pip install -e '.[bench]'",
            flush=True,
        )
        return None
    return result.stdout.strip()


class TorchProcess:
    """A new process in which the interpreter `python` runs `torch_peer.py`; a context manager.

    A call runs the function of that name in the process. Arguments and results must be valid in
    JSON. If the function raises an error, the call raises OSError with its message.
    """

    def __init__(self, python: str):
        script = pathlib.Path(__file__).with_name("torch_peer.py")
        self._process = subprocess.Popen(
            [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, function: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([function, arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise OSError(f"the process of PyTorch ended with exit code {self._process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise OSError(f"PyTorch: {reply['error']}")
        return reply["result"]

    def __enter__(self) -> "TorchProcess":
        return self

    def __exit__(self, *_: object) -> None:
        # The process ends when its standard input is closed.
        self._process.communicate()
