import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from alibi_jax.attention.tpu.grid import GridStep, make_grid, rows_per_launch, unpack

make_grid_jit = jax.jit(make_grid)


def expected_steps(active, group, groups):
    """The steps of a row group, from plain loops in Python."""
    steps = []
    for row, active_of_row in enumerate(active[group::groups]):
        for outer, active_of_block in enumerate(active_of_row):
            is_active = bool(active_of_block.any())
            inner_blocks = list(np.flatnonzero(active_of_block)) or [0]
            for inner in inner_blocks:
                first = inner == inner_blocks[0]
                last = inner == inner_blocks[-1]
                first_of_row = first and outer == 0
                steps.append(GridStep(row, outer, inner, is_active, first, last, first_of_row))
    return steps


# Few shapes, because each is compiled: two groups, one group, and one block per axis.
@settings(max_examples=60, deadline=None)
@given(st.sampled_from([(4, 3, 5), (3, 5, 2), (2, 1, 1)]).flatmap(lambda x: hnp.arrays(bool, x)))
def test_steps_equal_those_of_a_plain_loop(active):
    grid = make_grid_jit(active)
    groups = 2 if len(active) % 2 == 0 else 1
    assert grid.packed_steps.shape == (groups, active.size // groups)
    for group in range(groups):
        expected = expected_steps(active, group, groups)
        assert grid.num_steps[group] == len(expected)
        actual = jax.tree.map(np.asarray, unpack(grid.packed_steps[group]))
        actual = [GridStep(*(x.item() for x in step)) for step in zip(*actual)]
        # The rest repeats the last step's blocks and is inactive.
        expected += [GridStep(*expected[-1][:3], *4 * [False])] * (len(actual) - len(expected))
        assert actual == expected


def test_the_greatest_indices_do_not_overlap_in_a_packed_step():
    active = np.zeros((128, 1, 1023), bool)
    active[:, 0, 1022] = True
    grid = make_grid_jit(active)
    step = unpack(grid.packed_steps[1, 63])
    assert grid.num_steps.tolist() == [64, 64]
    assert (step.row, step.outer_block, step.inner_block) == (63, 0, 1022)
    assert step.last_of_outer
    step = unpack(make_grid_jit(np.ones((1, 128, 1023), bool)).packed_steps[0, -1])
    assert (step.row, step.outer_block, step.inner_block) == (0, 127, 1022)


@pytest.mark.parametrize(
    ("arguments", "rows"),
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
def test_rows_per_launch_fit(arguments, rows):
    assert rows_per_launch(*arguments) == rows


@pytest.mark.parametrize(("outer", "inner"), [(1024, 1), (1, 1024), (512, 512)])
def test_more_blocks_than_a_grid_holds_are_refused(outer, inner):
    with pytest.raises(ValueError, match=f"{outer} by {inner} blocks .* give larger blocks"):
        rows_per_launch(1, outer, inner)


def test_rows_that_belong_together_must_fit_together():
    assert rows_per_launch(8, 128, 256, multiple_of=4) == 4
    with pytest.raises(ValueError, match="128 by 256 blocks of 8 heads"):
        rows_per_launch(8, 128, 256, multiple_of=8)
