"""What the benchmarks share: runs that take turns, memory, and a peer in PyTorch.

Nothing here needs JAX but what says so: `torch_peer.py` runs where there may be none.
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

# A measurement is of as many calls as take so many seconds.
_LEAST_SECONDS = 0.1
_PRODUCT = 2048
# M_MMAP_THRESHOLD of glibc's malloc.h.
_MMAP_THRESHOLD = -3


def timed(run: Callable[[], Any]) -> float:
    """Seconds of a call that waits for its results: the mean of calls of a tenth of a second."""
    begun, calls = time.perf_counter(), 0
    while True:
        run()
        calls += 1
        seconds = time.perf_counter() - begun
        if seconds >= _LEAST_SECONDS:
            return seconds / calls


def in_turns(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each run returns in each round: a busy machine is busy for all of them."""
    numbers: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            numbers[name].append(run())
    return numbers


def spread(numbers: Sequence[float], form: str = ".2f") -> str:
    """The median, the least and the greatest."""
    middle, least, most = (f(numbers) for f in (statistics.median, min, max))
    return f"{middle:{form}} ({least:{form}} to {most:{form}})"


def ratios(numbers: Sequence[float], others: Sequence[float]) -> list[float]:
    """Round by round."""
    return [one / other for one, other in zip(numbers, others)]


def growth(run: Callable[[], Any]) -> float:
    """MiB by which the peak of this process's memory lies above what it held before the call.

    Of the second call, the first having made what stays. Linux and glibc only: the peak that
    `getrusage` tells cannot be set back, and a process starts with that of the one it comes from.
    """
    # Large blocks are taken from the system and given back, rather than kept for the next call.
    c = ctypes.CDLL(None)
    c.mallopt(_MMAP_THRESHOLD, 2**16)
    run()
    # JAX's results are ready a moment before what it took for them is given back.
    time.sleep(0.5)
    c.malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = _kilobytes("/proc/self/status", "VmRSS")
    run()
    return (_kilobytes("/proc/self/status", "VmHWM") - before) / 2**10


def check_room(size: float) -> None:
    """Raises MemoryError where so many bytes cannot be taken without swapping. Linux only."""
    if size > 2**10 * _kilobytes("/proc/meminfo", "MemAvailable"):
        raise MemoryError(f"needs {size / 2**30:.0f} GiB")


def _kilobytes(path: str, name: str) -> int:
    lines = pathlib.Path(path).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def normal_arrays(count: int, length: int, heads: int, size: int) -> np.ndarray:
    """Float32 `[count, 1, length, heads, size]`, the same numbers in every process."""
    shape = (count, 1, length, heads, size)
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def sample(results: Sequence[np.ndarray]) -> np.ndarray:
    """Some of the numbers of arrays `[B, T, N, H]`: enough to see whether they are the same."""
    return np.stack([x[:, :: max(1, x.shape[1] // 16), :, ::16] for x in results])


@contextlib.contextmanager
def attending(**options: Any) -> Iterator[None]:
    """The models that are traced in here call `attention` with these options. Needs JAX."""
    import functools

    from alibi_jax.model import self_attention

    plain = self_attention.attention
    self_attention.attention = functools.partial(plain, **options)
    try:
        yield
    finally:
        self_attention.attention = plain


def product_rate(dtype: str) -> Callable[[], float]:
    """A run that tells this machine's FLOP/s in a 2048 x 2048 x 2048 product. Needs JAX."""
    import jax
    import jax.numpy as jnp

    square = jnp.ones((_PRODUCT, _PRODUCT), dtype)
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    compiled = product.lower(square).compile()
    jax.block_until_ready(compiled(square))
    return lambda: 2 * _PRODUCT**3 / timed(lambda: jax.block_until_ready(compiled(square)))


def torch_version(python: str) -> str | None:
    """Of the PyTorch that an interpreter has; says so where it has none."""
    command = [python, "-c", "import torch; print(torch.__version__)"]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        print(f"{python} has no torch, which is left out: pip install -e '.[bench]'", flush=True)
        return None
    return found.stdout.strip()


class Peer:
    """`torch_peer.py` in a fresh process of an interpreter; a context manager.

    A call runs the function of that name there, with arguments and results that JSON can hold,
    and raises OSError with the message of what it raises.
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
            raise OSError(f"PyTorch's process ended ({self._process.wait()})")
        reply = json.loads(line)
        if "error" in reply:
            raise OSError(f"PyTorch: {reply['error']}")
        return reply["result"]

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        # Its standard input ends, and so does it.
        self._process.communicate()
