"""Which tokens make an example: shuffled windows to train on, ordered ones to score.

A window of length L that starts at `s` has the inputs tokens[s : s + L] and the targets
tokens[s + 1 : s + L + 1]: the target at index t sees t + 1 tokens.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float32, Int32, Int64, Integer

from alibi_jax.data.errors import DataError

# Ahead of the step being run; a batch is small and quick to make.
_PREFETCHED = 4


class TrainingBatches:
    """Batches as a function of the step: nothing of an iterator is ever saved.

    The windows follow one another without overlap, floor((N - 1) / length) of them, and each
    epoch has its own order. Example number step * batch_size + row of the run is the same for
    any number of processes. Raises DataError if there is not one window.
    """

    def __init__(
        self, tokens: Integer[np.ndarray, "N"], length: int, batch_size: int, seed: int
    ) -> None:
        import grain

        self.num_windows = (len(tokens) - 1) // length
        if self.num_windows < 1:
            raise DataError(
                f"train.length={length} needs {length + 1} tokens and the training split has "
                f"{len(tokens)}: choose a shorter train.length"
            )
        self._tokens = tokens
        self._length = length
        self._batch_size = batch_size
        self._windows = grain.MapDataset.range(self.num_windows).seed(seed).shuffle().repeat()

    def batch_at(
        self, step: int, rows: slice | Integer[np.ndarray, "B"] | None = None
    ) -> dict[str, Int32[np.ndarray, "B L"]]:
        """{"inputs", "targets"} of a step; of the global batch only `rows`, if given."""
        every = np.arange(self._batch_size)
        examples = step * self._batch_size + (every if rows is None else every[rows])
        windows = np.array([self._windows[int(example)] for example in examples], np.int64)
        span = np.arange(self._length + 1)
        block = self._tokens[windows[:, None] * self._length + span].astype(np.int32)
        return {"inputs": block[:, :-1], "targets": block[:, 1:]}

    def iterate(
        self,
        start_step: int,
        num_steps: int,
        rows: slice | Integer[np.ndarray, "B"] | None = None,
    ) -> Iterator[dict[str, Int32[np.ndarray, "B L"]]]:
        """`batch_at` of each step in order, made ahead of time in background threads."""
        import grain

        steps = grain.MapDataset.range(start_step, start_step + num_steps)
        batches = steps.map(lambda step: self.batch_at(int(step), rows))
        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=_PREFETCHED)
        return iter(batches.to_iter_dataset(options))


@dataclasses.dataclass(frozen=True)
class EvaluationWindows:
    """Windows that together score each target of a stream exactly once, in order."""

    num_tokens: int
    length: int
    stride: int
    # The first input of each window, and the first index in it that is scored.
    starts: Int64[np.ndarray, "W"]
    first_scored: Int64[np.ndarray, "W"]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def num_targets(self) -> int:
        """Every token but the first."""
        return self.num_tokens - 1

    @property
    def min_context(self) -> int:
        """The fewest tokens that a scored target sees, outside the first window.

        1 if there is no other window.
        """
        return self.length - self.stride + 1 if len(self) > 1 else 1

    def batch(
        self, tokens: Integer[np.ndarray, "N"], indices: Integer[np.ndarray, "B"]
    ) -> dict[str, Int32[np.ndarray, "B L"] | Float32[np.ndarray, "B L"]]:
        """{"inputs", "targets", "weights"} of the windows `indices`; weight 1: scored.

        -1 stands for no window. Where there is no target, tokens and weights are 0.
        """
        within = np.arange(self.length)
        positions = self.starts[indices][:, None] + within
        exists = (positions < self.num_targets) & (indices >= 0)[:, None]
        positions = np.where(exists, positions, 0)
        scored = exists & (within >= self.first_scored[indices][:, None])
        return {
            "inputs": np.where(exists, tokens[positions], 0).astype(np.int32),
            "targets": np.where(exists, tokens[positions + 1], 0).astype(np.int32),
            "weights": scored.astype(np.float32),
        }


def evaluation_windows(num_tokens: int, length: int, stride: int) -> EvaluationWindows:
    """Windows every `stride` tokens; each scores what the one before it did not reach.

    The first scores all of its targets, later ones their last `stride`, seeing at least
    length - stride + 1 tokens each. stride == length: windows that do not overlap. Raises
    ValueError for a stride that would skip targets, DataError where there is no target.
    """
    if length < 1:
        raise ValueError(f"length={length}: a window has at least 1 token")
    if not 1 <= stride <= length:
        raise ValueError(
            f"stride={stride} with length={length}: choose 1 to {length}, or targets are skipped"
        )
    if num_tokens < 2:
        raise DataError(f"{num_tokens} tokens leave nothing to predict: give a longer text")
    beyond_first = max(num_tokens - 1 - length, 0)
    starts = np.arange(1 + -(-beyond_first // stride), dtype=np.int64) * stride
    first_scored = np.where(starts == 0, 0, length - stride)
    return EvaluationWindows(num_tokens, length, stride, starts, first_scored)
