"""The loop around the step: data, checkpoints, metrics, and when to stop."""

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from alibi_jax.checkpoints import Checkpoints, Metadata
from alibi_jax.config import Config, ConfigError, flatten, from_dict
from alibi_jax.data.builders import open_documents
from alibi_jax.data.token_streams import token_stream
from alibi_jax.data.tokenizers import Tokenizer, make_tokenizer
from alibi_jax.data.windows import TrainingBatches, evaluation_windows
from alibi_jax.distributed import sharding
from alibi_jax.distributed.processes import StopRequest, first_then_all, say
from alibi_jax.evaluation.scoring import Scorer
from alibi_jax.progress import Progress
from alibi_jax.provenance import provenance
from alibi_jax.training.metrics import MetricsWriter
from alibi_jax.training.optimizers import clipped_warmup, make_schedule
from alibi_jax.training.profiling import Profiler, parse_steps
from alibi_jax.training.step import StepMetrics, Trainer, TrainState, check_fits
from alibi_jax.training.throughput import ThroughputMeter

# Keys that may differ between a run and its resumption; every other one shapes the numbers.
_FREE_TO_CHANGE = (
    "checkpoint.",
    "mesh.",
    "data.data_dir",
    "data.path",
    "train.log_every",
    "train.validation_",
)


def check_same_config(saved: Metadata, config: Config, workdir: pathlib.Path) -> None:
    """Raises ConfigError where a workdir's run was configured otherwise than this one."""
    before, now = flatten(from_dict(saved.config)), flatten(config)
    # Only a schedule that decays depends on where it ends.
    free = _FREE_TO_CHANGE + (("train.steps",) if now["optimizer.schedule"] == "constant" else ())
    for key, value in now.items():
        if before[key] != value and not key.startswith(free):
            raise ConfigError(
                f"{key}={value!r}, but the run in {workdir} has {before[key]!r}: give that value "
                "to resume it, or another --workdir to start anew"
            )


def check_same_text(
    saved: Metadata, text: str, tokenizer: Tokenizer, workdir: pathlib.Path
) -> None:
    """Raises ConfigError where a workdir's run was trained on another text or vocabulary."""
    if (saved.text, saved.tokenizer) != (text, tokenizer.to_dict()):
        raise ConfigError(
            f"the run in {workdir} was trained on another text than data.dataset now gives: "
            "restore that text to resume it, or give another --workdir to start anew"
        )


def train(config: Config, workdir: pathlib.Path, profile: str = "") -> int:
    """Trains until `train.steps`, from the latest checkpoint if there is one.

    Steps 10 to 15 are traced for `profile` "10:15". Returns the step reached: less than
    `train.steps` if asked to stop (SIGTERM).

    Raises:
        ConfigError, DataError, CheckpointError: before any work, one line that says why.
        FloatingPointError: for a loss or gradient that is not finite; nothing of it is saved.
    """
    config.check()
    traced = parse_steps(profile)
    mesh = sharding.make_mesh(config.mesh)
    check_fits(config, mesh)
    if workdir.exists() and not workdir.is_dir():
        raise ConfigError(f"--workdir={workdir} is a file: give a folder, or a new name")
    saved = _latest_metadata(workdir)
    if saved is not None:
        check_same_config(saved, config, workdir)
        if saved.step >= config.train.steps:
            return saved.step
    start = 0 if saved is None else saved.step
    profiler = Profiler(traced, workdir, start, config.train.steps)
    prepared = first_then_all("data", lambda: _prepare(config))
    if saved is not None:
        check_same_text(saved, prepared.text, prepared.tokenizer, workdir)
    trainer = Trainer(config, prepared.tokenizer.vocab_size, mesh)
    batches = TrainingBatches(
        prepared.tokens, config.train.length, config.train.batch_size, config.train.seed
    )
    _introduce(trainer, workdir, start)
    with Checkpoints(workdir, config.checkpoint) as checkpoints:
        state = (
            TrainState(**checkpoints.restore(start, **trainer.abstract_state._asdict()))
            if start
            else trainer.initial_state()
        )
        with (
            MetricsWriter(workdir, start) as writer,
            StopRequest() as stop,
            ThroughputMeter(config, trainer.vocab_size, mesh) as pace,
            profiler,
        ):
            loop = _Loop(trainer, prepared, checkpoints, writer, stop, pace, profiler)
            return loop.run(state, batches, start)


def _introduce(trainer: Trainer, workdir: pathlib.Path, start: int) -> None:
    """Says what is about to be trained, and on what."""
    params = jax.tree.leaves(trainer.abstract_state.params)
    mesh = " x ".join(f"{axis} {size}" for axis, size in trainer.mesh.shape.items())
    say(
        f"{workdir}: {sum(leaf.size for leaf in params):,} parameters, {mesh} of "
        f"{trainer.mesh.devices.flat[0].device_kind}, processes {jax.process_count()}, from step "
        f"{start + 1} to {trainer.config.train.steps}"
    )
    optimizer, steps = trainer.config.optimizer, trainer.config.train.steps
    if clipped_warmup(optimizer, steps) < optimizer.warmup_steps:
        say(
            f"optimizer.warmup_steps={optimizer.warmup_steps} is more than train.steps={steps}: "
            "the learning rate rises until the last step"
        )


def _latest_metadata(workdir: pathlib.Path) -> Metadata | None:
    if not (workdir / "checkpoints").is_dir():
        return None
    with Checkpoints(workdir) as checkpoints:
        step = checkpoints.latest_step()
        return None if step is None else checkpoints.metadata(step)


@dataclasses.dataclass(frozen=True)
class _Prepared:
    text: str  # The fingerprint of what is trained on.
    tokenizer: Tokenizer
    tokens: np.ndarray
    held_out: np.ndarray | None


def _prepare(config: Config) -> _Prepared:
    tokenizer = make_tokenizer(config.data)
    return _Prepared(
        open_documents(config.data, "train").fingerprint,
        tokenizer,
        token_stream(config.data, "train", tokenizer),
        token_stream(config.data, "validation", tokenizer)
        if config.train.validation_every
        else None,
    )


class _Loop:
    def __init__(
        self,
        trainer: Trainer,
        prepared: _Prepared,
        checkpoints: Checkpoints,
        writer: MetricsWriter,
        stop: StopRequest,
        pace: ThroughputMeter,
        profiler: Profiler,
    ):
        self.trainer = trainer
        self.prepared = prepared
        self.checkpoints = checkpoints
        self.writer = writer
        self.stop = stop
        self.pace = pace
        self.profiler = profiler
        self.validate = self._validator()
        self.schedule = make_schedule(trainer.config.optimizer, trainer.config.train.steps)
        self.provenance = provenance()

    def run(self, state: TrainState, batches: TrainingBatches, start: int) -> int:
        config, trainer = self.trainer.config, self.trainer
        steps = config.train.steps
        rows = sharding.local_rows(trainer.batch_sharding, config.train.batch_size)
        reached = start
        self.profiler.done(start)
        self.pace.restart()
        with (
            jax.set_mesh(trainer.mesh),
            Progress(
                steps, "training", unit="step", initial=start, shown=jax.process_index() == 0
            ) as bar,
        ):
            behind: tuple[int, StepMetrics] | None = None
            local_batches = batches.iterate(start, steps - start, rows)
            for step, local in enumerate(local_batches, start=start + 1):
                state, metrics = trainer.train_step(
                    state, trainer.device_batch(local), np.int32(step - 1)
                )
                # Read one step late, so that the next step is already under way; but at once
                # where the state is used or a rate is measured.
                if behind is not None:
                    self._read(*behind)
                behind = (step, metrics)
                bar.update()
                stopping = self.stop.at(step)
                saving = step % config.checkpoint.every == 0 or step == steps or stopping
                if saving or self._logs(step) or step == start + 1 or self.profiler.waits(step):
                    loss, grad_norm = self._read(step, metrics)
                    behind = None
                    with self.pace.aside():
                        self.profiler.done(step)
                    if self._logs(step):
                        self._log(step, loss, grad_norm, state, bar)
                    elif step == start + 1:
                        # Its time is mostly the compiler's: the rate counts from here.
                        self.pace.restart()
                reached = step
                if saving:
                    self._save(step, state)
                if behind is None:
                    self.pace.pause()
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

    def _read(self, step: int, metrics: StepMetrics) -> tuple[float, float]:
        """(loss, gradient norm) of a step, once it is done. Refuses what is not finite."""
        nll, targets, grad_norm = (float(x) for x in jax.device_get(metrics))
        self.pace.step()
        loss = nll / max(targets, 1.0)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self.checkpoints.wait()
            raise FloatingPointError(
                f"step {step}: loss {loss}, gradient norm {grad_norm}; last good checkpoint: "
                f"{self.checkpoints.latest_step() or 'none'}. Lower optimizer.learning_rate or "
                "lengthen optimizer.warmup_steps, in another --workdir"
            )
        return loss, grad_norm

    def _log(
        self, step: int, loss: float, grad_norm: float, state: TrainState, bar: Progress
    ) -> None:
        """Writes the step's line, with the held-out loss where that is due."""
        values = {
            "loss": loss,
            "learning_rate": float(self.schedule(step - 1)),
            "grad_norm": grad_norm,
            **self.pace.measured(),
        }
        if self._validates(step):
            values |= self.validate(state.params)
        self.writer.write(step, values)
        mfu = f", MFU {values['mfu']:.0%}" if "mfu" in values else ""
        bar.note(f"loss {loss:.3f}, {values['tokens_per_second']:,.0f} tokens/s{mfu}")
        self.pace.restart()

    def _save(self, step: int, state: TrainState) -> None:
        self.checkpoints.save(
            state.params,
            state.optimizer,
            Metadata(
                step=step,
                config=dataclasses.asdict(self.trainer.config),
                text=self.prepared.text,
                tokenizer=self.prepared.tokenizer.to_dict(),
                vocab_size=self.prepared.tokenizer.vocab_size,
                provenance=self.provenance,
            ),
        )

    def _validator(self) -> Callable[[Any], dict[str, float]]:
        """The loss on the held-out split, as eval.py has it, over as many targets as asked for."""
        held_out = self.prepared.held_out
        if held_out is None:
            return lambda _: {}
        train = self.trainer.config.train
        tokens = held_out[: (train.validation_targets or len(held_out)) + 1]
        windows = evaluation_windows(np.array([0, len(tokens)]), train.length, train.length)
        # As many windows at a time as a step has.
        rows = train.batch_size // train.accumulation
        scorer = Scorer(self.trainer.graphdef, self.trainer.mesh, rows * train.length)

        def validate(params: Any) -> dict[str, float]:
            scores = scorer(params, tokens, windows, "validation")
            return {"validation_loss": scores.mean_nll, "validation_targets": len(scores.nll)}

        return validate
