"""Every benchmark as a user runs it, at a small size; most of them with `-m slow`.

`TORCH_PYTHON=PATH pytest -m slow tests/test_benchmarks.py` takes PyTorch from that interpreter.
"""

import os
import re
import subprocess
import sys
from typing import NamedTuple

import pytest
from commands import PAGES, assert_is_valid, commands, flags_of, usage
from helpers import REPOSITORY, train_flags

TORCH_PYTHON = os.environ.get("TORCH_PYTHON", sys.executable)
# What conftest.py sets in the environment, and a user does not.
OF_TESTS = (
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    "JAX_NUM_CPU_DEVICES",
    "XLA_FLAGS",
)


class Benchmark(NamedTuple):
    """The flags of the smallest size, and the beginnings of the lines that it must print."""

    flags: str
    lines: list[str]
    slow: bool = True
    # A module that the benchmark needs and that no test installs.
    needs: str | None = None


SMALL_MODEL = (
    "--config.model.num_layers=1 --config.model.width=16 --config.model.num_heads=2"
    " --config.train.length=16 --config.train.batch_size=2 --config.train.accumulation=1"
)
ATTENTION = "--lengths=256 --forward_lengths=512 --memory_length=256 --rounds=1"
OURS = ["ours, all cores", "ours", "ours without reach", "jax.nn, key bias", "naive"]
TRAIN_STEP = "--tokens=512 --lengths=512 --rounds=1"

BENCHMARKS = {
    "adaptive.py": Benchmark(
        "--length=16 --width=64 --rounds=1",
        [
            "| adaptive |",
            "| adaptive, words of the first band |",
            "| adaptive, words of the last band |",
            "| one table of all words |",
        ],
    ),
    "attention.py": Benchmark(
        f"{ATTENTION} --dtypes=float32",
        [
            *(
                f"| 256 | float32 | {name} | {x} |"
                for name in ("forward", "gradient")
                for x in OURS
            ),
            *(f"| 512 | float32 | forward | {x} |" for x in OURS),
            *(f"| {x} |" for x in OURS),
        ],
    ),
    "checkpoint.py": Benchmark(
        "--megabytes=1 --rounds=1",
        [
            "| call of save |",
            "| until it is saved |",
            "| restore all |",
            "| restore parameters |",
        ],
    ),
    "depth.py": Benchmark(
        "--loop=2 --compile=1,3 --rounds=1",
        ["| 2 | in a loop |", "| 2 | one by one |", "| 1 |", "| 3 |"],
    ),
    "evaluate.py": Benchmark(
        # Attention of up to 256 tokens does not use reach.
        f"--lengths=300 --tokens=300 --rounds=1 {SMALL_MODEL}",
        ["| 300 |"],
    ),
    "gpu_attention.py": Benchmark(
        "--device=cpu --lengths=512 --tokens=512 --heads=2 --head_size=16 --rounds=1",
        [
            f"| 512 | 1 | {name} | {engine} |"
            for name in ("forward", "gradient")
            for engine in ("no bias", "dense", "blockwise", "folded")
        ],
    ),
    "long_evaluation.py": Benchmark(
        f"--lengths=16,32 --targets=64 {SMALL_MODEL}", ["| 16 |", "| 32 |"]
    ),
    "loss.py": Benchmark(
        "--vocabulary=256 --length=16 --width=16 --rounds=1",
        [f"| {2**power:,} |" for power in (18, 20, 22, 23, 24, 25, 26)],
        slow=False,
    ),
    "positions.py": Benchmark(
        f"--methods=alibi --rounds=1 --new_tokens=2 {SMALL_MODEL}", ["none ", "alibi "]
    ),
    "precision.py": Benchmark(
        "--heads=2 --lengths=128,256",
        [
            "| exact distance, s - m(i-j) [dense, blockwise, pallas_tpu] |",
            "| key positions, s + mj |",
            "| folded into q and k, six columns [folded] |",
            "| row mj in bfloat16 |",
        ],
        slow=False,
    ),
    "reach.py": Benchmark(
        "--lengths=128 --block=64",
        [
            f"| random, {heads} heads | {tolerance} |"
            for heads in (8, 16)
            for tolerance in ("2^-24", "1e-3")
        ],
        slow=False,
    ),
    "throughput.py": Benchmark(
        f"--repeats=1 --multiples=1,2 {SMALL_MODEL}",
        ["training: ", "scoring at 16: ", "scoring at 32: "],
    ),
    "tpu_bundles.py": Benchmark("--length=1024", ["| forward |", "| backward |"], needs="libtpu"),
    "train_step.py": Benchmark(
        TRAIN_STEP,
        [
            f"| 512 | 1 | {name} |"
            for name in ("ours", "ours, heads sharded", "ours, naive attention")
        ],
    ),
}


def scripts():
    """The benchmarks; other modules in their folder are imported or started by them."""
    paths = (REPOSITORY / "benchmarks").glob("[!_]*.py")
    return sorted({path.name for path in paths} - {"torch_peer.py"})


def run(script, *flags):
    """The lines that a benchmark prints; its exit code must be 0."""
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *flags],
        cwd=REPOSITORY,
        env={name: value for name, value in os.environ.items() if name not in OF_TESTS},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    # The exit code is 1 where results differ.
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def assert_has_lines(printed, beginnings):
    """Asserts that each beginning is a printed line's, and that finite numbers follow it.

    A benchmark prints why it has left something out in place of the numbers. A cell may be empty,
    but not the first.
    """
    for beginning in beginnings:
        rests = [line.removeprefix(beginning) for line in printed if line.startswith(beginning)]
        assert rests, (beginning, printed)
        for rest in rests:
            cells = [cell.strip() for cell in rest.strip(" |").split("|")]
            assert cells[0], (beginning, rest)
            for cell in filter(None, cells):
                assert re.match(r"-?\d", cell), (beginning, rest)
                assert not re.search(r"\b(nan|inf)\b", cell), (beginning, rest)


def small_flags(script, tmp_path):
    """The flags of the smallest size; no file is written outside of `tmp_path`."""
    figure = [f"--figure={tmp_path / 'figure.png'}"] if "figure" in script_flags(script) else []
    return [*BENCHMARKS[script].flags.split(), *figure]


def script_flags(script):
    return flags_of(f"benchmarks/{script}")


def test_every_benchmark_has_its_smallest_size_here():
    assert sorted(BENCHMARKS) == scripts()


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_benchmarks_and_flags_that_exist(page):
    for program, flags in commands(PAGES[page]):
        if program.startswith("benchmarks/"):
            assert program.removeprefix("benchmarks/") in BENCHMARKS
            assert_is_valid(program, flags)


@pytest.mark.parametrize("script", scripts())
def test_a_benchmark_says_how_to_run_itself(script):
    shown = usage(REPOSITORY / "benchmarks" / script)
    assert [program for program, _ in shown] == [f"benchmarks/{script}"]
    assert_is_valid(*shown[0])


def test_the_commands_of_the_page_of_measurements_are_found():
    """So that the tests above cannot pass because they find no command."""
    page = commands(PAGES["docs/performance.md"])
    assert ("benchmarks/depth.py", ["--rounds=3", "--compile=4,5,8,32"]) in page
    assert ("benchmarks/tpu_bundles.py", ["--chip=v5e:2x2", "--head_size=128"]) in page
    assert {program for program, _ in page} >= {
        f"benchmarks/{name}" for name in BENCHMARKS if name not in ("precision.py", "reach.py")
    } - {"benchmarks/positions.py"}


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, marks=[pytest.mark.slow] if benchmark.slow else [])
        for script, benchmark in BENCHMARKS.items()
    ],
)
def test_a_benchmark_prints_its_table(script, tmp_path):
    if BENCHMARKS[script].needs is not None:
        pytest.importorskip(BENCHMARKS[script].needs)
    assert_has_lines(run(script, *small_flags(script, tmp_path)), BENCHMARKS[script].lines)


@pytest.mark.slow
def test_the_benchmark_of_reach_measures_a_trained_run(tiny_config, tmp_path):
    config = tiny_config({"train.steps": 2})
    command = [sys.executable, "train.py", *train_flags(config, tmp_path / "run")]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    printed = run("reach.py", *BENCHMARKS["reach.py"].flags.split(), f"--workdir={tmp_path}/run")
    trained = [f"| trained, 8 heads of 2 | {tolerance} |" for tolerance in ("2^-24", "1e-3")]
    assert_has_lines(printed, [*BENCHMARKS["reach.py"].lines, *trained])


# The benchmarks that compare with PyTorch. Their exit code is 1 where its results differ.


@pytest.fixture(scope="module")
def torch_flag():
    """The flag that names an interpreter with PyTorch."""
    has_torch = subprocess.run([TORCH_PYTHON, "-c", "import torch"], capture_output=True)
    if has_torch.returncode:
        pytest.skip(f"{TORCH_PYTHON} has no torch: pip install -e '.[bench]'")
    return f"--torch_python={TORCH_PYTHON}"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_training_step_has_the_loss_of_pytorch(torch_flag, dtype):
    printed = run("train_step.py", *TRAIN_STEP.split(), f"--dtype={dtype}", torch_flag)
    names = ["| 512 | 1 | torch |", "| 512 | 1 | torch, compiled |"]
    assert_has_lines(printed, [*BENCHMARKS["train_step.py"].lines, *names])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_has_the_results_of_pytorch(torch_flag, dtype, tmp_path):
    figure = tmp_path / "figure.png"
    flags = [*ATTENTION.split(), f"--dtypes={dtype}", f"--figure={figure}", torch_flag]
    printed = run("attention.py", *flags)
    torch = ["torch mask", "torch flex", "torch causal, no bias"]
    assert_has_lines(
        printed,
        [
            *(f"| 256 | {dtype} | forward | {name} |" for name in [*OURS, *torch]),
            # Flex attention has no gradient on a CPU.
            *(f"| 256 | {dtype} | gradient | {name} |" for name in [*OURS, torch[0], torch[2]]),
            *(f"| {name} |" for name in [*OURS, *torch]),
        ],
    )
    assert figure.read_bytes().startswith(b"\x89PNG")
