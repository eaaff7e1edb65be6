import numpy as np
import pytest

from cluster.vision.sampler import overlay


@pytest.fixture
def picture():
    return np.random.default_rng(0).integers(100, 200, (84, 112, 3)).astype(np.uint8)


@pytest.fixture
def mask():
    mask = np.zeros((6, 8), bool)
    mask[2:4, 2:6] = True
    return mask


def test_kept_inside_is_untouched_and_pruned_is_dark(picture, mask):
    shown = overlay(picture, mask)
    assert shown.shape == picture.shape
    assert np.array_equal(shown[30:54, 30:82], picture[30:54, 30:82])
    assert shown[:27].max() < 100
    assert np.array_equal(picture, np.random.default_rng(0).integers(100, 200, (84, 112, 3)).astype(np.uint8))


def test_a_line_runs_around_what_is_kept(picture, mask):
    shown = overlay(picture, mask)
    line = (shown == shown[28, 28]).all(axis=2)
    assert line[28, 28:84].all()
    assert line[55, 28:84].all()
    assert line[28:56, 28].all()
    assert line[28:56, 83].all()
    assert line.sum() == 2 * 56 + 2 * 26


def test_nothing_pruned_shows_the_picture(picture):
    assert np.array_equal(overlay(picture, np.ones((6, 8), bool)), picture)
