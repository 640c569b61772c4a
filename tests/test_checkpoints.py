import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_arrays, mesh_of

from alibi_jax.checkpoints import FORMAT, CheckpointError, Checkpoints, Metadata
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
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 1
        with pytest.raises(CheckpointError, match=r"has steps \[1\]"):
            checkpoints.check_step(2)
    save(tmp_path, [2], keep=9)
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
