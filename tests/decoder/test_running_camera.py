"""A camera in its decoder process: other qualities in mid-stream, shedding, and the books on windows."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from camera_parts import WAIT_S, Keeper, camera_bench
from sightline.v1 import ingest_pb2
from waiting import until

from cluster import metrics
from cluster.codec import FileSource
from cluster.config.camera import ScheduleConfig
from cluster.control.ladder import FULL, Rung
from cluster.decoder.pipeline import stream_spec_at
from cluster.errors import CapacityError, NotReadyError, SourceError, UnavailableError
from cluster.lab.bench.processes import free_port
from cluster.types import MICROSECONDS, FrameSample, Question, StreamSpec
from cluster.types.cameras import NOT_ASKED
from cluster.vision.sampler import cut_patches

LOW = Rung("stride", prune=1.5, refresh_budget=0.0, stride=2.0, fps=0.5, f1=0.9)
SHED = Rung("shed", shed=True, f1=0.0)
NOON_S, MIDNIGHT_S = 12 * 3600.0, 24 * 3600.0


def dropped(reason: str) -> float:
    return metrics.windows.labels("dropped", reason)._value.get()


@pytest.fixture
def bench(clip):
    with camera_bench(clip) as bench:
        yield bench


@pytest.fixture
def keeper(bench):
    keeper = Keeper()
    bench.camera.route(bench.replica(keeper))
    return keeper


def test_a_rung_is_told_to_the_replica_and_the_video_goes_on(bench, keeper) -> None:
    bench.push(8)
    until(lambda: len(keeper.frames) >= 6, "frames at full quality")
    bench.camera.set_rung(LOW)
    until(lambda: len(keeper.specs) == 2, "the new specification")
    bench.push(12)
    until(lambda: keeper.frames[-1].duration == 2 * MICROSECONDS, "frames at the lower rate")
    bench.camera.set_rung(FULL)
    bench.push(12)
    until(lambda: keeper.frames[-1].pts > 28 * MICROSECONDS, "frames at the full rate")
    assert [(spec.stride_s, spec.refresh_budget) for spec in keeper.specs] == [(2, 0.5), (4, 0.0), (2, 0.5)]
    assert [frame.random_access for frame in keeper.frames] == [True] + [False] * (len(keeper.frames) - 1)
    assert keeper.frames[0].gap, "the replica may hold what another decoder saw"
    assert [frame.index for frame in keeper.frames] == list(range(len(keeper.frames)))
    durations = [round(frame.duration / 500_000) / 2 for frame in keeper.frames]
    assert durations == sorted(durations[:7]) + durations[7:]
    assert set(durations) <= {1.0, 1.5, 2.0}
    assert durations.count(2.0) >= 4
    assert durations[-1] == 1.0
    report = bench.camera.report()
    assert (report.state, report.reason, report.counts["windows_dropped"]) == ("running", "", 0)
    assert report.counts["gaps"] == 0


def test_a_replica_that_refuses_frames_is_the_cameras_reason(bench, keeper) -> None:
    async def refuse(sample: FrameSample, arrived_s: float) -> None:
        raise CapacityError("the pool has no room for its window")

    keeper.on_frame = refuse
    bench.push(8)
    sentence = "its replica refuses its frames: the pool has no room for its window"
    until(lambda: bench.camera.report().reason == sentence, "the reason")


def test_a_replica_that_its_decoder_cannot_reach_is_the_cameras_reason(bench) -> None:
    """Others can: the controller hears from both, and leaves the camera where it is."""
    bench.camera.route(f"127.0.0.1:{free_port()}")
    bench.push(4)
    until(lambda: bench.camera.report().last_frame_age_s is not None, "pictures")
    until(lambda: bench.camera.report().reason == "its decoder cannot reach its replica", "the reason", 10.0)
    bench.camera.route(bench.replica(keeper := Keeper()))
    bench.push(4)
    until(lambda: keeper.frames and not bench.camera.report().reason, "frames, and no reason")


def test_other_questions_reach_the_replica_and_the_window_goes_on(bench, keeper) -> None:
    bench.push(6)
    until(lambda: len(keeper.frames) >= 4, "frames")
    settings = bench.camera.settings
    [question] = settings.questions
    asked = settings.model_copy(
        update={
            "priority": "critical",
            "questions": [question.model_copy(update={"threshold": 0.7})],
            "window": settings.window.model_copy(update={"stride_s": 4.0}),
        }
    )
    assert bench.camera.apply_settings(asked)
    until(lambda: len(keeper.specs) == 2, "the new specification")
    bench.push(12)
    until(lambda: keeper.frames[-1].pts > 7 * MICROSECONDS, "frames after it")
    first, second = keeper.specs
    assert (first.priority, first.stride_s, first.questions[0].threshold) == ("normal", 2, 0.5)
    assert (second.priority, second.stride_s, second.questions[0].threshold) == ("critical", 4, 0.7)
    assert [frame.random_access for frame in keeper.frames] == [True] + [False] * (len(keeper.frames) - 1)
    assert not keeper.closed
    bench.camera.set_rung(LOW)
    until(lambda: keeper.specs[-1].stride_s == 4 and len(keeper.specs) == 3, "its rung on top of that")
    assert bench.camera.apply_settings(asked), "the same again"
    assert len(keeper.specs) == 3


def test_lazy_decoding_waits_half_of_the_stride_that_holds_now(clip) -> None:
    with camera_bench(clip, sampling={"lazy_decode": "auto"}) as bench:
        lazy = bench.camera._pipeline._lazy
        bench.push(2)
        assert lazy.wait_s == 1.0
        window = bench.camera.settings.window.model_copy(update={"stride_s": 4.0})
        assert bench.camera.apply_settings(bench.camera.settings.model_copy(update={"window": window}))
        bench.push(2)
        assert lazy.wait_s == 2.0


def test_settings_of_pictures_are_not_changed_while_it_runs(bench) -> None:
    settings = bench.camera.settings
    for key, value in (
        ("source", "rtsp://elsewhere/"),
        ("sampling", settings.sampling.model_copy(update={"fps": 1.0})),
        ("pruning", settings.pruning.model_copy(update={"policy": "none"})),
        ("privacy_masks", [((0.0, 0.0), (1.0, 0.0), (1.0, 1.0))]),
        ("zones", [((0.0, 0.0), (1.0, 0.0), (1.0, 1.0))]),
    ):
        assert not bench.camera.apply_settings(settings.model_copy(update={key: value})), key
    assert bench.camera.settings == settings


def test_the_same_rung_again_tells_nobody(bench) -> None:
    keeper = Keeper()
    bench.camera.set_rung(LOW)
    bench.camera.route(bench.replica(keeper))
    bench.camera.set_rung(LOW)
    bench.push(4)
    until(lambda: keeper.frames, "a frame")
    assert [spec.stride_s for spec in keeper.specs] == [4]


def test_a_shed_camera_sends_nothing_counts_every_window_and_comes_back(bench, keeper) -> None:
    bench.push(6)
    until(lambda: len(keeper.frames) >= 4, "frames")
    before, counted = len(keeper.frames), dropped("shed")
    bench.camera.set_rung(SHED)
    bench.push(20)
    until(lambda: bench.camera.report().counts["windows_dropped"] >= 8, "windows counted while it is shed")
    report = bench.camera.report()
    assert report.state == "running"
    assert "shed" in report.reason
    until(lambda: bench.sender.status("gate").in_flight == 0, "nothing under way")
    sent = len(keeper.frames)
    assert sent <= before + 2, "what was decoded before it was shed may still go"
    bench.camera.set_rung(FULL)
    bench.push(6)
    until(lambda: len(keeper.frames) > sent + 2, "frames again")
    again = keeper.frames[sent]
    assert (again.gap, again.fresh, again.complete) == (True, False, True)
    assert not keeper.frames[sent + 1].random_access
    # Every whole stride between the last frame sent and the first one afterwards, give or take the edges.
    gap = (again.pts - keeper.frames[sent - 1].end) / (2 * MICROSECONDS)
    windows = bench.camera.report().counts["windows_dropped"]
    assert abs(windows - gap) <= 1
    assert dropped("shed") - counted == windows
    assert again.windows_dropped == windows, "so that the replica does not count them again"
    assert bench.camera.report().reason == ""
    assert [spec.stride_s for spec in keeper.specs] == [2], "it was never told of a rung at which it does nothing"


def test_from_shed_to_a_lower_rung_the_replica_learns_of_it_before_the_first_frame(bench, keeper) -> None:
    bench.push(4)
    until(lambda: keeper.frames, "frames")
    bench.camera.set_rung(SHED)
    bench.push(4)
    bench.camera.set_rung(LOW)
    bench.push(10)
    until(lambda: keeper.frames[-1].duration == 2 * MICROSECONDS, "frames again")
    told = [each for each in keeper.told if isinstance(each, StreamSpec) or each.random_access]
    assert [type(each) for each in told] == [StreamSpec, FrameSample, StreamSpec, FrameSample]
    assert told[2].stride_s == 4


def test_a_camera_its_decoder_has_no_time_for_shows_keyframes_counts_its_windows_and_comes_back(bench, keeper) -> None:
    bench.push(6)
    until(lambda: len(keeper.frames) >= 4, "frames")
    before, counted = bench.camera.report().counts, dropped("decoder_slow")
    bench.camera.set_behind(True)
    bench.push(24)
    until(lambda: bench.camera.report().counts["windows_dropped"] >= 9, "windows counted meanwhile")
    report = bench.camera.report()
    assert (report.state, report.reason) == ("running", "keyframes only: its decoder is overloaded")
    assert report.last_frame_age_s < 5, "it gives pictures, nobody must think otherwise"
    # Twelve and a half a second, of which one in four seconds is a keyframe.
    decoded = report.counts["frames_decoded"] - before["frames_decoded"]
    assert 5 <= decoded <= 8
    assert report.counts["gaps"] == 0
    assert bench.camera.footage.latest.render().jpeg.startswith(b"\xff\xd8")
    sent = len(keeper.frames)
    bench.camera.set_behind(False)
    bench.push(10)
    until(lambda: len(keeper.frames) > sent + 2, "frames again")
    again = keeper.frames[sent]
    assert (again.gap, again.fresh, again.complete) == (True, False, True)
    assert not keeper.frames[sent + 1].random_access
    gap = (again.pts - keeper.frames[sent - 1].end) / (2 * MICROSECONDS)
    windows = bench.camera.report().counts["windows_dropped"]
    assert abs(windows - gap) <= 1
    assert dropped("decoder_slow") - counted == windows == again.windows_dropped
    assert bench.camera.report().reason == ""


def test_a_few_frames_between_two_times_without_any_hide_no_window(bench, keeper) -> None:
    bench.push(7)
    until(lambda: len(keeper.frames) >= 5, "frames")
    until(lambda: bench.sender.status("gate").in_flight == 0, "nothing under way")
    stride = 2 * MICROSECONDS
    bench.camera.set_behind(True)
    bench.push(9)
    sent = len(keeper.frames)
    bench.camera.set_behind(False)
    while len(keeper.frames) == sent:
        bench.push(0.4)
        time.sleep(0.02)
    bench.camera.set_behind(True)
    between = keeper.frames[-1]
    assert between.end - keeper.frames[sent].pts < stride, "too few for a window"
    bench.push(13)
    sent = len(keeper.frames)
    bench.camera.set_behind(False)
    bench.push(8)
    until(lambda: len(keeper.frames) > sent + 2, "frames again")
    again = keeper.frames[sent]
    assert again.gap
    # Every window of which the replica got no frame: it answers those of which it got one.
    seen = {at // stride for frame in keeper.frames[:sent] for at in (frame.pts + 100_000, frame.end - 100_000)}
    assert again.windows_dropped == len(set(range((again.pts + 100_000) // stride)) - seen)


def test_a_camera_that_another_decoder_had_for_a_while_is_answered_again_and_says_why_it_is_not(bench) -> None:
    """As after this process stood still: it has not asked the controller yet, which gave the camera to another."""
    keeper = Keeper()
    address = bench.replica(keeper)
    bench.camera.route(address)
    bench.push(6)
    until(lambda: len(keeper.frames) >= 4, "frames")
    other = bench.loop.run(bench._sender(), 5.0)
    other.confirm(1)
    other.assign(bench.camera.spec, address)
    until(lambda: len(keeper.specs) == 2, "the other's opening")
    bench.push(4)
    until(lambda: "another decoder" in bench.camera.report().reason, "a reason")
    assert bench.camera.report().state == "running"
    sent = len(keeper.frames)
    other.close("gate")
    until(lambda: keeper.closed == [False], "the other's leave")
    bench.push(8)
    until(lambda: len(keeper.frames) > sent + 2, "frames again")
    again = [(frame.fresh, frame.gap, frame.complete) for frame in keeper.frames[sent : sent + 2]]
    assert again == [(False, True, True), (False, False, False)]
    until(lambda: bench.camera.report().reason == "", "no reason")
    bench.loop.run(other.stop(0.1), 5.0)


def test_how_far_behind_a_camera_is(bench, clip, monkeypatch) -> None:
    bench.push(1)
    until(lambda: bench.camera.decode_backlog.decodes, "its video")
    backlog = bench.camera.decode_backlog
    assert (backlog.camera, backlog.behind_s, backlog.stride_s) == ("gate", 0.0, 2)
    bench.camera.set_rung(SHED)
    assert not bench.camera.decode_backlog.decodes
    with camera_bench(clip, source="rtsp://127.0.0.1:9/") as away:
        assert not away.camera.decode_backlog.decodes
    with camera_bench(clip, source=str(clip)) as patient:
        assert patient.camera.decode_backlog is None, "a file that may wait is never late"
        patient.camera.set_behind(True)
        keeper = Keeper()
        patient.camera.route(patient.replica(keeper))
        until(lambda: len(keeper.frames) == 24, "all of it all the same")
    monkeypatch.setattr(FileSource, "behind_s", property(lambda _: 3.0, lambda *_: None), raising=False)
    with camera_bench(clip, source=str(clip), source_options={"realtime": True, "speed": 0.01}) as played:
        until(lambda: played.camera.decode_backlog.decodes, "its video")
        # Nothing of it is queued: it is late where its packets are taken late.
        played.camera.route(played.replica(Keeper()))
        assert played.camera.decode_backlog.behind_s == 3.0
        assert played.camera.report().reason == "decoding is 3 s behind"


def test_a_camera_that_gives_no_picture_since_it_began_says_for_how_long(bench, monkeypatch) -> None:
    """As one that has given some at another decoder, and there would be taken for sound."""
    bench._sequence += 1
    bench.push(1)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 60, time=time.time, sleep=time.sleep)
    monkeypatch.setattr("cluster.decoder.running_camera.time", later)
    report = bench.camera.report()
    assert (report.state, report.counts["frames_decoded"]) == ("running", 0)
    assert report.last_frame_age_s >= 60


@pytest.mark.parametrize("why", ["no replica", "shed", "behind"])
def test_patches_are_cut_only_of_frames_that_are_sent(bench, monkeypatch, why: str) -> None:
    cuts = []

    def counted(pictures, groups, grid):
        cuts.append(groups)
        return cut_patches(pictures, groups, grid)

    monkeypatch.setattr("cluster.vision.sampler.cut_patches", counted)
    keeper = Keeper()
    if why != "no replica":
        bench.camera.route(bench.replica(keeper))
        bench.camera.set_rung(SHED if why == "shed" else FULL)
        bench.camera.set_behind(why == "behind")
    bench.push(6)
    assert bench.camera.pipeline_status.stats.frames_sampled >= 2
    assert not cuts
    if why == "no replica":
        bench.camera.route(bench.replica(keeper))
    bench.camera.set_rung(FULL)
    bench.camera.set_behind(False)
    bench.push(10)
    until(lambda: len(keeper.frames) >= 4 and len(keeper.frames) == len(cuts), "the frames cut")
    assert all(len(frame.patches) == frame.mask.sum() for frame in keeper.frames)


def test_without_a_replica_windows_are_counted_by_another_reason(bench) -> None:
    before = dropped("no_replica"), dropped("shed")
    bench.push(10)
    until(lambda: bench.camera.report().counts["windows_dropped"] >= 3, "windows")
    bench.camera.set_rung(SHED)
    # Told by keyframes, one in four seconds.
    bench.push(16)
    until(lambda: bench.camera.report().counts["windows_dropped"] >= 11, "more windows")
    none, shed = dropped("no_replica") - before[0], dropped("shed") - before[1]
    assert min(none, shed) >= 3
    assert none + shed == bench.camera.report().counts["windows_dropped"]


def test_a_file_that_may_wait_is_not_thrown_away_while_it_is_shed(clip) -> None:
    keeper = Keeper()
    with camera_bench(clip, source=str(clip)) as bench:
        bench.camera.set_rung(SHED)
        bench.camera.route(bench.replica(keeper))
        until(lambda: bench.camera.report().counts["frames_sampled"] >= 2, "its first frame to wait")
        assert "shed" in bench.camera.report().reason
        bench.camera.set_rung(FULL)
        until(lambda: bench.camera.ended, "its end")
        until(lambda: len(keeper.frames) == 24, "all of it")
    assert keeper.frames[0].pts == 0
    assert bench.camera.report().counts["windows_dropped"] == 0


def test_a_video_that_has_ended_loses_no_window_with_its_replica(clip) -> None:
    keeper = Keeper()
    with camera_bench(clip, source=str(clip)) as bench:
        bench.camera.route(bench.replica(keeper))
        until(lambda: bench.camera.ended and keeper.closed == [True], "its end")
        assert len(keeper.frames) == 24, "all of it was answered"
        bench.camera.route(None)
        bench.camera.route(bench.replica(Keeper()))
        assert bench.camera.report().counts["windows_lost"] == 0
        # Nor is it open there for good.
        assert bench.sender.status("gate") is None


@pytest.mark.parametrize(
    ("window_s", "stride_s", "budget", "rung", "expected"),
    [
        (40, 8, None, FULL, (8, None)),
        (40, 8, None, LOW, (16, 0.0)),
        (40, 8, 0.3, Rung("refresh", refresh_budget=0.5), (8, 0.3)),
        (10, 8, 0.3, LOW, (10, 0.0)),
        (8, 8, None, LOW, (8, 0.0)),
        (4, 8, None, LOW, (8, 0.0)),
    ],
)
def test_what_a_replica_is_told_of_a_rung(window_s, stride_s, budget, rung, expected) -> None:
    spec = StreamSpec("gate", (Question("q", "Who?"),), window_s=window_s, stride_s=stride_s, refresh_budget=budget)
    at = stream_spec_at(spec, rung)
    assert (at.stride_s, at.refresh_budget) == expected


def test_a_camera_that_is_asked_nothing_sends_nothing_and_misses_nothing(bench, keeper) -> None:
    bench.push(8)
    until(lambda: len(keeper.frames) >= 6, "frames")
    [question] = bench.camera.settings.questions
    night = ScheduleConfig(hours=["22:00-06:00"])
    other = question.model_copy(update={"id": "vehicle", "text": "Is there a vehicle?"})
    asked = {"questions": [question.model_copy(update={"when": night}), other]}
    assert bench.camera.apply_settings(bench.camera.settings.model_copy(update=asked))
    bench.camera.follow_schedule(NOON_S)
    until(lambda: [each.id for each in keeper.specs[-1].questions] == ["vehicle"], "the day's question alone")
    bench.camera.follow_schedule(MIDNIGHT_S)
    until(lambda: [each.id for each in keeper.specs[-1].questions] == ["person", "vehicle"], "both")
    assert not keeper.closed

    alone = {"questions": [question.model_copy(update={"when": night})]}
    assert bench.camera.apply_settings(bench.camera.settings.model_copy(update=alone))
    bench.camera.follow_schedule(MIDNIGHT_S)
    bench.push(4)
    bench.camera.follow_schedule(NOON_S)
    until(lambda: keeper.closed == [True], "its end at the replica, after what was sent")
    sent, specs = len(keeper.frames), len(keeper.specs)
    before = bench.camera.report().counts["frames_sampled"]
    bench.push(30)
    until(lambda: bench.camera.report().counts["frames_sampled"] > before, "keyframes for people")
    report = bench.camera.report()
    assert (report.state, report.reason) == ("running", NOT_ASKED)
    assert metrics.camera_asked.labels("gate")._value.get() == 0
    assert (len(keeper.frames), len(keeper.specs)) == (sent, specs)
    # A rung and another replica change nothing of that.
    bench.camera.set_rung(LOW)
    bench.camera.set_rung(FULL)
    assert len(keeper.specs) == specs

    bench.camera.follow_schedule(MIDNIGHT_S)
    until(lambda: len(keeper.specs) == specs + 1, "the questions of the night")
    bench.push(12)
    until(lambda: len(keeper.frames) >= sent + 4, "frames again")
    assert keeper.frames[sent].random_access
    counts = bench.camera.report().counts
    assert (counts["windows_dropped"], counts["windows_lost"]) == (0, 0)
    assert metrics.camera_asked.labels("gate")._value.get() == 1

    # The replica counts from nothing since it was opened again; what it had answered before is no loss.
    until(lambda: bench.sender.status("gate").windows.done == (len(keeper.frames) - sent) // 2, "what is answered")
    bench.camera.route(None)
    assert bench.camera.report().counts["windows_lost"] <= 1


def test_what_was_shed_before_a_camera_is_asked_nothing_ends_there(bench, keeper) -> None:
    [question] = bench.camera.settings.questions
    night = {"questions": [question.model_copy(update={"when": ScheduleConfig(hours=["22:00-06:00"])})]}
    assert bench.camera.apply_settings(bench.camera.settings.model_copy(update=night))
    bench.camera.follow_schedule(MIDNIGHT_S)
    bench.push(8)
    bench.camera.set_rung(SHED)
    bench.push(8)
    dropped = bench.camera.report().counts["windows_dropped"]
    bench.camera.follow_schedule(NOON_S)
    bench.push(60)
    bench.camera.follow_schedule(MIDNIGHT_S)
    bench.camera.set_rung(FULL)
    bench.push(12)
    assert bench.camera.report().counts["windows_dropped"] <= dropped + 1


def test_what_a_full_queue_drops_is_counted_of_every_session(bench) -> None:
    def dropped_packets() -> float:
        return metrics.ingest_dropped.labels("queue_full")._value.get()

    before = dropped_packets()
    packet = ingest_pb2.Packet(data=bytes((32 << 20) + 1), keyframe=True)
    for session, packets in ("first", 3), ("second", 7):
        bench.loop.run(bench.camera.sink.open(bench._header, session), WAIT_S)
        for sequence in range(packets):
            packet.sequence = sequence
            bench.loop.run(bench.camera.sink.offer(ingest_pb2.PacketBatch(packets=[packet])), WAIT_S)
        bench.camera.report()
    assert dropped_packets() - before == 10


def test_a_camera_that_pushes_again_has_none_of_its_last_session_under_way(bench, keeper) -> None:
    bench.push(24)
    until(lambda: len(keeper.frames) >= 20, "frames")
    bench.loop.run(bench.camera.sink.end(), WAIT_S)
    until(lambda: bench.camera.ended and keeper.closed, "its end")
    bench.loop.run(bench.camera.sink.open(bench._header, "another"), WAIT_S)
    sent = len(keeper.frames)
    bench.push(8)
    until(lambda: len(keeper.frames) >= sent + 4, "frames again")
    bench.camera.route(None)
    assert bench.camera.report().counts["windows_lost"] <= 2


def test_an_agent_that_did_not_hear_that_its_end_was_taken_hears_it_when_it_comes_back(bench, keeper) -> None:
    bench.push(4)
    camera, header = bench.camera, bench._header
    sent = bench.loop.run(camera.sink.end(), WAIT_S).next_sequence
    until(lambda: camera.ended, "its end")
    again = camera.sink
    assert bench.loop.run(again.open(header, "session"), WAIT_S).next_sequence == sent > 0
    assert bench.loop.run(again.end(), WAIT_S).next_sequence == sent
    assert camera.ended
    with pytest.raises(NotReadyError, match="session 'session' has ended"):
        bench.loop.run(again.offer(ingest_pb2.PacketBatch()), WAIT_S)
    assert bench.loop.run(camera.sink.open(header, "another"), WAIT_S).next_sequence == 0
    assert not camera.ended


def test_an_agent_whose_camera_ended_by_an_error_goes_on_with_its_session(bench, keeper, monkeypatch) -> None:
    """It was told that its session has ended, for which an agent gives up, and nobody was left who pushes."""

    def fail(*_: object) -> None:
        raise SourceError("this profile cannot be decoded", retryable=False)

    monkeypatch.setattr(bench.camera._pipeline._processor, "feed", fail)
    bench.push(1)
    until(lambda: bench.camera.ended, "its end")
    assert bench.camera.report().reason == "this profile cannot be decoded"
    bench.loop.run(bench.camera.sink.open(bench._header, "session"), WAIT_S)
    assert not bench.camera.ended
    bench.push(8)
    until(lambda: keeper.frames, "frames again")


def test_a_camera_that_is_stopped_while_an_agent_opens_it_again_does_not_run(bench, keeper, monkeypatch) -> None:
    """Its thread would live as long as the process, and its window at the replica of whoever has it now."""
    bench.push(8)
    bench.loop.run(bench.camera.sink.end(), WAIT_S)
    until(lambda: bench.camera.ended, "its end")
    specs, end_windows = len(keeper.specs), bench.camera._end_windows

    def stopped_meanwhile() -> None:
        end_windows()
        stopping = threading.Thread(target=bench.camera.stop, args=(WAIT_S,))
        stopping.start()
        stopping.join(WAIT_S)

    monkeypatch.setattr(bench.camera, "_end_windows", stopped_meanwhile)
    with pytest.raises(UnavailableError, match="no longer runs here"):
        bench.loop.run(bench.camera.sink.open(bench._header, "another"), WAIT_S)
    until(lambda: bench.camera.ended, "the end of what was begun")
    assert len(keeper.specs) == specs


@pytest.mark.parametrize("session", ["again", "another"])
def test_an_agent_that_comes_to_a_camera_that_has_moved_is_sent_to_the_other_decoder(bench, session: str) -> None:
    """It waited for its old connection to end. It was told that its session has ended, for which an agent gives up; or
    its new session started the camera here once more, and nobody ever stopped that."""
    sink, header = bench.camera.sink, bench._header
    bench.loop.run(sink.open(header, "again"), WAIT_S)
    assert bench.camera.stop(WAIT_S, moved=True)
    with pytest.raises(UnavailableError, match="no longer runs here"):
        bench.loop.run(sink.open(header, session), WAIT_S)
    assert bench.camera.ended


def test_a_camera_that_is_still_busy_after_its_stop_sends_nothing_in_the_name_of_the_next(bench, keeper, monkeypatch):
    """With other privacy masks a camera is begun anew: a picture of before must not get into its window."""
    bench.push(6)
    until(lambda: len(keeper.frames) >= 4, "frames")
    busy, ready = threading.Event(), threading.Event()
    select = bench.camera._pipeline._sampler.select

    def slow(picture):
        selection = select(picture)
        if selection is not None:
            busy.set()
            ready.wait(WAIT_S)
        return selection

    bench.camera._pipeline.force_anchor()
    monkeypatch.setattr(bench.camera._pipeline._sampler, "select", slow)
    while not busy.wait(0.2):
        bench.push(1 / 12.5)
    assert not bench.camera.stop(0.1)
    bench.sender.assign(bench.camera.spec, bench.camera.address)
    sent = []
    monkeypatch.setattr(bench.sender, "send", lambda *frame: sent.append(frame))
    ready.set()
    assert bench.camera.stop(WAIT_S)
    assert not sent
