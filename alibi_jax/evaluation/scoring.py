"""Losses of the targets of windows over a token stream, one by one, on all devices."""

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

# Seconds between two times that unfinished work is kept.
_KEEP_EVERY = 30.0


@dataclasses.dataclass
class Scores:
    """The loss of each target, in nats; which one it is in the stream; how many tokens it saw.

    `seconds` are of what was scored now, which is not all of it where losses were there already.
    """

    nll: Float32[np.ndarray, "M"]
    targets: Int64[np.ndarray, "M"]
    contexts: Int64[np.ndarray, "M"]
    seconds: float
    compile_seconds: float
    resumed: bool = False

    @property
    def total_nll(self) -> float:
        """Nats of all targets together, summed in float64."""
        return float(self.nll.sum(dtype=np.float64))

    @property
    def mean_nll(self) -> float:
        """Nats a target: the one division."""
        return self.total_nll / len(self.nll)

    def by_context(self, values: Any = 1.0) -> Float64[np.ndarray, "L"]:
        """Sums of `values` of the targets (default: their number) that see 1, 2, ... tokens."""
        weights = np.broadcast_to(np.asarray(values, np.float64), self.nll.shape)
        return np.bincount(self.contexts - 1, weights)


class Scorer:
    """Scores windows under one model, on all devices; one compilation a shape.

    `batch_tokens` is B·T for every length, as far as whole windows and the devices allow.
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

        # Replicated, so that every process holds all the numbers and adds them up alike.
        self._nll = jax.jit(nll, out_shardings=sharding.named_sharding(mesh))

    def batch_size(self, num_windows: int, length: int) -> int:
        """Windows a batch: a multiple of the devices that share it."""
        fitting = max(1, self.batch_tokens // (length * self._rows))
        return min(fitting, -(-num_windows // self._rows)) * self._rows

    def __call__(
        self,
        params: Any,
        tokens: np.ndarray,
        windows: EvaluationWindows,
        description: str,
        kept: Float32[np.ndarray, "M"] | None = None,
        keep: Callable[[Float32[np.ndarray, "M"]], None] = lambda _: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> Scores:
        """Scores all windows over the stream `tokens`.

        `keep` is called now and then, and where scoring is broken off, with the losses so far, NaN
        where there is none yet. Given those as `kept`, scoring goes on from there. Raises
        KeyboardInterrupt where `stopping`, asked after each batch, is true.
        """
        counts, offsets = windows.num_scored, windows.offsets
        nll = np.full(counts.sum(), np.nan, np.float32) if kept is None else kept.copy()
        missing = np.logical_or.reduceat(np.isnan(nll), offsets)
        resumed = not missing.all()
        scores = Scores(nll, windows.targets, windows.contexts, 0.0, 0.0, resumed)
        groups = {first: group[missing[group]] for first, group in windows.groups().items()}
        last_kept = time.monotonic()
        with Progress(
            sum(map(len, groups.values())),
            description,
            unit="window",
            leave=False,
            shown=jax.process_index() == 0,
        ) as progress:
            try:
                for first, group in groups.items():
                    for done in self._group(params, tokens, windows, first, group, scores):
                        progress.update(done)
                        if stopping():
                            raise KeyboardInterrupt
                        if time.monotonic() - last_kept > _KEEP_EVERY:
                            keep(nll)
                            last_kept = time.monotonic()
            except BaseException:
                keep(nll)
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
        """Scores the windows `group` into `scores`; yields how many each batch had."""
        if not len(group):
            return
        offsets = windows.offsets
        batch_size = self.batch_size(len(group), windows.length)
        rows = sharding.addressable_rows(self._placement, batch_size)
        begun = time.perf_counter()
        program = self.program(params, batch_size, windows.length, first_scored)
        scores.compile_seconds += time.perf_counter() - begun

        def collect(losses: jax.Array, indices: np.ndarray, scored: np.ndarray) -> int:
            places = offsets[indices][:, None] + np.arange(scored.shape[1])
            scores.nll[places[scored]] = np.asarray(losses)[scored]
            return int((indices >= 0).sum())

        begun = time.perf_counter()
        pending = None
        for first in range(0, len(group), batch_size):
            # Every process walks through all batches; past the last window are padding windows.
            indices = np.full(batch_size, -1)
            part = group[first : first + batch_size]
            indices[: len(part)] = part
            batch = windows.batch(tokens, indices, first_scored)
            inputs, targets = (
                sharding.make_global_array(self._placement, batch[name][rows], batch_size)
                for name in ("inputs", "targets")
            )
            losses = program(params, inputs, targets)
            # Collected one batch late, so that the next one's work is under way meanwhile.
            if pending is not None:
                yield collect(*pending)
            pending = (losses, indices, batch["scored"])
        if pending is not None:
            yield collect(*pending)
        scores.seconds += time.perf_counter() - begun

    def lowered(self, params: Any, batch_size: int, length: int, first_scored: int) -> Any:
        """What scores batches of windows from that index on, not compiled yet."""
        inputs, targets = (
            jax.ShapeDtypeStruct((batch_size, n), np.int32, sharding=self._placement)
            for n in (length, length - first_scored)
        )
        with jax.set_mesh(self.mesh):
            return self._nll.lower(params, inputs, targets)

    def program(self, params: Any, batch_size: int, length: int, first_scored: int) -> Any:
        """What scores batches of windows from that index on, compiled once.

        Raises ValueError where it needs more memory than there is.
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
