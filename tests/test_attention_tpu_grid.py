import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from alibi_jax.attention.tpu.grid import GridStep, make_grid, rows_per_call, unpack

pack = jax.jit(make_grid)


def plain(active, group, groups):
    """The steps of a group of rows, one after another in Python."""
    found = []
    for row, of_row in enumerate(active[group::groups]):
        for outer, of_block in enumerate(of_row):
            inner_blocks = list(np.flatnonzero(of_block))
            work = bool(inner_blocks)
            for inner in inner_blocks or [0]:
                first = inner == (inner_blocks or [0])[0]
                last = inner == (inner_blocks or [0])[-1]
                found.append(GridStep(row, outer, inner, work, first, last, first and outer == 0))
    return found


# Few shapes, for each is compiled: two groups, one, and one block a side.
@settings(max_examples=60, deadline=None)
@given(st.sampled_from([(4, 3, 5), (3, 5, 2), (2, 1, 1)]).flatmap(lambda x: hnp.arrays(bool, x)))
def test_steps_are_those_of_a_plain_loop(active):
    plan = pack(active)
    groups = 2 if len(active) % 2 == 0 else 1
    assert plan.words.shape == (groups, active.size // groups)
    for group in range(groups):
        expected = plain(active, group, groups)
        assert plan.counts[group] == len(expected)
        actual = jax.tree.map(np.asarray, unpack(plan.words[group]))
        actual = [GridStep(*(x.item() for x in step)) for step in zip(*actual)]
        # The rest stays where it is, and does nothing.
        expected += [GridStep(*expected[-1][:3], *4 * [False])] * (len(actual) - len(expected))
        assert actual == expected


def test_the_greatest_numbers_do_not_run_into_each_other():
    active = np.zeros((128, 1, 1023), bool)
    active[:, 0, 1022] = True
    plan = pack(active)
    step = unpack(plan.words[1, 63])
    assert plan.counts.tolist() == [64, 64]
    assert (step.row, step.outer, step.inner) == (63, 0, 1022)
    assert step.last
    step = unpack(pack(np.ones((1, 128, 1023), bool)).words[0, -1])
    assert (step.row, step.outer, step.inner) == (0, 127, 1022)


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ((16, 16, 16), 16),
        ((512, 16, 16), 128),
        ((150, 4, 4), 50),
        ((64, 64, 64), 32),
        ((7, 256, 256), 1),
        ((6, 256, 256), 2),
        ((194, 2, 2), 2),
        ((96, 64, 64, 3), 24),
    ],
)
def test_rows_per_call_fit(shape, count):
    assert rows_per_call(*shape) == count


@pytest.mark.parametrize(("outer", "inner"), [(1024, 1), (1, 1024), (512, 512)])
def test_more_blocks_than_a_schedule_holds_are_refused(outer, inner):
    with pytest.raises(ValueError, match=f"{outer} by {inner} blocks .* give larger blocks"):
        rows_per_call(1, outer, inner)


def test_rows_that_belong_together_must_fit_together():
    assert rows_per_call(8, 128, 256, together=4) == 4
    with pytest.raises(ValueError, match="128 by 256 blocks of 8 heads"):
        rows_per_call(8, 128, 256, together=8)
