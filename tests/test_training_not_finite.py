"""Numbers that are not finite: never saved, skipped if that is asked for, and a way back."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_arrays, mesh_of
from test_training import VOCAB, all_files, lines, saved_state

from alibi_jax.checkpoints import CheckpointError, Checkpoints, all_finite
from alibi_jax.config import ConfigError
from alibi_jax.data.windows import TrainingBatches
from alibi_jax.training.loop import train
from alibi_jax.training.step import StepMetrics, Trainer

pytestmark = pytest.mark.usefixtures("quick_compile")

# The first update overflows float32, although loss and gradient before it are finite.
OVERFLOW = {
    "optimizer.learning_rate": 3e38,
    "optimizer.weight_decay": 1e6,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
}
NAN = np.float32(np.nan)


@pytest.fixture
def bad_steps(monkeypatch):
    """A set of steps whose targets get the weight NaN."""
    steps = set()
    batch_at = TrainingBatches.batch_at

    def with_weights(self, step, rows=None):
        batch = batch_at(self, step, rows)
        weight = NAN if step + 1 in steps else np.float32(1)
        return batch | {"weights": np.full(batch["targets"].shape, weight)}

    monkeypatch.setattr(TrainingBatches, "batch_at", with_weights)
    return steps


def steps_of(workdir):
    with Checkpoints(workdir) as checkpoints:
        return checkpoints.steps()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_all_finite_finds_one_number(bad):
    tree = {"a": jnp.ones((3, 4)), "count": jnp.int32(7), "b": jnp.zeros(5, jnp.bfloat16)}
    assert all_finite(tree)
    assert not all_finite(tree | {"a": tree["a"].at[2, 3].set(bad)})
    assert not all_finite(tree | {"b": tree["b"].at[0].set(bad)})
    assert all_finite({"count": tree["count"]})


def test_the_largest_float32_is_finite():
    assert all_finite(jnp.full(3, np.finfo(np.float32).max))


def test_parameters_that_overflow_in_the_last_step_are_not_saved(tiny_config, tmp_path):
    config = tiny_config(OVERFLOW | {"train.steps": 1})
    with pytest.raises(FloatingPointError, match=r"step 1: .*moments not finite.*checkpoint: none"):
        train(config, tmp_path)
    assert steps_of(tmp_path) == []


@pytest.mark.parametrize("bad", [6, 8])
@pytest.mark.sample(1)
def test_a_bad_step_ends_the_run_and_names_the_last_checkpoint(
    tiny_config, tmp_path, bad_steps, bad
):
    bad_steps.add(bad)
    with pytest.raises(FloatingPointError, match=rf"^step {bad}: loss nan.*good checkpoint: 5\."):
        train(tiny_config(), tmp_path)
    assert steps_of(tmp_path) == [5]
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, bad))


def test_a_skipped_step_changes_nothing(tiny_config, stream_batches):
    trainer = Trainer(tiny_config({"train.max_skipped_steps": 1}), VOCAB, mesh_of(1, 1, 1, 1))
    with jax.set_mesh(trainer.mesh):
        before = jax.device_get(trainer.initial_state())
        batch = stream_batches.batch_at(0) | {"weights": np.full((16, 16), NAN)}
        state, metrics = trainer.train_step(
            trainer.initial_state(), trainer.device_batch(batch), np.int32(0)
        )
    assert isinstance(metrics, StepMetrics)
    assert not metrics.finite
    assert_same_arrays(jax.device_get(state), before)


@pytest.fixture
def stream_batches(tiny_config):
    from alibi_jax.data.token_streams import token_stream
    from alibi_jax.data.tokenizers import ByteTokenizer

    return TrainingBatches(token_stream(tiny_config().data, "train", ByteTokenizer()), 16, 16, 0)


def test_skipped_steps_are_counted_and_shown_once(tiny_config, tmp_path, bad_steps):
    bad_steps |= {3, 4, 7}
    config = tiny_config({"train.max_skipped_steps": 2, "train.log_every": 5})
    assert train(config, tmp_path) == 10
    text = (tmp_path / "metrics.jsonl").read_text()
    # Strict JSON has no NaN.
    logged = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert [(line["step"], line["skipped_steps"]) for line in logged] == [
        *[(3, 1), (4, 2), (5, 2), (7, 3), (10, 3)]
    ]
    assert [line["loss"] is None for line in logged] == [True, True, False, True, False]


def test_the_schedule_stands_still_in_a_skipped_step(tiny_config, tmp_path, bad_steps):
    bad_steps.add(2)
    config = tiny_config({"train.max_skipped_steps": 1})
    train(config, tmp_path / "skipped")
    bad_steps.clear()
    train(config, tmp_path / "whole")
    skipped, whole = (
        [x["learning_rate"] for x in lines(tmp_path / n)] for n in ("skipped", "whole")
    )
    assert skipped[2:] == whole[1:-1]
    state = saved_state(config, tmp_path / "skipped", 10)
    counts = [int(x) for x in jax.tree.leaves(state.optimizer) if x.dtype == jnp.int32]
    assert counts
    assert set(counts) == {9}


def test_too_many_bad_steps_in_a_row_end_the_run(tiny_config, tmp_path, bad_steps):
    bad_steps |= {2, 3, 6, 7, 8}
    with pytest.raises(FloatingPointError, match=r"^step 8: .*after 2 skipped steps"):
        train(tiny_config({"train.max_skipped_steps": 2}), tmp_path)
    assert steps_of(tmp_path) == [5]


def test_a_run_that_ended_goes_on_when_it_may_skip(tiny_config, tmp_path, bad_steps):
    bad_steps |= {4, 7}
    with pytest.raises(FloatingPointError, match="step 4"):
        train(tiny_config({"checkpoint.every": 2}), tmp_path / "run")
    config = tiny_config({"train.max_skipped_steps": 1, "checkpoint.every": 2})
    assert train(config, tmp_path / "run") == 10
    assert train(config, tmp_path / "whole") == 10
    # The two steps before the resume were compiled without skipping, which rounds otherwise.
    run, whole = lines(tmp_path / "run"), lines(tmp_path / "whole")
    assert [line["step"] for line in run] == [line["step"] for line in whole]
    assert [line.get("skipped_steps") for line in run] == [None] * 2 + [0] + [1] * 3 + [2] * 4
    for one, other in zip(run, whole):
        assert one["loss"] == (other["loss"] and pytest.approx(other["loss"], rel=1e-5))


def test_the_count_goes_on_after_a_resume(tiny_config, tmp_path, bad_steps):
    bad_steps |= {4, 7}
    config = tiny_config({"train.max_skipped_steps": 1, "optimizer.schedule": "constant"})
    config.train.steps = 5
    assert train(config, tmp_path) == 5
    config.train.steps = 10
    assert train(config, tmp_path) == 10
    assert [line["skipped_steps"] for line in lines(tmp_path)] == [0] * 3 + [1] * 3 + [2] * 4


def test_a_validation_loss_that_is_not_finite_ends_the_run(tiny_config, tmp_path, monkeypatch):
    from alibi_jax.evaluation.scoring import Scores

    monkeypatch.setattr(Scores, "mean_nll", property(lambda _: math.nan))
    changes = {"train.validation_every": 3, "train.validation_targets": 100, "checkpoint.every": 3}
    with pytest.raises(FloatingPointError, match=r"^step 3: validation loss nan.*: none\."):
        train(tiny_config(changes), tmp_path)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert steps_of(tmp_path) == []


# Going back.


def test_a_run_goes_back_to_a_step(tiny_config, tmp_path):
    config = tiny_config({"checkpoint.every": 2, "checkpoint.keep": 9})
    assert train(config, tmp_path) == 10
    assert steps_of(tmp_path) == [2, 4, 6, 8, 10]
    before, logged = saved_state(config, tmp_path, 10), lines(tmp_path)
    config.checkpoint.every = 100
    assert train(config, tmp_path, from_step=4) == 10
    assert steps_of(tmp_path) == [2, 4, 10]
    assert_same_arrays(saved_state(config, tmp_path, 10), before)
    assert lines(tmp_path) == logged


def test_going_back_to_a_step_without_a_checkpoint_changes_nothing(tiny_config, tmp_path):
    config = tiny_config()
    assert train(config, tmp_path / "run") == 10
    before = all_files(tmp_path)
    with pytest.raises(CheckpointError, match=r"--step=7: .* has steps \[5, 10\]"):
        train(config, tmp_path / "run", from_step=7)
    with pytest.raises(CheckpointError, match="has no checkpoints: leave --step out"):
        train(config, tmp_path / "other", from_step=7)
    assert all_files(tmp_path) == before


def test_a_checkpoint_of_bad_numbers_is_named(tiny_config, tmp_path):
    config = tiny_config({"optimizer.schedule": "constant"})
    assert train(config, tmp_path) == 10
    state = saved_state(config, tmp_path, 10)
    params = jax.tree.map(lambda x: x.at[...].set(NAN), state.params)
    with Checkpoints(tmp_path, config.checkpoint) as checkpoints:
        metadata = checkpoints.metadata(10)
        checkpoints.remove_after(5)
        checkpoints.save(params, state.optimizer, metadata)
    config.train.steps = 12
    with pytest.raises(
        CheckpointError, match=r"/10 is damaged \(params: .*not.*finite\): give --step=5 "
    ):
        train(config, tmp_path)
    assert train(config, tmp_path, from_step=5) == 12


@pytest.mark.parametrize("value", [1e39, 3.41e38, 1e-39, math.inf, math.nan])
def test_a_learning_rate_that_float32_cannot_hold_is_refused(tiny_config, tmp_path, value):
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate=.*finite number in float32"):
        train(tiny_config({"optimizer.learning_rate": value}), tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("value", [0.0, 3.4028234e38, 1.18e-38, 1])
def test_numbers_of_float32_are_accepted(tiny_config, value):
    tiny_config({"optimizer.learning_rate": value}).check()


def test_a_whole_number_that_no_float_holds_is_refused(tiny_config):
    with pytest.raises(ConfigError, match=r"model\.dropout=inf must be a finite number in float32"):
        tiny_config({"model.dropout": 10**400}).check()
