"""Runs in real processes: killed ones, stopped ones, and several processes as one run."""

import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers import (
    QUICK_COMPILE,
    REPOSITORY,
    assert_same_arrays,
    finish,
    free_port,
    mesh_of,
    train_flags,
    wait_for,
)

from alibi_jax.checkpoints import Checkpoints
from alibi_jax.distributed.processes import join
from alibi_jax.distributed.rendezvous import LaunchError
from alibi_jax.evaluation import EvaluationOptions, evaluate
from alibi_jax.training.loop import train
from alibi_jax.training.step import Trainer
from alibi_jax.training.throughput import THROUGHPUT_METRICS

pytestmark = pytest.mark.usefixtures("quick_compile")

STEPS = 40


def lines(workdir):
    """The lines of metrics.jsonl so far, without the throughput."""
    path = workdir / "metrics.jsonl"
    complete = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [
        {k: v for k, v in json.loads(x).items() if k not in THROUGHPUT_METRICS} for x in complete
    ]


def losses(workdir):
    return np.array([line["loss"] for line in lines(workdir)])


def saved_state(config, workdir, step=None):
    """(step, contents of its checkpoint); by default of the latest step."""
    trainer = Trainer(config, 256, mesh_of(1, 1, 1, 1))
    with Checkpoints(workdir) as checkpoints:
        step = checkpoints.check_step(step)
        return step, checkpoints.restore(step, **trainer.abstract_state._asdict())


# A single process that is stopped during training.


@pytest.fixture(scope="module")
def run_config(tiny_config):
    """A run whose steps draw random numbers of every kind."""
    return tiny_config(
        {"train.steps": STEPS, "train.accumulation": 2, "model.dropout": 0.1}
        | {"model.attention_dropout": 0.1, "model.activation_dropout": 0.1}
    )


@pytest.fixture(scope="module")
def train_as_users_do(launch, run_config):
    """A function that starts `train.py` with XLA's usual optimisations."""

    def start(workdir, *changes):
        flags = [*train_flags(run_config, workdir), *changes]
        return launch("train.py", *flags, devices=2, environment={})

    return start


@pytest.fixture(scope="module")
def undisturbed(train_as_users_do, tmp_path_factory):
    """The workdir of a run without interruption."""
    workdir = tmp_path_factory.mktemp("undisturbed")
    finish(train_as_users_do(workdir))
    return workdir


def kill_at_a_step(process, workdir):
    wait_for(lambda: len(lines(workdir)) >= 13, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL


def kill_in_the_middle_of_a_save(process, workdir):
    """Kills a run during a save that is not its first, so that a complete checkpoint exists."""

    def names():
        return [path.name for path in (workdir / "checkpoints").glob("*")]

    def saving():
        # Stopped first, so that the save cannot end between this check and the kill.
        if len(names()) < 2 or all(name.isdigit() for name in names()):
            return False
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        still_saving = any(not name.isdigit() for name in names())
        if not still_saving:
            process.send_signal(signal.SIGCONT)
        return still_saving

    wait_for(saving, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert any(not name.isdigit() for name in names())


def terminate(process, workdir):
    # Just after the save of step 9, and long before the next.
    wait_for(lambda: len(lines(workdir)) >= 10, process)
    process.terminate()
    output, _ = finish(process)
    stopped = lines(workdir)[-1]["step"]
    assert f"step {stopped} of {STEPS}" in output
    with Checkpoints(workdir) as checkpoints:
        assert checkpoints.latest_step() == stopped


@pytest.mark.parametrize("stop", [kill_at_a_step, kill_in_the_middle_of_a_save, terminate])
@pytest.mark.sample(1)
def test_g5_the_same_command_resumes_as_if_never_stopped(
    train_as_users_do, run_config, undisturbed, tmp_path, stop
):
    changes = ["--config.checkpoint.every=9"] if stop is terminate else []
    stop(train_as_users_do(tmp_path, *changes), tmp_path)
    assert 0 < len(lines(tmp_path)) < STEPS
    finish(train_as_users_do(tmp_path))
    assert lines(tmp_path) == lines(undisturbed)
    assert [line["step"] for line in lines(tmp_path)] == [*range(1, STEPS + 1)]
    assert_same_arrays(saved_state(run_config, tmp_path), saved_state(run_config, undisturbed))
    # No partial checkpoint is left.
    names = [sorted(os.listdir(workdir / "checkpoints")) for workdir in (tmp_path, undisturbed)]
    assert names == [["35", "40"], ["35", "40"]]


def test_a_finished_run_reports_that_and_changes_no_file(train_as_users_do, undisturbed):
    def files():
        return {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")}

    before = files()
    output, _ = finish(train_as_users_do(undisturbed))
    assert f"step {STEPS} of {STEPS}" in output
    assert files() == before


def test_a_loss_that_is_not_finite_ends_the_run_with_one_line(launch, tiny_config, tmp_path):
    config = tiny_config(
        {"optimizer.learning_rate": 1e30, "optimizer.clip_norm": 0.0, "checkpoint.every": 1}
    )
    output, errors = finish(launch("train.py", *train_flags(config, tmp_path), devices=2), code=1)
    (summary,) = output.splitlines()
    assert summary.endswith("(cpu), processes: 1, steps 1 to 10")
    last = errors.splitlines()[-1]
    assert last.startswith("error: step 2: loss nan, gradient norm nan; last good checkpoint: 1.")
    assert "Traceback" not in errors
    assert os.listdir(tmp_path / "checkpoints") == ["1"]
    _, state = saved_state(config, tmp_path)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state["params"]))


# Several processes as one run, with eight devices in total.


def test_two_processes_are_one_run(launch_two, launch, text_config, tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    outputs = [
        finish(process) for process in launch_two("train.py", *train_flags(text_config, two))
    ]
    # Only process 0 prints the output.
    assert [output.count("step 20 of 20") for output, _ in outputs] == [1, 0]
    train(text_config, one)
    assert [line["step"] for line in lines(two)] == [*range(1, 21)]
    np.testing.assert_allclose(losses(two), losses(one), rtol=1e-4)
    assert losses(two)[-1] < losses(two)[0] - 0.3

    # A run of two processes can be resumed by one.
    resumed = shutil.copytree(two, tmp_path / "resumed")
    shutil.rmtree(resumed / "checkpoints" / "20")
    assert train(text_config, resumed) == 20
    np.testing.assert_allclose(losses(resumed), losses(one), rtol=1e-4)

    check_a_killed_process(launch_two, text_config, two, tmp_path)
    check_evaluations_agree(launch_two, launch, two, tmp_path)


def check_a_killed_process(launch_two, config, undisturbed, tmp_path):
    """The other process stops, and the same command on both resumes as if nothing had happened."""
    workdir = tmp_path / "killed"
    first, second = launch_two("train.py", *train_flags(config, workdir))
    wait_for(lambda: len(lines(workdir)) >= 12, second)
    # Stopped first, so that the run cannot end between this check and the kill.
    second.send_signal(signal.SIGSTOP)
    assert len(lines(workdir)) < 20
    second.kill()
    _, errors = finish(first, code=1)
    assert "Traceback" not in errors
    last = errors.splitlines()[-1]
    assert "error: process 0 of 2 stops, because process 1 has stopped" in last
    assert "the same command on all processes resumes from the last checkpoint" in last
    for process in launch_two("train.py", *train_flags(config, workdir)):
        finish(process)
    assert lines(workdir) == lines(undisturbed)
    assert_same_arrays(saved_state(config, workdir), saved_state(config, undisturbed))


def check_evaluations_agree(launch_two, launch, workdir, tmp_path):
    options = {"lengths": "3x", "protocols": "nonoverlapping,sliding:8,fixed", "targets": 30}
    options |= {"passage": 8}
    flags = [f"--workdir={workdir}", *(f"--{name}={value}" for name, value in options.items())]

    def rows(out):
        return json.loads((out / "results.json").read_text())["runs"][0]["rows"]

    mesh = "--mesh=fsdp=2,context=2"
    processes = launch_two("eval.py", *flags, mesh, f"--out={tmp_path / 'two_processes'}")
    processes.append(launch("eval.py", *flags, f"--out={tmp_path / 'one_device'}", devices=1))
    for process in processes:
        finish(process)
    evaluate([str(workdir)], EvaluationOptions(**options), tmp_path / "eight_devices")
    sharded = "data=1,fsdp=2,context=2,tensor=2"
    evaluate([str(workdir)], EvaluationOptions(**options, mesh=sharded), tmp_path / "sharded")
    expected = rows(tmp_path / "one_device")
    assert len(expected) == 3
    for out in (tmp_path / name for name in ("two_processes", "eight_devices", "sharded")):
        for row, other in zip(rows(out), expected, strict=True):
            assert row["targets"] == other["targets"] > 0
            assert row["nll"] == pytest.approx(other["nll"], rel=1e-6)


def test_two_processes_stop_at_the_same_step(launch_two, text_config, tmp_path):
    workdir = tmp_path / "run"
    # Parameters are spread over both processes.
    text_config.mesh.data, text_config.mesh.fsdp, text_config.mesh.tensor = 1, 4, 2
    text_config.train.steps = 100_000
    # Some steps are not logged, as in any larger configuration.
    text_config.train.log_every = 2
    processes = launch_two("train.py", *train_flags(text_config, workdir))
    wait_for(lambda: len(lines(workdir)) >= 5, processes[0])
    # Only one process receives the signal.
    processes[1].terminate()
    for process in processes:
        finish(process)
    step, state = saved_state(text_config, workdir)
    assert lines(workdir)[-1]["step"] == step - step % 2 < text_config.train.steps
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


@pytest.mark.slow
def test_a_save_that_fails_in_one_process_ends_all_processes(launch_two, text_config, tmp_path):
    """By themselves, Orbax's threads would wait 20 minutes for one another."""
    # Both processes write parameters.
    text_config.mesh.data, text_config.mesh.fsdp, text_config.mesh.tensor = 1, 4, 2
    text_config.train.steps = 100_000
    first, second = launch_two("train.py", *train_flags(text_config, tmp_path / "run"))
    resource.prlimit(second.pid, resource.RLIMIT_FSIZE, (2000, 2000))
    _, errors = finish(second, code=1)
    assert errors.splitlines()[-1] == (
        f"error: {tmp_path}/run/checkpoints/10 could not be saved (File too large): make room "
        "there, and give the same command again, which starts anew"
    )
    assert "Traceback" not in errors
    _, errors = finish(first, code=1)
    assert "because process 1 has stopped" in errors.splitlines()[-1]


def test_a_process_that_is_missing_is_named(launch, text_config, tmp_path):
    coordinator = f"--coordinator=localhost:{free_port()}"
    flags = [*train_flags(text_config, tmp_path / "run"), coordinator, "--join_timeout=1"]
    alone = launch("train.py", *flags, "--num_processes=2", "--process_id=0", devices=1)
    _, errors = finish(alone, code=1)
    (line,) = errors.splitlines()
    assert line.startswith("error: process 1 of 2 did not start within 1 s: start all of them")
    assert not (tmp_path / "run").exists()


def test_an_error_while_preparing_data_is_raised_in_all_processes(
    launch_two, text_config, tmp_path
):
    text_config.data.path = str(tmp_path / "missing.txt")
    for process in launch_two("train.py", *train_flags(text_config, tmp_path / "run")):
        _, errors = finish(process, code=1)
        (line,) = (line for line in errors.splitlines() if line.startswith("error:"))
        assert "missing.txt' does not exist: give a text file or a folder" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_four_processes_are_one_run(launch_several, text_config, tmp_path):
    one = tmp_path / "one"
    train(text_config, one)
    sizes = {"mesh.data": 1, "mesh.fsdp": 2, "mesh.context": 2, "mesh.tensor": 2}
    mesh = [f"--config.{key}={size}" for key, size in sizes.items()]
    for name, flags in (("rows", []), ("mesh", mesh)):
        workdir = tmp_path / name
        flags = [*train_flags(text_config, workdir), *flags]
        outputs = [finish(process) for process in launch_several(4, "train.py", *flags)]
        assert [output.count("step 20 of 20") for output, _ in outputs] == [1, 0, 0, 0]
        np.testing.assert_allclose(losses(workdir), losses(one), rtol=1e-4)


# Restores a checkpoint onto a mesh; each process saves the shards that it holds.
RESTORE = """
import json, pathlib, sys
import jax, numpy as np
from alibi_jax.checkpoints import Checkpoints
from alibi_jax.config import Mesh, from_dict
from alibi_jax.distributed.processes import join
from alibi_jax.distributed.sharding import make_mesh
from alibi_jax.training.step import Trainer

workdir, out, mesh, *several = sys.argv[1:]
if several:
    join(several[0], 2, int(several[1]), 60)
with Checkpoints(pathlib.Path(workdir)) as checkpoints:
    step = checkpoints.check_step(None)
    config = from_dict(checkpoints.metadata(step).config)
    trainer = Trainer(config, 256, make_mesh(Mesh(**json.loads(mesh))))
    state = checkpoints.restore(step, **trainer.abstract_state._asdict())
arrays = {}
for path, leaf in jax.tree.leaves_with_path(state):
    whole = np.full(leaf.shape, -1, leaf.dtype)
    for shard in leaf.addressable_shards:
        whole[shard.index] = shard.data
    arrays[jax.tree_util.keystr(path)] = whole
np.savez(f"{out}.{jax.process_index()}.npz", **arrays)
"""
# Number of devices and mesh sizes of each restoration.
MESHES = {
    1: {},
    2: {"tensor": 2},
    4: {"fsdp": 2, "context": 2, "data": 1},
    16: {"data": 2, "fsdp": 4, "tensor": 2},
}


@pytest.mark.slow
def test_h1_a_run_of_any_devices_is_restored_on_any_others(
    launch, launch_two, tiny_config, tmp_path
):
    """Parameters and moments are equal bit for bit, and eval.py gives the same numbers."""
    sizes = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.context": 1, "mesh.tensor": 2}
    config, workdir = tiny_config(sizes), tmp_path / "run"
    assert train(config, workdir) == 10
    _, expected = saved_state(config, workdir)
    options = ["--lengths=3x", "--protocols=nonoverlapping,fixed", "--targets=30", "--passage=8"]
    flags = [f"--workdir={workdir}", *options]
    (script,) = [tmp_path / "restore.py"]
    script.write_text(RESTORE)
    evaluations = {}
    for devices, mesh in MESHES.items():
        out = tmp_path / f"on_{devices}"
        finish(launch(script, workdir, out, json.dumps(mesh), devices=devices))
        meshed = "--mesh=" + ",".join(f"{axis}={size}" for axis, size in mesh.items())
        finish(launch("eval.py", *flags, meshed, f"--out={out}", devices=devices))
        evaluations[devices] = out
    two, port = tmp_path / "on_two", free_port()
    arguments = (script, workdir, two, json.dumps({"fsdp": 8, "data": 1}), f"localhost:{port}")
    for process in [launch(*arguments, str(number), devices=4) for number in range(2)]:
        finish(process)
    for process in launch_two("eval.py", *flags, f"--out={two}"):
        finish(process)
    evaluations["two processes"] = two

    def restored(out):
        for path in sorted(tmp_path.glob(f"{out.name}.*.npz")):
            with np.load(path) as arrays:
                yield dict(arrays)

    paths = jax.tree.leaves_with_path(expected)
    for out in evaluations.values():
        parts = list(restored(out))
        assert len(parts) == (2 if out == two else 1)
        for path, leaf in paths:
            arrays = [part[jax.tree_util.keystr(path)] for part in parts]
            # Each process holds its shards of a sharded array, and both hold replicated arrays.
            found = (
                arrays[0] if len(arrays) == 1 else np.where(arrays[0] == -1, arrays[1], arrays[0])
            )
            np.testing.assert_array_equal(found, leaf, strict=True)

    def numbers(out):
        rows = json.loads((out / "results.json").read_text())["runs"][0]["rows"]
        return np.array([row["nll"] for row in rows]), [row["targets"] for row in rows]

    nll, targets = numbers(evaluations[1])
    assert len(nll) == 2
    for out in evaluations.values():
        np.testing.assert_allclose(numbers(out)[0], nll, rtol=1e-6)
        assert numbers(out)[1] == targets


@pytest.mark.slow
def test_two_terminals_as_in_docs_pods(tiny_config, tmp_path):
    """The commands of docs/pods.md, with another port and a smaller run."""
    page = (REPOSITORY / "docs" / "pods.md").read_text()
    section = page.split("## Two terminals on a laptop\n")[1].split("\n## ")[0]
    commands = re.findall(r"```sh\n(.*?)\n```", section, re.DOTALL)
    first, second, evaluation = (
        command.replace("localhost:9876", f"localhost:{port}")
        for port in [free_port()]
        for command in commands
    )
    for name in ("train.py", "eval.py", "configs"):
        (tmp_path / name).symlink_to(REPOSITORY / name)

    def start(command, flags):
        python, *rest = shlex.split(command)
        assert python == "python"
        return subprocess.Popen(
            [sys.executable, *rest, *flags],
            cwd=tmp_path,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"} | QUICK_COMPILE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    _, *smaller = train_flags(tiny_config(), tmp_path)
    processes = [start(command, smaller) for command in (first, second)]
    try:
        outputs = [finish(process)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert "step 10 of 10" in outputs[0]
    output, _ = finish(start(evaluation, ["--targets=30", "--passage=8", "--lengths=1x,2x"]))
    assert "perplexity per token" in output


# Prints the bytes of a run's parameters, and by how much memory rises while evaluation reads them.
READ = """
import pathlib, sys
import jax
from alibi_jax.config import parse_mesh
from alibi_jax.evaluation import load_run

def kibibytes(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

jax.block_until_ready(jax.numpy.ones(3) + 1)
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = kibibytes("VmRSS")
params = load_run(pathlib.Path(sys.argv[1]), None, parse_mesh(sys.argv[2])).params
size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print(size, 1024 * (kibibytes("VmHWM") - before))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "mesh"), [(1, "data=1"), (4, "fsdp=4")])
def test_h2_evaluation_reads_parameters_in_less_than_twice_their_memory(
    launch, tiny_config, tmp_path, devices, mesh
):
    """A single device holds all parameters; several devices hold a shard each."""
    changes = {"model.width": 1024, "model.num_layers": 8, "train.steps": 1}
    changes |= {"optimizer.schedule": "constant", "mesh.fsdp": 8, "mesh.data": 1}
    train(tiny_config(changes), tmp_path / "run")
    script = tmp_path / "read.py"
    script.write_text(READ)
    output, _ = finish(launch(script, tmp_path / "run", mesh, devices=devices))
    size, more = map(int, output.split())
    assert size > 4e8
    assert more < 2 * size


@pytest.mark.parametrize("address", ["localhost", "localhost:", "localhost:²", "h:0", "h:65536"])
def test_an_address_without_a_port_is_refused(address):
    with pytest.raises(LaunchError, match=r"--coordinator=.* a port from 1 to 65535"):
        join(address, 2, 0)
