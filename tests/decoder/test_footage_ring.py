"""The ring of packets: what it keeps, what it gives up, and what a recording gets of it."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from footage_parts import FPS, STEP, shifted, video
from hypothesis import given
from hypothesis import strategies as st

from cluster.codec.nal import parameter_sets
from cluster.codec.source import StreamHeader
from cluster.decoder.footage.ring import PacketRing, RingBudget
from cluster.types import MICROSECONDS, EncodedPacket

S = MICROSECONDS


def ring_of(header, packets, *, keep_s=4.0, most=1 << 24, budget=None):
    ring = PacketRing(keep_s, most, budget or RingBudget(1 << 30))
    ring.open(header)
    for packet in packets:
        ring.add_packet(packet)
    return ring


def times(recording):
    return [placed.time for placed in recording.pop_packets(10_000)]


def test_it_reaches_back_by_whole_groups(h264):
    header, packets = h264
    ring = ring_of(header, packets)
    # The newest picture is at 9.95 s: 4 s before it lie in the group that begins at 5 s.
    assert ring.gop_packets(0)[0].packet.sequence == 180
    recording = ring.record(0, 20 * S)
    assert times(recording)[0] == 5 * S
    assert recording.missing == "its first 5 s are no longer buffered"
    assert ring.bytes == sum(len(p.data) for p in packets[100:])


def test_what_never_was_is_not_called_given_up(h264):
    header, packets = h264
    assert ring_of(header, packets[:40]).record(-5 * S, 1 * S).missing == "the camera's video begins 5 s into it"
    assert ring_of(header, packets[:40]).record(-S // 2, 1 * S).missing == ""
    # What was forgotten, or given up as too much, was there.
    ring = ring_of(header, packets[:30])
    ring.delete_before()
    for packet in packets[30:60]:
        ring.add_packet(packet)
    assert ring.record(0, 3 * S).missing == "its first 2 s are no longer buffered"


def test_a_recording_is_what_was_and_what_comes(h264):
    header, packets = h264
    ring = ring_of(header, packets[:150])
    recording = ring.record(round(4.2 * S), round(8.5 * S))
    for packet in packets[150:]:
        ring.add_packet(packet)
    assert recording.complete
    assert (recording.missing, recording.end_reason, recording.losses) == ("", "", 0)
    assert times(recording) == [at * STEP for at in range(80, 170)]


def test_bytes_are_bounded_for_a_camera_and_for_all(h264):
    header, packets = h264
    group = sum(len(p.data) for p in packets[:20])
    ring = ring_of(header, packets, keep_s=100.0, most=3 * group)
    assert 0 < ring.bytes <= 3 * group
    budget = RingBudget(4 * group)
    quiet = ring_of(header, packets[:20], keep_s=100.0, budget=budget)
    loud = ring_of(header, packets, keep_s=100.0, budget=budget)
    # The quiet one keeps its share, and so the loud one must be the one to give way.
    assert quiet.bytes == group
    assert budget.held == quiet.bytes + loud.bytes <= 4 * group
    for each in (quiet, loud, loud):
        each.close()
    assert budget.held == 0


def test_a_camera_without_keyframes_is_given_up_and_said_so(h264):
    header, packets = h264
    endless = [replace(p, data=p.data + bytes(2000)) for p in packets[:1] + packets[1:20] * 9]
    endless = [replace(p, sequence=i, pts=i * STEP, dts=i * STEP) for i, p in enumerate(endless)]
    ring = ring_of(header, endless, most=100_000)
    assert ring.bytes == 0
    recording = ring.record(0, S)
    assert recording.done
    assert recording.end_reason == "the camera sent no keyframe"
    # It is there again with its next keyframe.
    for packet in shifted(packets[:20], endless[-1].pts + STEP, len(endless)):
        ring.add_packet(packet)
    assert ring.bytes == sum(len(p.data) for p in packets[:20])


def test_a_join_in_the_middle_waits_for_a_keyframe(h264):
    header, packets = h264
    ring = ring_of(header, packets[7:45])
    assert ring.gop_packets(0)[0].packet.sequence == 40
    assert times(ring.record(0, 3 * S))[0] == 20 * STEP


def test_lost_packets_leave_a_hole_up_to_the_next_keyframe(h264):
    header, packets = h264
    ring = ring_of(header, packets[:45] + packets[50:80])
    recording = ring.record(0, round(3.5 * S))
    assert times(recording) == [at * STEP for at in [*range(45), *range(60, 70)]]
    assert recording.losses == 1


def test_a_long_loss_is_no_clock_that_was_reset(h264):
    header, packets = h264
    ring = ring_of(header, packets[:45], keep_s=100.0)
    recording = ring.record(S, 30 * S)
    for packet in shifted(packets[60:100], 15 * S, 360):
        ring.add_packet(packet)
    assert (recording.losses, recording.end_reason) == (1, "")
    assert times(recording)[-1] == 15 * S + 99 * STEP


def test_what_comes_twice_or_late_counts_once(h264):
    header, packets = h264
    once = ring_of(header, packets[:60])
    twice = ring_of(header, [p for pair in zip(packets[:60], packets[:60], strict=True) for p in pair])
    assert twice.bytes == once.bytes


@pytest.mark.parametrize("by_s", [-3600, 3600])
def test_a_clock_that_is_set_anew_ends_a_recording(h264, by_s):
    header, packets = h264
    ring = ring_of(header, packets[:60])
    recording = ring.record(S, 20 * S)
    for packet in shifted(packets[60:100], by_s * S, 60):
        ring.add_packet(packet)
    assert recording.end_reason == "the camera's clock was reset"
    assert times(recording)[-1] == 59 * STEP
    # What lies before it can still be had, and so can what comes after.
    assert times(ring.record(S, 2 * S))[0] == S
    assert times(ring.record(3 * S + by_s * S, 4 * S + by_s * S))[0] == 3 * S + by_s * S


def test_a_time_that_nobody_holds_gets_the_newest(h264):
    header, packets = h264
    ring = ring_of(header, packets)
    recording = ring.record(-9000 * S, -8998 * S)
    assert recording.missing == "its time is no longer buffered, this is the newest"
    # Two seconds up to the newest picture, from the keyframe before them.
    assert times(recording) == [at * STEP for at in range(140, 200)]
    assert recording.complete or not recording.done
    # Of a camera that has just connected: its first packet, and two seconds from there.
    young = ring_of(header, packets[:1])
    recording = young.record(9000 * S, 9002 * S)
    for packet in packets[1:60]:
        young.add_packet(packet)
    assert recording.complete
    assert times(recording) == [at * STEP for at in range(40)]


def test_another_codec_or_size_is_another_clip(h264):
    header, packets = h264
    for other, why in (
        (video(40, "mjpeg")[1], "the camera changed its codec"),
        (video(40, size=(128, 96))[1], "the camera changed its picture format"),
    ):
        ring = ring_of(header, packets[:60])
        recording = ring.record(S, 20 * S)
        for packet in shifted(other, 3 * S, 60):
            ring.add_packet(packet)
        assert recording.end_reason == why
        assert len(times(recording)) == 40
        again = ring.record(3 * S, 5 * S)
        assert again.segment.codec == other[0].codec
        assert len(times(again)) == 40


def test_the_same_picture_with_sets_in_every_keyframe_is_one_clip(h264):
    header, packets = h264
    assert ring_of(header, packets).record(6 * S, 20 * S).end_reason == ""


def test_sets_that_are_repeated_or_left_out_before_some_keyframes_are_one_clip(h264):
    header, packets = h264
    sequence, sets = parameter_sets("h264", packets[0].data)
    assert packets[0].data.startswith(sets)
    first, rest = packets[0], packets[1:]
    repeated = [replace(first, data=sets + first.data), *rest]
    # Then those of pictures alone.
    left_out = [first, *(replace(each, data=each.data.replace(sequence, b"", 1)) for each in rest)]
    for sent in (repeated, left_out):
        recording = ring_of(header, sent, keep_s=20.0).record(0, 20 * S)
        assert (recording.end_reason, len(times(recording))) == ("", len(packets))
        assert recording.segment.extradata == sets


def test_the_connection_is_lost_and_comes_back(h264):
    header, packets = h264
    ring = ring_of(header, packets[:60])
    recording = ring.record(S, 20 * S)
    ring.pause("the connection to the camera was lost")
    assert recording.end_reason == "the connection to the camera was lost"
    assert ring.record(S, 20 * S).end_reason == recording.end_reason
    ring.open(header)
    for packet in packets[:40]:
        ring.add_packet(packet)
    assert times(ring.record(0, 20 * S))[:40] == [at * STEP for at in range(40)]


def test_of_two_sessions_whose_times_are_the_same_the_incidents_own_is_shown(h264):
    header, packets = h264
    # The second session is joined in mid-GOP, and so begins later than the first.
    ring = ring_of(header, packets, keep_s=100.0)
    ring.pause("the connection to the camera was lost")
    ring.open(header)
    for packet in packets[7:100]:
        ring.add_packet(packet)
    recording = ring.record(0, 7 * S, moment=5 * S)
    for packet in packets[100:]:
        ring.add_packet(packet)
    assert times(recording) == [at * STEP for at in range(20, 140)]
    assert (recording.end_reason, recording.missing) == ("", "")


def test_an_incident_of_the_session_before_is_shown_though_the_camera_is_back(h264):
    header, packets = h264
    ring = ring_of(header, packets, keep_s=100.0)
    ring.pause("the connection to the camera was lost")
    ring.open(header)
    for packet in packets[:60]:
        ring.add_packet(packet)
    recording = ring.record(0, 10 * S, moment=9 * S)
    assert recording.end_reason == "the connection to the camera was lost"
    assert times(recording) == [at * STEP for at in range(200)]


def test_a_still_is_of_its_session(h264):
    header, packets = h264
    ring = ring_of(header, [*packets, *shifted(packets, 10 * S, 200)], keep_s=100.0)
    before = ring.gop_packets(0)[0].segment
    ring.pause("the connection to the camera was lost")
    ring.open(header)
    for packet in packets[:50]:
        ring.add_packet(packet)
    for at_s, group_s, of_before in (18, 18, True), (13, 13, True), (1, 1, False), (4, 2, False):
        # Where the newest packet is a little before it, the session is still meant that has just begun.
        first = ring.gop_packets(at_s * S)[0]
        assert (first.time, first.segment is before) == (group_s * S, of_before)


def test_what_is_older_than_a_time_goes_though_the_camera_was_away_since(h264, monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr("cluster.decoder.footage.ring.time", SimpleNamespace(monotonic=lambda: now_s))
    header, packets = h264
    ring = ring_of(header, packets[:60], keep_s=100.0)
    ring.pause("the connection to the camera was lost")
    now_s += 500.0
    ring.open(header)
    for packet in packets[60:100]:
        ring.add_packet(packet)
    assert ring.delete_before(60.0) == sum(len(p.data) for p in packets[:60])
    assert times(ring.record(0, 20 * S))[0] == 3 * S


def test_forgotten_is_gone(h264):
    header, packets = h264
    budget = RingBudget(1 << 30)
    ring = ring_of(header, packets[:90], budget=budget)
    recording = ring.record(0, 20 * S)
    held = ring.bytes
    assert ring.delete_before() == held
    assert budget.held == 0
    assert recording.end_reason == "the camera was forgotten"
    for packet in packets[90:]:
        ring.add_packet(packet)
    # Nothing of before, not even what a group begun before would still need.
    assert times(ring.record(0, 20 * S))[0] == 5 * S


def test_a_silent_camera_is_not_held_for_ever(h264):
    ring = ring_of(*h264)
    ring.expire(3600.0)
    assert ring.bytes > 0
    ring.expire(-1.0)
    assert ring.bytes == 0


def test_a_camera_that_tells_no_times_is_kept_by_its_rate(h264):
    header, packets = h264
    untimed = [replace(p, pts=None, dts=None) for p in packets]
    ring = ring_of(header, untimed)
    assert 4.0 <= ring.seconds < 6.0 * 25 / FPS
    assert len(times(ring.record(0, 1 << 60))) >= 80


def test_a_camera_whose_clock_stands_still_is_kept_by_its_rate(h264):
    header, packets = h264
    stuck = [replace(p, pts=5 * S, dts=5 * S) for p in [*packets[100:], *shifted(packets, 0, 200)]]
    ring = ring_of(header, packets[:100] + stuck)
    assert 4.0 <= ring.seconds < 6.0
    # Sampled times go on from where they were 25 pictures later, a second after the clock stopped.
    shown = times(ring.record(round(16 * S), round(18 * S)))
    assert shown[0] > 15 * S
    assert [b - a for a, b in pairwise(shown)] == pytest.approx([STEP] * (len(shown) - 1), abs=2)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["key", "delta", "delta", "delta", "lost", "back", "ahead", "codec"]), st.integers(1, 5000)
        ),
        max_size=120,
    )
)
def test_whatever_comes_the_books_are_right(steps):
    """Bounded, begins where a decoder can, never decreasing in time within a clip, and empty books when closed."""
    budget = RingBudget(60_000)
    ring = PacketRing(3.0, 20_000, budget)
    ring.open(StreamHeader("h264", 0, 0, b""))
    sequence, now, codec = 0, 0, "h264"
    for what, size in steps:
        sequence += 2 if what == "lost" else 1
        now += {"back": -60 * S, "ahead": 60 * S}.get(what, STEP)
        codec = "mpeg4" if what == "codec" else codec
        ring.add_packet(EncodedPacket(codec, b"\0" * size, now, now, what == "key", sequence))
        assert 0 <= ring.bytes <= 20_000
        assert budget.held == ring.bytes
        held = ring.gop_packets(1 << 62)
        assert not held or held[0].starts
        assert [each.order for each in held] == sorted(each.order for each in held)
    taken = ring.record(now - 2 * S, now + S).pop_packets(10_000)
    assert not taken or taken[0].starts
    assert len({id(each.segment) for each in taken}) <= 1
    ring.close()
    assert budget.held == 0
