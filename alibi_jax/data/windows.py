"""Windows over a token stream: shuffled for training, in order for evaluation.

A window of length L that starts at index s has the inputs tokens[s : s + L] and the targets
tokens[s + 1 : s + L + 1]. The target at index t of the window sees t + 1 tokens: its context.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer

from alibi_jax.data.errors import DataError

# Batches made ahead of the running step. A batch is small and quick to make.
_PREFETCHED = 4


class TrainingBatches:
    """Batches as a function of the step, so that a checkpoint needs no state of an iterator.

    The floor((N - 1) / length) windows follow one another without overlap, and each epoch has its
    own order. For any number of processes, row r of step s is the run's example number
    s * batch_size + r. Raises DataError if the stream has no whole window.
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
        """{"inputs", "targets"} of a step: the global batch, or only its `rows`."""
        all_rows = np.arange(self._batch_size)
        examples = step * self._batch_size + (all_rows if rows is None else all_rows[rows])
        windows = np.array([self._windows[int(example)] for example in examples], np.int64)
        span = np.arange(self._length + 1)
        tokens = self._tokens[windows[:, None] * self._length + span].astype(np.int32)
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def iterate(
        self,
        start_step: int,
        num_steps: int,
        rows: slice | Integer[np.ndarray, "B"] | None = None,
    ) -> Iterator[dict[str, Int32[np.ndarray, "B L"]]]:
        """`batch_at` of each step in order. Background threads make the batches ahead of time."""
        import grain

        steps = grain.MapDataset.range(start_step, start_step + num_steps)
        batches = steps.map(lambda step: self.batch_at(int(step), rows))
        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=_PREFETCHED)
        return iter(batches.to_iter_dataset(options))


@dataclasses.dataclass(frozen=True)
class EvaluationWindows:
    """W windows over a token stream. Each window scores its targets from `first_scored` on.

    With `bos`, that token replaces the first input of each window and counts as context.
    """

    length: int
    # For each window: the stream index of its first input, its number of inputs (below `length` at
    # the end of a text), and the index in the window of its first scored target. All values of
    # `first_scored` other than 0 are equal.
    starts: Int64[np.ndarray, "W"]
    sizes: Int64[np.ndarray, "W"]
    first_scored: Int64[np.ndarray, "W"]
    bos: int | None = None

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def num_scored(self) -> Int64[np.ndarray, "W"]:
        """The number of targets that each window scores, at least 1."""
        return self.sizes - self.first_scored

    @property
    def offsets(self) -> Int64[np.ndarray, "W"]:
        """The index of each window's first scored target among all M scored targets."""
        return np.cumsum(self.num_scored) - self.num_scored

    @property
    def targets(self) -> Int64[np.ndarray, "M"]:
        """The stream index of each scored target, window by window."""
        return np.repeat(self.starts, self.num_scored) + self.contexts

    @property
    def contexts(self) -> Int64[np.ndarray, "M"]:
        """The context of each scored target in tokens, window by window."""
        counts = self.num_scored
        within = np.arange(counts.sum()) - np.repeat(self.offsets, counts)
        return within + np.repeat(self.first_scored, counts) + 1

    @property
    def min_context(self) -> int:
        """The smallest context of a scored target in windows that do not score all their targets.

        It is 1 if there are no such windows.
        """
        partial = self.first_scored[self.first_scored > 0]
        return int(partial.min()) + 1 if len(partial) else 1

    def groups(self) -> dict[int, Int64[np.ndarray, "G"]]:
        """The indices of the windows with each value of `first_scored`, by that value.

        Windows that score all their targets (0) form one group, and windows that score only their
        last targets form another.
        """
        values = np.unique(self.first_scored).tolist()
        return {value: np.flatnonzero(self.first_scored == value) for value in values}

    def batch(
        self,
        tokens: Integer[np.ndarray, "N"],
        indices: Integer[np.ndarray, "B"],
        first: int = 0,
    ) -> dict[str, Int32[np.ndarray, "B _"] | Bool[np.ndarray, "B _"]]:
        """{"inputs" [B, L], "targets" [B, L - first], "scored" [B, L - first]}.

        The rows are the windows `indices` of one group, whose `first_scored` is `first`. The index
        -1 gives an empty row. Column i of `targets` is the target at index first + i of the window.
        Where a row has no token, inputs and targets are 0 and `scored` is false.
        """
        is_window = indices >= 0
        starts, sizes = self.starts[indices], np.where(is_window, self.sizes[indices], 0)
        columns = np.arange(self.length)
        exists = columns < sizes[:, None]
        inputs = np.where(exists, tokens[np.where(exists, starts[:, None] + columns, 0)], 0)
        if self.bos is not None:
            inputs[is_window, 0] = self.bos
        scored, columns = exists[:, first:], columns[first:]
        targets = np.where(scored, tokens[np.where(scored, starts[:, None] + columns + 1, 0)], 0)
        return {
            "inputs": inputs.astype(np.int32),
            "targets": targets.astype(np.int32),
            "scored": scored,
        }


def evaluation_windows(
    bounds: Integer[np.ndarray, "bounds"], length: int, stride: int, bos: int | None = None
) -> EvaluationWindows:
    """Windows every `stride` tokens of each text. A window scores only targets not yet scored.

    Text d is tokens[bounds[d] : bounds[d + 1]]. Together its windows score each of its tokens
    except the first exactly once, in order. The first window of a text scores all of its targets.
    Later windows score their last `stride` targets, or fewer at the end of a text. Each of these
    has a context of at least length - stride + 1 tokens. With stride == length, windows do not
    overlap.

    Raises:
        ValueError: for a stride that would skip targets.
        DataError: if there is no target.
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
    """One window for each target (a stream index), which gives it exactly `context` tokens."""
    ones = np.ones(len(targets), np.int64)
    return EvaluationWindows(context, targets - context, ones * context, ones * (context - 1), bos)


def sample_targets(
    bounds: Integer[np.ndarray, "bounds"], context: int, count: int, seed: int
) -> Int64[np.ndarray, "M"]:
    """Stream indices of `count` targets that have at least `context` tokens before them, in order.

    The targets are in the non-overlapping windows of length `context` that are whole and are not
    the first of their text. So in non-overlapping windows of that length, or of a length that
    divides it, their indices in the window are evenly distributed. All such targets are divided
    into `count` equal stretches, and one target is drawn from each stretch. If there are at most
    `count` such targets, all of them are returned.
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
    """The number of targets of each text that `sample_targets` draws from."""
    windows = (np.diff(bounds) - 1) // context
    return np.maximum(windows - 1, 0) * context
