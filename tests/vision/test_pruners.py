"""What every pruning policy must hold, run over the whole registry."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.registry import pruners
from cluster.types import PatchGrid
from cluster.vision import make_pruner
from cluster.vision.pruners.base import complete_groups, parameters

every_pruner = pytest.mark.parametrize("name", pruners.names())


def random_frame(make_frame, rng, index, **given):
    grid_shape = (8, 12)
    luma = np.full((112, 168), 100, np.uint8)
    for _ in range(rng.integers(0, 4)):
        y, x = rng.integers(0, 112), rng.integers(0, 168)
        luma[y : y + rng.integers(1, 40), x : x + rng.integers(1, 40)] = rng.integers(0, 256)
    planes = {
        "max_motion": rng.exponential(0.1, grid_shape).astype(np.float32),
        "net_motion": rng.exponential(1.0, grid_shape).astype(np.float32),
        "intra": (rng.random(grid_shape) ** 8).astype(np.float32),
        "difference": rng.exponential(2.0, grid_shape).astype(np.float32),
    }
    return make_frame(luma, index=index, **planes, **given)


@every_pruner
@given(seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_masks_are_whole_groups_and_anchors_keep_everything(name, seed, make_frame):
    rng = np.random.default_rng(seed)
    pruner = make_pruner(name)
    for index in range(12):
        anchor = index == 0 or rng.random() < 0.15
        frame = random_frame(make_frame, rng, index, anchor=anchor, fresh=index == 0)
        decision = pruner.prune(frame)
        assert decision.mask.shape == (8, 12)
        assert decision.mask.dtype == np.bool_
        assert np.array_equal(decision.mask, complete_groups(decision.mask, 2))
        assert 0.0 <= decision.activity <= 1.0
        if anchor:
            assert decision.mask.all()


@every_pruner
def test_a_fresh_sample_keeps_everything_and_forgets(name, make_frame):
    rng = np.random.default_rng(3)
    story = [random_frame(make_frame, rng, index) for index in range(10)]
    used, new = make_pruner(name), make_pruner(name)
    for frame in story:
        used.prune(frame)
    restart = [random_frame(make_frame, rng, 10, fresh=True)] + [random_frame(make_frame, rng, i) for i in (11, 12, 13)]
    for frame in restart:
        after, fresh = used.prune(frame), new.prune(frame)
        assert np.array_equal(after.mask, fresh.mask)
        assert after.activity == fresh.activity
    assert make_pruner(name).prune(restart[0]).activity == 1.0
    assert make_pruner(name).prune(restart[0]).mask.all()


@every_pruner
def test_another_grid_keeps_everything(name, make_frame):
    pruner = make_pruner(name)
    pruner.prune(make_frame(100))
    pruner.prune(make_frame(100, index=1))
    wider = PatchGrid(8, 16, 14, 2, 2)
    assert pruner.prune(make_frame(100, index=2, on=wider)).mask.all()
    assert pruner.prune(make_frame(100, index=3, on=wider)).mask.shape == (8, 16)


@every_pruner
def test_decisions_do_not_alias_state(name, make_frame):
    rng = np.random.default_rng(5)
    frames = [random_frame(make_frame, rng, index) for index in range(8)]
    undisturbed, disturbed = make_pruner(name), make_pruner(name)
    for frame in frames:
        expected = undisturbed.prune(frame).mask.copy()
        mask = disturbed.prune(frame).mask
        assert np.array_equal(mask, expected)
        mask[:] = ~mask


@every_pruner
def test_pictures_are_not_changed(name, make_frame):
    rng = np.random.default_rng(6)
    pruner = make_pruner(name)
    for index in range(6):
        frame = random_frame(make_frame, rng, index)
        before = (frame.luma.copy(), frame.rgb.copy(), frame.change.net_motion.copy())
        pruner.prune(frame)
        assert np.array_equal(frame.luma, before[0])
        assert np.array_equal(frame.rgb, before[1])
        assert np.array_equal(frame.change.net_motion, before[2])


def test_none_keeps_everything_and_still_reports_activity(make_frame):
    pruner = make_pruner("none")
    pruner.prune(make_frame(100))
    difference = np.zeros((8, 12), np.float32)
    difference[0, 0] = 20
    decision = pruner.prune(make_frame(100, index=1, difference=difference))
    assert decision.mask.all()
    assert decision.activity == pytest.approx(1 / 24)


def test_every_parameter_is_described():
    for name in pruners:
        policy = pruners.get(name)
        assert policy.__doc__
        for parameter in parameters(policy):
            assert make_pruner(name, {parameter: 1})


def test_unknown_names_and_parameters_say_what_there_is():
    with pytest.raises(ConfigError, match=r"unknown pruner 'replenich'; did you mean 'replenish'\?"):
        make_pruner("replenich")
    with pytest.raises(ConfigError, match="pruner 'codecsight' has no parameter 'tao'; there are: tau, alpha"):
        make_pruner("codecsight", {"tao": 1.0})
    with pytest.raises(ConfigError, match="no parameter '_active'"):
        make_pruner("codecsight", {"_active": 1.0})
