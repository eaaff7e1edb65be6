from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.types import cell_means
from cluster.vision import make_pruner
from cluster.vision.pruners.replenish import HEAD_START, Replenish

SHAPE = (8, 12)
PATCH = 14


@pytest.fixture
def texture():
    rng = np.random.default_rng(1)
    surfaces = rng.integers(60, 140, SHAPE).repeat(PATCH, axis=0).repeat(PATCH, axis=1)
    return (surfaces + rng.integers(-12, 13, surfaces.shape)).astype(np.uint8)


def cell(row, col, rows=1, cols=1):
    return slice(row * PATCH, (row + rows) * PATCH), slice(col * PATCH, (col + cols) * PATCH)


def camera_threshold(pruner):
    """That of the calmest cell, which has none of its own; grey levels."""
    return float(np.min(pruner.cell_thresholds()))


def groups_of(mask):
    return {(int(row) // 2, int(col) // 2) for row, col in np.argwhere(mask)}


def test_constant_input_keeps_nothing(make_frame, texture):
    pruner = make_pruner("replenish")
    pruner.prune(make_frame(texture))
    for index in range(1, 30):
        decision = pruner.prune(make_frame(texture, index=index))
        assert not decision.mask.any()
        assert decision.activity == 0.0


def test_an_object_is_kept_while_it_moves_and_what_it_uncovers_too(make_frame, texture):
    pruner = make_pruner("replenish", {"restate": 0})
    pruner.prune(make_frame(texture))
    there, gone = texture.copy(), texture
    there[cell(2, 2, 2, 2)] = 220
    assert groups_of(pruner.prune(make_frame(there, index=1)).mask) == {(1, 1)}
    assert not pruner.prune(make_frame(there, index=2)).mask.any(), "it stands: the model has seen it"
    assert groups_of(pruner.prune(make_frame(gone, index=3)).mask) == {(1, 1)}


def restated(pruner, make_frame, pictures, anchors=()):
    """Indices of the samples that keep something, and the groups that any of them keeps; anchors aside."""
    kept, groups = [], set()
    for index, picture in enumerate(pictures):
        decision = pruner.prune(make_frame(picture, index=index, anchor=index in (0, *anchors)))
        if decision.mask.any() and index not in (0, *anchors):
            kept.append(index)
            groups |= groups_of(decision.mask)
    return kept, groups


def with_object(texture):
    picture = texture.copy()
    picture[cell(2, 2, 2, 2)] = 220
    return picture


def test_what_stands_is_shown_again_until_it_is_background(make_frame, texture):
    pruner = Replenish(restate=2, settle=12)
    kept, groups = restated(pruner, make_frame, [texture] * 41 + [with_object(texture)] * 40 + [texture] * 40)
    assert groups == {(1, 1)}
    # It comes with sample 41 and is shown again until it has stood for 12; then the empty place is, as long.
    assert kept == [41, *range(42, 53, 2), 81, *range(82, 93, 2)]


def test_an_anchor_shows_what_stands_and_counts(make_frame, texture):
    pictures = [texture] * 41 + [with_object(texture)] * 12
    kept, _ = restated(Replenish(restate=4), make_frame, pictures, anchors=(46,))
    assert kept == [41, 44, 50]


def test_who_stood_in_the_first_picture_leaves_no_trace_for_long(make_frame, texture):
    """The place is background once it was seen for longer than the one who stood there: ten seconds and more."""
    kept, groups = restated(Replenish(), make_frame, [with_object(texture)] * 5 + [texture] * 60)
    assert groups == {(1, 1)}
    assert kept == [5, *range(6, 5 + HEAD_START + 4, 2)]


@pytest.mark.parametrize(("fresh", "again"), [(False, [52, 54, 56, 58]), (True, [])])
def test_who_stands_is_known_after_missing_video_and_not_in_another_scene(make_frame, texture, fresh, again):
    pruner = Replenish()
    restated(pruner, make_frame, [texture] * 41 + [with_object(texture)] * 9)
    pruner.prune(replace(make_frame(with_object(texture), index=50, fresh=fresh), gap=not fresh))
    shown = [pruner.prune(make_frame(with_object(texture), index=index)).mask for index in range(51, 60)]
    assert [index for index, mask in enumerate(shown, 51) if mask.any()] == again


def test_who_stands_is_shown_while_video_is_left_undecoded(make_frame, texture):
    pruner = Replenish(settle=12)
    restated(pruner, make_frame, [texture] * 41 + [with_object(texture)] * 3)
    again = replace(make_frame(with_object(texture), index=44), repeated=True)
    decisions = [pruner.repeat(again) for _ in range(20)]
    assert [index for index, decision in enumerate(decisions, 44) if decision.mask.any()] == [44, 46, 48, 50, 52]
    assert {group for decision in decisions for group in groups_of(decision.mask)} == {(1, 1)}
    assert not any(decision.activity for decision in decisions)


def with_ripple(picture, row, col, levels):
    """One cell ``levels`` above and below its picture in turns: so different, and as bright."""
    rippled = picture.astype(np.int16)
    rippled[cell(row, col)] += np.where(np.indices((PATCH, PATCH)).sum(0) % 2, levels, -levels)
    return rippled.astype(np.uint8)


def test_the_faint_edge_of_who_passes_is_no_background(make_frame, texture):
    """Learned, it would differ from the place itself once they have gone, and be shown for a minute."""
    passing, gone = with_ripple(with_object(texture), 2, 4, 4), with_ripple(texture, 2, 4, -2)
    kept, _ = restated(Replenish(), make_frame, [texture] * 41 + [passing] * 2 + [gone] * 20)
    assert kept == [41, 42, 43]


def test_what_came_unnoticed_is_no_background_at_once(make_frame, texture):
    """By two steps below the threshold, the first stored with its group: it stands since it differs, not since the
    cell last changed."""
    half, whole = (with_half_object(texture, levels) for levels in (4, 8))
    pictures = [texture] * 41 + [half] + [whole] * 2 + [texture] * 20
    kept, _ = restated(Replenish(settle=12), make_frame, pictures)
    assert kept == [41, 42, 44]


def with_half_object(texture, levels):
    """In one group, three cells of an object, and one that it hardly reaches."""
    picture = with_object(texture)
    picture[cell(3, 3)] = with_ripple(texture, 3, 3, levels)[cell(3, 3)]
    return picture


def test_a_picture_that_differs_everywhere_is_another_background(make_frame, texture):
    other = np.roll(texture, (3 * PATCH, 5 * PATCH), (0, 1))
    kept, _ = restated(Replenish(), make_frame, [texture] * 11 + [other] * 30)
    assert kept == [11]


def test_a_noisy_camera_knows_who_stands_after_missing_video(make_frame, texture):
    """By the threshold of a clean camera, all of its next pictures would differ from the background."""
    rng, pruner, there = np.random.default_rng(4), Replenish(), with_object(texture)
    restated(
        pruner, make_frame, [noisy(texture, rng, 6) for _ in range(60)] + [noisy(there, rng, 6) for _ in range(10)]
    )
    pruner.prune(replace(make_frame(noisy(there, rng, 6), index=70), gap=True))
    masks = [pruner.prune(make_frame(noisy(there, rng, 6), index=index)).mask for index in range(71, 81)]
    assert [index for index, mask in enumerate(masks, 71) if (1, 1) in groups_of(mask)] == [72, 74, 76, 78, 80]
    assert np.mean(masks) < 0.1


@pytest.mark.parametrize(("flashes", "again"), [(1, True), (3, True), (4, False)])
def test_a_flash_is_no_background_and_a_camera_that_was_turned_has_one(make_frame, texture, flashes, again):
    """Every second picture is compared with the background, and another one replaces it at the second time."""
    pruner, there = Replenish(), with_object(texture)
    other = np.roll(texture, (3 * PATCH, 5 * PATCH), (0, 1))
    restated(pruner, make_frame, [texture] * 41 + [there] * 4 + [other] * flashes)
    masks = [pruner.prune(make_frame(there, index=index)).mask for index in range(50, 60)]
    # In the first one everything that the flash hid comes back.
    assert any((1, 1) in groups_of(mask) for mask in masks[1:]) == again


def test_a_turned_camera_that_is_mostly_masked_has_another_background(make_frame, texture):
    pruner, hidden = Replenish(), np.zeros(SHAPE, bool)
    hidden[:, :7] = True
    pictures = [texture] * 11 + [np.roll(texture, 3 * PATCH, 0)] * 30
    kept = [
        pruner.prune(replace(make_frame(picture, index=index), hidden=hidden)).mask.any()
        for index, picture in enumerate(pictures)
    ]
    assert [index for index, any_kept in enumerate(kept) if any_kept] == [0, 11]


def test_who_was_shown_less_at_a_lower_quality_is_shown_again_after_it(make_frame, texture):
    """A person who hardly differs (by seven levels) is not background because the ladder prunes harder for a while."""
    faint = texture.copy()
    faint[cell(2, 2, 2, 2)] = texture[cell(2, 2, 2, 2)] + np.where(np.indices((28, 28)).sum(0) % 2, 7, -7)
    pruner = Replenish()
    restated(pruner, make_frame, [texture] * 41)
    shown = []
    for index in range(41, 71):
        pruner.margin = 9.0 if 50 <= index < 60 else 4.5
        if pruner.prune(make_frame(faint, index=index)).mask.any():
            shown.append(index)
    assert shown == [41, *range(42, 50, 2), *range(60, 71, 2)]


@pytest.mark.parametrize("flags", [{"gap": True}, {"anchor": True}])
def test_the_background_learns_where_keyframes_or_anchors_are_all_that_comes(make_frame, texture, flags):
    """As of an overloaded decoder, or while no replica is ready: the scene of hours ago would flood the next frames."""
    pruner, now = Replenish(settle=20), np.where(np.arange(texture.shape[1]) < 70, 255 - texture, texture)
    restated(pruner, make_frame, [texture] * 41)
    for index in range(41, 81):
        assert pruner.prune(replace(make_frame(now, index=index), **flags)).mask.all()
    assert not any(pruner.prune(make_frame(now, index=index)).mask.any() for index in range(81, 100))


def test_a_repeated_picture_says_nothing_of_the_noise(make_frame, texture):
    rng, pruner = np.random.default_rng(4), Replenish()
    restated(pruner, make_frame, [noisy(texture, rng, 6) for _ in range(60)])
    before, still = camera_threshold(pruner), noisy(texture, rng, 6)
    pruner.prune(make_frame(still, index=60))
    for index in range(61, 121):
        pruner.prune(replace(make_frame(still, index=index, anchor=True), repeated=True))
    assert camera_threshold(pruner) == pytest.approx(before, abs=0.5)
    assert before > 8


def test_nothing_is_remembered_after_a_reset(make_frame, texture):
    pruner = make_pruner("replenish")
    pruner.prune(make_frame(texture))
    pruner.reset()
    assert pruner.prune(make_frame(texture, index=1)).mask.all()


@pytest.mark.parametrize("options", [{"memory": 0}, {"calibrated_after": 0}, {"restate": -1}])
def test_numbers_of_samples_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Replenish(**options)


@pytest.mark.parametrize("gain", [0.7, 1.0, 1.3])
def test_what_stands_is_told_from_a_change_of_light(make_frame, texture, gain):
    lit = (with_object(texture // 2) * gain).astype(np.uint8)
    kept, groups = restated(Replenish(), make_frame, [texture // 2] * 11 + [lit] * 10)
    assert groups == {(1, 1)}
    assert kept == [11, 12, 14, 16, 18, 20]


def test_keeps_less_than_sticky_and_never_less_than_it_needs(make_frame, texture):
    """A ball crosses the picture: sticky keeps its whole trail, replenishment only where it is and was."""
    sticky, ours = make_pruner("codecsight"), make_pruner("replenish", {"restate": 0})
    trail, near = [], []
    for index in range(6):
        picture = texture.copy()
        picture[cell(2, 2 * index, 2, 2)] = 230
        motion = np.zeros(SHAPE, np.float32)
        motion[2:4, 2 * index : 2 * index + 2] = 14.0
        frame = make_frame(picture, index=index, max_motion=motion, net_motion=motion)
        trail.append(sticky.prune(frame).mask)
        near.append(ours.prune(frame).mask)
    for index in range(1, 6):
        assert groups_of(near[index]) == {(1, index - 1), (1, index)}
        assert len(groups_of(trail[index])) == index


def test_slow_drift_is_kept_once_it_has_added_up(make_frame, texture):
    """One grey level per sample is below every threshold; frame-to-frame difference would never see it."""
    pruner = make_pruner("replenish")
    pruner.prune(make_frame(texture))
    kept_at = []
    for index in range(1, 40):
        picture = texture.copy()
        picture[cell(4, 6, 2, 2)] += np.uint8(index)
        if groups_of(pruner.prune(make_frame(picture, index=index)).mask) == {(2, 3)}:
            kept_at.append(index)
    assert kept_at
    assert 5 <= kept_at[0] <= 15
    assert len(kept_at) >= 2, "the memory moves on with what was kept"
    assert len(kept_at) <= 8


@pytest.mark.parametrize(("gain", "offset"), [(1.25, 0), (0.8, 0), (1.0, 30), (1.1, -15)])
def test_auto_exposure_is_not_change_but_an_object_under_it_is(make_frame, texture, gain, offset):
    pruner = make_pruner("replenish")
    pruner.prune(make_frame(texture))
    exposed = np.clip(np.rint(texture * gain + offset), 0, 255).astype(np.uint8)
    assert not pruner.prune(make_frame(exposed, index=1)).mask.any()
    exposed[cell(0, 0, 2, 2)] = 235
    assert groups_of(pruner.prune(make_frame(exposed, index=2)).mask) == {(0, 0)}
    assert not pruner.prune(make_frame(exposed, index=3)).mask.any()
    back = texture.copy()
    assert groups_of(pruner.prune(make_frame(back, index=4)).mask) == {(0, 0)}


def test_without_exposure_every_cell_of_a_brighter_picture_changed(make_frame, texture):
    pruner = make_pruner("replenish", {"exposure": 0})
    pruner.prune(make_frame(texture))
    brighter = np.clip(texture.astype(np.int16) + 40, 0, 255).astype(np.uint8)
    assert pruner.prune(make_frame(brighter, index=1)).mask.all()


def test_without_dilation_a_suspicious_neighbour_is_left(make_frame):
    """Noise-free, so a cell changes above 5 grey levels and is suspicious above 2.75, half the margin less."""
    masks = {}
    for dilation in (0, 1):
        pruner = make_pruner("replenish", {"dilation": dilation, "calibrated_after": 1})
        flat = np.full((SHAPE[0] * PATCH, SHAPE[1] * PATCH), 100, np.uint8)
        for index in range(3):
            pruner.prune(make_frame(flat, index=index))
        changed = flat.copy()
        changed[cell(0, 0, 2, 2)] = 160
        # A pattern that no shift of brightness explains, beside it.
        changed[cell(0, 2, 2, 2)][::2] = 104
        changed[cell(0, 2, 2, 2)][1::2] = 96
        masks[dilation] = groups_of(pruner.prune(make_frame(changed, index=3)).mask)
    assert masks == {0: {(0, 0)}, 1: {(0, 0), (0, 1)}}


def test_soft_shadow_is_light_and_a_hard_one_is_content(make_frame, texture):
    pruner = make_pruner("replenish", {"shade": 0.08})
    pruner.prune(make_frame(texture))
    soft, hard = texture.copy(), texture.copy()
    soft[cell(0, 0, 4, 4)] = np.rint(soft[cell(0, 0, 4, 4)] * 0.93).astype(np.uint8)
    hard[cell(0, 0, 4, 4)] = np.rint(hard[cell(0, 0, 4, 4)] * 0.6).astype(np.uint8)
    assert not pruner.prune(make_frame(soft, index=1)).mask.any()
    assert {(0, 0), (0, 1), (1, 0), (1, 1)} <= groups_of(pruner.prune(make_frame(hard, index=2)).mask)


def noisy(texture, rng, sigma):
    return np.clip(texture + rng.normal(0, sigma, texture.shape), 0, 255).astype(np.uint8)


@pytest.mark.parametrize("sigma", [2.0, 5.0])
def test_threshold_follows_the_sensor_noise_and_stays_bounded(make_frame, texture, sigma):
    rng = np.random.default_rng(2)
    pruner = Replenish()
    assert camera_threshold(pruner) == pruner.lowest
    shares = []
    for index in range(24):
        shares.append(pruner.prune(make_frame(noisy(texture, rng, sigma), index=index)).mask.mean())
    # Mean |difference| of two independent Gaussian noises.
    noise = sigma * 2 / np.sqrt(np.pi)
    assert camera_threshold(pruner) == pytest.approx(noise + pruner.margin, abs=0.8)
    assert max(shares[4:]) == 0.0
    event = noisy(texture, rng, sigma)
    event[cell(2, 2, 2, 2)] = 230
    assert (1, 1) in groups_of(pruner.prune(make_frame(event, index=24)).mask)


def test_threshold_is_capped_however_bad_the_camera(make_frame, texture):
    rng = np.random.default_rng(2)
    pruner = Replenish()
    for index in range(20):
        pruner.prune(make_frame(noisy(texture, rng, 40.0), index=index))
    assert camera_threshold(pruner) == pruner.highest


def test_an_event_does_not_raise_the_threshold(make_frame, texture):
    """Noise is taken from the quiet seconds: a lorry that fills half of the picture for a while is none."""
    pruner = Replenish()
    for index in range(40):
        picture = texture.copy()
        if index % 4 >= 2:
            picture[:, : 6 * PATCH] = np.random.default_rng(index).integers(0, 256, (112, 6 * PATCH))
        pruner.prune(make_frame(picture, index=index))
    assert camera_threshold(pruner) == pruner.lowest


def test_foliage_calms_down_and_a_real_event_there_is_still_seen(make_frame, texture):
    rng = np.random.default_rng(4)
    pruner = Replenish()
    kept = []
    for index in range(400):
        picture = texture.copy()
        crown = picture[cell(0, 0, 4, 4)]
        picture[cell(0, 0, 4, 4)] = np.clip(crown + rng.normal(0, 7.0, crown.shape), 0, 255).astype(np.uint8)
        kept.append(pruner.prune(make_frame(picture, index=index, anchor=index % 16 == 0)).mask[:4, :4].mean())
    pruned = [share for index, share in enumerate(kept) if index % 16]
    assert np.mean(pruned[:40]) > 0.9
    assert np.mean(pruned[-40:]) < 0.1
    thresholds = pruner.cell_thresholds()
    assert thresholds[:4, :4].min() > thresholds[4:, 4:].max()
    assert thresholds.max() <= pruner.tolerance * camera_threshold(pruner)
    picture = texture.copy()
    picture[cell(0, 0, 2, 2)] = 20
    assert pruner.prune(make_frame(picture, index=401)).mask[0, 0]


def test_cells_where_things_often_pass_keep_their_sensitivity(make_frame, texture):
    """A lane where every four seconds somebody passes is no foliage."""
    pruner = Replenish()
    for index in range(400):
        picture = texture.copy()
        if index % 8 < 2:
            picture[cell(2, 2, 2, 2)] = 190 + 30 * (index % 2)
        pruner.prune(make_frame(picture, index=index, anchor=index % 16 == 0))
    thresholds = pruner.cell_thresholds()
    assert thresholds[2:4, 2:4].max() <= 1.05 * thresholds[6:, 6:].max()


def evidence_pruner(make_frame, texture):
    pruner = make_pruner("replenish")
    for index in range(4):
        pruner.prune(make_frame(texture, index=index))
    return pruner


def slightly(texture):
    """A low-contrast figure of 3 x 3 cells: above half of the margin, below the threshold."""
    picture = texture.copy()
    patch = picture[cell(2, 4, 3, 3)].astype(np.int16)
    checker = np.indices(patch.shape).sum(axis=0) % 2 * 2 - 1
    picture[cell(2, 4, 3, 3)] = patch + 4 * checker
    return picture


def test_low_contrast_alone_is_not_enough(make_frame, texture):
    pruner = evidence_pruner(make_frame, texture)
    assert not pruner.prune(make_frame(slightly(texture), index=4)).mask.any()


def test_low_contrast_with_motion_of_a_body_is_kept(make_frame, texture):
    pruner = evidence_pruner(make_frame, texture)
    motion = np.zeros(SHAPE, np.float32)
    motion[2:5, 4:7] = 6.0
    mask = pruner.prune(make_frame(slightly(texture), index=4, net_motion=motion)).mask
    assert groups_of(mask) == {(1, 2), (1, 3), (2, 2), (2, 3)}


def test_stray_vectors_are_noise(make_frame, texture):
    pruner = evidence_pruner(make_frame, texture)
    motion = np.zeros(SHAPE, np.float32)
    motion[::2, ::2] = 9.0
    assert not pruner.prune(make_frame(slightly(texture), index=4, net_motion=motion)).mask.any()


def test_vectors_over_unchanged_pixels_are_noise(make_frame, texture):
    pruner = evidence_pruner(make_frame, texture)
    everywhere = np.full(SHAPE, 9.0, np.float32)
    assert not pruner.prune(make_frame(texture, index=4, net_motion=everywhere)).mask.any()


def test_low_contrast_with_new_content_is_kept(make_frame, texture):
    pruner = evidence_pruner(make_frame, texture)
    intra = np.zeros(SHAPE, np.float32)
    intra[3, 5] = 1.0
    mask = pruner.prune(make_frame(slightly(texture), index=4, intra=intra)).mask
    assert (1, 2) in groups_of(mask)


def test_a_change_spreads_one_cell_to_suspicious_neighbours_only(make_frame, texture):
    pruner = evidence_pruner(make_frame, texture)
    picture = slightly(texture)
    picture[cell(3, 5)] = 230
    mask = pruner.prune(make_frame(picture, index=4)).mask
    assert groups_of(mask) == {(1, 2), (1, 3), (2, 2), (2, 3)}
    alone = texture.copy()
    alone[cell(3, 5)] = 230
    other = evidence_pruner(make_frame, texture)
    assert groups_of(other.prune(make_frame(alone, index=4)).mask) == {(1, 2)}


def test_an_anchor_renews_the_memory_of_every_cell(make_frame, texture):
    pruner = evidence_pruner(make_frame, texture)
    changed = slightly(texture)
    assert pruner.prune(make_frame(changed, index=4, anchor=True)).mask.all()
    changed[cell(2, 4, 3, 3)] -= 2
    assert not pruner.prune(make_frame(changed, index=5)).mask.any()


@given(seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_difference_matches_plain_loops(seed, make_frame, grid):
    rng = np.random.default_rng(seed)
    pruner = Replenish(shade=0.05)
    pruner.prune(make_frame(rng.integers(0, 256, (112, 168)).astype(np.uint8)))
    memory = pruner._memory
    luma = rng.integers(0, 256, (112, 168)).astype(np.uint8)
    found = memory.difference(luma, cell_means(luma, grid), pruner.shade)
    for row, col in np.ndindex(SHAPE):
        now = luma[cell(row, col)].astype(float)
        then = memory.luma[cell(row, col)].astype(float)
        bound = pruner.shade * then.mean()
        exact = min(max(now.mean() - then.mean(), -bound), bound)
        # A shift half-way between two levels may be rounded either way in single precision.
        shifts = {round(exact - 1e-3), round(exact + 1e-3)}
        allowed = [np.minimum(np.abs(now - then - shift), 255).mean() for shift in shifts]
        assert min(abs(found[row, col] - each) for each in allowed) < 1e-3


@given(seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_visible_cell_is_ever_stale(seed, make_frame):
    """The picture put together from what was last kept differs nowhere by more than the threshold and the shade."""
    rng = np.random.default_rng(seed)
    background = rng.integers(60, 140, (112, 168)).astype(np.uint8)
    pruner = Replenish()
    composite = background.copy()
    for index in range(14):
        picture = background.copy()
        for _ in range(rng.integers(0, 3)):
            y, x = rng.integers(0, 90), rng.integers(0, 140)
            picture[y : y + 26, x : x + 20] = rng.integers(0, 256)
        mask = pruner.prune(make_frame(picture, index=index)).mask
        pixels = mask.repeat(PATCH, axis=0).repeat(PATCH, axis=1)
        composite[pixels] = picture[pixels]
        stale = np.abs(composite.astype(np.int16) - picture).reshape(8, PATCH, 12, PATCH).mean(axis=(1, 3))
        assert stale.max() <= pruner.tolerance * camera_threshold(pruner) + 0.05 * 255
