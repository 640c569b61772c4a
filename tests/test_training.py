import itertools
import json
import math
import os
import shutil
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_arrays, mesh_of

from alibi_jax.checkpoints import Checkpoints
from alibi_jax.config import ConfigError
from alibi_jax.data.token_streams import token_stream
from alibi_jax.data.tokenizers import ByteTokenizer
from alibi_jax.data.windows import TrainingBatches
from alibi_jax.distributed.processes import StopRequest
from alibi_jax.training.loop import train
from alibi_jax.training.step import Trainer, TrainState, summed_gradients
from alibi_jax.training.throughput import THROUGHPUT_METRICS

pytestmark = pytest.mark.usefixtures("quick_compile")

VOCAB = 256
# After one step with this optimizer, its state is the gradient itself.
PLAIN_GRADIENT = {"optimizer.name": "sgd", "optimizer.momentum": 0.0, "optimizer.clip_norm": 0.0}
# How many of the 16 targets of each row count. If each micro-batch or device were averaged first,
# one with 2 targets would weigh as much as one with 8.
COUNTS = [8, 2, 16, 0, 1, 5, 2, 8, 3, 3, 16, 16, 0, 0, 1, 9]
WEIGHTS = (np.arange(16) < np.array(COUNTS)[:, None]).astype(np.float32)


@pytest.fixture(scope="module")
def stream(tiny_config):
    return token_stream(tiny_config().data, "train", ByteTokenizer())


@pytest.fixture(scope="module")
def batches(stream, tiny_config):
    train = tiny_config().train
    return TrainingBatches(stream, train.length, train.batch_size, train.seed)


def run_steps(trainer, state, batches, steps):
    """(state, losses) after `steps` steps."""
    losses = []
    with jax.set_mesh(trainer.mesh):
        for step in range(steps):
            batch = trainer.device_batch(batches.batch_at(step))
            state, metrics = trainer.train_step(state, batch, np.int32(step))
            losses.append(float(metrics.nll / metrics.targets))
    return state, losses


def gradient(trainer, params, batches, weights):
    """(gradient, StepMetrics) of the first batch."""
    fresh = TrainState(params, trainer.tx.init(params))
    placed = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), fresh, trainer.abstract_state)
    with jax.set_mesh(trainer.mesh):
        batch = trainer.device_batch(batches.batch_at(0) | {"weights": weights})
        state, metrics = trainer.train_step(placed, batch, np.int32(0))
    return jax.device_get((state.optimizer[1].trace, metrics))


def assert_close(one, other, tolerance):
    """Each array differs by at most `tolerance` of its largest entry."""
    for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other)):
        apart = np.abs(a - b).max() / np.abs(b).max()
        assert apart <= tolerance, f"{jax.tree_util.keystr(path)}: {apart}"


def lines(workdir):
    """The lines of metrics.jsonl, without the throughput."""
    found = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in THROUGHPUT_METRICS} for line in found]


def saved_state(config, workdir, step):
    trainer = Trainer(config, VOCAB, mesh_of(1, 1, 1, 1))
    with Checkpoints(workdir) as checkpoints:
        return TrainState(**checkpoints.restore(step, **trainer.abstract_state._asdict()))


def all_files(workdir):
    return {path: path.stat().st_mtime_ns for path in workdir.rglob("*") if path.is_file()}


# The same batch in micro-batches and on meshes.


@pytest.fixture(scope="module")
def whole(tiny_config, batches):
    """(trainer, parameters, gradient, metrics) of one batch without accumulation on one device."""
    trainer = Trainer(tiny_config(PLAIN_GRADIENT), VOCAB, mesh_of(1, 1, 1, 1))
    params = jax.device_get(trainer.initial_state().params)
    return trainer, params, *gradient(trainer, params, batches, WEIGHTS)


def assert_same_gradient(whole, batches, config, mesh):
    _, params, expected, metrics = whole
    trainer = Trainer(config, VOCAB, mesh)
    found, measured = gradient(trainer, params, batches, WEIGHTS)
    assert measured.targets == metrics.targets == sum(COUNTS)
    np.testing.assert_allclose(measured, metrics, rtol=1e-5)
    assert_close(found, expected, 1e-5)


@pytest.mark.parametrize(("accumulation", "devices"), [(4, 1), (16, 1), (2, 8)])
def test_g1_accumulation_is_one_large_batch(tiny_config, batches, whole, accumulation, devices):
    config = tiny_config(PLAIN_GRADIENT | {"train.accumulation": accumulation})
    assert_same_gradient(whole, batches, config, mesh_of(devices, 1, 1, 1))


@pytest.mark.parametrize("accumulation", [1, 2, 4, 8])
def test_g1_summed_gradients_are_not_divided(accumulation):
    rows, weights = jnp.arange(1.0, 9.0), jnp.array([8.0, 2.0] * 4)

    def loss(scale, batch, _):
        return (scale * batch["rows"] * batch["weights"]).sum(), batch["weights"].sum()

    batch = {"rows": rows, "weights": weights}
    total, count, grads = summed_gradients(loss, jnp.float32(3.0), batch, accumulation)
    assert (total, count, grads) == (3 * (rows * weights).sum(), 40, (rows * weights).sum())


def test_each_micro_batch_has_its_index():
    # Neighbouring rows go to different micro-batches; each draws its own dropout.
    _, _, grads = summed_gradients(
        lambda scale, batch, index: ((scale * batch["rows"] * 10.0**index).sum(), jnp.float32(1)),
        jnp.float32(1.0),
        {"rows": jnp.array([1.0, 2.0, 3.0, 4.0])},
        2,
    )
    assert grads == (1 + 3) + 10 * (2 + 4)


def test_g2_uneven_weights_over_devices_are_one_device(tiny_config, batches, whole):
    assert_same_gradient(whole, batches, tiny_config(PLAIN_GRADIENT), mesh_of(8, 1, 1, 1))


def test_g3_a_batch_without_targets_changes_nothing(batches, whole):
    trainer, params, *_ = whole
    grads, metrics = gradient(trainer, params, batches, np.zeros_like(WEIGHTS))
    assert tuple(metrics) == (0, 0, 0, True)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(grads))


def test_a3_tensor_parallel_gradients(tiny_config, batches, whole):
    assert_same_gradient(whole, batches, tiny_config(PLAIN_GRADIENT), mesh_of(1, 1, 1, 8))


@pytest.mark.parametrize(("heads", "sizes"), [(8, [2, 4, 8]), (12, [2, 4])])
def test_a3_tensor_parallel_heads_keep_their_slopes(tiny_config, batches, heads, sizes):
    config = tiny_config({"model.num_heads": heads, "model.width": 4 * heads})
    inputs = batches.batch_at(0)["inputs"]
    initial = jax.device_get(Trainer(config, VOCAB, mesh_of(1, 1, 1, 1)).initial_state().params)

    def logits(tensor):
        trainer = Trainer(config, VOCAB, mesh_of(1, 1, 1, tensor))
        placement = jax.tree.map(lambda x: x.sharding, trainer.abstract_state.params)

        @jax.jit
        def run(params, inputs):
            model = nnx.merge(trainer.graphdef, params)
            return model.logits(model.hidden_states(inputs))

        with jax.set_mesh(trainer.mesh):
            return jax.device_get(run(jax.device_put(initial, placement), inputs))

    alone = logits(1)
    for tensor in sizes:
        np.testing.assert_allclose(logits(tensor), alone, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def one_device(tiny_config, batches):
    """(initial state, first 20 losses) on one device."""
    trainer = Trainer(tiny_config({"train.steps": 20}), VOCAB, mesh_of(1, 1, 1, 1))
    initial = trainer.initial_state()
    on_host = jax.device_get(initial)
    return on_host, run_steps(trainer, initial, batches, 20)[1]


MESHES = [s for s in itertools.product((1, 2, 4, 8), repeat=4) if math.prod(s) == 8]
# The meshes of a quick test: each axis alone, and each pair of axes.
QUICK = {(8, 1, 1, 1), (1, 8, 1, 1), (1, 1, 8, 1), (1, 1, 1, 8)}
QUICK |= {(2, 2, 1, 2), (2, 1, 4, 1), (1, 2, 2, 2)}


@pytest.mark.parametrize(
    "sizes", [s if s in QUICK else pytest.param(s, marks=pytest.mark.slow) for s in MESHES]
)
def test_a_mesh_changes_nothing(tiny_config, batches, one_device, sizes):
    trainer = Trainer(tiny_config({"train.steps": 20}), VOCAB, mesh_of(*sizes))
    initial = trainer.initial_state()
    assert_same_arrays(jax.device_get(initial), one_device[0])
    _, losses = run_steps(trainer, initial, batches, 20)
    np.testing.assert_allclose(losses, one_device[1], rtol=1e-4)
    # The losses have fallen, so that their agreement means something.
    assert losses[-1] < losses[0] - 0.3


# The adaptive vocabulary of the paper's word models, with three bands of bytes.
ADAPTIVE = {
    "model.adaptive_cutoffs": "40,110",
    "model.adaptive_factor": 2,
    "model.adaptive_dropout": 0.2,
    "model.final_norm": False,
    "model.use_bias": True,
}

# Twelve heads on eight devices, one position method of each other kind, and dropout.
OTHER_MODELS = {
    "twelve": {"model.num_heads": 12, "model.width": 24, "model.num_layers": 5},
    "near": {"train.length": 256, "train.batch_size": 8},
    **{name: {"model.position": name} for name in ("rotary", "t5", "fox", "learned")},
    "dropout": {"model.dropout": 0.1, "model.attention_dropout": 0.1, "train.accumulation": 2},
    "adaptive": ADAPTIVE,
}
OTHER_MESHES = {
    "twelve": [s for s in MESHES if s[3] <= 4],
    "near": [(1, 2, 4, 1), (1, 1, 2, 4)],
}
QUICK_OF_OTHERS = {(name, (1, 2, 2, 2)) for name in ("t5", "fox", "dropout")}


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        pytest.param(
            model,
            sizes,
            marks=[] if (model, sizes) in QUICK_OF_OTHERS else pytest.mark.slow,
        )
        for model in OTHER_MODELS
        for sizes in OTHER_MESHES.get(model, [(1, 2, 2, 2), (1, 1, 8, 1)])
    ],
)
def test_a_mesh_changes_nothing_of_other_models(tiny_config, model, sizes, stream):
    changes = {"train.steps": 20} | OTHER_MODELS[model]
    config = tiny_config(changes)
    batches = TrainingBatches(stream, config.train.length, config.train.batch_size, 0)
    losses = []
    for mesh in (mesh_of(1, 1, 1, 1), mesh_of(*sizes)):
        trainer = Trainer(config, VOCAB, mesh)
        losses.append(run_steps(trainer, trainer.initial_state(), batches, 20)[1])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert losses[0][-1] < losses[0][0] - 0.3


# Sharded state, one compilation, donation.


@pytest.mark.parametrize(
    ("optimizer", "sizes"),
    [("adamw", (1, 8, 1, 1)), ("sgd", (2, 2, 1, 2)), ("adafactor", (2, 2, 1, 2))],
)
@pytest.mark.sample(1)
def test_state_is_sharded_donated_and_compiled_for_once(
    tiny_config, batches, compiled, optimizer, sizes
):
    # Wide enough that Adafactor factors its moments.
    config = tiny_config({"optimizer.name": optimizer, "model.width": 128})
    trainer = Trainer(config, VOCAB, mesh_of(*sizes))
    num_shards = sizes[1] * sizes[3]
    state = trainer.initial_state()
    assert_sharded(state, num_shards)
    with jax.set_mesh(trainer.mesh):
        for step in range(3):
            before, batch = state, trainer.device_batch(batches.batch_at(step))
            state, _ = trainer.train_step(state, batch, np.int32(step))
            assert all(leaf.is_deleted() for _, leaf in large_leaves(before))
    assert_sharded(state, num_shards)
    assert compiled.count("_train_step") == 1


def large_leaves(state):
    """(name, array) of the model's matrices and their moments: 7 at least."""
    leaves = jax.tree.leaves_with_path(state)
    large = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves if leaf.size > 600]
    assert len(large) >= 7
    return large


def assert_sharded(state, num_shards):
    for name, leaf in large_leaves(state):
        assert not leaf.sharding.is_fully_replicated, name
        assert {shard.data.size for shard in leaf.addressable_shards} == {
            leaf.size // num_shards
        }, name


# Stopping and resuming within one process; test_distributed_processes.py kills real processes.


def test_g5_resumed_is_never_stopped(tiny_config, tmp_path):
    config = tiny_config({"optimizer.name": "adafactor", "optimizer.schedule": "linear"})
    whole = tmp_path / "whole"
    assert train(config, whole) == 10
    stopped = shutil.copytree(whole, tmp_path / "stopped")
    # The state of a run that was killed between the checkpoints of step 5 and step 10.
    shutil.rmtree(stopped / "checkpoints" / "10")
    assert train(config, stopped) == 10
    assert_same_arrays(saved_state(config, stopped, 10), saved_state(config, whole, 10))
    assert lines(stopped) == lines(whole)
    assert [line["step"] for line in lines(whole)] == list(range(1, 11))


@pytest.mark.slow
def test_adaptive_dropout_is_in_training(tiny_config, batches):
    def losses(**changes):
        config = tiny_config(ADAPTIVE | changes)
        trainer = Trainer(config, VOCAB, mesh_of(1, 1, 1, 1))
        return run_steps(trainer, trainer.initial_state(), batches, 1)[1]

    assert losses() == losses()
    assert losses() != losses(**{"model.adaptive_dropout": 0.0})


def test_a_save_is_no_slow_step(tiny_config, tmp_path, monkeypatch):
    save = Checkpoints.save

    def slow(*arguments):
        time.sleep(1.5)
        return save(*arguments)

    monkeypatch.setattr(Checkpoints, "save", slow)
    train(tiny_config({"train.log_every": 3}), tmp_path)
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    # The save after step 5 counts for the interval that is logged at step 6, but for no step.
    sixth = logged[1]
    assert sixth["step"] == 6
    assert sixth["slowest_step_seconds"] < 1.5
    assert sixth["tokens_per_second"] < 3 * 16 * 16 / 1.5
    assert set(sixth) >= set(THROUGHPUT_METRICS) - {"mfu"}


@pytest.mark.slow
def test_an_adaptive_model_learns_and_resumes(tiny_config, tmp_path):
    config = tiny_config(ADAPTIVE | {"train.steps": 40, "checkpoint.every": 20, "mesh.tensor": 2})
    whole = tmp_path / "whole"
    assert train(config, whole) == 40
    logged = lines(whole)
    assert logged[-1]["loss"] < logged[0]["loss"] - 0.5
    stopped = shutil.copytree(whole, tmp_path / "stopped")
    shutil.rmtree(stopped / "checkpoints" / "40")
    assert train(config, stopped) == 40
    assert_same_arrays(saved_state(config, stopped, 40), saved_state(config, whole, 40))
    assert lines(stopped) == logged


def test_g5_ten_steps_are_five_and_five(tiny_config, tmp_path):
    # A run with a constant schedule may be resumed with more steps.
    config = tiny_config(
        {"optimizer.name": "sgd", "optimizer.schedule": "constant", "mesh.fsdp": 2}
        | {"train.validation_every": 5, "train.validation_targets": 100, "train.log_every": 2}
    )
    ten, five = tmp_path / "ten", tmp_path / "five"
    assert train(config, ten) == 10
    config.train.steps = 5
    assert train(config, five) == 5
    config.train.steps = 10
    assert train(config, five) == 10
    assert_same_arrays(saved_state(config, five, 10), saved_state(config, ten, 10))
    assert lines(five) == lines(ten)
    assert [line["step"] for line in lines(ten)] == [2, 4, 5, 6, 8, 10]
    assert [line["step"] for line in lines(ten) if "validation_loss" in line] == [5, 10]


@pytest.fixture(scope="module")
def finished(tiny_config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished")
    config = tiny_config()
    assert train(config, workdir) == 10
    return workdir


def test_a_finished_run_does_nothing_more(tiny_config, finished):
    before = all_files(finished)
    assert train(tiny_config(), finished) == 10
    assert all_files(finished) == before


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.width", 32, "model.width=32, .* has 16"),
        ("model.position", "rotary", "model.position='rotary', .* has 'alibi'"),
        ("train.batch_size", 8, "train.batch_size=8, .* has 16"),
        ("train.length", 32, "train.length=32, .* has 16"),
        ("train.seed", 1, "train.seed=1, .* has 0"),
        ("train.steps", 20, "train.steps=20, .* has 10"),
        ("optimizer.learning_rate", 0.5, "optimizer.learning_rate=0.5, .* has 0.002"),
        ("data.tokenizer", "bpe", "data.tokenizer='bpe', .* has 'bytes'"),
    ],
)
def test_another_configuration_of_a_run_is_refused(tiny_config, finished, key, value, message):
    before = all_files(finished)
    with pytest.raises(ConfigError, match=message):
        train(tiny_config({key: value}), finished)
    assert all_files(finished) == before


def test_another_text_at_the_same_path_is_refused(tiny_config, tmp_path):
    text = tmp_path / "text.txt"
    config = tiny_config(
        {"data.dataset": "text", "data.path": str(text), "data.data_dir": str(tmp_path / "data")}
    )
    text.write_text("the cat sat on the mat. \n" * 200)
    config.train.steps = 10
    config.optimizer.schedule = "constant"
    assert train(config, tmp_path / "run") == 10
    config.train.steps = 12
    text.write_text("a dog lay down on a log. \n" * 200)
    with pytest.raises(ConfigError, match="another text"):
        train(config, tmp_path / "run")
    text.write_text("the cat sat on the mat. \n" * 200)
    assert train(config, tmp_path / "run") == 12


def test_any_number_of_words_fits_the_devices(tiny_config, tmp_path):
    (tmp_path / "wiki.train.tokens").write_text(" the cat sat on the mat . \n" * 20)
    (tmp_path / "wiki.valid.tokens").write_text(" the mat sat on the cat . \n")
    values = {
        "data.dataset": "wikitext",
        "data.path": str(tmp_path),
        "data.data_dir": str(tmp_path / "data"),
        "data.tokenizer": "words",
    }
    # Checks that need no text come before the text is read.
    with pytest.raises(ConfigError, match=r"train\.batch_size/train\.accumulation=12"):
        train(tiny_config(values | {"train.batch_size": 12}), tmp_path / "run")
    assert not (tmp_path / "data").exists()
    # The table of 6 words and the end of a line is padded to be sharded over 8 devices.
    config = tiny_config(values | {"mesh.data": 1, "mesh.tensor": 8})
    assert train(config, tmp_path / "run") == config.train.steps
    assert lines(tmp_path / "run")[-1]["loss"] < math.log(7) + 1.0


def test_keys_that_change_no_numbers_may_change(tiny_config, finished, tmp_path):
    workdir = shutil.copytree(finished, tmp_path / "copy")
    shutil.rmtree(workdir / "checkpoints" / "10")
    changes = {"mesh.fsdp": 2, "mesh.tensor": 2, "checkpoint.every": 3, "checkpoint.keep": 9}
    assert train(tiny_config(changes | {"train.log_every": 2}), workdir) == 10
    assert [line["step"] for line in lines(workdir)] == [1, 2, 3, 4, 5, 6, 8, 10]
    # Resumed on another mesh, it is the same run up to rounding.
    expected = {line["step"]: line["loss"] for line in lines(finished)}
    for line in lines(workdir):
        assert line["loss"] == pytest.approx(expected[line["step"]], rel=1e-4)
    with Checkpoints(workdir) as checkpoints:
        assert checkpoints.check_step(6) == 6


# Signals.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_remembered_until_the_step_ends(number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.at(1)
        os.kill(os.getpid(), number)
        assert stop.at(2)
        # A second signal has its usual effect.
        assert signal.getsignal(number) == before
    assert signal.getsignal(number) == before
