"""Eight simulated CPU devices, set before anything asks JAX for its devices.

The package is imported inside the fixtures only: pytest puts its type checks in place after
this file is read.
"""

import atexit
import collections
import ctypes
import functools
import gc
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import jax
import numpy as np
import pytest
from helpers import QUICK_COMPILE, REPOSITORY, free_port

# Each function is compiled once for all workers and the programs that they start. These inherit the
# variables; this process outlives them and deletes the folder.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    folder = tempfile.mkdtemp(prefix="alibi-jax-compiled-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # JAX read its variables when it was imported, before these two were set.
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
# XLA's earlier way of compiling loops takes half as long. The way that users' programs are compiled
# is still tested: test_cli removes this flag, and with newer versions of JAX all tests run without
# it, because those versions do not have it and would stop with an error.
if jax.__version_info__ < (0, 11):
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")
jax.config.update("jax_num_cpu_devices", 8)

# Eight heads and sixteen rows divide evenly over every mesh of eight devices.
TINY = {
    "model.num_layers": 1,
    "model.width": 16,
    "model.num_heads": 8,
    "train.length": 16,
    "train.batch_size": 16,
    "train.steps": 10,
    "train.log_every": 1,
    "train.validation_every": 0,
    "optimizer.warmup_steps": 2,
    "checkpoint.every": 5,
}

# A test process drops its compiled programs when it uses more memory than the limit: two processes
# have to fit into the memory of a laptop. The limit rises if little is freed, so that the next
# tests do not compile all over again.
LEAST_LIMIT, HEADROOM = 16 * 2**28, 2**28
limit = LEAST_LIMIT


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks all but `count` variants of a test with `sample(count)` as slow, evenly spaced."""
    variants = collections.defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("sample"):
            variants[item.path, item.originalname, *mark.args].append(item)
    for (*_, count), every in variants.items():
        kept = {part * len(every) // count for part in range(count)}
        for index, item in enumerate(every):
            if index not in kept:
                item.add_marker(pytest.mark.slow)


def resident_bytes():
    """The resident memory of this process; 0 if the system has no /proc."""
    statm = pathlib.Path("/proc/self/statm")
    pages = int(statm.read_text().split()[1]) if statm.exists() else 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def pytest_runtest_teardown():
    global limit
    if resident_bytes() > limit:
        jax.clear_caches()
        gc.collect()
        if sys.platform == "linux":
            # Without this, glibc keeps the memory that is freed.
            ctypes.CDLL(None).malloc_trim(0)
        limit = max(LEAST_LIMIT, resident_bytes() + HEADROOM)


@pytest.fixture
def compiled():
    """The names of the functions that the test has compiled, one for each compilation.

    The count that `jax.jit` itself keeps is 0 once its cache is full, as after very many tests
    (jax-ml/jax#39078).
    """
    names = []

    def listen(event, _, fun_name="", **__):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(fun_name.removeprefix("jit(").removesuffix(")"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """A folder in which the embedded corpus is prepared and tokenised as bytes."""
    from alibi_jax.config import Data
    from alibi_jax.data.token_streams import token_stream
    from alibi_jax.data.tokenizers import ByteTokenizer

    path = tmp_path_factory.mktemp("data")
    for split in ("train", "validation"):
        token_stream(Data(data_dir=str(path)), split, ByteTokenizer())
    return path


@pytest.fixture(scope="session")
def tiny_config(data_dir):
    """`tiny_config({"model.width": 32})` configures a run of seconds, with the values given."""
    from alibi_jax.config import Config

    def make(changes=()):
        config = Config()
        for key, value in ({"data.data_dir": str(data_dir)} | TINY | dict(changes)).items():
            section, name = key.split(".")
            setattr(getattr(config, section), name, value)
        return config

    return make


@pytest.fixture(scope="module")
def quick_compile():
    """Halves compile times and slows programs, for tests that need no optimization by XLA."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def start_script():
    """A function that starts a Python script of that text; processes left at the end are killed."""
    running = []

    def start(code, *arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def launch():
    """A function that starts `train.py` or `eval.py`; processes left at the end are killed."""
    running = []

    def start(program, *flags, devices, environment=QUICK_COMPILE):
        process = subprocess.Popen(
            [sys.executable, str(REPOSITORY / program), *flags],
            env=os.environ
            | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
            | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def launch_several(launch):
    """A function that starts `count` processes with eight devices in total."""

    def start(count, program, *flags):
        several = [f"--coordinator=localhost:{free_port()}", f"--num_processes={count}"]
        return [
            launch(program, *flags, *several, f"--process_id={number}", devices=8 // count)
            for number in range(count)
        ]

    return start


@pytest.fixture(scope="module")
def launch_two(launch_several):
    return functools.partial(launch_several, 2)


@pytest.fixture
def text_config(tiny_config, tmp_path):
    """A run on a text that no process has prepared yet."""
    words = np.random.default_rng(0).choice(["alpha", "beta", "gamma", "delta"], 4000)
    (tmp_path / "text.txt").write_text(" ".join(words))
    return tiny_config(
        {"data.dataset": "text", "data.path": str(tmp_path / "text.txt")}
        | {"data.data_dir": str(tmp_path / "data"), "train.steps": 20, "checkpoint.every": 10}
    )
