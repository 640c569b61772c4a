"""Random positions of queries and keys, and what the tests of position functions share."""

import numpy as np
from fuzz import one_line
from hypothesis import strategies as st

# Leading axes of the queries and of the keys, numbers of queries, keys and heads. Few shapes, so
# that few programs are compiled.
SHAPES = [
    ((), (), 5, 7, 2),
    ((), (), 1, 1, 1),
    ((2,), (2,), 4, 4, 3),
    ((2,), (1,), 1, 9, 8),
    ((), (), 70, 3, 2),
    ((), (), 0, 3, 2),
    ((), (), 3, 0, 1),
    ((0,), (0,), 2, 2, 2),
]
LAST = 2**31 - 1


@st.composite
def positions(draw, lead, length, start, whole):
    """Positions from `start` on: in a row, anywhere up to 2^31 - 1, all equal, or not whole."""
    shape, random = (*lead, length), np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["row", "row", "row", "spread", "equal"]))
    if not whole:
        factor = draw(st.sampled_from([0.5, 0.25, 1 / 3, 0.999, 7.5]))
        first = np.clip(start, -(2**16), 2**16)
        return (np.broadcast_to(first + np.arange(length), shape) * factor).astype(np.float32)
    room = LAST - start - length
    if kind == "row":
        first = start + min(room, draw(st.sampled_from([0, 1, 1000, 2**20])))
        return np.broadcast_to(first + np.arange(length), shape).astype(np.int32)
    if kind == "equal":
        return np.full(shape, start, np.int32)
    return random.integers(start, min(LAST, start + LAST), shape, endpoint=True).astype(np.int32)


STARTS = [
    0,
    0,
    0,
    1,
    255,
    4096,
    100_000,
    2**24 - 3,
    2**24,
    2**30,
    LAST - 80,
    LAST - 2000,
    -5,
    -(2**30),
]


@st.composite
def inputs_of(draw, methods, count):
    """A method, positions of queries and keys that are at most 2^31 - 1 apart, and a seed."""
    name = draw(st.sampled_from(methods))
    # A program for each shape takes longest.
    shapes = SHAPES[2:3] if count < 1000 else SHAPES
    query_lead, key_lead, length, key_length, heads = draw(st.sampled_from(shapes))
    start = draw(st.sampled_from(STARTS))
    whole = draw(st.integers(0, 3)) > 0
    queries = draw(positions(query_lead, length, start, whole))
    keys = draw(positions(key_lead, key_length, start, whole))
    return name, queries, keys, heads, draw(st.integers(0, 2**32))


def exact_relative(queries, keys):
    """Key position minus query position, exactly: `[..., 1, T, S]` in float64."""
    queries, keys = queries.astype(np.float64), keys.astype(np.float64)
    return (keys[..., None, :] - queries[..., :, None])[..., None, :, :]


def per_head(x):
    return np.asarray(x, np.float64)[:, None, None]


def assert_within(found, wanted, error, shown=""):
    """Asserts the shape, and that no entry is further from the oracle than its greatest error."""
    assert found.shape == wanted.shape, shown
    off = abs(np.asarray(found, np.float64) - wanted)
    assert (off <= error).all(), (shown, found, wanted, (off - error).max())


def refused_broken(name, queries, error):
    """What a refusal is: only positions that are not whole may be refused."""
    message = one_line(error)
    assert "positions" in message
    assert queries.dtype != np.int32, message
    return f"{name}: positions that are not whole refused"
