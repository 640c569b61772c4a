"""Which tokens make an example: shuffled windows to train on, ordered ones to score.

A window of length L that starts at `s` has the inputs tokens[s : s + L] and the targets
tokens[s + 1 : s + L + 1]: the target at index t sees t + 1 tokens.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer

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
    """Windows over a stream, and which targets each of them scores: its last ones.

    The target at index t of a window sees t + 1 tokens, which is its context. With `bos`, that
    token takes the place of each window's first input, and counts as one of those seen.
    """

    length: int
    # The first input of each window, how many it has (fewer than `length` at the end of a text),
    # and the first index in it that is scored: in all of them 0 or the same other one.
    starts: Int64[np.ndarray, "W"]
    sizes: Int64[np.ndarray, "W"]
    first_scored: Int64[np.ndarray, "W"]
    bos: int | None = None

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def num_scored(self) -> Int64[np.ndarray, "W"]:
        """Targets that each window scores, at least 1."""
        return self.sizes - self.first_scored

    @property
    def offsets(self) -> Int64[np.ndarray, "W"]:
        """Of each window's first target among all of them."""
        return np.cumsum(self.num_scored) - self.num_scored

    @property
    def targets(self) -> Int64[np.ndarray, "M"]:
        """The index in the stream of each target, window by window."""
        return np.repeat(self.starts, self.num_scored) + self.contexts

    @property
    def contexts(self) -> Int64[np.ndarray, "M"]:
        """How many tokens each target sees, window by window."""
        counts = self.num_scored
        within = np.arange(counts.sum()) - np.repeat(self.offsets, counts)
        return within + np.repeat(self.first_scored, counts) + 1

    @property
    def min_context(self) -> int:
        """The fewest tokens that a target sees, outside windows that score all they have.

        1 if there is no other window.
        """
        later = self.first_scored[self.first_scored > 0]
        return int(later.min()) + 1 if len(later) else 1

    def groups(self) -> dict[int, Int64[np.ndarray, "G"]]:
        """The windows that score all they have, and those that score their ends only.

        By the first index in them that is scored, which in a group is one.
        """
        firsts = np.unique(self.first_scored).tolist()
        return {first: np.flatnonzero(self.first_scored == first) for first in firsts}

    def batch(
        self,
        tokens: Integer[np.ndarray, "N"],
        indices: Integer[np.ndarray, "B"],
        first: int = 0,
    ) -> dict[str, Int32[np.ndarray, "B _"] | Bool[np.ndarray, "B _"]]:
        """{"inputs" [B, L], "targets" [B, L - first], "scored" [B, L - first]}.

        Of the windows `indices`, a group that is scored from `first` on; -1 stands for no window.
        Target i of a row stands at index first + i. Where there is none, tokens are 0 and `scored`
        is false.
        """
        real = indices >= 0
        starts, sizes = self.starts[indices], np.where(real, self.sizes[indices], 0)
        within = np.arange(self.length)
        exists = within < sizes[:, None]
        inputs = np.where(exists, tokens[np.where(exists, starts[:, None] + within, 0)], 0)
        if self.bos is not None:
            inputs[real, 0] = self.bos
        scored, within = exists[:, first:], within[first:]
        targets = np.where(scored, tokens[np.where(scored, starts[:, None] + within + 1, 0)], 0)
        return {
            "inputs": inputs.astype(np.int32),
            "targets": targets.astype(np.int32),
            "scored": scored,
        }


def evaluation_windows(
    bounds: Integer[np.ndarray, "bounds"], length: int, stride: int, bos: int | None = None
) -> EvaluationWindows:
    """Windows every `stride` tokens of each text; each scores what the one before did not reach.

    Text d is tokens[bounds[d] : bounds[d + 1]]; together its windows score each of its tokens but
    the first exactly once, in order. Its first window scores all of its targets, later ones their
    last `stride`, seeing at least length - stride + 1 tokens each. stride == length: windows that
    do not overlap. Raises ValueError for a stride that would skip targets, DataError where there
    is no target.
    """
    if length < 1:
        raise ValueError(f"length={length}: a window has at least 1 token")
    if not 1 <= stride <= length:
        raise ValueError(
            f"stride={stride} with length={length}: choose 1 to {length}, or targets are skipped"
        )
    num_targets = np.diff(bounds) - 1
    if not (num_targets > 0).any():
        raise DataError(
            f"{bounds[-1] - bounds[0]} tokens leave nothing to predict: give a longer text"
        )
    beyond_first = np.maximum(num_targets - length, 0)
    windows = np.where(num_targets > 0, 1 + -(-beyond_first // stride), 0)
    number = np.arange(windows.sum()) - np.repeat(np.cumsum(windows) - windows, windows)
    starts = np.repeat(bounds[:-1], windows) + number * stride
    return EvaluationWindows(
        length,
        starts,
        np.minimum(length, np.repeat(bounds[1:], windows) - 1 - starts),
        np.where(number == 0, 0, length - stride),
        bos,
    )


def fixed_context_windows(
    targets: Integer[np.ndarray, "M"], context: int, bos: int | None = None
) -> EvaluationWindows:
    """A window for each target (its index in the stream), which sees exactly `context` tokens."""
    every = np.ones(len(targets), np.int64)
    return EvaluationWindows(
        context, targets - context, every * context, every * (context - 1), bos
    )


def sample_targets(
    bounds: Integer[np.ndarray, "bounds"], context: int, count: int, seed: int
) -> Int64[np.ndarray, "M"]:
    """Targets that can be given `context` tokens, in order.

    They are of the whole windows of that length which follow a text's first, so that in windows
    that do not overlap, of that length or one that divides it, they stand anywhere alike. One is
    drawn in each of `count` stretches that share them out evenly; all of them, where there are
    no more.
    """
    eligible = num_eligible(bounds, context)
    ends = np.cumsum(eligible)
    total = int(ends[-1])
    count = min(count, total)
    edges = np.arange(count + 1) * total // max(count, 1)
    drawn = np.random.default_rng(seed).integers(edges[:-1], edges[1:])
    text = np.searchsorted(ends, drawn, side="right")
    return bounds[text] + context + 1 + drawn - (ends - eligible)[text]


def num_eligible(bounds: Integer[np.ndarray, "bounds"], context: int) -> Int64[np.ndarray, "texts"]:
    """How many targets of each text `sample_targets` draws from."""
    windows = (np.diff(bounds) - 1) // context
    return np.maximum(windows - 1, 0) * context
