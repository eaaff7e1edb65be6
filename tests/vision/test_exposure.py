import numpy as np
import pytest

from cluster.vision.pruners.replenish import Exposure, fit_exposure


@pytest.fixture
def scene():
    return np.random.default_rng(0).uniform(20, 160, (24, 42)).astype(np.float32)


@pytest.mark.parametrize(("gain", "offset"), [(1.0, 0.0), (1.3, 0.0), (1.0, 40.0), (0.7, 12.0), (1.15, -20.0)])
def test_global_changes_are_recovered_though_a_third_of_the_picture_is_covered(scene, gain, offset):
    reference = scene.copy()
    now = (scene - offset) / gain
    now[:8] = 230.0
    fitted = fit_exposure(now, reference)
    recovered = fitted.gain * now[8:] + fitted.offset
    assert np.abs(recovered - reference[8:]).max() < 1.0


def test_flat_pictures_are_compensated_by_offset_alone():
    fitted = fit_exposure(np.full((4, 4), 90.0, np.float32), np.full((4, 4), 100.0, np.float32))
    assert fitted.gain * 90.0 + fitted.offset == pytest.approx(100.0, abs=0.5)


def test_black_pictures_fit():
    zero = np.zeros((4, 4), np.float32)
    assert fit_exposure(zero, zero).is_identity


def test_apply_rounds_and_clips():
    luma = np.array([[0, 100, 200, 255]], np.uint8)
    assert Exposure(1.5, -20.0).apply(luma).tolist() == [[0, 130, 255, 255]]


def test_negligible_exposure_returns_the_same_array():
    luma = np.arange(4, dtype=np.uint8)
    assert Exposure(1.001, 0.1).apply(luma) is luma
    assert not Exposure(1.01, 0.0).is_identity
