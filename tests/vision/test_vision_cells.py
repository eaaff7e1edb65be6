import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cluster.types import PatchGrid, cell_means
from cluster.vision.pruners.base import any_in_group, complete_groups, dilate, neighbours

masks = st.tuples(st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 2, 3])).flatmap(
    lambda shape: st.tuples(hnp.arrays(np.bool_, (shape[0] * shape[2], shape[1] * shape[2])), st.just(shape[2]))
)


def around(mask, row, col):
    rows, cols = mask.shape
    return [
        mask[r, c]
        for r in range(max(0, row - 1), min(rows, row + 2))
        for c in range(max(0, col - 1), min(cols, col + 2))
        if (r, c) != (row, col)
    ]


@given(masks)
@settings(deadline=None)
def test_groups_and_neighbourhoods_match_plain_loops(case):
    mask, merge = case
    complete, dilated, count = complete_groups(mask, merge), dilate(mask), neighbours(mask)
    for row, col in np.ndindex(mask.shape):
        top, left = row // merge * merge, col // merge * merge
        group = [bool(mask[r, c]) for r in range(top, top + merge) for c in range(left, left + merge)]
        assert complete[row, col] == any(group)
        assert any_in_group(mask, merge)[row // merge, col // merge] == any(group)
        assert dilated[row, col] == (mask[row, col] or any(around(mask, row, col)))
        assert count[row, col] == sum(around(mask, row, col))


@given(st.sampled_from([2, 14, 16, 28]), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_cell_means_match_numpy_means(patch, rows, cols, seed):
    grid = PatchGrid(rows, cols, patch, 1, 1)
    plane = np.random.default_rng(seed).integers(0, 256, (grid.height, grid.width)).astype(np.uint8)
    means = cell_means(plane, grid)
    assert means.shape == (rows, cols)
    assert means.dtype == np.float32
    for row, col in np.ndindex(rows, cols):
        cell = plane[row * patch : (row + 1) * patch, col * patch : (col + 1) * patch]
        assert abs(means[row, col] - cell.mean()) < 1e-3


def test_cell_means_do_not_overflow_on_white():
    grid = PatchGrid(2, 2, 56, 1, 1)
    assert np.allclose(cell_means(np.full((112, 112), 255, np.uint8), grid), 255.0)
