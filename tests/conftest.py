"""Eight simulated CPU devices, set before anything asks JAX for its devices.

The package is imported inside the fixtures only: pytest puts its type checks in place after
this file is read.
"""

import atexit
import ctypes
import gc
import os
import pathlib
import shutil
import sys
import tempfile

import jax
import pytest

# What takes long to compile is compiled once, for all workers and the programs that they start:
# the variables are theirs too, and the folder this process's, which outlives them.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    folder = tempfile.mkdtemp(prefix="alibi-jax-compiled-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # Where something has imported JAX before this file, it has not seen them.
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
# XLA's earlier way to compile loops takes half as long. How users' programs are compiled is tested
# all the same: by test_cli, which leaves this out, and by all tests with newer versions,
# which don't have the flag, and would stop at it.
if jax.__version_info__ < (0, 11):
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")
jax.config.update("jax_num_cpu_devices", 8)

# Eight heads, sixteen rows: whatever mesh eight devices make, they fit.
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

# Resident bytes of a test process above which it drops its compiled programs: two processes have
# to fit beside other programs into the memory of a laptop.
MOST_RESIDENT = 2 * 2**30


def resident_bytes():
    """The resident memory of this process; 0 where the system has no /proc."""
    statm = pathlib.Path("/proc/self/statm")
    pages = int(statm.read_text().split()[1]) if statm.exists() else 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def pytest_runtest_teardown():
    if resident_bytes() > MOST_RESIDENT:
        jax.clear_caches()
        gc.collect()
        if sys.platform == "linux":
            # glibc keeps what is freed otherwise.
            ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def compiled():
    """The names of the functions that have been compiled in the test, one for each time.

    What `jax.jit` itself counts is 0 once its cache is full, as after very many tests
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
    """`tiny_config({"model.width": 32})`: a run of seconds, but for the values given."""
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
    """Twice as fast to compile, slower to run: for what no optimization of XLA's decides."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
