"""From an alert to a clip that plays: decoder, alerting and gateway over real gRPC, and what goes wrong between."""

import asyncio
import contextlib
import errno
import io
import json
import sqlite3
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
from footage_parts import HEIGHT, STEP, WIDTH, Alarm, full_disk, grey, level, played, sample, shifted, site, video
from PIL import Image
from rpc_serving import serving
from sightline.v1 import memory_pb2, memory_pb2_grpc, pictures_pb2, pictures_pb2_grpc
from waiting import until_async

from actors.cli import main
from cluster.alerts.clips.footage_store import StorageError
from cluster.alerts.health import CameraStates
from cluster.alerts.incident import AlertEvent
from cluster.alerts.store import AlertStore
from cluster.client import GatewayClient
from cluster.codec.source import StreamHeader
from cluster.decoder.footage.camera import CameraFootage
from cluster.decoder.footage.ring import PacketRing, RingBudget
from cluster.errors import (
    CapacityError,
    ForbiddenError,
    NotReadyError,
    SightlineError,
    UnauthenticatedError,
    UnavailableError,
    UnknownCameraError,
)
from cluster.gateway.guard import Guard
from cluster.gateway.memory_proxy import MemoryProxy
from cluster.security.audit import AuditLog
from cluster.security.roles import Principal, Role
from cluster.types import CameraStatus
from cluster.wire.channel import ChannelPool, open_channel
from cluster.wire.tls import ClientCredentials


async def fetched(address, incident, kind="clip", credentials=None, **options):
    """What the file is and its bytes, as a client gets them."""

    def fetch():
        with GatewayClient(address, credentials=credentials) as client:
            about, data = client.footage(incident, kind, **options)
            return about, b"".join(data)

    return await asyncio.to_thread(fetch)


async def test_an_incident_gets_its_snapshot_at_once_and_then_its_clip(tmp_path, h264):
    async with site(tmp_path) as running:
        running.feed(h264, 110)
        incident = await running.alert(5.0)
        assert incident.clip == "waiting"
        assert incident.clip_url == f"/v1/incidents/{incident.id}/clip.mp4"
        await until_async(lambda: running.store.find(incident.id, "snapshot") is not None)
        # Its last second is still to come.
        with pytest.raises(NotReadyError, match="not recorded yet"):
            await fetched(running.address, incident.id)
        running.feed(h264, 140)
        settled = await running.settled(incident.id)
        assert (settled.clip, settled.footage_note) == ("whole", "")
        about, clip = await fetched(running.address, incident.id)
        assert (about.camera, about.media_type, about.size, about.note) == ("gate", "video/mp4", len(clip), "")
        # From 1 s before the window that opened it to 1 s after.
        assert [luma for _, luma in played(clip)] == [pytest.approx(level(i), abs=2) for i in range(60, 120)]
        about, jpeg = await fetched(running.address, incident.id, "snapshot")
        assert about.media_type == "image/jpeg"
        shown = Image.open(io.BytesIO(jpeg)).convert("L").resize((1, 1)).getpixel((0, 0))
        assert shown == pytest.approx(grey(100), abs=4)


async def test_parts_of_a_file(tmp_path, h264):
    async with site(tmp_path) as running:
        running.feed(h264, 200)
        incident = await running.alert(5.0)
        await running.settled(incident.id)
        _, clip = await fetched(running.address, incident.id)
        parts = ((0, 10), (7, 1000), (len(clip) - 5, 0), (len(clip) - 5, 500), (len(clip), 0), (2**64 - 1, 0))
        for offset, length in parts:
            about, part = await fetched(running.address, incident.id, offset=offset, length=length)
            assert (about.size, part) == (len(clip), clip[offset : offset + length if length else None])


async def test_the_alert_carries_the_links(tmp_path, h264):
    async with site(tmp_path, url="https://sightline.example/") as running:
        running.feed(h264, 200)
        incident = await running.alert(5.0)
        body = AlertEvent("k", "new", 0.0, incident).body()["incident"]
        assert body["snapshot_url"] == f"https://sightline.example/v1/incidents/{incident.id}/snapshot.jpg"
        assert (body["clip"], body["clip_url"][-9:]) == ("waiting", "/clip.mp4")
        json.dumps(body)


async def test_clips_off_means_no_promises(tmp_path, h264):
    async with site(tmp_path, enabled=False) as running:
        incident = await running.alert(5.0)
        assert (incident.clip, incident.clip_url, incident.snapshot_url) == ("", "", "")


async def test_an_incident_that_ends_gets_another_clip_where_wanted(tmp_path, h264):
    async with site(tmp_path, at_end=True) as running:
        running.feed(h264, 80)
        incident = await running.alert(3.0)
        running.feed(h264, 150)
        await running.settled(incident.id)
        for end_s in (4.0, 5.0, 6.0):
            running.service.accept_answer(running.alarm(end_s))
        running.service.accept_answer(running.alarm(7.0, score=0.1))
        running.feed(h264, 200)
        await until_async(lambda: running.store.find(incident.id, "end") is not None)
        _, clip = await fetched(running.address, incident.id, "end")
        assert [luma for _, luma in played(clip)] == [pytest.approx(level(i), abs=2) for i in range(100, 140)]


async def test_a_decoder_that_dies_leaves_what_it_had_sent(tmp_path, h264):
    async with site(tmp_path, after_s=30) as running:
        running.feed(h264, 150)
        incident = await running.alert(5.0)
        await until_async(lambda: running.store.bytes_stored and running.store.find(incident.id, "snapshot"))
        await asyncio.sleep(0.3)
        await running.stop_decoder()
        settled = await running.settled(incident.id)
        assert settled.clip == "part"
        assert "the clip is incomplete: the camera's decoder does not answer" in settled.footage_note
        about, clip = await fetched(running.address, incident.id)
        assert about.note == settled.footage_note
        shown = played(clip)
        # Whole groups of pictures up to the last that was sent.
        assert [luma for _, luma in shown] == [pytest.approx(level(60 + i), abs=2) for i in range(len(shown))]
        assert len(shown) >= 60


async def test_a_decoder_that_comes_back_is_asked_again(tmp_path, h264, monkeypatch):
    monkeypatch.setattr("cluster.alerts.clips.footage_collector.PAUSE_S", 0.1)
    async with site(tmp_path) as running:
        running.feed(h264, 100)
        await running.stop_decoder()
        incident = await running.alert(5.0)
        # A process that has to load takes seconds.
        await until_async(lambda: running.routes == 4)
        await running.start_decoder()
        await until_async(lambda: running.routes == 5)
        # It has the camera before that is connected.
        await asyncio.sleep(0.3)
        ring = running.cameras["gate"].ring
        ring.open(h264[0])
        for packet in h264[1][100:150]:
            ring.add_packet(packet)
        settled = await running.settled(incident.id)
        assert (settled.clip, running.routes) == ("part", 5)
        assert settled.footage_note == "the clip is incomplete: the camera's video begins 2 s into it"


async def test_no_decoder_no_clip_and_it_is_said(tmp_path, h264, monkeypatch):
    monkeypatch.setattr("cluster.alerts.clips.footage_collector.SLACK_S", 0.0)
    async with site(tmp_path) as running:
        await running.stop_decoder()
        incident = await running.alert(5.0)
        settled = await running.settled(incident.id)
        assert (settled.clip, settled.footage_note) == ("none", "no snapshot and no clip: no decoder is ready")
        with pytest.raises(NotReadyError, match="no snapshot and no clip: no decoder is ready"):
            await fetched(running.address, incident.id)


async def test_a_camera_that_stops_sending_ends_its_clip(tmp_path, h264, monkeypatch):
    monkeypatch.setattr("cluster.alerts.clips.footage_collector.SLACK_S", 0.0)
    async with site(tmp_path, after_s=0.5) as running:
        running.feed(h264, 101)
        frozen = await running.alert(5.0)
        settled = await running.settled(frozen.id)
        assert settled.footage_note == "the clip is incomplete: the camera did not send the rest in time"
        lost = await running.alert(5.0, question="car")
        running.cameras["gate"].ring.pause("the connection to the camera was lost")
        settled = await running.settled(lost.id)
        assert settled.footage_note == "the clip is incomplete: the connection to the camera was lost"


async def test_a_camera_without_keyframes_has_no_clip(tmp_path, h264, monkeypatch):
    monkeypatch.setattr("cluster.alerts.clips.footage_collector.SLACK_S", 0.0)
    header, packets = h264
    async with site(tmp_path) as running:
        running.feed((header, [p for p in packets if not p.keyframe]), 150)
        settled = await running.settled((await running.alert(5.0)).id)
        assert settled.footage_note == ("no snapshot and no clip: the camera sent no keyframe")


async def test_viewers_of_a_hung_disk_leave_the_sinks_their_threads(tmp_path, monkeypatch):
    hung, reading = threading.Event(), []

    class Hung(io.BytesIO):
        def read(self, *_):
            reading.append(1)
            hung.wait(60)
            return b""

    async with site(tmp_path) as running, open_channel(await running.alerting_at()) as channel:
        incident, store = await running.alert(1.0), running.collector.store
        draft = store.begin("gate", incident.id, "end", time.time())
        draft.write(b"video")
        draft.commit()
        monkeypatch.setattr(store, "open", lambda _: Hung())
        request = pictures_pb2.FootageRequest(incident=incident.id, kind="end")
        viewers = [pictures_pb2_grpc.PicturesStub(channel).Footage(request) for _ in range(40)]
        for viewer in viewers:
            await viewer.read()
        await until_async(lambda: reading)
        try:
            async with asyncio.timeout(10.0):
                # As connecting and resolving names do.
                await asyncio.to_thread(int)
        finally:
            hung.set()
            for viewer in viewers:
                viewer.cancel()


async def test_a_clip_that_waits_for_its_camera_counts_as_one_that_is_recorded(tmp_path, h264):
    header, packets = h264
    async with site(tmp_path, at_once=1) as running:
        running.feed((header, [p for p in packets if not p.keyframe]), 50)
        order = pictures_pb2.RecordRequest(camera="gate", until=90_000_000, deadline_s=60.0)
        waiting = asyncio.ensure_future(anext(running.recorder.record(order)))
        await asyncio.sleep(0)
        with pytest.raises(CapacityError, match="1 clips are being recorded already"):
            await anext(running.recorder.record(order))
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_a_codec_that_changes_in_the_middle_ends_it(tmp_path, h264):
    both = [*h264[1][:110], *shifted(video(40, "mjpeg")[1], 110 * STEP, 110)]
    async with site(tmp_path) as running:
        running.feed((h264[0], both), 110)
        incident = await running.alert(5.0)
        running.feed((h264[0], both), 130)
        settled = await running.settled(incident.id)
        assert settled.footage_note == "the clip is incomplete: the camera changed its codec"
        assert len(played((await fetched(running.address, incident.id))[1])) == 50


async def test_a_full_disk_costs_the_clip_alone(tmp_path, h264):
    async with site(tmp_path, keep_free=1 << 60) as running:
        running.feed(h264, 200)
        incident = await running.alert(5.0)
        settled = await running.settled(incident.id)
        assert settled.clip == "none"
        assert settled.footage_note.startswith("no snapshot and no clip: the disk is full")
        assert running.store.trouble.startswith("the disk is full")
        # The incident itself goes on, and so does the next.
        running.service.accept_answer(running.alarm(6.0, score=0.1))
        assert (await running.alert(8.0)).id != incident.id


async def test_a_hundred_incidents_at_once(tmp_path, h264):
    """So many clips are made as may be at once; the others say why they have none, and none of them waits."""
    async with site(tmp_path, at_once=30, after_s=2) as running:
        running.feed(h264, 110)
        rules = dict.fromkeys((f"q{n}" for n in range(100)), next(iter(running.service._rules["gate"].values())))
        running.service._rules["gate"] = rules
        alarm = Alarm()
        for question in rules:
            running.service.accept_answer(alarm(5.0, question=question))
        await until_async(lambda: len(running.collector._work) >= 30)
        running.feed(h264, 200)
        found = [await running.settled(each.id, 30.0) for each in running.service.open_incidents()]
        states = [each.clip for each in found]
        assert (states.count("whole"), states.count("none"), len(states)) == (30, 70, 100)
        refused = {each.footage_note for each in found if each.clip == "none"}
        assert refused == {"no clip: 30 are being recorded already (clips.at_once)"}
        assert len(running.collector._work) == 0
        assert len(running.store._files) == 60


async def test_what_must_be_encoded_anew_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.decoder.footage.service.MOST_REENCODED", 2)
    async with site(tmp_path, after_s=5) as running:
        running.feed(video(40, "mjpeg"), 40)
        rules = dict.fromkeys((f"q{n}" for n in range(5)), next(iter(running.service._rules["gate"].values())))
        running.service._rules["gate"] = rules
        incidents = [await running.alert(1.5, question=question) for question in rules]
        await until_async(lambda: len(running.collector._work) == 2)
        running.cameras["gate"].ring.pause("the video ended")
        found = [await running.settled(each.id) for each in incidents]
        assert sorted((each.clip, each.footage_note) for each in found) == [
            *[("none", "no clip: 2 clips are being re-encoded already")] * 3,
            *[("part", "the clip is incomplete: the video ended")] * 2,
        ]


async def test_a_masked_camera_shows_nothing_behind_its_mask(tmp_path, h264):
    async with site(tmp_path) as running:
        left = ((0.0, 0.0), (0.5, 0.0), (0.5, 1.0), (0.0, 1.0))
        running.cameras["gate"] = CameraFootage(PacketRing(10.0, 1 << 24, running.budget), [left])
        running.feed(h264, 200)
        incident = await running.alert(5.0)
        assert (await running.settled(incident.id)).clip == "whole"
        _, jpeg = await fetched(running.address, incident.id, "snapshot")
        picture = Image.open(io.BytesIO(jpeg)).convert("L")
        assert max(picture.crop((0, 0, 40, 64)).getdata()) < 24
        _, clip = await fetched(running.address, incident.id)
        # Half black, half as it was.
        assert [luma for _, luma in played(clip)] == [pytest.approx((level(i) + 16) / 2, abs=6) for i in range(60, 120)]


async def test_a_clip_that_takes_too_much_memory_to_decode_says_so(tmp_path, h264):
    async with site(tmp_path) as running:
        mask = ((0.0, 0.0), (0.5, 0.0), (0.5, 1.0))
        running.cameras["gate"] = CameraFootage(PacketRing(10.0, 1 << 24, running.budget), [mask], decoded_bytes=1024)
        running.feed(h264, 200)
        incident = await running.alert(5.0)
        settled = await running.settled(incident.id)
        assert settled.clip == "none"
        assert "source_options.decoded_bytes" in settled.footage_note


@pytest.mark.parametrize("readable", [True, False])
async def test_alerting_that_is_restarted_makes_the_clip_again(tmp_path, h264, monkeypatch, readable):
    """Also where the database cannot be opened until later."""

    def unreadable(_):
        raise sqlite3.OperationalError("unable to open database file")

    async with site(tmp_path, after_s=3) as running:
        running.feed(h264, 110)
        incident = await running.alert(5.0)
        await asyncio.sleep(0.3)
        await running.stop_alerting()
        assert not [path for path in (tmp_path / "clips").iterdir() if path.suffix == ".part"]
        with monkeypatch.context() as patch:
            if not readable:
                patch.setattr(AlertStore, "_open", unreadable)
            await running.start_alerting()
        running.feed(h264, 200)
        await until_async(lambda: not running.service._journal.trouble)
        settled = await running.settled(incident.id)
        assert (settled.clip, settled.footage_note) == ("whole", "")


def forget_footage(client, camera):
    """As programs call it; the command line forgets memories with it."""
    return client._call(client._pictures.Forget, pictures_pb2.ForgetFootageRequest(camera=camera))


async def test_forgetting_takes_the_clips_and_the_packets(tmp_path, h264):
    async with site(tmp_path) as running:
        for camera in ("gate", "yard"):
            running.feed(h264, 200, camera)
        incidents = {camera: await running.alert(5.0, camera=camera) for camera in ("gate", "yard")}
        for incident in incidents.values():
            await running.settled(incident.id)
        waiting = await running.alert(9.9, question="car")
        await until_async(lambda: len(running.collector._work) == 1 and running.store.find(waiting.id, "snapshot"))

        def forget():
            with GatewayClient(running.address) as client:
                return forget_footage(client, "gate")

        gone = await asyncio.to_thread(forget)
        # The one under way may have become a part of a clip by then.
        assert gone.files in (3, 4)
        assert running.cameras["gate"].ring.bytes == 0
        names = [path.name for path in (tmp_path / "clips").iterdir()]
        assert len(names) == 2
        assert all(incidents["yard"].id in name for name in names)
        # And nothing says any more that there ever was anything.
        assert [each.camera for each in await running.service.incidents()] == ["yard"]
        with pytest.raises(UnknownCameraError, match="there is no incident"):
            await fetched(running.address, incidents["gate"].id)


async def test_packets_are_not_said_to_be_deleted_where_nobody_says_which_decoder_has_them(tmp_path, h264, monkeypatch):
    async with site(tmp_path) as running:
        running.feed(h264, 110)

        async def nobody(camera):
            raise UnavailableError("the controller restarts")

        with monkeypatch.context() as patched:
            patched.setattr(running.proxy, "_decoder", nobody)
            with pytest.raises(UnavailableError, match="the controller restarts"):
                await running.proxy.forget("gate")
        assert running.cameras["gate"].ring.bytes > 0
        await running.proxy.forget("gate")
        assert running.cameras["gate"].ring.bytes == 0
        # Without a decoder, nobody has any.
        await running.stop_decoder()
        await running.proxy.forget("gate")


async def test_a_camera_that_is_removed_takes_its_clips_along(tmp_path, h264):
    async with site(tmp_path) as running:
        await running.collector.retain_cameras({"gate": "1", "yard": "1"})
        running.feed(h264, 200)
        incident = await running.alert(5.0)
        await running.settled(incident.id)
        # While it is removed, alerting is away: it is done all the same.
        await running.stop_alerting()
        await running.start_alerting()
        assert len(running.store._files) == 2
        await running.collector.retain_cameras({"yard": "1"})
        assert (len(running.store._files), list((tmp_path / "clips").iterdir())) == (0, [])
        assert await running.service.incidents() == []


@pytest.mark.parametrize("ahead_s", [0.0, 3600.0])
async def test_a_camera_that_is_added_again_shows_nothing_of_the_one_that_was_removed(
    tmp_path, h264, monkeypatch, ahead_s
):
    """Also where the clock was ahead when it was recorded, and has been put right since."""
    now_s = time.time
    async with site(tmp_path) as running:
        await running.collector.retain_cameras({"gate": "1", "yard": "1"})
        running.feed(h264, 200)
        with monkeypatch.context() as clock:
            clock.setattr(time, "time", lambda: now_s() + ahead_s)
            await running.settled((await running.alert(5.0)).id)
        # Nobody has looked in between.
        await running.collector.retain_cameras({"gate": "2", "yard": "1"})
        assert (len(running.store._files), list((tmp_path / "clips").iterdir())) == (0, [])
        assert await running.service.incidents() == []


async def test_what_could_not_be_deleted_is_tried_again(tmp_path, h264, monkeypatch):
    monkeypatch.setattr("cluster.alerts.clips.footage_collector.SWEEP_S", 0.05)
    async with site(tmp_path) as running:
        await running.collector.retain_cameras({"gate": "1", "yard": "1"})
        running.feed(h264, 200)
        incident = await running.alert(5.0)
        await running.settled(incident.id)
        file = tmp_path / "clips" / running.store.find(incident.id, "clip").name
        file.unlink()
        # A folder of its name, which deleting a file does not remove.
        file.mkdir()
        await running.collector.retain_cameras({"yard": "1"})
        assert running.store.find(incident.id, "clip") is not None
        file.rmdir()
        await until_async(lambda: not len(running.store._files))
        assert list((tmp_path / "clips").iterdir()) == []


async def test_a_folder_that_cannot_be_opened_at_the_start_is_opened_once_it_can(tmp_path, h264, monkeypatch):
    """A camera that is removed meanwhile takes its records along, and its files once they can be deleted."""
    monkeypatch.setattr("cluster.alerts.clips.footage_collector.SWEEP_S", 0.05)
    clips = tmp_path / "clips"
    async with site(tmp_path) as running:
        await running.collector.retain_cameras({"gate": "1", "yard": "1"})
        running.feed(h264, 200)
        await running.settled((await running.alert(5.0)).id)
        await running.stop_alerting()
        clips.rename(tmp_path / "away")
        clips.touch()
        await running.start_alerting()
        assert "disk error (" in running.store.trouble
        await running.collector.retain_cameras({"yard": "1"})
        assert await running.service.incidents() == []
        assert running.collector._unerased.keys() == {"gate"}
        with pytest.raises(StorageError, match=r"disk error \("):
            await running.collector.delete_footage("yard")
        clips.unlink()
        (tmp_path / "away").rename(clips)
        await until_async(lambda: not running.collector._unerased)
        assert list(clips.iterdir()) == []


async def test_a_folder_that_cannot_be_listed_for_a_while_ends_nothing(tmp_path, h264, monkeypatch):
    tries = []

    def unreadable(folder):
        tries.append(folder)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("cluster.alerts.clips.footage_collector.SWEEP_S", 0.05)
    async with site(tmp_path) as running:
        await running.collector.retain_cameras({"gate": "1", "yard": "1"})
        running.feed(h264, 200)
        incident = await running.alert(5.0)
        await running.settled(incident.id)
        with monkeypatch.context() as broken:
            broken.setattr(Path, "iterdir", unreadable)
            await running.collector.retain_cameras({"yard": "1"})
            await until_async(lambda: len(tries) > 2)
            assert running.collector._unerased.keys() == {"gate"}
        await until_async(lambda: not running.collector._unerased)


async def refuse(running, on):
    """SQLite itself writes nothing."""
    await running.service._journal.read(lambda store: store._db.execute(f"PRAGMA query_only = {on}").fetchall())


@pytest.mark.parametrize("restarted", [False, True])
async def test_what_a_camera_that_is_added_again_shows_is_its_own(tmp_path, h264, monkeypatch, restarted):
    """The database takes nothing when it is removed: what is still to be erased is of the one before."""
    sweeps = []
    monkeypatch.setattr("cluster.alerts.clips.footage_collector.SWEEP_S", 0.02)
    async with site(tmp_path) as running:
        await running.collector.retain_cameras({"gate": "1", "yard": "1"})
        running.feed(h264, 130)
        old = await running.alert(5.0)
        await running.settled(old.id)
        yard = await running.alert(5.0, camera="yard")
        await refuse(running, 1)
        await running.collector.retain_cameras({"gate": "2", "yard": "1"})
        if restarted:
            await running.stop_alerting()
            await running.start_alerting(lambda: refuse(running, 1))
        erase = running.collector._erase

        async def counted(*arguments):
            sweeps.append(arguments)
            await erase(*arguments)

        running.collector._erase = counted
        await until_async(lambda: sweeps)
        # Its clip waits for the last second meanwhile.
        running.feed(h264, 170)
        new = await running.alert(8.0)
        before = len(sweeps)
        await until_async(lambda: len(sweeps) > before + 2)
        assert [each.id for each in running.service.open_incidents() if each.camera == "gate"] == [new.id]
        running.feed(h264, 200)

        def clip():
            return next(each.clip for each in running.service.open_incidents() if each.id == new.id)

        await until_async(lambda: clip() != "waiting")
        assert clip() == "whole"
        await refuse(running, 0)
        await until_async(lambda: not running.collector._unerased)
        assert {each.id for each in await running.service.incidents()} == {new.id, yard.id}
        assert (await running.incident(new.id)).open
        assert running.store.find(old.id, "clip") is None
        assert running.store.find(new.id, "clip") is not None
        # Written once it is erased.
        await until_async(lambda: json.loads((tmp_path / "known.json").read_text())["unerased"] == {})


async def test_cameras_of_another_run_are_not_taken_for_removed(tmp_path, h264):
    async with site(tmp_path) as running:
        await running.collector.retain_cameras({"gate": "1", "yard": "1"})
        running.feed(h264, 200)
        await running.settled((await running.alert(5.0)).id)
    async with site(tmp_path) as running:
        running.collector._run, running.collector.cameras = "another", {}
        await running.collector.retain_cameras({"yard": "1"})
        assert len(running.store._files) == 2


async def test_what_an_earlier_run_could_not_delete_is_deleted_by_the_next(tmp_path, h264, monkeypatch):
    monkeypatch.setattr("cluster.alerts.clips.footage_collector.SWEEP_S", 0.05)
    async with site(tmp_path) as running:
        await running.collector.retain_cameras({"gate": "1", "yard": "1"})
        running.feed(h264, 200)
        await running.settled((await running.alert(5.0)).id)
        await refuse(running, 1)
        await running.collector.retain_cameras({"yard": "1"})
        assert list(running.collector._unerased) == ["gate"]
    known = tmp_path / "known.json"
    known.write_text(json.dumps(json.loads(known.read_text()) | {"run": "an earlier one"}))
    async with site(tmp_path) as running:
        await until_async(lambda: not running.collector._unerased)
        assert await running.service.incidents() == []
        assert len(running.store._files) == 0


async def test_a_mute_goes_with_a_camera_that_is_removed_while_alerting_is_away(tmp_path):
    async with site(tmp_path) as running:
        await running.collector.retain_cameras({"gate": "1", "yard": "1", "door": "1"})
        for camera in ("gate", "yard", "door", "*"):
            await running.service.mute(camera, "*", 3600.0, "ann")
    async with site(tmp_path) as running:
        lives = {"yard": "1", "door": "2"}
        statuses = tuple(CameraStatus(name, source="", life=life) for name, life in lives.items())
        await running.service.update_cameras(CameraStates(1, (), statuses, {}))
        await running.collector.retain_cameras(lives)
        # Whose the mute of the other door was, nobody knows: it ends by itself.
        assert {each.camera for each in running.service.mutes()} == {"yard", "door", "*"}
    async with site(tmp_path) as running:
        assert "gate" not in {each.camera for each in running.service.mutes()}


# -- live pictures and who may see ------------------------------------------------------------------

WHO = {
    "agent": Principal("agent", frozenset({Role.INGEST})),
    "viewer": Principal("viewer", frozenset({Role.VIEW}), ("gate",)),
    "boss": Principal("boss", frozenset({Role.ADMIN})),
}


def verify(secret):
    if secret not in WHO:
        raise UnauthenticatedError("unknown token")
    return WHO[secret]


async def test_who_may_see_what(tmp_path, h264):
    async with site(tmp_path, guard=Guard(verify, audit=AuditLog(tmp_path / "audit.jsonl"))) as running:
        incidents = {}
        for camera in ("gate", "yard"):
            running.feed(h264, 200, camera)
            incidents[camera] = await running.alert(5.0, camera=camera)
            await running.settled(incidents[camera].id)

        def outcome(who, call):
            with GatewayClient(running.address, credentials=ClientCredentials(token=who)) as client:
                try:
                    call(client)
                except SightlineError as error:
                    return type(error)
            return None

        def calls(camera):
            for kind in ("snapshot", "clip"):
                yield lambda c, kind=kind: b"".join(c.footage(incidents[camera].id, kind)[1])
            yield lambda c: c.picture(camera)
            yield lambda c: forget_footage(c, camera)

        seen = {
            (who, camera): [await asyncio.to_thread(outcome, who, call) for call in calls(camera)]
            for who in ("agent", "viewer", "nobody", "boss")
            for camera in ("yard", "gate")
        }
        no, unknown, empty = ForbiddenError, UnauthenticatedError, NotReadyError
        # Not even that there is such an incident is told.
        hidden = UnknownCameraError
        assert seen == {
            ("agent", "gate"): [no] * 4,
            ("agent", "yard"): [no] * 4,
            # There is a ring, but nothing was sampled: there is no picture.
            ("viewer", "gate"): [None, None, empty, no],
            ("viewer", "yard"): [hidden, hidden, no, no],
            ("nobody", "gate"): [unknown] * 4,
            ("nobody", "yard"): [unknown] * 4,
            ("boss", "gate"): [None, None, empty, None],
            ("boss", "yard"): [None, None, empty, None],
        }
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [(line["cameras"], line["outcome"], line.get("text", "")) for line in lines if line["who"] == "viewer"][
        :4
    ] == [
        ([], "not_found", f"{incidents['yard'].id}, snapshot"),
        ([], "not_found", f"{incidents['yard'].id}, clip"),
        (["yard"], "forbidden", ""),
        ([], "forbidden", ""),
    ]
    told = [line for line in lines if line["call"].endswith("Footage") and line["outcome"] == "ok"]
    assert [(line["who"], *line["cameras"]) for line in told] == [
        *[("viewer", "gate")] * 2,
        *[("boss", "yard")] * 2,
        *[("boss", "gate")] * 2,
    ]


async def test_odd_questions_get_a_sentence(tmp_path, h264):
    async with site(tmp_path) as running:
        for incident, kind, error, says in (
            ("", "clip", SightlineError, "incident must be an id of at most"),
            ("x" * 65, "clip", SightlineError, "incident must be an id of at most"),
            ("../../etc/passwd", "clip", SightlineError, "there is no incident"),
            ("0" * 16, "film", SightlineError, "kind must be one of snapshot, clip, end"),
        ):
            with pytest.raises(error, match=says):
                await fetched(running.address, incident, kind)
        running.decoder_address = ""
        with pytest.raises(UnavailableError, match="no decoder is ready"):
            await asyncio.to_thread(_picture, running.address)


def _picture(address):
    with GatewayClient(address) as client:
        return client.picture("gate")


async def test_a_reader_that_leaves_stops_the_recording(tmp_path, h264):
    async with site(tmp_path, after_s=60) as running:
        running.feed(h264, 110)
        parts = running.recorder.record(pictures_pb2.RecordRequest(camera="gate", until=90_000_000, deadline_s=60.0))
        async with contextlib.aclosing(parts):
            await anext(parts)
            assert len(running.recorder._recording._held) == 1
        assert len(running.recorder._recording._held) == 0
        running.feed(h264, 120)
        assert running.cameras["gate"].ring._recordings == []


def test_a_ring_that_fails_does_not_stop_its_camera(h264, caplog):
    """The camera's packets go on although nothing can be kept of them."""
    footage = CameraFootage(PacketRing(5.0, 1 << 20, RingBudget(1 << 20)))
    footage.open(StreamHeader("h264", 0, 0, b""))
    # None has no fields at all: anything that looks at it fails.
    for packet in [*h264[1][:3], None, *h264[1][3:6]]:
        footage.add_packet(packet)
    assert "no clips of this camera" in caplog.text
    assert footage.ring.bytes == 0


# -- the command line -------------------------------------------------------------------------------


async def test_the_command_line_saves_pictures_and_clips(tmp_path, h264, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    async with site(tmp_path / "site") as running:
        running.feed(h264, 200)
        incident = await running.alert(5.0)
        await running.settled(incident.id)
        running.cameras["gate"].latest.show(sample(3), np.ones((4, 6), bool), time.monotonic())

        async def sightline(*arguments):
            return await asyncio.to_thread(main, [*arguments, "--gateway", running.address])

        assert await sightline("incidents", "clip", incident.id, "-o", "fence.mp4") == 0
        assert len(played((tmp_path / "fence.mp4").read_bytes())) == 60
        assert await sightline("incidents", "clip", incident.id, "--snapshot") == 0
        assert Image.open(tmp_path / f"{incident.id}.jpg").size == (WIDTH, HEIGHT)
        assert await sightline("cameras", "picture", "gate", "--kept", "--width", "48") == 0
        assert Image.open(tmp_path / "gate.jpg").size == (48, 32)
        capsys.readouterr()
        assert await sightline("incidents", "clip", incident.id, "--end") == 1
        assert "error: the end clip of this incident does not exist" in capsys.readouterr().err
        assert await sightline("incidents", "clip", incident.id, "--end", "--snapshot") == 2
        assert await sightline("incidents", "clip", incident.id, "-o", "fence.mp4/all.mp4") != 0
        assert await sightline("cameras", "picture", "yard") == 1
        assert "no picture of this camera yet" in capsys.readouterr().err
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            ["fence.mp4", f"{incident.id}.jpg", "gate.jpg", "site"]
        )


async def test_an_incident_that_ends_first_hears_of_its_clip_all_the_same(tmp_path, h264):
    async with site(tmp_path) as running:
        running.feed(h264, 110)
        incident = await running.alert(5.0)
        running.service.accept_answer(running.alarm(6.0, score=0.1))
        await running.service._flush()
        assert running.service.open_incidents() == []
        running.feed(h264, 150)
        settled = await running.settled(incident.id)
        assert (settled.open, settled.clip, settled.end) == (False, "whole", incident.end)
        # Its events are as they were sent.
        events = (await running.service.incident(incident.id)).events
        assert [(each.kind, each.incident.clip) for each in events] == [("new", "waiting"), ("end", "waiting")]


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_clip_is_known_of_when_the_disk_can_be_read_again(tmp_path, h264, monkeypatch, caplog, restarted):
    def unreadable(*_):
        raise sqlite3.OperationalError("disk I/O error")

    readable = AlertStore.incident
    async with site(tmp_path) as running:
        running.feed(h264, 110)
        incident = await running.alert(5.0)
        running.service.accept_answer(running.alarm(6.0, score=0.1))
        await running.service._flush()
        monkeypatch.setattr(AlertStore, "incident", unreadable)
        running.feed(h264, 150)
        await until_async(lambda: "cannot record the state of incident" in caplog.text)
        kept = running.store.find(incident.id, "clip")
        if restarted:
            await running.stop_alerting()
            await running.stop_decoder()
        monkeypatch.setattr(AlertStore, "incident", readable)
        if restarted:
            await running.start_alerting()
        settled = await running.settled(incident.id)
        assert settled.clip == ("part" if restarted else "whole"), settled.footage_note
        assert running.store.find(incident.id, "clip") == kept is not None


async def test_only_what_may_show_the_time_before_is_forgotten(tmp_path, h264):
    """A clip under way may; so may packets, but not those that came since."""
    async with site(tmp_path, at_end=True) as running:
        running.feed(h264, 110)
        incident = await running.alert(5.0)
        await until_async(lambda: running.store.find(incident.id, "snapshot"))
        ring = running.cameras["gate"].ring
        held = ring.bytes
        # The picture at 5.45 s has just come.
        reply = await running.proxy.forget("gate", 3.0)
        assert (reply.files, reply.incidents) == (1, 0)
        assert 0 < ring.bytes < held
        settled = await running.settled(incident.id)
        assert (settled.clip, settled.footage_note) == ("none", "no clip: the camera's memory was deleted")
        # Long ago there was nothing.
        running.feed(h264, 140)
        before = ring.bytes
        reply = await running.proxy.forget("gate", 3600.0)
        assert (reply.files, reply.bytes, reply.incidents, ring.bytes) == (0, 0, 0, before)


async def test_a_full_disk_is_said_once_and_also_when_it_is_over(tmp_path, h264, caplog, monkeypatch):
    monkeypatch.setattr("cluster.alerts.clips.footage_collector.SLACK_S", 1.0)
    caplog.set_level("INFO")
    async with site(tmp_path) as running:
        running.feed(h264, 200)
        running.store._keep_free = 1 << 60
        for end_s in (5.0, 6.0, 7.0):
            incident = await running.alert(end_s)
            assert (await running.settled(incident.id)).clip == "none"
            running.service.accept_answer(running.alarm(end_s + 0.5, score=0.1))
        assert caplog.text.count("cannot store snapshots and clips: the disk is full: less than clips.keep_free") == 1
        assert not [each for each in caplog.records if each.levelname == "WARNING" and "incident" in each.message]
        running.store._keep_free = 0
        assert (await running.settled((await running.alert(9.0)).id)).clip != "none"
        assert caplog.text.count("snapshots and clips are stored again") == 1


async def test_a_disk_that_takes_nothing_at_all_stops_neither_windows_nor_alerts(tmp_path, h264, monkeypatch):
    """The clips' disk and the alerts' one are the same, and it is full: what goes on is known by heart."""
    monkeypatch.setattr("cluster.alerts.clips.footage_collector.SLACK_S", 1.0)
    async with site(tmp_path) as running:
        running.feed(h264, 200)
        with full_disk(512):
            for end_s in (5.0, 7.0):
                incident = await running.alert(end_s)
                await until_async(lambda: running.service.open_incidents()[0].clip == "none")
                [found] = running.service.open_incidents()
                assert (found.id, found.footage_note) == (incident.id, "no snapshot and no clip: the disk is full")
                running.service.accept_answer(running.alarm(end_s + 1, score=0.1))
                assert running.service.open_incidents() == []
            assert (await running.service.outbox()).trouble.startswith("cannot write alerts to disk")
            assert running.store.trouble == "the disk is full"
        # There is room again: the next one has its clip, and nothing that happened meanwhile is missing.
        incident = await running.alert(9.0)
        assert (await running.settled(incident.id)).clip == "part"
        assert len(await running.service.incidents()) == 3
        assert ((await running.service.outbox()).trouble, running.store.trouble) == ("", "")
        assert not [path for path in (tmp_path / "clips").iterdir() if path.suffix == ".part"]


async def test_the_command_line_says_what_is_forgotten(tmp_path, h264, capsys):
    """Through the gateway: at the camera's replica first, then what is kept of its incidents."""

    class Replica(memory_pb2_grpc.MemoryServicer):
        async def Forget(self, request, context):
            return memory_pb2.ForgetResponse(frames=3, bytes=2048)

    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(site(tmp_path))
        running.feed(h264, 200)
        incident = await running.alert(5.0)
        await running.settled(incident.id)
        replica = await stack.enter_async_context(serving(Replica()))

        async def route(camera):
            return replica

        proxy = MemoryProxy(route, ChannelPool(), on_forget=running.proxy.forget)
        at = ["--gateway", await stack.enter_async_context(serving(proxy))]
        assert await asyncio.to_thread(main, ["forget", "gate", "--before", "1h", *at]) == 0
        assert capsys.readouterr().out == (
            "gate: deleted 3 frames, 2.0 kB of memory; 0 files, 0 B of footage; 0 incidents, 0 alerts\n"
        )
        assert await asyncio.to_thread(main, ["forget", "gate", "--yes", "--json", "-", *at]) == 0
        told = json.loads(capsys.readouterr().out)
        # Two alerts: that it began, and the end that forgetting makes of what goes on.
        assert (told["frames"], told["files"], told["incidents"], told["alerts"]) == (3, 2, 1, 2)
        assert told["file_bytes"] > 0
        assert (await running.service.incidents(), list((tmp_path / "clips").iterdir())) == ([], [])
