"""A sample of the strikes of strikes.py, and whether the comparison after them notices damage."""

import json
import random
import shutil
import signal

import pytest
import strikes
from cases import CASES, STEPS
from comparison import differences
from faults import BEFORE

TRAINING = CASES[0]


@pytest.fixture(scope="module")
def striker(tmp_path_factory):
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    cached = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    with strikes.Striker(tmp_path_factory.mktemp("strikes"), quick | cached) as striker:
        yield striker


def test_g5_a_killed_training_ends_as_if_nothing_had_happened(striker):
    struck, problems = striker.trial(TRAINING, [BEFORE], random.Random(1))
    assert not problems, struck
    assert struck


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1 process$", "2 processes$"])
@pytest.mark.parametrize("kinds", ["kill|SIGTERM", "file too large|disk full|no new files"])
def test_random_strikes(processes, kinds):
    arguments = ["--strikes=25", f"--cases={processes}", f"--kinds={kinds}"]
    assert strikes.main(arguments) == 0


# What the comparison notices.


@pytest.fixture
def finished(striker, tmp_path):
    """(a copy of the folder of a training, the folder, the folder with every step)."""
    undisturbed = striker.references.undisturbed(TRAINING).folder
    copy = shutil.copytree(undisturbed, tmp_path / "copy")
    return copy, undisturbed, striker.references.every_step(1)


def test_a_copy_has_no_difference(finished):
    assert differences(*finished) == []


def test_files_that_are_left_or_missing_are_named(finished):
    copy, *others = finished
    (copy / "data" / ".left").touch()
    (copy / "run" / "metrics.jsonl.new").touch()
    shutil.rmtree(copy / "run" / "tensorboard")
    found = differences(copy, *others)
    assert found[:2] == ["litter: data/.left", "litter: run/metrics.jsonl.new"]
    assert "missing: run/tensorboard" in found


def test_a_metric_that_is_repeated_lost_or_other_is_named(finished):
    copy, *others = finished
    path = copy / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    other = json.dumps(json.loads(lines[-1]) | {"loss": 0.0}) + "\n"
    for changed in (lines[:-1], [*lines, lines[-1]], [*lines[:-1], other]):
        path.write_text("".join(changed))
        (found,) = differences(copy, *others)
        assert found.startswith("metrics: ")


def test_a_checkpoint_of_another_step_is_named(finished):
    copy, undisturbed, every_step = finished
    checkpoints = copy / "run" / "checkpoints"
    shutil.rmtree(checkpoints / str(STEPS))
    (checkpoints / str(STEPS - 2)).rename(checkpoints / str(STEPS))
    found = differences(copy, undisturbed, every_step)
    assert f"checkpoints of steps [{STEPS}]" in found
    assert any(difference.startswith(f"step {STEPS}: ") for difference in found)


def test_a_byte_of_the_tokens_that_differs_is_named(finished):
    copy, *others = finished
    path = next(copy.glob("data/alibi_jax/*/tokens.bin"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (found,) = differences(copy, *others)
    assert found.startswith("contents of data/alibi_jax/")


# The faults themselves.


def test_a_kill_comes_before_exactly_the_operation_that_was_asked_for(striker, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "sys.stderr.write('begun\\n')\n"
        "open('read', 'rb')\n"
        "open('one', 'w').write('1')\n"
        "os.rename('one', 'two')\n"
        "os.remove('two')\n"
        "print('done')\n"
    )
    (tmp_path / "read").touch()
    left = []
    for event in range(1, 5):
        run = striker.programs.start(program, [], tmp_path, watch={"event": event})
        assert striker.programs.wait([run], 60)
        assert run.err == ["begun"]
        assert run.code == (-signal.SIGKILL if event < 4 else 0)
        left.append([name for name in ("one", "two") if (tmp_path / name).exists()])
        for name in ("one", "two"):
            (tmp_path / name).unlink(missing_ok=True)
    assert left == [[], ["one"], ["two"], []]
    assert run.out == ["done"]
    assert run.events == ["open one", "os.rename one two", "os.remove two"]
