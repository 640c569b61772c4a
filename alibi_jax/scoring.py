"""Loss over windows of a token stream: exact sums and counts, on all devices."""

import dataclasses
import math
import time
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from alibi_jax import sharding
from alibi_jax.data.windows import EvaluationWindows, evaluation_windows
from alibi_jax.losses import token_nll


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How windows of a length are laid over a stream.

    `nonoverlapping`: each window's targets have 1, 2, ..., L tokens of context; the paper's
    main tables. `sliding`: windows move by `stride`, and past the first only their last
    `stride` targets count, each with at least L - stride + 1 tokens of context; stride 1 is
    the paper's Appendix B.
    """

    name: str
    stride: int | None = None

    def __str__(self) -> str:
        return self.name if self.stride is None else f"{self.name}:{self.stride}"

    def windows(self, num_tokens: int, length: int) -> EvaluationWindows:
        """The windows that cover each of the stream's targets exactly once."""
        return evaluation_windows(num_tokens, length, self.stride or length)


@dataclasses.dataclass
class Scores:
    """Sums by position in the window: of losses in nats, of targets, of their bytes."""

    nll: Float[np.ndarray, "L"]
    targets: Int[np.ndarray, "L"]
    num_bytes: int
    seconds: float
    compile_seconds: float

    @property
    def mean_nll(self) -> float:
        """Nats a target: the one division."""
        return float(self.nll.sum() / self.targets.sum())

    @property
    def bits_per_byte(self) -> float:
        """Bits a byte of raw text."""
        return float(self.nll.sum() / (math.log(2) * self.num_bytes))


class Scorer:
    """Scores windows under one model, on all devices; one compilation a shape.

    `batch_tokens` is B·T for every length, as far as whole windows and the devices allow.
    """

    def __init__(self, graphdef: Any, mesh: jax.sharding.Mesh, batch_tokens: int):
        self.mesh = mesh
        self.batch_tokens = batch_tokens
        self._rows = sharding.axis_size(mesh, "batch")
        self._placement = sharding.named_sharding(mesh, "batch", None)
        self._compiled: dict[tuple[int, int], Any] = {}

        def nll(params: Any, inputs: Array, targets: Array) -> Array:
            model = nnx.merge(graphdef, params)
            return token_nll(model.hidden_states(inputs), model.unembedding, targets)

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
        token_bytes: Int[np.ndarray, "V"],
        description: str,
    ) -> Scores:
        """Scores all windows; sums in float64. `tokens` is the stream they were made for."""
        num_windows, length = len(windows), windows.length
        batch_size = self.batch_size(num_windows, length)
        rows = sharding.local_rows(self._placement, batch_size)
        begun = time.perf_counter()
        nll = self._compile(params, batch_size, length)
        scores = Scores(
            np.zeros(length), np.zeros(length, np.int64), 0, 0.0, time.perf_counter() - begun
        )

        def collect(pending: tuple[jax.Array, dict[str, np.ndarray]]) -> None:
            losses, batch = pending
            scored = batch["weights"] > 0
            scores.nll += np.where(scored, np.asarray(losses, np.float64), 0.0).sum(0)
            scores.targets += scored.sum(0)
            scores.num_bytes += int(token_bytes[batch["targets"]][scored].sum())

        begun = time.perf_counter()
        pending = None
        progress = tqdm(
            range(0, num_windows, batch_size),
            desc=description,
            unit="batch",
            leave=False,
            disable=jax.process_index() != 0,
        )
        for first in progress:
            indices = np.arange(first, first + batch_size)
            # Every process walks through all batches; past the last window are padding windows.
            batch = windows.batch(tokens, np.where(indices < num_windows, indices, -1))
            inputs, targets = (
                sharding.global_array(self._placement, batch[name][rows], batch_size)
                for name in ("inputs", "targets")
            )
            losses = nll(params, inputs, targets)
            # Collected one batch late, so that the next one's work is under way meanwhile.
            if pending is not None:
                collect(pending)
            pending = (losses, batch)
        if pending is not None:
            collect(pending)
        scores.seconds = time.perf_counter() - begun
        return scores

    def _compile(self, params: Any, batch_size: int, length: int) -> Any:
        shape = (batch_size, length)
        if shape not in self._compiled:
            tokens = jax.ShapeDtypeStruct(shape, np.int32, sharding=self._placement)
            with jax.set_mesh(self.mesh):
                self._compiled[shape] = self._nll.lower(params, tokens, tokens).compile()
        return self._compiled[shape]
