"""Runs that are refused before they change anything, in real processes.

Either the processes of a run were not told the same, or another run holds the folder.
"""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys

import pytest
from helpers import QUICK_COMPILE, REPOSITORY, finish, free_port, train_flags, wait_for

import alibi_jax
from alibi_jax.distributed.folders import locked_folder
from alibi_jax.training.loop import train

pytestmark = pytest.mark.usefixtures("quick_compile")

HOST = socket.gethostname()
SAME_COMMAND = "start all processes with the same command and the same packages"


@pytest.fixture
def launch_two():
    """A function that starts two processes as one run; they are killed at the end.

    A command is a program with its flags. Each process may have a folder to work in and a folder to
    import the package from.
    """
    running = []

    def start(*commands, folders=(None, None), packages=(REPOSITORY, REPOSITORY)):
        several = [f"--coordinator=localhost:{free_port()}", "--num_processes=2"]
        for number, (program, *flags) in enumerate(commands):
            process = subprocess.Popen(
                [
                    *(sys.executable, str(REPOSITORY / program), *flags),
                    *(*several, f"--process_id={number}"),
                ],
                env=os.environ
                | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
                | {"PYTHONPATH": str(packages[number]), **QUICK_COMPILE},
                cwd=folders[number],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            running.append(process)
        return running[-2:]

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def refusal(launch_two):
    """A function that starts two processes and returns the one line that both print."""

    def run(*commands, **places):
        processes = launch_two(*commands, **places)
        first, second = (error_lines(finish(process, 1)[1]) for process in processes)
        assert first == second
        (line,) = first
        return line.removeprefix("error: ")

    return run


def error_lines(errors):
    return [line for line in errors.splitlines() if "error" in line]


def differ(theirs, ours):
    return f"process 1 ({HOST}) has {theirs}; process 0 ({HOST}) has {ours}: "


def other_folder(first, second):
    return (
        f"process 1 ({HOST}) does not see in --workdir={second} the file that process 0 ({HOST}) "
        f"wrote in --workdir={first}: give all processes the same --workdir, on a disk that they "
        "share"
    )


def test_another_configuration_is_named(refusal, tiny_config, tmp_path):
    command = ["train.py", *train_flags(tiny_config(), tmp_path / "run")]
    other = ["--config.train.seed=7", "--config.train.length=8", "--profile=1:2"]
    line = refusal(command, [*command, *other])
    theirs = "--profile='1:2', train.length=8, train.seed=7"
    ours = "--profile='', train.length=16, train.seed=0"
    assert line == differ(theirs, ours) + SAME_COMMAND
    assert os.listdir(tmp_path) == []


def test_another_text_under_the_same_name_is_named(refusal, text_config, tmp_path):
    text_config.data.path = "text.txt"
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        (folder / "text.txt").write_text(f"{folder.name} " * 1000)
    command = ["train.py", *train_flags(text_config, tmp_path / "run")]
    line = refusal(command, command, folders=folders)
    for fact in ("digest of the training text=", "training tokens='5", "training tokens='6"):
        assert fact in line
    assert line.startswith(f"process 1 ({HOST}) has ")
    assert line.endswith(": give all processes the same text")
    assert not (tmp_path / "run").exists()


def test_workdirs_that_are_not_one_folder_are_named(refusal, tiny_config, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    line = refusal(*(["train.py", *train_flags(tiny_config(), x)] for x in (first, second)))
    assert line == other_folder(first, second)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(("key", "value"), [("steps", 10), ("length", 16)])
@pytest.mark.parametrize("other", [0, 1])
def test_one_process_that_has_finished_its_steps_is_named(
    refusal, tiny_config, tmp_path, key, value, other
):
    """The run is finished after ten steps, so a process with ten steps has nothing to do."""
    config = tiny_config({"optimizer.schedule": "constant"})
    train(config, tmp_path)
    commands = [["train.py", *train_flags(config, tmp_path)] for _ in range(2)]
    commands[other].append(f"--config.train.{key}=20")
    values = [value, value]
    values[other] = 20
    key = f"train.{key}"
    expected = differ(f"{key}={values[1]}", f"{key}={values[0]}")
    assert refusal(*commands) == expected + SAME_COMMAND


@pytest.mark.slow
@pytest.mark.parametrize("finished", [0, 1])
def test_a_process_whose_workdir_has_a_finished_run_is_named(
    refusal, tiny_config, tmp_path, finished
):
    workdirs = [tmp_path / "0", tmp_path / "1"]
    train(tiny_config(), workdirs[finished])
    commands = (["train.py", *train_flags(tiny_config(), workdir)] for workdir in workdirs)
    assert refusal(*commands) == other_folder(*workdirs)


@pytest.mark.slow
@pytest.mark.parametrize("older", [0, 1])
def test_another_version_of_the_package_is_named(refusal, tiny_config, tmp_path, older):
    shutil.copytree(REPOSITORY / "alibi_jax", tmp_path / "old" / "alibi_jax")
    path = tmp_path / "old" / "alibi_jax" / "__init__.py"
    path.write_text(path.read_text().replace(f'"{alibi_jax.__version__}"', '"0.0.9"'))
    # A program imports the package that lies beside it, before all others.
    program = tmp_path / "start.py"
    train_py = str(REPOSITORY / "train.py")
    program.write_text(f"import runpy; runpy.run_path({train_py!r}, run_name='__main__')")
    command = [program, *train_flags(tiny_config(), tmp_path / "run")]
    packages, versions = [REPOSITORY, REPOSITORY], [alibi_jax.__version__] * 2
    packages[older], versions[older] = tmp_path / "old", "0.0.9"
    line = refusal(command, command, packages=packages)
    for number, version in enumerate(versions):
        fact = (
            f"process {number} ({HOST}) has version of alibi-jax='{version}', digest of alibi_jax="
        )
        assert fact in line
    assert line.endswith(SAME_COMMAND)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_evaluations_that_were_not_told_the_same_are_named(refusal, tiny_config, tmp_path):
    for name, changes in (("0", {}), ("1", {"train.seed": 3})):
        train(tiny_config(changes), tmp_path / name / "run")
    first, second = (tmp_path / name / "run" for name in ("0", "1"))
    command = ["eval.py", "--lengths=1x", "--passage=0"]
    here, there = f"--workdir={first}", f"--workdir={second}"
    line = refusal([*command, here, "--step=5"], [*command, here, "--targets=30"])
    assert line == differ("--step=None, --targets=30", "--step=5, --targets=512") + SAME_COMMAND
    line = refusal([*command, here], [*command, there])
    assert line == differ(f"--workdir=['{second}']", f"--workdir=['{first}']") + SAME_COMMAND
    line = refusal([*command, here], ["train.py", *train_flags(tiny_config(), first)])
    assert line.startswith(f"process 1 ({HOST}) has program='training', --workdir=None, ")
    # The same name is another run in another folder.
    shutil.rmtree(second / "checkpoints" / "10")
    commands = [[*command, "--workdir=run"]] * 2
    line = refusal(*commands, folders=(tmp_path / "0", tmp_path / "1"))
    assert line.startswith(f"process 1 ({HOST}) has step of the checkpoint=5, train.seed=3")
    assert line.endswith("let all processes read the same checkpoint in run")


def files(folder):
    return {path: path.read_bytes() for path in pathlib.Path(folder).rglob("*") if path.is_file()}


@pytest.mark.parametrize("several", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_second_trainer_is_refused_until_the_first_ends(
    launch, launch_two, tiny_config, tmp_path, several
):
    workdir = tmp_path / "run"
    changes = {"optimizer.schedule": "constant", "train.steps": 1_000_000}
    config = tiny_config(changes | {"checkpoint.every": 3, "checkpoint.keep": 1_000_000})
    first = launch("train.py", *train_flags(config, workdir), devices=2)
    wait_for(lambda: (workdir / "checkpoints" / "6").is_dir(), first)
    # Stopped, so that it changes no file itself.
    first.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, first.pid, os.WSTOPPED)
    before = files(workdir)
    config.train.steps = 12
    command = ["train.py", *train_flags(config, workdir)]
    seconds = launch_two(command, command) if several else [launch(*command, devices=2)]
    since = json.loads((workdir / "lock").read_text())["since"]
    for second in seconds:
        (line,) = error_lines(finish(second, 1)[1])
        assert line == (
            f"error: --workdir={workdir} is in use by process {first.pid} on {HOST} since {since}: "
            "wait until it ends, stop it, or give another --workdir"
        )
    assert files(workdir) == before
    first.kill()
    first.wait()
    # The file that the kill left does not block the next run.
    assert (workdir / "lock").exists()
    saved = [name for name in os.listdir(workdir / "checkpoints") if name.isdigit()]
    config.train.steps = max(map(int, saved)) + 3
    output, _ = finish(launch("train.py", *train_flags(config, workdir), devices=2))
    assert f"step {config.train.steps} of {config.train.steps}" in output
    assert not (workdir / "lock").exists()


@pytest.mark.slow
def test_evaluation_reads_a_workdir_that_is_trained_or_that_it_cannot_write_to(
    launch, tiny_config, tmp_path
):
    workdir = tmp_path / "run"
    config = tiny_config({"train.steps": 1_000_000, "checkpoint.keep": 1_000_000})
    first = launch("train.py", *train_flags(config, workdir), devices=2)
    wait_for(lambda: (workdir / "checkpoints" / "5").is_dir(), first)
    flags = [f"--workdir={workdir}", "--step=5", "--lengths=1x", "--passage=0"]
    finish(launch("eval.py", *flags, devices=2))
    assert first.poll() is None
    assert "results.json" in os.listdir(workdir / "eval")
    assert "lock" not in os.listdir(workdir / "eval")
    with locked_folder("out", workdir / "eval"):
        (line,) = error_lines(finish(launch("eval.py", *flags, devices=2), 1)[1])
    assert line.startswith(f"error: --out={workdir / 'eval'} is in use by process {os.getpid()} on")
    first.kill()
    first.wait()
    before = files(workdir)
    finish(launch("eval.py", *flags, f"--out={tmp_path / 'out'}", devices=2))
    assert (tmp_path / "out" / "results.json").exists()
    assert files(workdir) == before
