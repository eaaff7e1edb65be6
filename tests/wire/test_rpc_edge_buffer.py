"""The edge agent's buffer: bounded, whole GOPs, newest wins, nothing lost uncounted."""

import threading
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.codec.source import StreamHeader
from cluster.types import EncodedPacket
from cluster.wire.edge_buffer import EdgeBuffer

HEADER = StreamHeader("h264", 0, 0, b"")


def packet(sequence, *, keyframe=None, size=10, gop=5):
    keyframe = sequence % gop == 0 if keyframe is None else keyframe
    return EncodedPacket("h264", bytes(size), None, None, keyframe, sequence)


def buffer(max_packets=10, max_bytes=10_000, *, lossless=False):
    made = EdgeBuffer(max_packets, max_bytes, lossless=lossless, wake=lambda: None)
    made.begin(HEADER)
    return made


def numbers(packets):
    return [packet.sequence for packet in packets]


def test_batches_by_count_and_bytes():
    held = buffer(max_packets=100)
    for i in range(20):
        held.put(packet(i))
    assert numbers(held.take(0, 4, 1000)) == [0, 1, 2, 3]
    assert numbers(held.take(0, 100, 35)) == [4, 5, 6]
    assert numbers(held.take(0, 100, 1)) == [7], "at least one, however large"
    assert (held.in_flight, held.waiting) == (8, 12)


def test_acknowledged_packets_are_forgotten_and_the_rest_is_sent_again():
    held = buffer()
    for i in range(6):
        held.put(packet(i))
    held.take(0, 4, 1000)
    assert held.acknowledge(3) == (3, 30)
    assert (held.in_flight, held.waiting, held.bytes) == (1, 2, 30)
    held.rewind()
    assert numbers(held.take(0, 10, 1000)) == [3, 4, 5]


def test_a_full_buffer_drops_the_oldest_gop():
    held = buffer(max_packets=10)
    for i in range(11):
        held.put(packet(i))
    assert numbers(held.take(0, 100, 1000)) == [5, 6, 7, 8, 9, 10]
    assert held.dropped == 5


def test_the_rest_of_a_gop_under_way_goes_first():
    held = buffer(max_packets=10)
    for i in range(10):
        held.put(packet(i))
    held.take(0, 2, 1000)
    held.put(packet(10))
    assert numbers(held.take(0, 100, 1000)) == [5, 6, 7, 8, 9, 10]
    assert held.dropped == 3


def test_one_long_gop_is_dropped_to_its_end():
    held = buffer(max_packets=4)
    for i in range(8):
        held.put(packet(i, keyframe=i in (0, 6)))
    assert numbers(held.take(0, 100, 1000)) == [6, 7]
    assert held.dropped == 6


def test_packets_in_flight_are_never_dropped():
    held = buffer(max_packets=4)
    for i in range(4):
        held.put(packet(i))
    held.take(0, 4, 1000)
    held.put(packet(5))
    assert held.dropped == 1
    held.acknowledge(4)
    held.put(packet(6))
    assert held.dropped == 2, "its GOP began with a packet that was dropped"
    held.put(packet(10))
    assert numbers(held.take(0, 4, 1000)) == [10]


def test_lossless_waits_for_room():
    held = buffer(max_packets=3, lossless=True)

    def work():
        for i in range(50):
            held.put(packet(i))
        held.finish()

    thread = threading.Thread(target=work)
    thread.start()
    got = []
    while len(got) < 50:
        batch = held.take(0, 2, 1000)
        assert held.in_flight + held.waiting <= 3
        got += numbers(batch)
        held.acknowledge(got[-1] + 1 if got else 0)
    thread.join(5.0)
    assert got == list(range(50))
    assert held.dropped == 0
    assert held.is_over(0)


def test_closing_unblocks_a_waiting_source():
    held = buffer(max_packets=1, lossless=True)
    held.put(packet(0))
    thread = threading.Thread(target=held.put, args=(packet(1),))
    thread.start()
    held.close()
    thread.join(5.0)
    assert not thread.is_alive()
    assert held.waiting == 1


def test_epochs_are_not_mixed():
    held = buffer()
    held.put(packet(0))
    other = StreamHeader("h264", 640, 480, b"")
    held.begin(other)
    held.put(packet(5))
    assert (held.epoch, held.header(0), held.header(1)) == (0, HEADER, other)
    assert numbers(held.take(0, 10, 1000)) == [0]
    assert held.take(0, 10, 1000) == []
    assert held.is_over(0)
    held.acknowledge(1)
    assert held.epoch == 1
    assert numbers(held.take(1, 10, 1000)) == [5]
    assert not held.is_over(1)


def test_the_same_header_again_is_the_same_epoch():
    held = buffer()
    held.put(packet(0))
    held.begin(HEADER)
    held.put(packet(5))
    assert numbers(held.take(0, 10, 1000)) == [0, 5]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.sampled_from(["put", "put", "put", "key", "take", "ack", "rewind"]), max_size=80),
    st.integers(1, 8),
    st.integers(20, 200),
)
@pytest.mark.filterwarnings("ignore")
def test_any_sequence_of_calls(calls, max_packets, max_bytes):
    """Bounds hold, order holds, every packet is held, acknowledged or counted, and no GOP is entered in its middle."""
    held = buffer(max_packets, max_bytes)
    put = acknowledged = 0
    sent: list[EncodedPacket] = []
    for call in calls:
        if call in ("put", "key"):
            held.put(packet(put, keyframe=call == "key" or put == 0, size=10 + put % 7))
            put += 1
        elif call == "take":
            sent += held.take(0, 3, 1000)
        elif call == "ack" and sent:
            acknowledged += held.acknowledge(sent[-1].sequence + 1)[0]
        elif call == "rewind":
            held.rewind()
            sent.clear()
        count = held.in_flight + held.waiting
        assert count <= max_packets
        assert held.bytes <= max_bytes or count == 1
        assert put == acknowledged + held.dropped + count
        for before, after in pairwise(sent):
            assert after.sequence > before.sequence
            assert after.sequence == before.sequence + 1 or after.keyframe
