"""A camera's packets as they come: unchanged, to so many viewers, and not where they show what is masked."""

import asyncio
import io

import av
import pytest
from footage_parts import site, video
from sightline.v1 import pictures_pb2, pictures_pb2_grpc

from cluster.decoder.footage import service
from cluster.decoder.footage.camera import CameraFootage
from cluster.decoder.footage.ring import PacketRing, RingBudget
from cluster.errors import CapacityError, NotReadyError, UnavailableError
from cluster.wire.channel import open_channel


async def watched(stub, count, feed, camera="gate"):
    """The first parts of a live view, with ``feed(n)`` after the n-th."""
    call = stub.Live(pictures_pb2.LiveRequest(camera=camera))
    data = b""
    async for part in call:
        data += part.data
        count -= 1
        if not count:
            call.cancel()
            return data
        feed()
    return data


async def test_packets_come_through_unchanged_from_the_newest_keyframe_on(tmp_path):
    """What was held of before is not shown; every picture is there as soon as the next one is."""
    made = video(100, gop=20)
    async with site(tmp_path) as running, open_channel(running.address) as channel:
        running.feed(made, 50)
        stub = pictures_pb2_grpc.PicturesStub(channel)
        fed = iter(range(51, 100))
        data = await watched(stub, 20, lambda: running.feed(made, next(fed)))
    with av.open(io.BytesIO(data)) as file:
        shown = [bytes(packet) for packet in file.demux(video=0) if packet.size]
    assert len(shown) >= 28
    # MP4 has lengths in place of start codes; sizes of slices and their bytes are the same.
    for got, sent in zip(shown, made[1][40:], strict=False):
        assert got[-16:] == sent.data[-16:]


@pytest.mark.parametrize(
    ("footage", "error", "sentence"),
    [
        (lambda ring: CameraFootage(ring, [((0.0, 0.0), (0.5, 0.0), (0.5, 0.5))]), NotReadyError, "are not masked"),
        (lambda ring: CameraFootage(None), NotReadyError, "clips.enabled"),
        (lambda ring: CameraFootage(PacketRing(10.0, 1 << 20, RingBudget(1 << 20))), UnavailableError, "at the moment"),
    ],
)
async def test_where_there_is_no_live_view_the_reason_is_said(tmp_path, footage, error, sentence):
    async with site(tmp_path) as running:
        running.feed(video(30), 30)
        running.cameras["gate"] = footage(running.cameras["gate"].ring)
        with pytest.raises(error, match=sentence):
            await anext(running.recorder.watch("gate"))


async def test_a_codec_that_browsers_do_not_play_is_named(tmp_path):
    async with site(tmp_path) as running:
        running.feed(video(30, "mjpeg"), 30)
        with pytest.raises(NotReadyError, match="browsers do not play mjpeg"):
            await anext(running.recorder.watch("gate"))
        ring = running.cameras["gate"].ring
        assert ring._recordings == [] or all(each.done for each in ring._recordings)


async def test_hevc_comes_as_it_is_with_its_parameter_sets_in_front(tmp_path):
    made = video(60, "libx265")
    async with site(tmp_path) as running, open_channel(running.address) as channel:
        running.feed(made, 30)
        fed = iter(range(31, 60))
        stub = pictures_pb2_grpc.PicturesStub(channel)
        data = await watched(stub, 10, lambda: running.feed(made, next(fed)))
    with av.open(io.BytesIO(data)) as container:
        [stream] = container.streams.video
        assert stream.codec_context.name == "hevc"
        assert len([*container.decode(video=0)]) >= 1
    # What a browser is told the codec by: an hvcC with at least VPS, SPS and PPS (ISO 14496-15, 8.3.3.1).
    box = data[data.index(b"hvcC") + 4 :]
    assert (box[0], box[1] & 0x1F) == (1, 1)
    assert box[22] >= 3


async def test_viewers_are_bounded_and_one_that_leaves_makes_room(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "MOST_WATCHING", 1)
    async with site(tmp_path) as running:
        running.feed(video(100), 30)
        first = running.recorder.watch("gate")
        await anext(first)
        with pytest.raises(CapacityError, match="1 live views"):
            await anext(running.recorder.watch("gate"))
        await first.aclose()
        second = running.recorder.watch("gate")
        assert await anext(second)
        await second.aclose()


async def test_one_that_reads_too_slowly_is_cut_off_and_the_camera_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "SLOW_BYTES", 2000)
    made = video(400)
    async with site(tmp_path) as running:
        running.feed(made, 30)
        slow, quick = running.recorder.watch("gate"), running.recorder.watch("gate")
        await anext(slow)
        for upto in range(31, 400):
            running.feed(made, upto)
            if upto % 5 == 0:
                await anext(quick)
        left = [part async for part in slow]
        assert len(b"".join(left)) < 20_000
        await quick.aclose()
        assert running.cameras["gate"].ring.seconds > 5


async def test_when_the_camera_connects_again_the_view_ends(tmp_path):
    made = video(100)
    async with site(tmp_path) as running:
        running.feed(made, 30)
        parts = running.recorder.watch("gate")
        await anext(parts)
        running.cameras["gate"].ring.open(made[0])
        async with asyncio.timeout(5):
            left = [part async for part in parts]
        assert len(b"".join(left)) < 20_000
        assert running.cameras["gate"].ring._recordings == []


async def test_once_a_mask_is_drawn_no_queued_picture_is_shown(tmp_path):
    """The decoder begins the camera anew, with other footage; what waits for a viewer was never masked."""
    made = video(100)
    async with site(tmp_path) as running:
        running.feed(made, 30)
        first, second = running.recorder.watch("gate"), running.recorder.watch("gate")
        await anext(first)
        await anext(second)
        running.feed(made, 90)
        before = running.cameras.pop("gate")
        with pytest.raises(UnavailableError):
            await anext(first)
        running.cameras["gate"] = CameraFootage(before.ring, [((0.0, 0.0), (0.5, 0.0), (0.5, 0.5))])
        assert [part async for part in second] == []
        assert all(each.done for each in before.ring._recordings)
