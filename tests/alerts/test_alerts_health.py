"""Cameras that are offline, frozen, covered or turned away: the rules, and real pictures through the real decoder."""

import os
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
import pytest

from cluster.alerts.health import HealthMonitor
from cluster.alerts.open_incidents import OpenIncidents
from cluster.codec import FileSource
from cluster.codec.privacy import Polygon
from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.config.alerts import HealthConfig
from cluster.decoder.picture_statistics import LONGEST_GAP_S, SETTLE_S, PictureStatistics
from cluster.types import CameraStatus, PatchGeometry, PictureHealth
from cluster.types.cameras import NOT_ASKED

NOW = 1_700_000_000.0
RULES = HealthConfig()
REAL = sorted(Path(os.environ.get("SIGHTLINE_CLIPS", "no-clips")).glob("*.mp4"))
FPS, WIDTH, HEIGHT = 10, 320, 192


class Desk:
    def __init__(self, rules: HealthConfig = RULES, update_s: float = 60.0) -> None:
        self.open_incidents = OpenIncidents("here")
        self.monitor = HealthMonitor(self.open_incidents, rules, update_s)
        self.tracks: dict = {}

    def look(self, status, picture, at_s: float, **options) -> list[tuple[str, str]]:
        """(event, subject) of what this look told."""
        self.monitor.update(status, picture, NOW + at_s, **options)
        changes = self.open_incidents.pop_changes()
        self.tracks |= changes.tracks
        return [(event.kind, event.incident.subject) for event in changes.events.values()]

    def each_second(self, make, begin: int, end: int, **fields) -> list[tuple[int, str, str]]:
        """A running camera whose picture is as ``fields`` say: (second, event, subject)."""
        told = []
        for second in range(begin, end):
            picture = make.picture(second * 1_000_000, **fields)
            told += [(second, *each) for each in self.look(make.status(), picture, second)]
        return told


def test_offline_and_back(make):
    desk = Desk()
    assert desk.each_second(make, 0, 20) == []
    away = [
        (t, e) for t in range(20, 80) for e, _ in desk.look(make.status(state="backoff", reason="no route"), None, t)
    ]
    assert away == [(50, "new")]
    assert desk.open_incidents.oldest_first[0].text == "no route"
    back = [(t, e) for t in range(80, 100) for e, _ in desk.look(make.status(), make.picture(t), t)]
    assert back == [(90, "end")]


def test_a_short_break_is_no_incident(make):
    desk = Desk()
    for begin in range(0, 600, 30):
        for t in range(begin, begin + 29):
            assert desk.look(make.status(state="backoff"), None, t) == []
        assert desk.look(make.status(), make.picture(begin), begin + 29) == []


def test_connected_without_pictures_counts_from_the_last_one(make):
    desk = Desk()
    desk.look(make.status(), make.picture(0), 0)
    assert desk.look(make.status(last_frame_age_s=29.0), None, 29) == []
    assert desk.look(make.status(last_frame_age_s=31.0), None, 31) == [("new", "camera-offline")]


def test_who_is_not_offline(make):
    """A camera the cluster has not asked yet, a file that has ended, and a file whose reader takes its time."""
    desk = Desk()
    starting = CameraStatus("gate", state="waiting", reason="no replica is ready yet")
    ended = make.status(state="ended", last_frame_age_s=100.0)
    slow = make.status(last_frame_age_s=100.0)
    for t in range(0, 300, 10):
        assert desk.look(starting, None, t) == []
        assert desk.look(ended, None, t) == []
        assert desk.look(slow, None, t, patient=True) == []


def test_a_cluster_that_starts_again_calls_no_camera_offline_and_takes_back_what_it_said_of_none(make):
    desk = Desk()
    starting = make.status(state="waiting", reason="no replica is ready yet", frames_decoded=500)
    assert [told for t in range(300) for told in desk.look(starting, None, t)] == []
    gone = make.status(state="backoff", reason="no route")
    assert [told for t in range(300, 340) for told in desk.look(gone, None, t)] == [("new", "camera-offline")]
    desk.monitor = HealthMonitor(desk.open_incidents, RULES, 1000.0)
    assert [told for t in range(340, 400) for told in desk.look(starting, None, t)] == []


def test_a_pushing_camera_nobody_pushes_for_is_offline(make):
    desk = Desk()
    silent = CameraStatus("dock", state="waiting")
    assert [t for t in range(60) if desk.look(silent, None, t)] == [30]
    assert desk.open_incidents.oldest_first[0].text == "no agent pushes for it"


def test_frozen(make):
    desk = Desk()
    told = [
        (t, e)
        for t in range(100)
        for e, _ in desk.look(make.status(), make.picture(t * 1_000_000, still_s=float(t), changed=0.0), t)
    ]
    assert told == [(60, "new")]
    assert desk.each_second(make, 100, 115) == [(110, "end", "frozen-image")]


def test_covered_is_sudden(make):
    desk = Desk()
    assert desk.each_second(make, 0, 60) == []
    assert desk.each_second(make, 60, 80, luma=9.0, spread=4.0) == [(65, "new", "covered-lens")]
    assert desk.each_second(make, 80, 95) == [(90, "end", "covered-lens")]


def test_an_incident_of_a_condition_that_is_no_longer_checked_ends(make):
    before = Desk()
    before.each_second(make, 0, 70)
    before.each_second(make, 70, 80, luma=9.0, spread=4.0)
    [incident] = before.open_incidents.oldest_first
    after = Desk(HealthConfig(covered={"enabled": False}))
    after.open_incidents.load([incident], [], NOW + 80)
    assert after.each_second(make, 80, 100, luma=9.0, spread=4.0) == [(90, "end", "covered-lens")]


def test_dusk_is_not(make):
    """Contrast falls to a tenth within half an hour."""
    desk = Desk()
    for t in range(1800):
        faded = make.picture(t * 1_000_000, spread=45.0 * 0.1 ** (t / 1800), luma=110.0 * 0.2 ** (t / 1800))
        assert desk.look(make.status(), faded, t) == []


def test_a_covered_lens_is_still_covered_after_a_restart(make):
    desk = Desk()
    desk.each_second(make, 0, 60)
    desk.each_second(make, 60, 70, spread=4.0)
    other = Desk()
    other.open_incidents.load(desk.open_incidents.oldest_first, [], NOW)
    other.monitor.load(desk.tracks)
    assert other.each_second(make, 70, 100, spread=4.0) == []
    assert other.each_second(make, 100, 115) == [(110, "end", "covered-lens")]


def test_turned_away(make):
    desk = Desk()
    desk.each_second(make, 0, 10)
    assert desk.each_second(make, 10, 60, strangeness=0.8) == [(40, "new", "scene-change")]
    assert desk.each_second(make, 60, 75) == [(70, "end", "scene-change")]


@pytest.mark.parametrize("state", ["paused", "ended"])
@pytest.mark.parametrize(
    ("subject", "wrong"),
    [
        ("frozen-image", {"still_s": 100.0}),
        ("covered-lens", {"spread": 4.0}),
        ("scene-change", {"strangeness": 0.8}),
    ],
)
def test_a_camera_that_shows_nothing_on_purpose_has_no_bad_picture(make, state, subject, wrong):
    desk = Desk()
    desk.each_second(make, 0, 60)
    assert [each[1:] for each in desk.each_second(make, 60, 100, **wrong)] == [("new", subject)]
    told = [(t, *each) for t in range(100, 200) for each in desk.look(make.status(state=state), None, t)]
    assert told == [(110, "end", subject)]
    # Going on as before, it is another one.
    assert [each[1:] for each in desk.each_second(make, 200, 240, **wrong)] == [("new", subject)]


def test_what_is_switched_off_is_not_looked_for(make):
    desk = Desk(HealthConfig(frozen={"enabled": False}))
    assert desk.each_second(make, 0, 100, still_s=1000.0) == []


def test_pictures_that_nobody_answers(make):
    """8 s a stride: eight of them are 64 s, and 120 s are what was asked for."""
    desk = Desk(RULES)

    def look(second, windows, **fields):
        status = make.status(windows_done=windows, windows_gated=1, **({"windows_per_s": 0.125} | fields))
        return [(second, *each) for each in desk.look(status, make.picture(second), second, stride_s=8.0)]

    told = [event for second in range(0, 80) for event in look(second, second // 8)]
    told += [event for second in range(80, 300) for event in look(second, 9, reason="another decoder sends it")]
    # The last one came at 72 s.
    assert told[:1] == [(192, "new", "camera-unanswered")]
    assert (
        desk.open_incidents.oldest_first[0].text
        == "it sends pictures, but none was answered for 180 s: another decoder sends it"
    )
    told = [event for second in range(300, 330) for event in look(second, second // 8)]
    assert told == [(310, "end", "camera-unanswered")]
    for begin, unexpected in (400, {"windows_per_s": 0.0}), (900, {"reason": NOT_ASKED}):
        assert [event for second in range(begin, begin + 500) for event in look(second, 41, **unexpected)] == []


def test_a_long_stride_is_no_silence(make):
    desk = Desk(HealthConfig(unanswered={"after_s": 20.0}))
    for second in range(0, 700):
        status = make.status(windows_done=second // 100, windows_per_s=0.01)
        assert desk.look(status, make.picture(second), second, stride_s=100.0) == []
    # The last one came at 600 s: eight strides, and what a picture may take.
    told = [desk.look(status, make.picture(second), second, stride_s=100.0) for second in range(700, 1500)]
    assert [700 + number for number, each in enumerate(told) if each][:1] == [600 + 800 + 5 + 1]


def test_a_removed_camera_ends_its_incidents(make):
    desk = Desk()
    desk.each_second(make, 0, 2, still_s=100.0)
    assert [incident.subject for incident in desk.open_incidents.oldest_first] == ["frozen-image"]
    desk.monitor.retain_cameras({}, NOW + 5)
    assert desk.open_incidents.oldest_first == []


# -- real pictures ------------------------------------------------------------------------------
def scene(seed: int) -> np.ndarray:
    """Blocks of grey as a street has them: a few large surfaces, some detail."""
    random = np.random.default_rng(seed)
    large = np.kron(random.uniform(30, 220, (6, 10)), np.ones((32, 32)))
    return (large + np.kron(random.uniform(-15, 15, (48, 80)), np.ones((4, 4)))).clip(0, 255)


def filmed(picture: np.ndarray, seconds: int, seed: int = 0) -> list[np.ndarray]:
    """A sensor's view of a still scene: noise, and a small thing that moves."""
    random = np.random.default_rng(seed)
    frames = []
    for index in range(seconds * FPS):
        frame = picture + random.normal(0, 2.0, picture.shape)
        x = 4 * index % (WIDTH - 24)
        frame[100:124, x : x + 24] = 250
        frames.append(frame.clip(0, 255).astype(np.uint8))
    return frames


def watched(path: Path, masks: Sequence[Polygon] = ()) -> list[PictureHealth]:
    """What the decoder reports, sample by sample."""
    source = FileSource(path)
    processor = CodecProcessor(PatchGeometry(patch=8, merge=2, temporal=2), CodecOptions(masks=tuple(masks)))
    watch = PictureStatistics()
    processor.open(source.open())
    seen = []
    frames = [frame for packet in source.packets() for frame in processor.feed(packet)]
    for frame in [*frames, *processor.drain()]:
        watch.add_sample(frame)
        seen.append(watch.health)
    return seen


def recorded(
    path: Path, frames: list[np.ndarray], codec: str = "libx264", gop: int = 20, masks: Sequence[Polygon] = ()
) -> list[PictureHealth]:
    with av.open(str(path), "w") as container:
        stream = container.add_stream(
            codec, rate=FPS, options={"preset": "ultrafast" if codec == "libx265" else "veryfast"}
        )
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.codec_context.gop_size = gop
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(np.repeat(frame[..., None], 3, axis=2), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return watched(path, masks)


def judged(pictures: list[PictureHealth], rules: HealthConfig) -> list[tuple[float, str, str]]:
    """(seconds of the camera's clock, event, subject) of a camera that shows these."""
    desk, status = Desk(rules, update_s=1e9), CameraStatus("gate", state="running", frames_decoded=1)
    told = []
    for picture in pictures:
        second = picture.pts / 1e6
        told += [(second, *each) for each in desk.look(status, picture, second)]
    return told


QUICK = HealthConfig(frozen={"after_s": 10.0}, covered={"after_s": 2.0}, scene_change={"after_s": 10.0}, clear_s=2.0)


@pytest.mark.parametrize("gop", [10, 50])
def test_a_frozen_recording(tmp_path, gop):
    frames = filmed(scene(1), 20)
    pictures = recorded(tmp_path / "a.mp4", [*frames, *[frames[-1]] * (15 * FPS), *filmed(scene(1), 6)], gop=gop)
    [begin, end] = judged(pictures, QUICK)
    assert begin[1:] == ("new", "frozen-image")
    assert 29 <= begin[0] <= 32
    assert end[1:] == ("end", "frozen-image")


def test_a_covered_recording(tmp_path):
    dark = np.full((HEIGHT, WIDTH), 12.0)
    covered = [
        (dark + np.random.default_rng(n).normal(0, 2, dark.shape)).clip(0, 255).astype(np.uint8) for n in range(80)
    ]
    pictures = recorded(tmp_path / "a.mp4", [*filmed(scene(1), 20), *covered, *filmed(scene(1), 6)])
    told = judged(pictures, QUICK)
    assert [each[1:] for each in told] == [("new", "covered-lens"), ("end", "covered-lens")]
    assert 21.5 <= told[0][0] <= 23.5


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_a_camera_that_was_turned(tmp_path, codec):
    pictures = recorded(tmp_path / "a.mp4", filmed(scene(1), 20) + filmed(scene(2), 15), codec)
    told = judged(pictures, QUICK)
    assert [each[1:] for each in told] == [("new", "scene-change")]
    assert 29.5 <= told[0][0] <= 32


@pytest.mark.parametrize("share", [0.45, 0.6, 0.9])
def test_behind_a_privacy_mask_is_no_part_of_the_scene(tmp_path, share):
    """A camera of which a large part is masked: turned, and before that in other light."""
    street = scene(1)
    frames = [frame for each in (street, (street * 1.3 + 20).clip(0, 255), scene(2)) for frame in filmed(each, 20)]
    mask = ((0.0, 0.0), (share, 0.0), (share, 1.0), (0.0, 1.0))
    pictures = recorded(tmp_path / "a.mp4", frames, masks=[mask])
    told = judged(pictures, QUICK)
    assert [each[1:] for each in told] == [("new", "scene-change")], max(each.strangeness for each in pictures)
    assert 49.5 <= told[0][0] <= 52


def test_exposure_noise_and_what_moves_are_no_other_scene(tmp_path):
    """Brighter, then with half the contrast, then a third of the picture hidden by something that stops there."""
    street = scene(1)
    bright, flat = (street * 1.6).clip(0, 255), 90 + 0.5 * (street - 110)
    parked = street.copy()
    parked[:, : WIDTH // 3] = 30
    frames = [frame for each in (street, bright, flat, street, parked) for frame in filmed(each, 15)]
    assert judged(recorded(tmp_path / "a.mp4", frames), QUICK) == []


@pytest.mark.parametrize(
    ("away_s", "step_s", "gaps"), [(0, 0.5, False), (400, 0.5, False), (86_400, 0.5, False), (0, 4.0, True)]
)
def test_the_new_scene_becomes_the_usual_one_once_it_has_been_seen_for_long_enough(away_s, step_s, gaps):
    """Not from a file, which would be long: the same pictures again and again. ``away_s``: without video before it;
    ``gaps``: every sample follows one, as where only keyframes are decoded."""
    from cluster.types import ChangeGrid, PatchGrid, SampledPicture

    grid = PatchGrid(24, 40, 8, 2, 2)
    planes = [np.zeros((24, 40), np.float32)] * 3
    change = ChangeGrid(*planes, luma=np.full((24, 40), 1.0, np.float32), cue="luma", frames=5)
    watch, strange = PictureStatistics(), {}
    for index in range(-round(30 / step_s), round((SETTLE_S + 30) / step_s)):
        luma = scene(1 if index < 0 else 2).astype(np.uint8)
        at_s = 30 + index * step_s + (away_s if index >= 0 else 0)
        gap = gaps or (index == 0 and away_s > 0)
        frame = SampledPicture(index, round(at_s * 1e6), False, at_s == 0, grid, luma, luma, change, gap=gap)
        watch.add_sample(frame)
        strange[index * step_s] = watch.health.strangeness
    assert max(value for at_s, value in strange.items() if at_s < 0) < 0.1
    # A part of the time without video counts, as nobody can tell a long GOP from it.
    counted_s = min(away_s, LONGEST_GAP_S)
    assert min(value for at_s, value in strange.items() if 0 <= at_s < SETTLE_S - counted_s - 2 * step_s) > 0.5
    assert max(value for at_s, value in strange.items() if at_s > SETTLE_S - counted_s + 2 * step_s) < 0.1


@pytest.mark.skipif(not REAL, reason="SIGHTLINE_CLIPS names no folder of real clips")
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_no_false_alarm_on_real_clips(path):
    """With conditions ten times as impatient as the default ones."""
    rules = HealthConfig(frozen={"after_s": 6.0}, covered={"after_s": 0.5}, scene_change={"after_s": 3.0}, clear_s=1.0)
    pictures = watched(path)
    assert len(pictures) > 50
    assert judged(pictures, rules) == []
