"""The training loop: data, checkpoints, metrics, and when to stop."""

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from alibi_jax.checkpoints import Checkpoints, Metadata, check_path
from alibi_jax.config import Config, ConfigError, flatten
from alibi_jax.data.windows import TrainingBatches, evaluation_windows
from alibi_jax.distributed import sharding
from alibi_jax.distributed.agreement import agree, process_zero_first
from alibi_jax.distributed.folders import check_shared, locked_folder
from alibi_jax.distributed.processes import StopRequest, say
from alibi_jax.evaluation.scoring import Scorer
from alibi_jax.progress import Progress
from alibi_jax.provenance import installation, provenance
from alibi_jax.training.metrics import MetricsWriter
from alibi_jax.training.optimizers import clipped_warmup, make_schedule
from alibi_jax.training.profiling import Profiler, parse_steps
from alibi_jax.training.resume import check_same_config, check_same_text, saved_metadata
from alibi_jax.training.step import StepMetrics, Trainer, TrainState, check_fits
from alibi_jax.training.texts import TrainingData, prepare_data
from alibi_jax.training.throughput import ThroughputMeter


def train(
    config: Config, workdir: pathlib.Path, profile: str = "", from_step: int | None = None
) -> int:
    """Trains until `train.steps`, from the latest checkpoint if there is one.

    `from_step` goes back to the checkpoint of that step: the run continues from there, and its
    later checkpoints and metrics are removed. `profile` "10:15" traces steps 10 to 15. Returns the
    last finished step, which is less than `train.steps` if the run was asked to stop (SIGTERM or
    Ctrl-C).

    Raises:
        ConfigError, DataError, LaunchError, FolderError: before training begins; the message is
            one line.
        CheckpointError: before training begins, and when a save has failed.
        FloatingPointError: for numbers that are not finite, in a step that may not be skipped or
            in a validation loss; that step is not saved.
        KeyboardInterrupt: if the run was asked to stop before its first step.
    """
    config.check()
    check_path(workdir, saving=True)
    traced_steps = parse_steps(profile)
    with StopRequest() as stop:
        agree(
            lambda: (
                {"program": "training", "--profile": profile, "--step": from_step}
                | flatten(config)
                | installation()
            ),
            "start all processes with the same command and the same packages",
        )
        mesh = sharding.make_mesh(config.mesh)
        check_fits(config, mesh)
        if workdir.exists() and not workdir.is_dir():
            raise ConfigError(f"--workdir={workdir} is a file: give a folder, or a new name")
        with locked_folder("workdir", workdir):
            check_shared("workdir", workdir)
            return _train_in(workdir, config, mesh, from_step, traced_steps, stop)


def _train_in(
    workdir: pathlib.Path,
    config: Config,
    mesh: jax.sharding.Mesh,
    from_step: int | None,
    traced_steps: tuple[int, int] | None,
    stop: StopRequest,
) -> int:
    """Trains as `train` does, in a workdir that this run holds."""
    saved = saved_metadata(workdir, from_step)
    agree(
        lambda: {"step of the checkpoint": saved and saved.step},
        f"check the disk of --workdir={workdir}, on which all processes must see the same files",
    )
    if saved is not None:
        check_same_config(saved, config, workdir)
        if saved.step >= config.train.steps:
            with Checkpoints(workdir, config.checkpoint) as checkpoints:
                checkpoints.remove_after(saved.step)
                checkpoints.remove_surplus()
            if from_step is not None:
                MetricsWriter(workdir, from_step).close()
            return saved.step
    start = 0 if saved is None else saved.step
    profiler = Profiler(traced_steps, workdir, start, config.train.steps)
    data = process_zero_first("data", lambda: prepare_data(config))
    agree(data.facts, "give all processes the same text")
    if saved is not None:
        check_same_text(saved, data.fingerprint, data.tokenizer, workdir)
    trainer = Trainer(config, data.tokenizer.vocab_size, mesh)
    batches = TrainingBatches(
        data.tokens, config.train.length, config.train.batch_size, config.train.seed
    )
    _print_summary(trainer, workdir, start)
    # Damage to metrics.jsonl shows in the line that the run logged last before its checkpoint.
    last_logged = 0 if saved is None else start - start % saved.config["train"]["log_every"]
    with Checkpoints(workdir, config.checkpoint) as checkpoints:
        state = (
            TrainState(**checkpoints.restore(start, **trainer.abstract_state._asdict()))
            if start
            else trainer.initial_state()
        )
        checkpoints.remove_after(start)
        with (
            MetricsWriter(workdir, start, last_logged) as writer,
            ThroughputMeter(config, trainer.vocab_size, mesh) as throughput,
            profiler,
        ):
            for note in writer.notes:
                say(note)
            loop = _TrainingLoop(trainer, data, checkpoints, writer, stop, throughput, profiler)
            return loop.run(state, batches, start)


def _print_summary(trainer: Trainer, workdir: pathlib.Path, start: int) -> None:
    """Prints the size of the model, the devices and the steps that will be trained."""
    params = jax.tree.leaves(trainer.abstract_state.params)
    mesh = " x ".join(f"{axis} {size}" for axis, size in trainer.mesh.shape.items())
    say(
        f"{workdir}: {sum(leaf.size for leaf in params):,} parameters, mesh {mesh} "
        f"({trainer.mesh.devices.flat[0].device_kind}), processes: {jax.process_count()}, steps "
        f"{start + 1} to {trainer.config.train.steps}"
    )
    optimizer, steps = trainer.config.optimizer, trainer.config.train.steps
    if clipped_warmup(optimizer, steps) < optimizer.warmup_steps:
        say(
            f"optimizer.warmup_steps={optimizer.warmup_steps} is more than train.steps={steps}: "
            "the learning rate rises until the last step"
        )


class _TrainingLoop:
    def __init__(
        self,
        trainer: Trainer,
        data: TrainingData,
        checkpoints: Checkpoints,
        writer: MetricsWriter,
        stop: StopRequest,
        throughput: ThroughputMeter,
        profiler: Profiler,
    ):
        self.trainer = trainer
        self.data = data
        self.checkpoints = checkpoints
        self.writer = writer
        self.stop = stop
        self.throughput = throughput
        self.profiler = profiler
        self.validate = self._make_validate()
        self.schedule = make_schedule(trainer.config.optimizer, trainer.config.train.steps)
        self.provenance = provenance()
        self.skipped_steps = writer.skipped_steps
        self.skipped_in_a_row = 0

    def run(self, state: TrainState, batches: TrainingBatches, start: int) -> int:
        config, trainer = self.trainer.config, self.trainer
        steps = config.train.steps
        rows = sharding.addressable_rows(trainer.batch_sharding, config.train.batch_size)
        reached = start
        self.profiler.after_step(start)
        self.throughput.begin_interval()
        with (
            jax.set_mesh(trainer.mesh),
            Progress(
                steps, "training", unit="step", initial=start, shown=jax.process_index() == 0
            ) as bar,
        ):
            pending: tuple[int, StepMetrics] | None = None
            local_batches = batches.iterate(start, steps - start, rows)
            for step, local in enumerate(local_batches, start=start + 1):
                state, metrics = trainer.train_step(
                    state, trainer.device_batch(local), np.int32(step - 1)
                )
                # The metrics are read one step late, so that the devices already run the next
                # step. They are read at once where the state is used or a rate is measured.
                if pending is not None:
                    self._finish_step(*pending)
                pending = (step, metrics)
                bar.update()
                self.checkpoints.check_save()
                stopping = self.stop.at(step)
                saving = step % config.checkpoint.every == 0 or step == steps or stopping
                traced = self.profiler.must_wait_for(step)
                if saving or self._logs(step) or step == start + 1 or traced:
                    loss, grad_norm = self._finish_step(step, metrics)
                    pending = None
                    with self.throughput.untimed():
                        self.profiler.after_step(step)
                    if self._logs(step):
                        self._log(step, loss, grad_norm, state, bar)
                    elif step == start + 1:
                        # The first step is mostly compilation: rates count from its end.
                        self.throughput.begin_interval()
                reached = step
                if saving:
                    self._save(step, state)
                if pending is None:
                    self.throughput.begin_step()
                if stopping:
                    break
        return reached

    def _validates(self, step: int) -> bool:
        train = self.trainer.config.train
        return bool(train.validation_every) and (
            step % train.validation_every == 0 or step == train.steps
        )

    def _logs(self, step: int) -> bool:
        train = self.trainer.config.train
        return step % train.log_every == 0 or step == train.steps or self._validates(step)

    def _finish_step(self, step: int, metrics: StepMetrics) -> tuple[float, float]:
        """Waits for a step and returns its (loss, gradient norm).

        Raises FloatingPointError for numbers that are not finite, unless the step was skipped.
        """
        nll, targets, grad_norm, finite = (float(x) for x in jax.device_get(metrics))
        self.throughput.end_step()
        loss = nll / max(targets, 1.0)
        if finite:
            self.skipped_in_a_row = 0
        else:
            self._count_skipped(step, loss, grad_norm)
        return loss, grad_norm

    def _count_skipped(self, step: int, loss: float, grad_norm: float) -> None:
        """Counts and logs a skipped step. Raises FloatingPointError if it was not to be skipped."""
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row > self.trainer.config.train.max_skipped_steps:
            state = ", parameters or moments not finite" if math.isfinite(loss + grad_norm) else ""
            skipped = self.skipped_in_a_row - 1
            raise self._not_finite(
                step,
                f"loss {loss}, gradient norm {grad_norm}{state}"
                + (f", after {skipped} skipped steps" if skipped else ""),
                "; or raise train.max_skipped_steps, and the same run skips such steps",
            )
        self.skipped_steps += 1
        if not self._logs(step):
            values = {"loss": loss, "grad_norm": grad_norm, "skipped_steps": self.skipped_steps}
            self.writer.write(step, values)

    def _not_finite(self, step: int, numbers: str, remedy: str = "") -> FloatingPointError:
        """The error for a step with these numbers, once the running save is complete."""
        self.checkpoints.wait()
        return FloatingPointError(
            f"step {step}: {numbers}; last good checkpoint: "
            f"{self.checkpoints.latest_step() or 'none'}. Lower optimizer.learning_rate or raise "
            f"optimizer.warmup_steps, and give another --workdir{remedy}"
        )

    def _log(
        self, step: int, loss: float, grad_norm: float, state: TrainState, bar: Progress
    ) -> None:
        """Writes the metrics of a step, with the validation loss where that is due."""
        values = {
            "loss": loss,
            # A skipped step does not advance the schedule.
            "learning_rate": float(self.schedule(step - 1 - self.skipped_steps)),
            "grad_norm": grad_norm,
            **self.throughput.metrics(),
        }
        if self.trainer.config.train.max_skipped_steps:
            values["skipped_steps"] = self.skipped_steps
        if self._validates(step):
            values |= self.validate(state.params)
            if not math.isfinite(values["validation_loss"]):
                raise self._not_finite(step, f"validation loss {values['validation_loss']}")
        self.writer.write(step, values)
        mfu = f", MFU {values['mfu']:.0%}" if "mfu" in values else ""
        bar.note(f"loss {loss:.3f}, {values['tokens_per_second']:,.0f} tokens/s{mfu}")
        self.throughput.begin_interval()

    def _save(self, step: int, state: TrainState) -> None:
        self.checkpoints.save(
            state.params,
            state.optimizer,
            Metadata(
                step=step,
                config=dataclasses.asdict(self.trainer.config),
                text=self.data.fingerprint,
                tokenizer=self.data.tokenizer.to_dict(),
                vocab_size=self.data.tokenizer.vocab_size,
                provenance=self.provenance,
            ),
        )

    def _make_validate(self) -> Callable[[Any], dict[str, float]]:
        """A function from parameters to the validation loss, computed as in eval.py.

        The loss is over the first `train.validation_targets` targets of the validation split, or
        over all of them where that is 0.
        """
        tokens = self.data.validation_tokens
        if tokens is None:
            return lambda _: {}
        train = self.trainer.config.train
        tokens = tokens[: (train.validation_targets or len(tokens)) + 1]
        windows = evaluation_windows(np.array([0, len(tokens)]), train.length, train.length)
        # Validation batches have the size of a training micro-batch.
        rows = train.batch_size // train.accumulation
        scorer = Scorer(self.trainer.graphdef, self.trainer.mesh, rows * train.length)

        def validate(params: Any) -> dict[str, float]:
            scores = scorer(params, tokens, windows, "validation")
            return {"validation_loss": scores.mean_nll, "validation_targets": len(scores.nll)}

        return validate
