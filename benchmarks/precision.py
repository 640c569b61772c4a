"""What each way to write a linear bias costs in precision, against float64.

    python benchmarks/precision.py [--heads=16] [--lengths=1024,8192,65536]

Queries, keys and values of head size 64, standard normal, rounded to bfloat16; scores and
biases added up in float32, 24 rows of each length. Prints, of the worst head, the greatest error
of an output and the greatest total variation of a row of weights.
"""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
from absl import app, flags

from alibi_jax.biases import alibi_slopes

_HEADS = flags.DEFINE_integer("heads", 16, "Heads.")
_LENGTHS = flags.DEFINE_list("lengths", ["1024", "8192", "65536"], "Keys.")
_ROWS = 24

single = np.float32


def half(x: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16."""
    return np.asarray(x, ml_dtypes.bfloat16).astype(single)


def forms(
    scores: np.ndarray, slope: float, rows: np.ndarray, columns: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Biased scores, up to a shift of each row, by each form; `scores` are float32."""
    distance = rows[:, None] - columns
    m, position = single(slope), columns.astype(single)
    yield (
        "exact distance, s - m(i-j) [dense, blockwise, pallas_tpu]",
        scores - m * distance.astype(single),
    )
    start = (rows // 512 * 512)[:, None]
    yield "from the block of queries, s + m(j-i0)", scores + m * (columns - start).astype(single)
    yield "key positions, s + mj", scores + m * position
    centred = columns - len(columns) // 2
    whole = np.round(centred / 256) * 256
    parts, rest = [], slope
    for _ in range(3):
        parts.append(half(rest))
        rest = rest - np.float64(parts[-1])
    total = scores
    for column in (centred - whole, whole):
        for part in parts:
            total = total + half(part) * half(column)
    yield "folded into q and k, six columns [folded]", total
    whole = columns // 256 * 256
    two = scores + half(slope) * half(whole) + half(slope) * half(columns - whole)
    yield "folded, two columns, slope in bfloat16", two
    yield "matrix -m(i-j) in bfloat16", scores + half(-slope * distance)
    yield "row mj in bfloat16", scores + half(slope * columns)
    yield "folded, one column j in bfloat16", scores + half(slope) * half(columns)


def softmax(scores: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """In float64, over what is visible."""
    scores = np.where(visible, scores.astype(np.float64), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def errors(length: int, num_heads: int) -> dict[str, tuple[float, float]]:
    """Of each form, the worst error of an output and of a row's weights."""
    rng = np.random.default_rng(0)
    rows = length - 1 - np.arange(_ROWS) * (length // 64)
    columns = np.arange(length)
    query, key, value = (
        half(rng.standard_normal((n, 64))).astype(np.float64) for n in (_ROWS, length, length)
    )
    scores = query @ key.T / 8
    visible = columns <= rows[:, None]
    worst: dict[str, tuple[float, float]] = {}
    for slope in np.asarray(alibi_slopes(num_heads), np.float64):
        right = softmax(scores - slope * (rows[:, None] - columns), visible)
        for name, biased in forms(scores.astype(single), slope, rows, columns):
            weights = softmax(biased, visible)
            found = abs((weights - right) @ value).max(), abs(weights - right).sum(axis=1).max() / 2
            worst[name] = tuple(np.maximum(found, worst.get(name, (0.0, 0.0))))
    return worst


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
