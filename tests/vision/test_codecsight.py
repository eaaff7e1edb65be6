import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.vision import make_pruner
from cluster.vision.pruners.baselines import CodecSight

SHAPE = (8, 12)


def plane(cells, value=1.0):
    out = np.zeros(SHAPE, np.float32)
    for cell in cells:
        out[cell] = value
    return out


@given(seed=st.integers(0, 2**32 - 1), alpha=st.sampled_from([0.0, 0.02]))
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_matches_the_published_rule_written_as_loops(seed, alpha, make_frame):
    rng = np.random.default_rng(seed)
    pruner = CodecSight(tau=0.25, alpha=alpha)
    active = set()
    for index in range(10):
        anchor = index == 0 or rng.random() < 0.2
        motion = rng.exponential(0.08, SHAPE).astype(np.float32)
        luma = rng.exponential(1.0, SHAPE).astype(np.float32)
        intra = np.where(rng.random(SHAPE) < 0.02, rng.choice([0.5, 0.75], SHAPE), 0.0).astype(np.float32)
        frame = make_frame(
            80, index=index, anchor=anchor, fresh=index == 0, max_motion=motion, difference=luma, intra=intra
        )
        mask = pruner.prune(frame).mask
        if anchor:
            active.clear()
            assert mask.all()
            continue
        for row, col in np.ndindex(SHAPE):
            if motion[row, col] + np.float32(alpha) * luma[row, col] > 0.25 or intra[row, col] > 0.5:
                active.add((row // 2, col // 2))
        expected = {(row // 2, col // 2) for row, col in np.argwhere(mask).tolist()}
        assert expected == active


def test_sticks_until_the_next_anchor(make_frame):
    pruner = make_pruner("codecsight")
    pruner.prune(make_frame(80))
    assert pruner.prune(make_frame(80, index=1, max_motion=plane([(2, 3)]))).mask.sum() == 4
    still = pruner.prune(make_frame(80, index=2))
    assert still.mask.sum() == 4
    assert still.activity == 0.0
    assert pruner.prune(make_frame(80, index=3, anchor=True)).mask.all()
    assert not pruner.prune(make_frame(80, index=4)).mask.any()


def test_threshold_is_exclusive_at_a_quarter_pixel(make_frame):
    pruner = make_pruner("codecsight")
    pruner.prune(make_frame(80))
    assert not pruner.prune(make_frame(80, index=1, max_motion=plane([(2, 3)], 0.25))).mask.any()
    assert pruner.prune(make_frame(80, index=2, max_motion=plane([(2, 3)], 0.5))).mask.any()


@pytest.mark.parametrize(("cue", "kept"), [("luma", 4), ("vectors+luma", 0)])
def test_luma_stands_in_only_where_there_are_no_vectors(cue, kept, make_frame):
    pruner = make_pruner("codecsight")
    pruner.prune(make_frame(80, cue=cue))
    assert pruner.prune(make_frame(80, index=1, cue=cue, difference=plane([(0, 0)], 9.0))).mask.sum() == kept
