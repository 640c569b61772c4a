"""The loss of each target of windows over a token stream, computed on all devices."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32, Float64, Int64

from alibi_jax.data.windows import EvaluationWindows
from alibi_jax.distributed import memory, sharding
from alibi_jax.progress import Progress

# The limit of a mean loss, in nats. The perplexity of a larger loss may overflow float64, and JSON
# has no infinity.
MAX_NLL = 700.0
# Seconds between two saves of unfinished work.
_SAVE_EVERY = 30.0


@dataclasses.dataclass
class Scores:
    """For each target the loss in nats, the index in the stream and the context in tokens.

    `seconds` excludes compilation. `resumed`: some losses were saved by an earlier process, so
    `seconds` covers only the others.
    """

    nll: Float32[np.ndarray, "M"]
    targets: Int64[np.ndarray, "M"]
    contexts: Int64[np.ndarray, "M"]
    seconds: float
    compile_seconds: float
    resumed: bool = False

    @property
    def total_nll(self) -> float:
        """The sum of the losses in nats, in float64."""
        return float(self.nll.sum(dtype=np.float64))

    @property
    def mean_nll(self) -> float:
        """The mean loss in nats per target. The sum is divided only here."""
        return self.total_nll / len(self.nll)

    def by_context(self, values: Any = 1.0) -> Float64[np.ndarray, "L"]:
        """The sum of `values` over the targets with 1, 2, ... tokens of context.

        By default it is the number of these targets.
        """
        weights = np.broadcast_to(np.asarray(values, np.float64), self.nll.shape)
        return np.bincount(self.contexts - 1, weights)


class Scorer:
    """Scores windows under one model, on all devices; compiles once per shape.

    A batch has `batch_tokens` = B·T tokens at every length, as far as whole windows and the number
    of devices allow.
    """

    def __init__(self, graphdef: Any, mesh: jax.sharding.Mesh, batch_tokens: int):
        self.mesh = mesh
        self.batch_tokens = batch_tokens
        self._rows = sharding.axis_size(mesh, "batch")
        self._placement = sharding.named_sharding(mesh, "batch", None)
        self._programs: dict[tuple[int, int, int], Any] = {}

        def nll(params: Any, inputs: Array, targets: Array) -> Array:
            model = nnx.merge(graphdef, params)
            hidden = model.hidden_states(inputs, last=targets.shape[1])
            return model.token_nll(hidden, targets)

        # The losses are replicated, so that every process holds all of them and computes the same
        # sums.
        self._nll = jax.jit(nll, out_shardings=sharding.named_sharding(mesh))

    def batch_size(self, num_windows: int, length: int) -> int:
        """The number of windows per batch: a multiple of the number of devices that share it."""
        fitting = max(1, self.batch_tokens // (length * self._rows))
        return min(fitting, -(-num_windows // self._rows)) * self._rows

    def __call__(
        self,
        params: Any,
        tokens: np.ndarray,
        windows: EvaluationWindows,
        description: str,
        saved_losses: Float32[np.ndarray, "M"] | None = None,
        save: Callable[[Float32[np.ndarray, "M"]], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Scores:
        """Scores all windows over the stream `tokens`.

        `save` is called about every 30 s, and when scoring is interrupted, with the losses so far;
        a missing loss is NaN. Scoring continues from `saved_losses`. `should_stop` is called after
        each batch; KeyboardInterrupt is raised once it returns true.
        """
        counts, offsets = windows.num_scored, windows.offsets
        if saved_losses is None:
            nll = np.full(counts.sum(), np.nan, np.float32)
        else:
            nll = saved_losses.copy()
        missing = np.logical_or.reduceat(np.isnan(nll), offsets)
        resumed = not missing.all()
        scores = Scores(nll, windows.targets, windows.contexts, 0.0, 0.0, resumed)
        groups = {first: group[missing[group]] for first, group in windows.groups().items()}
        last_saved = time.monotonic()
        with Progress(
            sum(map(len, groups.values())),
            description,
            unit="window",
            leave=False,
            shown=jax.process_index() == 0,
        ) as progress:
            try:
                for first, group in groups.items():
                    for num_windows in self._group(params, tokens, windows, first, group, scores):
                        progress.update(num_windows)
                        if should_stop():
                            raise KeyboardInterrupt
                        if time.monotonic() - last_saved > _SAVE_EVERY:
                            save(nll)
                            last_saved = time.monotonic()
            except BaseException:
                save(nll)
                raise
        return scores

    def _group(
        self,
        params: Any,
        tokens: np.ndarray,
        windows: EvaluationWindows,
        first_scored: int,
        group: np.ndarray,
        scores: Scores,
    ) -> Iterator[int]:
        """Scores the windows `group` into `scores`; yields the number of windows of each batch."""
        if not len(group):
            return
        offsets = windows.offsets
        batch_size = self.batch_size(len(group), windows.length)
        rows = sharding.addressable_rows(self._placement, batch_size)
        started = time.perf_counter()
        program = self.program(params, batch_size, windows.length, first_scored)
        scores.compile_seconds += time.perf_counter() - started

        def collect(losses: jax.Array, indices: np.ndarray, scored: np.ndarray) -> int:
            positions = offsets[indices][:, None] + np.arange(scored.shape[1])
            scores.nll[positions[scored]] = np.asarray(losses)[scored]
            return int((indices >= 0).sum())

        started = time.perf_counter()
        pending = None
        for first in range(0, len(group), batch_size):
            # Every process iterates over all batches. Index -1 is a padding window.
            indices = np.full(batch_size, -1)
            batch_windows = group[first : first + batch_size]
            indices[: len(batch_windows)] = batch_windows
            batch = windows.batch(tokens, indices, first_scored)
            inputs, targets = (
                sharding.make_global_array(self._placement, batch[name][rows], batch_size)
                for name in ("inputs", "targets")
            )
            losses = program(params, inputs, targets)
            # Losses are collected one batch late, so that the devices already work on the next
            # batch.
            if pending is not None:
                yield collect(*pending)
            pending = (losses, indices, batch["scored"])
        if pending is not None:
            yield collect(*pending)
        scores.seconds += time.perf_counter() - started

    def lowered(self, params: Any, batch_size: int, length: int, first_scored: int) -> Any:
        """The program for batches of windows scored from index `first_scored` on, not compiled."""
        inputs, targets = (
            jax.ShapeDtypeStruct((batch_size, n), np.int32, sharding=self._placement)
            for n in (length, length - first_scored)
        )
        with jax.set_mesh(self.mesh):
            return self._nll.lower(params, inputs, targets)

    def program(self, params: Any, batch_size: int, length: int, first_scored: int) -> Any:
        """The program for batches of windows scored from index `first_scored` on, compiled once.

        Raises ValueError where the program needs more memory than is free.
        """
        shape = (batch_size, length, first_scored)
        if shape not in self._programs:
            program = self.lowered(params, batch_size, length, first_scored).compile()
            memory.check_program_fits(
                program,
                f"a batch of {batch_size} windows of {length} tokens",
                "give a smaller --batch_tokens"
                if batch_size > self._rows
                else "use more devices, or ones with more memory",
            )
            self._programs[shape] = program
        return self._programs[shape]
