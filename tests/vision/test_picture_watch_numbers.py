"""The picture watch's own mean, deviation and median against numpy's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from cluster.decoder.picture_statistics import _median, _moments

SHAPES = arrays.array_shapes(min_dims=1, max_dims=2, max_side=12)


@given(arrays.arrays(np.uint8, SHAPES))
def test_moments_are_numpys(values: np.ndarray) -> None:
    before = values.copy()
    mean, spread = _moments(values)
    assert mean == pytest.approx(values.mean(), rel=1e-5, abs=1e-4)
    assert spread == pytest.approx(values.std(), rel=1e-4, abs=1e-3)
    assert np.array_equal(values, before)


@given(arrays.arrays(np.float32, SHAPES, elements=st.floats(-300, 300, width=32)))
def test_the_median_is_numpys(values: np.ndarray) -> None:
    before = values.copy()
    assert _median(values) == pytest.approx(np.median(values), rel=1e-6, abs=1e-6)
    assert np.array_equal(values, before)
