"""Measures the rounding errors of the ways to write a linear bias, relative to float64.

    python benchmarks/precision.py [--heads=16] [--lengths=1024,8192,65536]

Queries, keys and values are normal random numbers of head size 64, rounded to bfloat16. Scores and
biases are added in float32. For each length, 24 rows are computed. The table gives two numbers for
the worst head: the greatest error of an output, and the greatest total variation between the
weights of a row and the exact weights.
"""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
from absl import app, flags

from alibi_jax.biases import alibi_slopes

_HEADS = flags.DEFINE_integer("heads", 16, "Number of heads.")
_LENGTHS = flags.DEFINE_list("lengths", ["1024", "8192", "65536"], "Numbers of keys.")
_ROWS = 24


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """The numbers rounded to bfloat16, as float32."""
    return np.asarray(x, ml_dtypes.bfloat16).astype(np.float32)


def forms(
    scores: np.ndarray, slope: float, rows: np.ndarray, columns: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """The name and the biased scores of each form, up to a shift of each row.

    `scores` are float32. `rows` and `columns` are the positions of queries and keys.
    """
    distance = rows[:, None] - columns
    m, position = np.float32(slope), columns.astype(np.float32)
    yield (
        "exact distance, s - m(i-j) [dense, blockwise, pallas_tpu]",
        scores - m * distance.astype(np.float32),
    )
    start = (rows // 512 * 512)[:, None]
    from_block = scores + m * (columns - start).astype(np.float32)
    yield "from the block of queries, s + m(j-i0)", from_block
    yield "key positions, s + mj", scores + m * position
    centred = columns - len(columns) // 2
    coarse = np.round(centred / 256) * 256
    slope_parts, remainder = [], slope
    for _ in range(3):
        slope_parts.append(to_bfloat16(remainder))
        remainder = remainder - np.float64(slope_parts[-1])
    total = scores
    for column in (centred - coarse, coarse):
        for slope_part in slope_parts:
            total = total + to_bfloat16(slope_part) * to_bfloat16(column)
    yield "folded into q and k, six columns [folded]", total
    coarse = columns // 256 * 256
    two_columns = (
        scores
        + to_bfloat16(slope) * to_bfloat16(coarse)
        + to_bfloat16(slope) * to_bfloat16(columns - coarse)
    )
    yield "folded, two columns, slope in bfloat16", two_columns
    yield "matrix -m(i-j) in bfloat16", scores + to_bfloat16(-slope * distance)
    yield "row mj in bfloat16", scores + to_bfloat16(slope * columns)
    yield "folded, one column j in bfloat16", scores + to_bfloat16(slope) * to_bfloat16(columns)


def softmax(scores: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """The softmax over the visible keys, in float64."""
    scores = np.where(visible, scores.astype(np.float64), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def errors(length: int, num_heads: int) -> dict[str, tuple[float, float]]:
    """The greatest error of an output, and of a row's weights, for each form."""
    rng = np.random.default_rng(0)
    rows = length - 1 - np.arange(_ROWS) * (length // 64)
    columns = np.arange(length)
    query, key, value = (
        to_bfloat16(rng.standard_normal((n, 64))).astype(np.float64)
        for n in (_ROWS, length, length)
    )
    scores = query @ key.T / 8
    visible = columns <= rows[:, None]
    greatest: dict[str, tuple[float, float]] = {}
    for slope in np.asarray(alibi_slopes(num_heads), np.float64):
        exact_weights = softmax(scores - slope * (rows[:, None] - columns), visible)
        for name, biased in forms(scores.astype(np.float32), slope, rows, columns):
            weights = softmax(biased, visible)
            output_error = abs((weights - exact_weights) @ value).max()
            weight_error = abs(weights - exact_weights).sum(axis=1).max() / 2
            form_errors = output_error, weight_error
            greatest[name] = tuple(np.maximum(form_errors, greatest.get(name, (0.0, 0.0))))
    return greatest


def main(_: list[str]) -> None:
    """Prints a table in Markdown."""
    lengths = [int(length) for length in _LENGTHS.value]
    tables = [errors(length, _HEADS.value) for length in lengths]
    print("| form | " + " | ".join(f"{length:,}" for length in lengths) + " |")
    print("|---|" + "---|" * len(lengths))
    for name in tables[0]:
        cells = (f"{table[name][0]:.0e} / {table[name][1]:.0e}" for table in tables)
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    app.run(main)
