import itertools
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.codec import PushSource, StreamHeader
from cluster.codec.source import PacketQueue
from cluster.errors import SourceError
from cluster.types import EncodedPacket

HEADER = StreamHeader("h264", 64, 64, b"")


def packet(sequence: int, *, keyframe: bool = False, size: int = 10) -> EncodedPacket:
    return EncodedPacket("h264", bytes(size), sequence * 40_000, None, keyframe, sequence)


def accepts(source: PushSource, one: EncodedPacket) -> bool:
    return source.offer([one]) == 0


def drained(source: PushSource) -> list[int]:
    return [packet.sequence for packet in source.packets()]


def test_packets_come_out_in_order_and_the_end_is_told() -> None:
    source = PushSource()
    source.begin_session(HEADER, "a")
    assert all(accepts(source, packet(index)) for index in range(5))
    source.end_session()
    assert source.open() == HEADER
    assert not source.ended or source.queued == 5
    assert drained(source) == [0, 1, 2, 3, 4]
    assert source.ended


def test_repeats_are_ignored_and_holes_pass() -> None:
    source = PushSource()
    source.begin_session(HEADER, "a")
    for sequence in (0, 1, 1, 0, 2, 5, 4, 6):
        assert accepts(source, packet(sequence))
    source.end_session()
    source.open()
    assert drained(source) == [0, 1, 2, 5, 6]
    assert source.next_sequence == 7


def test_a_full_queue_drops_up_to_the_next_keyframe() -> None:
    source = PushSource(max_packets=3)
    source.begin_session(HEADER, "a")
    assert [accepts(source, packet(index)) for index in range(5)] == [True, True, True, False, False]
    assert source.credit() == 0
    source.open()
    packets = source.packets()
    assert next(packets).sequence == 0
    # There is room again, but what follows the hole cannot be decoded.
    assert source.credit() == 1
    assert not accepts(source, packet(5))
    assert accepts(source, packet(6, keyframe=True))
    source.end_session()
    assert [packet.sequence for packet in packets] == [1, 2, 6]
    assert source.dropped == 3
    assert source.next_sequence == 7


def test_a_reconnect_in_the_same_session_loses_nothing() -> None:
    source = PushSource()
    source.begin_session(HEADER, "a")
    accepts(source, packet(0))
    source.open()
    packets = source.packets()
    assert next(packets).sequence == 0
    source.begin_session(HEADER, "a")
    assert source.next_sequence == 1
    accepts(source, packet(1))
    source.end_session()
    assert [packet.sequence for packet in packets] == [1]


def test_another_session_follows_once_the_first_is_drained() -> None:
    source = PushSource()
    source.begin_session(HEADER, "a")
    accepts(source, packet(0))
    source.open()
    other = StreamHeader("hevc", 32, 32, b"x")
    source.begin_session(other, "b")
    assert source.next_sequence == 0
    accepts(source, packet(0, keyframe=True))
    accepts(source, packet(1))
    assert drained(source) == [0]
    assert not source.ended
    assert source.open() == other
    source.end_session()
    assert drained(source) == [0, 1]
    assert source.ended


@pytest.mark.parametrize("announced", [False, True])
def test_closing_wakes_a_blocked_reader(announced: bool) -> None:
    source = PushSource()
    if announced:
        source.begin_session(HEADER, "a")
    outcome: list[object] = []

    def read() -> None:
        try:
            source.open()
            outcome.append(drained(source))
        except SourceError as error:
            outcome.append(error.retryable)

    thread = threading.Thread(target=read)
    thread.start()
    source.close()
    thread.join(10)
    assert not thread.is_alive()
    assert outcome in ([[]], [False])
    with pytest.raises(SourceError, match="no longer accepts packets"):
        source.begin_session(HEADER, "b")
    assert not accepts(source, packet(0))


def test_a_slow_consumer_on_another_thread_gets_everything_within_credit() -> None:
    source = PushSource(max_packets=4)
    source.begin_session(HEADER, "a")
    got: list[int] = []

    def read() -> None:
        source.open()
        got.extend(drained(source))

    thread = threading.Thread(target=read)
    thread.start()
    sequence = 0
    while sequence < 200:
        for _ in range(source.credit()):
            assert accepts(source, packet(sequence))
            sequence += 1
    source.end_session()
    thread.join(10)
    assert got == list(range(sequence))
    assert source.dropped == 0


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 60)), max_size=60),
    st.integers(1, 8),
    st.integers(1, 200),
)
def test_the_queue_never_exceeds_its_bounds_nor_breaks_a_group(
    steps: list[tuple[bool, bool, int]], max_packets: int, max_bytes: int
) -> None:
    queue = PacketQueue(max_packets, max_bytes)
    out: list[EncodedPacket] = []
    offered = 0
    for take, keyframe, size in steps:
        if take:
            got = queue.get(0)
            out += [got] if got else []
        else:
            queue.put_all((packet(offered, keyframe=keyframe, size=size),))
            offered += 1
        assert len(queue) <= max_packets
        assert queue.bytes <= max_bytes
    queue.close()
    while (got := queue.get()) is not None:
        out.append(got)
    assert len(out) + queue.dropped == offered
    assert queue.bytes == 0
    for before, after in itertools.pairwise(out):
        assert after.sequence == before.sequence + 1 or after.keyframe


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.lists(st.tuples(st.integers(-1, 2), st.booleans(), st.integers(1, 40)), max_size=6), max_size=8),
    st.integers(1, 8),
    st.integers(20, 200),
)
def test_packets_that_come_together_are_as_packets_one_by_one(
    batches: list[list[tuple[int, bool, int]]], max_packets: int, max_bytes: int
) -> None:
    together, single = (PushSource(max_packets=max_packets, max_bytes=max_bytes) for _ in range(2))
    for source in (together, single):
        source.begin_session(HEADER, "a")
    sequence = 0
    for batch in batches:
        packets = []
        for step, keyframe, size in batch:
            packets.append(packet(max(0, sequence + step), keyframe=keyframe, size=size))
            sequence = max(sequence, packets[-1].sequence + 1)
        dropped = together.offer(packets)
        assert dropped == sum(not accepts(single, each) for each in packets)
    for attribute in ("next_sequence", "dropped", "queued"):
        assert getattr(together, attribute) == getattr(single, attribute)
    found = []
    for source in (together, single):
        source.end_session()
        source.open()
        found.append(list(source.packets()))
    assert found[0] == found[1]
