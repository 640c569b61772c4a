"""Random programs of attention, and arrays and arguments for them."""

import functools
import random
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

LAST, BLOCK = 2**31 - 1, 8
# Batch rows, queries, keys, heads, key heads, features of a key and of a value. With more than
# four blocks of keys, engines leave out the blocks beyond the reach.
SHAPES = [
    (1, 4, 4, 2, 2, 4, 4),
    (2, 5, 9, 4, 2, 4, 3),
    (1, 1, 17, 8, 1, 8, 8),
    (1, 1, 1, 1, 1, 1, 1),
    (2, 33, 33, 2, 1, 4, 4),
    (2, 50, 50, 4, 4, 4, 8),
    (1, 9, 64, 3, 3, 4, 4),
    (1, 17, 8, 2, 2, 4, 4),
    (0, 3, 3, 2, 2, 4, 4),
    (2, 0, 3, 2, 2, 4, 4),
    (2, 3, 0, 2, 1, 4, 4),
    (1, 3, 3, 1, 1, 2, 0),
]
DTYPES = {"float32": np.float32, "bfloat16": jnp.bfloat16, "float16": np.float16}


class Program(NamedTuple):
    """What is compiled once and then runs for many inputs."""

    shape: tuple[int, ...]
    engine: str | None
    dtype: str
    causal: bool
    window: Any
    offset: Any
    positions: str
    segments: bool
    mask: tuple[int, int] | None
    future_slopes: bool
    residual: bool


@functools.cache
def program(number):
    """The same program for the same number."""
    draw = random.Random(number)
    shape = draw.choice(SHAPES)
    batch, length, key_length, heads, *_ = shape
    engine = ["dense", "blockwise", "all heads", None, "folded", "pallas_tpu"][
        5 if number % 30 == 17 else number % 5
    ]
    plain = engine in ("folded", "pallas_tpu") and draw.random() < 0.8
    if plain and length != key_length:
        shape = SHAPES[4 + draw.randrange(2)]
        batch, length, key_length, heads, *_ = shape
    dtype = draw.choice(["float32", "float32", *DTYPES])
    if engine == "folded" and length == 1:
        # XLA has no product of two bfloat16 numbers on a CPU, only of arrays.
        dtype = "float32"
    windows = [*[None] * 6, *[1, 2, 7] * 2, max(1, length), LAST - 3, LAST, 2**31, 2**40, 0, 2.5]
    last = key_length - length
    offsets = [*[None] * 4, *["traced"] * 4, 0, last, last, 1, -1, 2**31 - max(1, length), 2.5]
    return Program(
        shape,
        engine,
        dtype,
        draw.random() < 0.7 or plain,
        draw.choice(windows),
        None if plain else draw.choice(offsets),
        "none" if plain else draw.choice(["none", "none", "whole", "broken", "per row"]),
        draw.random() < 0.5 and engine != "folded",
        draw.choice([(1, 1), (batch, 1), (batch, heads)])
        if draw.random() < 0.3 and not plain
        else None,
        draw.random() < 0.3 and not plain,
        draw.random() < 0.3 and not plain,
    )


def positions_of(draw, made, rows, start):
    """Positions of queries and keys that are at most 2^31 - 1 apart."""
    _, length, key_length, *_ = made.shape
    both = []
    for tokens in (length, key_length):
        shape = (rows, tokens) if made.positions == "per row" else (tokens,)
        if made.positions == "broken":
            both.append((draw.normal(size=shape) * 30).astype(np.float32))
        elif draw.random() < 0.6:
            row = start + draw.integers(0, 50) + np.arange(tokens)
            both.append(np.broadcast_to(row, shape).astype(np.int32))
        else:
            last = min(LAST, start + int(draw.choice([100, 10_000, LAST])))
            both.append(draw.integers(start, last, shape, endpoint=True).astype(np.int32))
    return both


def make_inputs(made, seed, scale, start):
    """Arrays for a program: queries, keys and values; slopes; and all other arguments."""
    draw = np.random.default_rng(seed)
    batch, length, key_length, heads, kv_heads, size, value_size = made.shape
    dtype = DTYPES[made.dtype]
    if made.dtype == "float16":
        scale = min(scale, 5.0)

    def normal(*shape):
        x = jnp.asarray(draw.normal(size=shape) * scale, dtype)
        return np.array(x.astype(jnp.float32))

    arrays = [
        normal(batch, length, heads, size),
        normal(batch, key_length, kv_heads, size),
        normal(batch, key_length, kv_heads, value_size),
    ]
    steep = 1.0 if made.engine == "folded" else draw.choice([0.0, 1.0, 1.0, 1.0, 300.0])
    slopes = [np.exp(draw.uniform(-9, 0, heads)).astype(np.float32) * steep for _ in range(2)]
    slopes = [x.astype(np.float32) for x in slopes]
    given = {"cotangent": draw.normal(size=(batch, length, heads, value_size)).astype(np.float32)}
    if made.offset == "traced":
        near = [0, key_length - length, *range(-length, key_length + 2)]
        given["offset"] = np.int32(draw.choice(near))
    if made.positions != "none":
        given["query_positions"], given["key_positions"] = positions_of(draw, made, batch, start)
    if made.segments:
        ids = draw.choice([1, 2, 3, -1, LAST, 0], (batch, length + key_length))
        if draw.random() < 0.7:
            ids = np.sort(draw.integers(0, 4, ids.shape), axis=1)
        given["key_segment_ids"] = ids[:, :key_length].astype(np.int32)
        given["query_segment_ids"] = (
            given["key_segment_ids"][:, -length:]
            if 0 < length <= key_length
            else ids[:, :length].astype(np.int32)
        )
    if made.mask is not None:
        given["mask"] = draw.random((*made.mask, length, key_length)) < draw.choice(
            [0.1, 0.5, 0.95]
        )
    return arrays, slopes, given


def first_index(made, given):
    if made.offset == "traced":
        return int(given["offset"])
    return made.shape[2] - made.shape[1] if made.offset is None else made.offset


def is_valid(made):
    """Whether the arguments are such that some engine serves them."""
    _, length, key_length, *_ = made.shape
    window, offset = made.window, made.offset
    if not (window is None or (isinstance(window, int) and window >= 1)):
        return False
    if isinstance(offset, float):
        return False
    if made.causal and offset != "traced":
        return length <= key_length and (offset is None or 0 <= offset <= key_length - length)
    if not made.causal and length != key_length and offset is None:
        return made.positions != "none"
    return True
