import errno
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_arrays, file_size_limit, flip, mesh_of

from alibi_jax.checkpoints import FORMAT, CheckpointError, Checkpoints, Metadata
from alibi_jax.checkpoints.errors import damage_named
from alibi_jax.config import Checkpoint
from alibi_jax.distributed.sharding import named_sharding
from alibi_jax.evaluation import load_run
from alibi_jax.training.loop import train
from alibi_jax.training.step import Trainer, TrainState

pytestmark = pytest.mark.usefixtures("quick_compile")

VOCAB = 256


def metadata(step):
    return Metadata(step, {}, "text", {"kind": "bytes"}, VOCAB, {})


def matrices(mesh, shape=(8, 16), value=1.0):
    """(params, optimizer), each a single matrix that is sharded over `mesh`."""
    placement = named_sharding(mesh, "embed", "ff")
    matrix = jax.device_put(value * jnp.arange(np.prod(shape), dtype=float).reshape(shape))
    return {"up": jax.device_put(matrix, placement)}, {"mu": jax.device_put(-matrix, placement)}


def abstract(tree, mesh=None, shape=None):
    placement = named_sharding(mesh or mesh_of(1, 1, 1, 1), "embed", "ff")
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(shape or x.shape, x.dtype, sharding=placement), tree
    )


def save(workdir, steps, mesh=None, **rules):
    """Saves checkpoints of these steps; the step scales their values."""
    with Checkpoints(workdir, Checkpoint(**rules)) as checkpoints:
        for step in steps:
            checkpoints.save(*matrices(mesh or mesh_of(1, 1, 1, 1), value=step), metadata(step))


def kept(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def trained(tiny_config, tmp_path_factory):
    """A workdir with checkpoints of steps 1 and 2, and its trainer on one device."""
    config = tiny_config(
        {"train.steps": 2, "checkpoint.every": 1, "optimizer.warmup_steps": 1}
        | {"optimizer.name": "adafactor"}
    )
    workdir = tmp_path_factory.mktemp("trained")
    train(config, workdir)
    return workdir, Trainer(config, VOCAB, mesh_of(1, 1, 1, 1))


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ({"keep": 1}, [6]),
        ({"keep": 2}, [5, 6]),
        ({"keep": 9}, [1, 2, 3, 4, 5, 6]),
        ({"keep": 1, "keep_every": 2}, [2, 4, 6]),
        ({"keep": 2, "keep_every": 4}, [4, 5, 6]),
        ({"keep": 1, "keep_every": 4}, [4, 6]),
    ],
)
@pytest.mark.sample(2)
def test_keep_rules(tmp_path, rules, left):
    save(tmp_path, range(1, 7), **rules)
    assert kept(tmp_path) == left


def test_keep_rules_hold_over_a_restart(tmp_path):
    for steps in ([1, 2, 3], [4], [5, 6]):
        save(tmp_path, steps, keep=2, keep_every=3)
    assert kept(tmp_path) == [3, 5, 6]


def test_a_save_takes_the_values_of_its_moment(tmp_path):
    params, optimizer = matrices(mesh_of(2, 2, 1, 2))
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    with Checkpoints(tmp_path, Checkpoint(keep=9)) as checkpoints:
        for number in range(4):
            checkpoints.save(params, optimizer, metadata(number))
            # The next step overwrites the buffers while the save is running.
            params, optimizer = step(params), step(optimizer)
    first, _ = matrices(mesh_of(1, 1, 1, 1))
    with Checkpoints(tmp_path) as checkpoints:
        for number in range(4):
            restored = checkpoints.restore(number, params=abstract(first))["params"]
            np.testing.assert_array_equal(restored["up"], first["up"] + number)


@pytest.mark.parametrize(
    "after", [(1, 1, 1, 1), (1, 2, 1, 1), (2, 1, 1, 2), (1, 4, 1, 2), (8, 1, 1, 1)]
)
@pytest.mark.parametrize("before", [(1, 1, 1, 1), (1, 4, 1, 2)])
def test_h1_restored_on_other_devices(tmp_path, before, after):
    save(tmp_path, [3], mesh_of(*before))
    params, optimizer = matrices(mesh_of(*after), value=3)
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(
            3,
            params=abstract(params, mesh_of(*after)),
            optimizer=abstract(optimizer, mesh_of(*after)),
        )
    assert_same_arrays(restored, {"params": params, "optimizer": optimizer})
    assert restored["params"]["up"].sharding == params["up"].sharding


def test_h2_parameters_are_read_alone(trained, tmp_path):
    workdir, trainer = trained
    with Checkpoints(workdir) as checkpoints:
        params = checkpoints.restore(2, params=trainer.abstract_state.params)["params"]
    copy = shutil.copytree(workdir, tmp_path / "copy")
    # Without its files the optimizer, which is not the default one, cannot be read.
    shutil.rmtree(copy / "checkpoints" / "2" / "optimizer")
    with Checkpoints(copy) as checkpoints:
        alone = checkpoints.restore(2, params=trainer.abstract_state.params)["params"]
    assert_same_arrays(alone, params)
    assert_same_arrays(load_run(copy, None).params, params)


@pytest.mark.parametrize("shape", [(8, 10), (8, 4), (16, 16)])
def test_h3_another_shape_is_refused(tmp_path, shape):
    save(tmp_path, [1])
    params, optimizer = matrices(mesh_of(1, 1, 1, 1))
    with Checkpoints(tmp_path) as checkpoints:
        said = re.escape(f"params: up has shape (8, 16), and this configuration needs {shape}")
        with pytest.raises(CheckpointError, match=said):
            checkpoints.restore(1, params=abstract(params, shape=shape))
        said = re.escape(f"optimizer: mu has shape (8, 16), and this configuration needs {shape}")
        with pytest.raises(CheckpointError, match=said):
            checkpoints.restore(1, optimizer=abstract(optimizer, shape=shape))


def test_h3_another_vocabulary_is_refused(trained):
    workdir, trainer = trained
    other = Trainer(trainer.config, 512, trainer.mesh)
    with (
        Checkpoints(workdir) as checkpoints,
        pytest.raises(CheckpointError, match=r"embedding has shape \(256, 16\).*needs \(512, 16\)"),
    ):
        checkpoints.restore(2, params=other.abstract_state.params)


def test_h3_a_missing_or_unknown_parameter_is_refused(tmp_path):
    save(tmp_path, [1])
    wanted = abstract(matrices(mesh_of(1, 1, 1, 1))[0])
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=r"down has shape none.*needs \(8, 16\)"):
            checkpoints.restore(1, params=wanted | {"down": wanted["up"]})
        with pytest.raises(CheckpointError, match=r"up has shape \(8, 16\).*needs none"):
            checkpoints.restore(1, params={})


def test_h4_the_optimizer_comes_back_as_it_began(trained):
    workdir, trainer = trained
    initial = trainer.initial_state()
    with Checkpoints(workdir) as checkpoints:
        restored = TrainState(**checkpoints.restore(2, **trainer.abstract_state._asdict()))
    assert jax.tree.structure(restored) == jax.tree.structure(initial)
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(initial)):
        assert (one.shape, one.dtype, one.sharding) == (other.shape, other.dtype, other.sharding)


def test_h5_what_was_restored_is_given_up_in_the_first_step(trained):
    """goodfire-ai/spd PR#932: otherwise a resumed run holds its state twice for one step."""
    workdir, trainer = trained
    with Checkpoints(workdir) as checkpoints:
        state = TrainState(**checkpoints.restore(2, **trainer.abstract_state._asdict()))
    tokens = np.zeros((trainer.config.train.batch_size, trainer.config.train.length), np.int32)
    with jax.set_mesh(trainer.mesh):
        batch = trainer.device_batch({"inputs": tokens, "targets": tokens})
        trainer.train_step(state, batch, np.int32(2))
    # Adafactor has placeholders of one number, which no step changes.
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state) if leaf.size > 1)


def test_a_half_written_checkpoint_counts_for_nothing(tmp_path):
    save(tmp_path, [1, 2], keep=9)
    whole = tmp_path / "checkpoints" / "2"
    # The name that Orbax gives to an unfinished checkpoint.
    half = whole.rename(f"{whole}.orbax-checkpoint-tmp")
    shutil.rmtree(half / "params")
    (tmp_path / "checkpoints" / "7.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 1
        with pytest.raises(CheckpointError, match=r"has steps \[1\]"):
            checkpoints.check_step(2)
    save(tmp_path, [2], keep=9)
    # What killed processes left is gone.
    assert kept(tmp_path) == [1, 2]
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 2


def test_missing_checkpoints_are_named(trained, tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoints here"):
        Checkpoints(tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "checkpoints").mkdir()
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(CheckpointError, match="no complete checkpoint yet"),
    ):
        checkpoints.check_step(None)
    with Checkpoints(trained[0]) as checkpoints:
        assert checkpoints.check_step(None) == 2
        assert checkpoints.check_step(1) == 1
        with pytest.raises(CheckpointError, match=r"--step=7: .* has steps \[1, 2\]"):
            checkpoints.check_step(7)


@pytest.mark.parametrize(
    ("position", "refused"), [("learned", True), ("t5", True), ("alibi", False)]
)
def test_tables_of_the_first_format_are_refused(position, refused, tmp_path):
    params, optimizer = matrices(mesh_of(1, 1, 1, 1))
    config = {"model": {"position": position}}
    with Checkpoints(tmp_path, Checkpoint()) as checkpoints:
        checkpoints.save(params, optimizer, Metadata(1, config, "text", {}, VOCAB, {}, format=1))
        checkpoints.wait()
        if refused:
            with pytest.raises(CheckpointError, match="table of positions elsewhere"):
                checkpoints.metadata(1)
        else:
            model = {"position": position, "remat": "none"}
            assert checkpoints.metadata(1).config == {"model": model}


def test_a_format_from_the_future_is_refused(tmp_path):
    params, optimizer = matrices(mesh_of(1, 1, 1, 1))
    with Checkpoints(tmp_path, Checkpoint()) as checkpoints:
        checkpoints.save(
            params, optimizer, Metadata(1, {}, "text", {}, VOCAB, {}, format=FORMAT + 1)
        )
        checkpoints.wait()
        with pytest.raises(CheckpointError, match="update alibi_jax"):
            checkpoints.metadata(1)


def test_checkpoints_that_a_kill_left_beyond_those_kept_are_removed(tiny_config, tmp_path):
    values = {"train.steps": 4, "checkpoint.every": 1, "checkpoint.keep": 9}
    train(tiny_config(values), tmp_path)
    assert kept(tmp_path) == [1, 2, 3, 4]
    # The run has finished, so that this start saves nothing.
    values["checkpoint.keep"] = 1
    assert train(tiny_config(values | {"checkpoint.keep_every": 3}), tmp_path) == 4
    assert kept(tmp_path) == [3, 4]


REMEDY = "give --step=1 to use the checkpoint before it"
DAMAGES = {
    "deleted": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "flipped": lambda path: flip(path, path.stat().st_size * 4),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
}


def read(workdir, trainer, step=2):
    with Checkpoints(workdir) as checkpoints:
        checkpoints.metadata(step)
        return checkpoints.restore(step, **trainer.abstract_state._asdict())


def read_or_refused(workdir, trainer, good):
    """Whether step 2 is refused in the one line; otherwise its values are `good`, to the bit."""
    said = ""
    try:
        values = read(workdir, trainer)
    except CheckpointError as error:
        said = str(error)
    if not said:
        assert_same_arrays(values, good)
        return False
    path = re.escape(f"{workdir}/checkpoints/2")
    assert re.fullmatch(rf"{path} is damaged \([^\n]{{5,160}}\): {REMEDY}", said), said
    return True


@pytest.fixture(scope="module")
def good(trained):
    return read(*trained)


def files_of(workdir):
    step = workdir / "checkpoints" / "2"
    return [path.relative_to(step) for path in sorted(step.rglob("*")) if path.is_file()]


# Neither Orbax nor this package reads these files.
UNREAD = ("commit_success.txt", "_sharding", "ocdbt.process_0/manifest.ocdbt")
# Orbax does not miss this file if it is not there.
OPTIONAL = "array_metadatas/process_0"


def check_damages(trained, good, workdir, damages):
    shutil.copytree(trained[0], workdir)
    names = files_of(workdir)
    assert len(names) == 18
    for name in names:
        path = workdir / "checkpoints" / "2" / name
        content = path.read_bytes()
        for damage in damages:
            DAMAGES[damage](path)
            refused = read_or_refused(workdir, trained[1], good)
            harmless = str(name).endswith(UNREAD) or damage in ("flipped", "longer")
            harmless |= damage == "deleted" and str(name).endswith(OPTIONAL)
            assert refused or harmless, (name, damage)
            path.write_bytes(content)
    assert not read_or_refused(workdir, trained[1], good)


def test_no_damage_of_a_file_goes_unnoticed(trained, good, tmp_path):
    check_damages(trained, good, tmp_path / "copy", ["deleted", "flipped"])


@pytest.mark.slow
def test_no_other_damage_of_a_file_goes_unnoticed(trained, good, tmp_path):
    check_damages(trained, good, tmp_path / "copy", ["empty", "cut", "zeros", "longer"])


@pytest.mark.slow
def test_no_flipped_bit_goes_unnoticed(trained, good, tmp_path):
    workdir = shutil.copytree(trained[0], tmp_path / "copy")
    pick, refused = random.Random(0), 0
    for name in files_of(workdir):
        path = workdir / "checkpoints" / "2" / name
        for bit in pick.sample(range(8 * path.stat().st_size), 10):
            flip(path, bit)
            refused += read_or_refused(workdir, trained[1], good)
            flip(path, bit)
    assert refused > 50


@pytest.mark.parametrize("item", ["params", "optimizer"])
def test_arrays_of_another_step_are_refused(trained, good, tmp_path, item):
    workdir = shutil.copytree(trained[0], tmp_path / "copy")
    folder = workdir / "checkpoints"
    shutil.rmtree(folder / "2" / item)
    shutil.copytree(folder / "1" / item, folder / "2" / item)
    with pytest.raises(CheckpointError, match=rf"damaged \({item}: its values are not those"):
        read(workdir, trained[1])
    # Evaluation reads the parameters alone.
    if item == "params":
        with pytest.raises(CheckpointError, match=rf"damaged \(params: .*\): {REMEDY}"):
            load_run(workdir)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: shutil.copytree(folder / "1", folder / "2"), "they are those of step 1"),
        (lambda folder: (folder / "2").symlink_to("1"), "they are those of step 1"),
        (lambda folder: (folder / "2").mkdir(), "their file is missing"),
    ],
)
def test_a_folder_that_is_no_checkpoint_of_its_step_is_refused(trained, tmp_path, make, said):
    workdir = shutil.copytree(trained[0], tmp_path / "copy")
    shutil.rmtree(workdir / "checkpoints" / "2")
    make(workdir / "checkpoints")
    with pytest.raises(CheckpointError, match=rf"2 is damaged \(metadata: {said}\): {REMEDY}"):
        read(workdir, trained[1])


def test_a_missing_item_is_named(trained, tmp_path):
    workdir = shutil.copytree(trained[0], tmp_path / "copy")
    shutil.rmtree(workdir / "checkpoints" / "2" / "optimizer")
    said = rf"2 is damaged \(optimizer: its folder is missing\): {REMEDY}"
    with pytest.raises(CheckpointError, match=said):
        read(workdir, trained[1])


def test_the_remedy_is_a_checkpoint_that_is_there(trained, tmp_path):
    workdir = shutil.copytree(trained[0], tmp_path / "copy")
    damaged = workdir / "checkpoints" / "1" / "_CHECKPOINT_METADATA"
    damaged.unlink()
    with pytest.raises(CheckpointError, match="give --step=2 to use the checkpoint after it"):
        read(workdir, trained[1], step=1)
    shutil.rmtree(workdir / "checkpoints" / "2")
    with pytest.raises(CheckpointError, match="there is no other one, so train anew"):
        read(workdir, trained[1], step=1)


def test_a_changed_number_of_the_configuration_is_noticed(trained, tmp_path):
    workdir = shutil.copytree(trained[0], tmp_path / "copy")
    path = workdir / "checkpoints" / "2" / "_CHECKPOINT_METADATA"
    values = json.loads(path.read_text())
    values["custom_metadata"]["config"]["optimizer"]["learning_rate"] *= 2
    path.write_text(json.dumps(values))
    said = "damaged \\(metadata: its values differ from those that were written"
    with Checkpoints(workdir) as checkpoints, pytest.raises(CheckpointError, match=said):
        checkpoints.metadata(2)


def test_damage_of_an_earlier_format_is_named_where_it_shows(tmp_path):
    written = pathlib.Path(__file__).parent / "data" / "format_2"
    workdir = shutil.copytree(written, tmp_path / "copy")
    for path in workdir.glob("checkpoints/5/params/d/*"):
        path.unlink()
    said = r"is damaged \(list of arrays: it can't be read\): there is no other one"
    with pytest.raises(CheckpointError, match=said):
        load_run(workdir)


PROGRAM = """
import pathlib, sys
import jax
jax.config.update("jax_num_cpu_devices", 1)
sys.path.append("tests")
from helpers import file_size_limit
from test_checkpoints import matrices, metadata, mesh_of
from alibi_jax.checkpoints import Checkpoints
from alibi_jax.checkpoints.errors import FailedSaves
from alibi_jax.config import Checkpoint

if sys.argv[2] == "late":
    FailedSaves.emit = lambda *_: None
with Checkpoints(pathlib.Path(sys.argv[1]), Checkpoint(keep=1)) as checkpoints:
    checkpoints.save(*matrices(mesh_of(1, 1, 1, 1)), metadata(1))
    checkpoints.wait()
    with file_size_limit(20_000):
        large = matrices(mesh_of(1, 1, 1, 1), (100, 100))
        checkpoints.save(*large, metadata(2))
        checkpoints.wait()
"""


@pytest.mark.parametrize("log", ["late", "in time"])
def test_a_save_on_a_full_disk_is_named_and_keeps_the_earlier_checkpoint(log, tmp_path):
    """In a process of its own, which has to end. Orbax may log the error after it has raised it."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), log],
        cwd=pathlib.Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        f"alibi_jax.checkpoints.errors.CheckpointError: {tmp_path}/checkpoints/2 could not be "
        "saved (File too large): make room there, and give the same command again, which goes on "
        "from step 1"
    )
    params, _ = matrices(mesh_of(1, 1, 1, 1))
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 1
        restored = checkpoints.restore(1, params=abstract(params))["params"]
    assert_same_arrays(restored, params)
    # Once there is room, saves go on.
    save(tmp_path, [2], keep=9)
    assert kept(tmp_path) == [1, 2]


def test_a_failed_save_ends_the_training_at_once(tiny_config, tmp_path):
    values = {"train.steps": 500, "checkpoint.every": 400, "train.log_every": 500}
    limit = file_size_limit(4000)
    save_checkpoint = Checkpoints.save
    try:
        with pytest.MonkeyPatch.context() as patch:

            def limited_save(*arguments):
                limit.__enter__()
                save_checkpoint(*arguments)

            patch.setattr(Checkpoints, "save", limited_save)
            said = "400 could not be saved .*make room there, and give the same command"
            with pytest.raises(CheckpointError, match=said):
                train(tiny_config(values), tmp_path)
    finally:
        limit.__exit__(None, None, None)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    fsync, synced = os.fsync, {}

    def spy(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.setdefault(os.path.relpath(path, tmp_path / "checkpoints"), kept_names())
        fsync(descriptor)

    def kept_names():
        return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())

    monkeypatch.setattr(os, "fsync", spy)
    save(tmp_path, [3])
    unfinished = "3.orbax-checkpoint-tmp"
    before = {path.removeprefix(unfinished) for path in synced if path.startswith(unfinished)}
    files = {
        str(path).removeprefix(f"{tmp_path}/checkpoints/3")
        for path in (tmp_path / "checkpoints").rglob("*")
    }
    # Orbax writes the last one when it renames.
    assert before >= files - {"/commit_success.txt"}
    assert all(synced[path] == [unfinished] for path in synced if path.startswith(unfinished))
    assert synced["3/_CHECKPOINT_METADATA"] == synced["."] == ["3"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        PermissionError(errno.EACCES, "Permission denied"),
        ValueError(f"UNKNOWN: Error reading [os_error_code='{errno.ESTALE}']"),
    ],
)
def test_an_error_that_says_nothing_about_the_files_is_not_called_damage(tmp_path, error):
    path = tmp_path / "10"
    with (
        pytest.raises(CheckpointError, match=r"/10 could not be read \(.*same command again"),
        damage_named(path, "params"),
    ):
        raise error
    (tmp_path / "5").mkdir()
    with (
        pytest.raises(CheckpointError, match=r"/10 is damaged \(params: gone\): give --step=5"),
        damage_named(path, "params"),
    ):
        raise ValueError("gone")
