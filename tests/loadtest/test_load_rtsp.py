"""Simulated RTSP cameras, played by the cluster's own RTSP source."""

import asyncio
import itertools
import threading
from itertools import islice

import pytest
from waiting import until_async

from cluster.codec.nal import START_CODE
from cluster.codec.network import NetworkSource
from cluster.codec.source import StreamHeader
from cluster.errors import ConfigError, SourceError
from loadtest.footage import make_footage
from loadtest.profile import Profile, packets, script
from loadtest.rtsp import FRAGMENT_BYTES, RtspCameras, rtp, units


@pytest.fixture(scope="module")
def clip():
    return make_footage("quiet", fps=10, size=(320, 192), seconds=4)


FIRST: list[float] = []


class Player(threading.Thread):
    """What a decoder does: opens the address and keeps its packets."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.source = NetworkSource(url, connect_timeout_s=10)
        self.packets = []
        self.error = None
        self.start()

    def run(self) -> None:
        try:
            self.header = self.source.open()
            for packet in self.source.packets():
                self.packets.append(packet)
        except SourceError as error:
            self.error = error


def begin(server: RtspCameras, clip, name: str = "cam"):
    """A camera that sends a packet every few milliseconds."""
    line = server.add(name, clip.header, FIRST.append)
    profile = Profile(mix={"quiet": 1.0}, fps=10)
    sent = packets(profile, script(profile, 0), {"quiet": clip})

    async def deliver() -> None:
        for due in sent:
            line.deliver(due.packet)
            await asyncio.sleep(0.005)

    return line, asyncio.create_task(line.run()), asyncio.create_task(deliver())


async def test_a_decoder_gets_the_cameras_pictures_at_the_cameras_times(clip) -> None:
    server = RtspCameras()
    await server.start()
    line, running, delivering = begin(server, clip)
    await asyncio.sleep(0.3)
    player = Player(server.url("cam"))
    await until_async(lambda: len(player.packets) >= 91)
    assert (player.header.codec, player.header.width, player.header.height) == ("h264", 320, 192)
    profile = Profile(mix={"quiet": 1.0}, fps=10)
    truth = {due.packet.pts: due.packet for due in islice(packets(profile, script(profile, 0), {"quiet": clip}), 400)}
    assert player.packets[0].keyframe
    # FFmpeg gives the packet that it opened the stream with no time.
    got = player.packets[1:91]
    # The camera's own clock, although the player came in the middle; a 90 kHz tick is eleven microseconds.
    times = [min(truth, key=lambda pts, p=packet: abs(pts - p.pts)) for packet in got]
    assert all(abs(time - packet.pts) <= 12 for time, packet in zip(times, got, strict=True))
    assert times == list(range(times[0], times[0] + 90 * 100_000, 100_000))
    assert all(units(packet.data)[-1] == units(truth[time].data)[-1] for time, packet in zip(times, got, strict=True))
    assert [packet.sequence for packet in got] == list(range(1, 91))
    assert line.status.packets >= 90
    assert len(FIRST) == 1
    # Cut off, it has to come again, and begins with a keyframe.
    line.cut()
    await until_async(lambda: not player.is_alive())
    again = Player(server.url("cam"))
    await until_async(lambda: len(again.packets) >= 5)
    assert again.packets[0].keyframe
    assert line.status.reconnects == 1
    delivering.cancel()
    running.cancel()
    await asyncio.wait({running})
    gone = Player(server.url("cam"))
    await until_async(lambda: not gone.is_alive())
    assert "404" in str(gone.error)
    for each in (player, again, gone):
        each.source.close()
    await server.close()


async def test_who_does_not_read_loses_whole_gops_and_holds_up_nobody(clip, monkeypatch) -> None:
    monkeypatch.setattr("loadtest.rtsp.UNREAD_BYTES", 50_000)
    server = RtspCameras()
    await server.start()
    line, running, delivering = begin(server, clip)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
    for number, (method, more) in enumerate([("SETUP", "Transport: RTP/AVP/TCP;interleaved=0-1\r\n"), ("PLAY", "")], 1):
        writer.write(f"{method} {server.url('cam')} RTSP/1.0\r\nCSeq: {number}\r\n{more}\r\n".encode())
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
    delivering.cancel()
    big = [packet for gop in clip.gops for packet in gop.packets]
    from cluster.types import EncodedPacket

    for number in range(4000):
        stored = big[number % len(big)]
        line.deliver(EncodedPacket("h264", stored.data * 20, number, number, stored.keyframe, number))
    assert line.status.dropped > 0
    assert line.status.packets < 4000
    writer.close()
    running.cancel()
    await asyncio.wait({running})
    await server.close()


def test_units_survive_fragmenting() -> None:
    sizes = [5, FRAGMENT_BYTES, FRAGMENT_BYTES + 1, 5 * FRAGMENT_BYTES]
    whole = [bytes([0x65]) + bytes([1 + number % 250]) * (size - 1) for number, size in enumerate(sizes)]
    sent = list(rtp(b"".join(START_CODE + unit for unit in whole), 7, itertools.count(65534)))
    numbers = [int.from_bytes(packet[2:4], "big") for packet in sent]
    assert numbers == [(65534 + place) % 2**16 for place in range(len(sent))]
    assert [packet[1] >> 7 for packet in sent] == [0] * (len(sent) - 1) + [1]
    assert {packet[4:8] for packet in sent} == {(7).to_bytes(4, "big")}
    assert max(map(len, sent)) <= FRAGMENT_BYTES + 14
    joined, found = b"", []
    for payload in (packet[12:] for packet in sent):
        if payload[0] & 0x1F != 28:
            found.append(payload)
            continue
        if payload[1] & 0x80:
            joined = bytes([payload[0] & 0xE0 | payload[1] & 0x1F])
        joined += payload[2:]
        if payload[1] & 0x40:
            found.append(joined)
    assert found == whole


def test_other_codecs_are_refused() -> None:
    with pytest.raises(ConfigError, match="send h264, not hevc"):
        RtspCameras().add("cam", StreamHeader("hevc", 64, 64, b""))
