"""The training step and the loop around it."""

import dataclasses
import math
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from alibi_jax import sharding
from alibi_jax.checkpoints import Checkpoints, Metadata
from alibi_jax.config import Config, ConfigError, flatten, from_dict
from alibi_jax.data.streams import token_stream
from alibi_jax.data.tokenizers import Tokenizer, make_tokenizer
from alibi_jax.data.windows import TrainingBatches
from alibi_jax.losses import token_nll, weighted_sum
from alibi_jax.metrics import MetricsWriter
from alibi_jax.model import abstract_model, initial_params
from alibi_jax.optimizers import make_optimizer, make_schedule
from alibi_jax.provenance import provenance
from alibi_jax.scoring import Protocol, Scorer

Batch = dict[str, Array]


class TrainState(NamedTuple):
    """What a step takes and gives; the step's number is the loop's."""

    params: Any
    optimizer: Any


class StepMetrics(NamedTuple):
    """Of one step: sums over its targets, not means."""

    nll: Float[Array, ""]
    targets: Float[Array, ""]
    grad_norm: Float[Array, ""]


def summed_gradients(
    loss: Callable[[Any, Batch, Int[Array, ""]], tuple[Array, Array]],
    params: Any,
    batch: Batch,
    accumulation: int,
) -> tuple[Array, Array, Any]:
    """(sum of losses, sum of weights, gradient of the sum of losses) over micro-batches.

    `loss(params, micro_batch, index)` gives a sum and a count. Nothing is divided here, so
    that unequal counts weigh as they would in one batch.
    """
    gradient = jax.value_and_grad(loss, has_aux=True)
    if accumulation == 1:
        (total, count), grads = gradient(params, batch, jnp.int32(0))
        return total, count, grads

    def split(x: Array) -> Array:
        # Neighbouring rows go to different micro-batches: each device keeps its own rows.
        return x.reshape(x.shape[0] // accumulation, accumulation, *x.shape[1:]).swapaxes(0, 1)

    def add(sums: Any, micro: tuple[Batch, Array]) -> tuple[Any, None]:
        (total, count), grads = gradient(params, *micro)
        return jax.tree.map(jnp.add, sums, (total, count, grads)), None

    zeros = (jnp.float32(0), jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
    micro_batches = (jax.tree.map(split, batch), jnp.arange(accumulation, dtype=jnp.int32))
    (total, count, grads), _ = jax.lax.scan(add, zeros, micro_batches)
    return total, count, grads


@dataclasses.dataclass
class Trainer:
    """A configuration's jitted functions, on a mesh."""

    config: Config
    vocab_size: int
    mesh: jax.sharding.Mesh

    def __post_init__(self) -> None:
        config = self.config
        sharding.check_fits(config, self.vocab_size, self.mesh)
        self.graphdef, abstract_params = abstract_model(config, self.vocab_size, self.mesh)
        self.tx = make_optimizer(config.optimizer, config.train.steps)
        replicated = sharding.named_sharding(self.mesh)

        def place(moment: Any, param: Any) -> jax.ShapeDtypeStruct:
            # Adafactor's factors are vectors with none of the parameter's axes: replicated.
            same = moment.shape == param.shape
            return jax.ShapeDtypeStruct(
                moment.shape, moment.dtype, sharding=param.sharding if same else replicated
            )

        # Left to itself, the compiler replicates moments, and the second step compiles anew.
        abstract_optimizer = optax.tree.map_params(
            self.tx,
            place,
            jax.eval_shape(self.tx.init, abstract_params),
            abstract_params,
            transform_non_params=lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=replicated
            ),
        )
        self.abstract_state = TrainState(abstract_params, abstract_optimizer)
        placement = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        self._init = jax.jit(self._initial_state, out_shardings=placement)
        self.train_step = jax.jit(
            self._train_step, donate_argnums=0, out_shardings=(placement, replicated)
        )
        self.batch_sharding = sharding.named_sharding(self.mesh, "batch", None)

    def initial_state(self) -> TrainState:
        """Fresh parameters and moments, made where they live."""
        with jax.set_mesh(self.mesh):
            return self._init(jax.random.key(self.config.train.seed))

    def device_batch(self, local: dict[str, np.ndarray]) -> Batch:
        """The global batch from this process's rows."""
        return {
            name: sharding.global_array(self.batch_sharding, x, self.config.train.batch_size)
            for name, x in local.items()
        }

    def _initial_state(self, key: Array) -> TrainState:
        params = initial_params(self.config, self.vocab_size, key)
        return TrainState(params, self.tx.init(params))

    def _train_step(
        self, state: TrainState, batch: Batch, step: Int[Array, ""]
    ) -> tuple[TrainState, StepMetrics]:
        model = self.config.model
        has_dropout = any((model.dropout, model.attention_dropout, model.activation_dropout))
        # A stream of its own, so that dropout is not drawn from the key of the parameters.
        key = jax.random.fold_in(jax.random.key(self.config.train.seed), 1)
        key = jax.random.fold_in(key, step)

        def loss(params: Any, batch: Batch, micro_batch: Array) -> tuple[Array, Array]:
            model = nnx.merge(self.graphdef, params)
            dropout_key = jax.random.fold_in(key, micro_batch) if has_dropout else None
            hidden = model.hidden_states(batch["inputs"], dropout_key=dropout_key)
            nll = token_nll(hidden, model.unembedding, batch["targets"])
            return weighted_sum(nll, batch.get("weights"))

        total, count, grads = summed_gradients(
            loss, state.params, batch, self.config.train.accumulation
        )
        grads = jax.tree.map(lambda grad: grad / jnp.maximum(count, 1.0), grads)
        updates, optimizer = self.tx.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, optimizer), StepMetrics(total, count, optax.global_norm(grads))


class StopRequest:
    """Whether someone asked the run to end, agreed on by all processes; a context manager.

    A single process listens for SIGTERM and Ctrl-C itself; a second signal is not held back.
    Several ask the coordination service, which names one step to all.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if jax.process_count() == 1:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _ask(self, number: int, frame: Any) -> None:
        self._asked = True
        self.__exit__()

    def at(self, step: int) -> bool:
        """Whether to stop after this step."""
        if jax.process_count() > 1:
            return bool(multihost_utils.reached_preemption_sync_point(step))
        return self._asked


# Keys that may differ between a run and its resumption; every other one shapes the numbers.
_FREE_TO_CHANGE = (
    "checkpoint.",
    "mesh.",
    "data.data_dir",
    "data.path",
    "train.log_every",
    "train.validation_",
)


def check_same_run(
    saved: Metadata, config: Config, tokenizer: Tokenizer, workdir: pathlib.Path
) -> None:
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
    if saved.tokenizer != tokenizer.to_dict():
        raise ConfigError(
            f"the run in {workdir} was trained with another vocabulary, so its text has changed: "
            "restore the text, or give another --workdir"
        )


def train(config: Config, workdir: pathlib.Path) -> int:
    """Trains until `train.steps`, from the latest checkpoint if there is one.

    Returns the step reached: less than `train.steps` if asked to stop (SIGTERM).

    Raises:
        ConfigError, DataError, CheckpointError: before any work, one line that says why.
        FloatingPointError: for a loss or gradient that is not finite; nothing of it is saved.
    """
    config.check()
    mesh = sharding.make_mesh(**dataclasses.asdict(config.mesh))
    # What does not depend on the vocabulary is refused before any text is read.
    sharding.check_fits(config, None, mesh)
    tokenizer, tokens, held_out = _on_one_process_first(lambda: _prepare(config))
    trainer = Trainer(config, tokenizer.vocab_size, mesh)
    batches = TrainingBatches(
        tokens, config.train.length, config.train.batch_size, config.train.seed
    )
    with Checkpoints(workdir, config.checkpoint) as checkpoints:
        start = checkpoints.latest_step() or 0
        if start:
            check_same_run(checkpoints.metadata(start), config, tokenizer, workdir)
            saved = checkpoints.restore(start, **trainer.abstract_state._asdict())
            state = TrainState(**saved)
        else:
            state = trainer.initial_state()
        with MetricsWriter(workdir, start) as writer, StopRequest() as stop:
            loop = _Loop(trainer, tokenizer, held_out, checkpoints, writer, stop)
            return loop.run(state, batches, start)


def _prepare(config: Config) -> tuple[Tokenizer, np.ndarray, np.ndarray | None]:
    tokenizer = make_tokenizer(config.data)
    held_out = None
    if config.train.validation_every:
        held_out = token_stream(config.data, "validation", tokenizer)
    return tokenizer, token_stream(config.data, "train", tokenizer), held_out


def _on_one_process_first(prepare: Callable[[], Any]) -> Any:
    """Process 0 prepares; the others then find it done or, where disks are not shared, do it."""
    prepared = prepare() if jax.process_index() == 0 else None
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("data prepared")
    return prepared if jax.process_index() == 0 else prepare()


class _Loop:
    def __init__(
        self,
        trainer: Trainer,
        tokenizer: Tokenizer,
        held_out: np.ndarray | None,
        checkpoints: Checkpoints,
        writer: MetricsWriter,
        stop: StopRequest,
    ):
        self.trainer = trainer
        self.tokenizer = tokenizer
        self.checkpoints = checkpoints
        self.writer = writer
        self.stop = stop
        self.validate = self._validator(held_out)
        self.schedule = make_schedule(trainer.config.optimizer, trainer.config.train.steps)
        self.provenance = provenance()
        self.clock = (0.0, 0)

    def run(self, state: TrainState, batches: TrainingBatches, start: int) -> int:
        config, trainer = self.trainer.config, self.trainer
        steps = config.train.steps
        rows = sharding.local_rows(trainer.batch_sharding, config.train.batch_size)
        reached = start
        self.clock = (time.perf_counter(), start)
        with (
            jax.set_mesh(trainer.mesh),
            tqdm(
                total=steps,
                initial=start,
                unit="step",
                dynamic_ncols=True,
                disable=jax.process_index() != 0,
            ) as bar,
        ):
            behind: tuple[int, StepMetrics] | None = None
            local_batches = batches.iterate(start, steps - start, rows)
            for step, local in enumerate(local_batches, start=start + 1):
                state, metrics = trainer.train_step(
                    state, trainer.device_batch(local), np.int32(step - 1)
                )
                # Read one step late, so that the next step is already under way.
                if behind is not None:
                    self._finish(*behind, state=None, bar=bar)
                behind = (step, metrics)
                reached = step
                stopping = self.stop.at(step)
                saving = step % config.checkpoint.every == 0 or step == steps or stopping
                if saving or self._validates(step):
                    self._finish(*behind, state=state, bar=bar)
                    behind = None
                if saving:
                    self._save(step, state)
                if stopping:
                    break
        return reached

    def _validates(self, step: int) -> bool:
        train = self.trainer.config.train
        return bool(train.validation_every) and (
            step % train.validation_every == 0 or step == train.steps
        )

    def _finish(
        self, step: int, metrics: StepMetrics, *, state: TrainState | None, bar: Any
    ) -> None:
        """Waits for a step, refuses what is not finite, and writes what there is to write."""
        train = self.trainer.config.train
        nll, targets, grad_norm = (float(x) for x in jax.device_get(metrics))
        loss = nll / max(targets, 1.0)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise FloatingPointError(
                f"step {step}: loss {loss}, gradient norm {grad_norm}; last good checkpoint: "
                f"{self.checkpoints.latest_step() or 'none'}. Lower optimizer.learning_rate or "
                "lengthen optimizer.warmup_steps"
            )
        bar.update(1)
        now = time.perf_counter()
        since, first = self.clock
        tokens_per_second = (step - first) * train.batch_size * train.length / (now - since)
        validates = state is not None and self._validates(step)
        if step % train.log_every == 0 or step == train.steps or validates:
            values = {
                "loss": loss,
                "tokens_per_second": tokens_per_second,
                "learning_rate": float(self.schedule(step - 1)),
                "grad_norm": grad_norm,
            }
            if validates and state is not None:
                values |= self.validate(state.params)
            self.writer.write(step, values)
            bar.set_postfix_str(f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s")
            self.clock = (time.perf_counter(), step)
        elif first == step - 1 and bar.n == bar.initial + 1:
            # The first step's time is mostly the compiler's: the rate counts from here.
            self.clock = (now, step)

    def _save(self, step: int, state: TrainState) -> None:
        self.checkpoints.save(
            state.params,
            state.optimizer,
            Metadata(
                step=step,
                config=dataclasses.asdict(self.trainer.config),
                tokenizer=self.tokenizer.to_dict(),
                vocab_size=self.tokenizer.vocab_size,
                provenance=self.provenance,
            ),
        )

    def _validator(self, held_out: np.ndarray | None) -> Callable[[Any], dict[str, float]]:
        """The loss on the held-out split, as eval.py has it, over as many targets as asked for."""
        if held_out is None:
            return lambda _: {}
        train = self.trainer.config.train
        tokens = held_out[: (train.validation_targets or len(held_out)) + 1]
        windows = Protocol("nonoverlapping").windows(len(tokens), train.length)
        scorer = Scorer(self.trainer.graphdef, self.trainer.mesh, train.batch_size * train.length)

        def validate(params: Any) -> dict[str, float]:
            scores = scorer(params, tokens, windows, self.tokenizer.token_bytes, "validation")
            return {
                "validation_loss": scores.mean_nll,
                "validation_targets": int(scores.targets.sum()),
            }

        return validate
