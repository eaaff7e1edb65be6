"""Decoder -> replica over loopback: order, credit, slow replicas, broken connections, refusals."""

import asyncio
import threading
from collections import deque
from contextlib import AsyncExitStack, suppress

import grpc
import grpc.aio
import numpy as np
import pytest
import rpc_serving
from frame_parts import Replica, frame_counts, sending, serving
from loop_thread import EventLoopThread
from sightline.v1 import frames_pb2, frames_pb2_grpc

from cluster.decoder import frame_sender
from cluster.decoder.frame_lanes import Lane
from cluster.decoder.frame_sender import FrameSender
from cluster.errors import UnknownCameraError
from cluster.replica.frames_service import FramesServicer
from cluster.types.reports import WindowCounters
from cluster.wire.channel import CallEndedError, open_channel, write
from cluster.wire.convert import frame_to_proto, spec_to_json
from cluster.wire.server import RpcServer


async def test_frames_arrive_in_order_and_unchanged(make, until):
    replica = Replica()
    async with serving(replica) as address, sending() as (sender, lost):
        for camera in ("gate", "yard"):
            sender.assign(make.spec(camera), address)
            assert all(sender.send(make.sample(camera, i)) for i in range(20))
        await until(lambda: len(replica.frames["gate"]) == len(replica.frames["yard"]) == 20)
        assert [spec.stream for spec in replica.opened] == ["gate", "yard"]
        for camera in ("gate", "yard"):
            for i, got in enumerate(replica.frames[camera]):
                sent = make.sample(camera, i)
                assert np.array_equal(got.patches, sent.patches)
                assert np.array_equal(got.mask, sent.mask)
                assert (got.index, got.pts, got.fresh) == (i, sent.pts, sent.fresh)
        await until(lambda: sender.status("gate").windows.done == 20)
        assert (sender.status("gate").in_flight, sender.status("gate").dropped) == (0, 0)
        assert lost == []


async def test_a_connection_that_breaks_without_a_status_is_made_again(make, until, monkeypatch):
    """Core refuses a write and says nothing more: the sender ends the call, and connects again."""
    rpc_serving.refuse_writes(monkeypatch, frame_sender, "frame")
    replica = Replica()
    async with serving(replica) as address, sending() as (sender, lost):
        sender.assign(make.spec("gate"), address)
        for i in range(2):
            assert sender.send(make.sample("gate", i, fresh=True))
            await until(lambda i=i: len(lost) == i + 1)
            assert lost[i].reason == "the connection ended without a status"
        assert sender.send(make.sample("gate", 2, fresh=True))
        await until(lambda: replica.indices("gate") == [2])


async def test_acknowledgements_of_many_cameras_go_together_and_refusals_at_once(make, until):
    replica = Replica()
    cameras = ["gate", "yard", "dock"]
    async with serving(replica, gather_s=60.0) as address, open_channel(address) as channel:
        call = frames_pb2_grpc.FramesStub(channel).Send()
        for camera in cameras:
            opened = frames_pb2.StreamOpen(camera=camera, spec_json=spec_to_json(make.spec(camera)))
            await call.write(frames_pb2.FrameMessage(open=opened))
        told = []
        while len(told) < 3:
            ack = await call.read()
            told += [each.camera for each in (ack, *ack.more) if each.opened]
        for camera in cameras:
            await call.write(frames_pb2.FrameMessage(frame=frame_to_proto(make.sample(camera, 0))))
        await until(lambda: all(replica.indices(camera) == [0] for camera in cameras))
        replica.refuse = {1: "pts went back"}
        await call.write(frames_pb2.FrameMessage(frame=frame_to_proto(make.sample("gate", 1))))
        ack = await call.read()
        found = {each.camera: (each.index, each.refused) for each in (ack, *ack.more)}
        assert found == {"gate": (1, "pts went back"), "yard": (0, ""), "dock": (0, "")}
        call.cancel()


async def test_an_answered_window_is_acknowledged_before_the_next_frame(make, until):
    replica, answered = Replica(), 0
    replica.counters = lambda camera: WindowCounters(done=answered)
    servicer = FramesServicer(replica, gather_s=60.0)
    async with rpc_serving.serving(servicer) as address, sending() as (sender, lost):
        sender.assign(make.spec(), address)
        for index in range(3):
            assert sender.send(make.sample(index=index))
        await until(lambda: len(replica.frames["gate"]) == 3)
        answered = 1
        servicer.acknowledge("gate")
        await until(lambda: sender.status("gate").windows.done == 1)
        servicer.acknowledge("unknown")
        assert sender.send(make.sample(index=3))
        await until(lambda: len(replica.frames["gate"]) == 4)
        assert lost == []


async def test_a_sender_reads_acknowledgements_of_many_cameras(make, until):
    replica = Replica()
    cameras = [f"camera-{n}" for n in range(5)]
    async with serving(replica, gather_s=0.05) as address, sending() as (sender, _):
        for camera in cameras:
            sender.assign(make.spec(camera), address)
            assert sender.send(make.sample(camera, 0))
        await until(lambda: all(sender.status(camera).windows.done == 1 for camera in cameras))
        assert [sender.status(camera).in_flight for camera in cameras] == [0] * 5


async def test_many_threads_send_at_once(make, until):
    replica = Replica()
    async with serving(replica) as address, sending(max_queue=64) as (sender, _):
        cameras = [f"camera-{n}" for n in range(6)]
        for camera in cameras:
            sender.assign(make.spec(camera), address)

        def work(camera):
            for i in range(40):
                sender.send(make.sample(camera, i))

        threads = [threading.Thread(target=work, args=(camera,)) for camera in cameras]
        for thread in threads:
            thread.start()
        for camera in cameras:
            await until(lambda camera=camera: len(replica.frames[camera]) == 40, camera)
            assert replica.indices(camera) == list(range(40))
        for thread in threads:
            thread.join()


async def test_a_slow_replica_costs_whole_queues_and_a_fresh_anchor(make, until):
    replica = Replica()
    replica.gate.clear()
    async with serving(replica, credit=4) as address, sending(max_queue=8) as (sender, lost):
        sender.assign(make.spec(), address)
        assert sender.send(make.sample(index=0))
        await until(lambda: sender.status("gate").in_flight == 1)
        for i in range(1, 12):
            assert sender.send(make.sample(index=i))
            await until(lambda i=i: sender.status("gate").in_flight == min(4, i + 1))
        assert (sender.status("gate").queued, sender.status("gate").dropped) == (8, 0)
        assert not sender.send(make.sample(index=12)), "the queue is full"
        assert (sender.status("gate").queued, sender.status("gate").dropped) == (0, 9)
        assert not sender.send(make.sample(index=13)), "only a fresh anchor may follow the hole"
        assert sender.send(make.sample(index=14, fresh=True))
        assert sender.send(make.sample(index=15))
        replica.gate.set()
        await until(lambda: len(replica.frames["gate"]) == 6)
        assert replica.indices() == [0, 1, 2, 3, 14, 15]
        assert sender.status("gate").dropped == 10
        assert lost == []


async def test_a_fresh_anchor_replaces_a_full_queue(make, until):
    replica = Replica()
    replica.gate.clear()
    async with serving(replica, credit=1) as address, sending(max_queue=4) as (sender, _):
        sender.assign(make.spec(), address)
        sender.send(make.sample(index=0))
        await until(lambda: sender.status("gate").in_flight == 1)
        for i in range(1, 5):
            assert sender.send(make.sample(index=i))
        assert sender.send(make.sample(index=5, fresh=True)), "newest wins"
        replica.gate.set()
        await until(lambda: len(replica.frames["gate"]) == 2)
        assert replica.indices() == [0, 5]
        assert sender.status("gate").dropped == 4


async def test_replica_memory_is_bounded_by_credit(make, until):
    replica = Replica()
    replica.gate.clear()
    async with serving(replica, credit=3) as address, open_channel(address) as channel:
        call = frames_pb2_grpc.FramesStub(channel).Send()
        opened = frames_pb2.StreamOpen(camera="gate", spec_json=spec_to_json(make.spec()))
        await call.write(frames_pb2.FrameMessage(open=opened))
        first = await call.read()
        assert (first.opened, first.credit, first.refused) == (True, 3, "")
        with suppress(CallEndedError):
            for i in range(1000):
                await write(call, frames_pb2.FrameMessage(frame=frame_to_proto(make.sample(index=i))))
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "credit of 3" in await call.details()
    await until(lambda: replica.lost == ["gate"])


async def test_a_camera_that_starts_again_beside_its_unprocessed_frames_costs_no_other_its_connection(make, until):
    """The first of its old frames to be acknowledged gives the new ones credit."""
    replica = Replica()
    replica.gate.clear()
    async with serving(replica, credit=4) as address, sending() as (sender, lost):
        sender.assign(make.spec("yard"), address)
        sender.assign(make.spec(), address)
        for i in range(4):
            assert sender.send(make.sample(index=i))
        await until(lambda: sender.status("gate").in_flight == 4)
        sender.close("gate")
        sender.assign(make.spec(), address)
        for i in range(4, 8):
            assert sender.send(make.sample(index=i, fresh=i == 4))
        await until(lambda: replica.arrived == 1)
        # Lets this one frame pass.
        replica.gate.set()
        replica.gate.clear()
        await until(lambda: sender.status("gate").in_flight == 4)
        replica.gate.set()
        await until(lambda: replica.indices() == list(range(8)))
        await until(lambda: sender.status("gate").in_flight == 0)
        assert lost == []


def wire(message, **changes):
    for key, value in changes.items():
        setattr(message, key, value)
    return message


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda frame: wire(frame, mask=frame.mask + b"\0"), "mask of 4 bytes"),
        (lambda frame: wire(frame, patches=frame.patches[:-1]), "bytes of patches"),
        (lambda frame: wire(frame, mask=bytes([0b10000000, 0, 0])), "part of a merge group"),
        (lambda frame: wire(frame, camera="unopened"), "was not opened"),
    ],
)
async def test_malformed_frames_end_the_stream(make, spoil, sentence):
    async with serving(Replica()) as address, open_channel(address) as channel:
        call = frames_pb2_grpc.FramesStub(channel).Send()
        opened = frames_pb2.StreamOpen(camera="gate", spec_json=spec_to_json(make.spec()))
        await call.write(frames_pb2.FrameMessage(open=opened))
        await call.read()
        await call.write(frames_pb2.FrameMessage(frame=spoil(frame_to_proto(make.sample()))))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call.read()
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert sentence in failure.value.details()


@pytest.mark.parametrize(
    ("opened", "sentence"),
    [
        ({"camera": "gate", "spec_json": "{"}, "Invalid JSON"),
        ({"camera": "gate", "spec_json": '{"stream": "yard", "questions": []}'}, "specification of 'yard'"),
        ({"camera": "gate", "spec_json": '{"stream": "gate", "questions": [], "zoom": 1}'}, "zoom: Unexpected keyword"),
    ],
)
async def test_malformed_open_ends_the_stream(opened, sentence):
    async with serving(Replica()) as address, open_channel(address) as channel:
        call = frames_pb2_grpc.FramesStub(channel).Send()
        await call.write(frames_pb2.FrameMessage(open=frames_pb2.StreamOpen(**opened)))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call.read()
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert sentence in failure.value.details()


async def test_a_broken_connection_is_told_and_healed(make, until):
    first, second = Replica(), Replica()
    first.gate.clear()
    async with sending() as (sender, lost):
        async with serving(first, credit=4) as address:
            sender.assign(make.spec(), address)
            sender.assign(make.spec("yard"), address)
            for i in range(6):
                assert sender.send(make.sample(index=i))
            await until(lambda: sender.status("gate").in_flight == 4)
        await until(lambda: lost)
        assert {(stream.camera, stream.address, stream.frames) for stream in lost} == {
            ("gate", address, 6),
            ("yard", address, 0),
        }
        assert (sender.status("gate").lost, sender.status("gate").dropped) == (4, 2)
        assert not sender.send(make.sample(index=6)), "the window is gone: only a fresh anchor may come"
        assert sender.send(make.sample(index=7, fresh=True))
        async with serving(second, port=int(address.rpartition(":")[2])):
            await until(lambda: second.indices() == [7])
            assert {spec.stream for spec in second.opened} == {"gate", "yard"}


async def test_a_camera_moves_to_another_replica(make, until):
    old, new = Replica(), Replica()
    async with serving(old) as here, serving(new) as there, sending() as (sender, _):
        sender.assign(make.spec(), here)
        sender.send(make.sample(index=0))
        await until(lambda: old.indices() == [0])
        sender.assign(make.spec(), there)
        assert not sender.send(make.sample(index=1))
        assert sender.send(make.sample(index=2, fresh=True))
        await until(lambda: new.indices() == [2])
        await until(lambda: old.closed == [("gate", False)])


async def test_an_unreachable_replica_is_told_once_and_loses_nothing(make, until):
    replica = Replica()
    async with serving(Replica()) as address:
        port = int(address.rpartition(":")[2])
    async with sending() as (sender, lost):
        sender.assign(make.spec(), address)
        assert sender.send(make.sample(index=0))
        await until(lambda: lost)
        assert [(stream.camera, stream.frames) for stream in lost] == [("gate", 0)]
        async with serving(replica, port=port):
            await until(lambda: replica.indices() == [0])
            # A frame that a replica has and has not acknowledged when it ends counts as lost.
            await until(lambda: sender.status("gate").in_flight == 0)
        assert len([stream for stream in lost if stream.frames]) == 0


async def test_a_camera_of_an_unreachable_replica_is_removed_at_once_and_no_stop_waits_for_it(make, until, monkeypatch):
    async with serving(Replica()) as address:
        pass
    async with sending() as (sender, lost):
        sender.assign(make.spec(), address)
        assert sender.send(make.sample(index=0))
        await until(lambda: lost)
        # The attempt that goes on meanwhile ends by itself only after the test.
        monkeypatch.setattr(frame_sender, "CONNECT_S", 600.0)
        sender.close("gate")
        assert sender.status("gate") is None
        assert not sender.send(make.sample(index=1, fresh=True))
        async with asyncio.timeout(60.0):
            await sender.stop(600.0)


async def test_a_camera_that_ends_while_its_replica_restarts_sends_the_rest_and_one_with_none_is_removed(make, until):
    replica = Replica()
    async with serving(Replica()) as address:
        port = int(address.rpartition(":")[2])
    async with sending() as (sender, lost):
        for camera in ("gate", "yard"):
            sender.assign(make.spec(camera), address)
        assert sender.send(make.sample(index=0))
        await until(lambda: lost)
        for camera in ("gate", "yard"):
            sender.close(camera, flush=True)
        await until(lambda: sender.status("yard") is None)
        assert sender.status("gate").queued == 1
        async with serving(replica, port=port):
            await until(lambda: replica.closed == [("gate", True)])
        assert replica.indices() == [0]


async def test_the_connection_ends_with_its_last_camera_although_that_stays_open_at_the_replica(make, until):
    replica = Replica()
    async with serving(replica) as address, sending() as (sender, _):
        for camera in ("gate", "yard"):
            sender.assign(make.spec(camera), address)
            assert sender.send(make.sample(camera, 0))
        await until(lambda: len(replica.frames) == 2)
        sender.close("yard")
        await until(lambda: replica.closed == [("yard", False)])
        sender.release("gate")
        # No other decoder has opened it: the replica waits for one, for as long as after a decoder that is gone.
        await until(lambda: replica.lost == ["gate"])
        assert replica.closed == [("yard", False)]


async def test_a_camera_that_moves_while_its_replica_is_away_breaks_no_new_connection(make, until):
    """A replica ends a stream on which a camera is closed that was never opened there."""
    again, other = Replica(), Replica()
    async with serving(other) as there, sending() as (sender, lost):
        async with serving(Replica()) as here:
            for camera in ("gate", "yard"):
                sender.assign(make.spec(camera), here)
                assert sender.send(make.sample(camera, 0))
            await until(lambda: all(sender.status(camera).sent for camera in ("gate", "yard")))
        await until(lambda: {each.camera for each in lost} == {"gate", "yard"})
        lost.clear()
        sender.assign(make.spec("gate"), there)
        async with serving(again, port=int(here.rpartition(":")[2])):
            assert sender.send(make.sample("yard", 1, fresh=True))
            await until(lambda: again.indices("yard") == [1])
            assert sender.send(make.sample("yard", 2))
            await until(lambda: again.indices("yard") == [1, 2])
            assert lost == []
            assert [spec.stream for spec in again.opened] == ["yard"]


async def test_another_specification_keeps_the_stream(make, until):
    replica = Replica()
    async with serving(replica) as address, sending() as (sender, lost):
        sender.assign(make.spec(), address)
        sender.send(make.sample(index=0))
        await until(lambda: replica.indices() == [0])
        sender.assign(make.spec(window_s=16.0), address)
        assert sender.send(make.sample(index=1))
        await until(lambda: replica.indices() == [0, 1])
        assert [spec.window_s for spec in replica.opened] == [40.0, 16.0]
        assert lost == []


async def test_a_refused_frame_leads_to_a_fresh_anchor(make, until):
    replica = Replica()
    replica.refuse = {2: "pts went back"}
    async with serving(replica) as address, sending() as (sender, lost):
        for camera in ("gate", "yard"):
            sender.assign(make.spec(camera), address)
        sender.send(make.sample(index=0))
        sender.send(make.sample(index=1))
        sender.send(make.sample(index=2))
        await until(lambda: lost)
        assert [(stream.camera, stream.reason) for stream in lost] == [("gate", "pts went back")]
        assert not sender.send(make.sample(index=3))
        assert sender.send(make.sample(index=4, fresh=True))
        assert sender.send(make.sample("yard", 0))
        await until(lambda: replica.indices() == [0, 1, 4] and replica.indices("yard") == [0])


async def send_more_than_fit(sender, address, make, until):
    """Twelve frames to a replica with a credit of eight that acknowledges none."""
    sender.assign(make.spec(), address)
    assert all(sender.send(make.sample(index=i)) for i in range(12))
    await until(lambda: sender.status("gate").in_flight == 8)


async def test_every_frame_behind_a_refused_one_is_taken_dropped_or_lost(make, until):
    """Frames on their way when the replica refuses one are discarded there."""
    replica, before = Replica(), frame_counts()
    replica.gate.clear()
    replica.refuse = {2: "pts went back"}
    async with serving(replica, credit=8) as address, sending() as (sender, lost):
        await send_more_than_fit(sender, address, make, until)
        replica.gate.set()
        await until(lambda: lost)
        assert sender.send(make.sample(index=12, fresh=True))
        await until(lambda: replica.indices() == [0, 1, 12] and sender.status("gate").in_flight == 0)
        counts, lane = frame_counts() - before, sender.status("gate")
        assert counts["sent"] == 3 + counts["lost refused"] == lane.sent
        assert counts["sent"] + counts["dropped refused"] == 13
        assert 3 + lane.lost + lane.dropped == 13
        assert set(counts) == {"sent", "lost refused", "dropped refused"}


async def test_frames_on_their_way_when_a_camera_is_closed_count_although_nobody_has_it_any_more(make, until):
    replica, before = Replica(), frame_counts()
    replica.gate.clear()
    replica.refuse = {2: "pts went back"}
    async with serving(replica, credit=8) as address, sending() as (sender, _):
        await send_more_than_fit(sender, address, make, until)
        sender.close("gate")
        assert sender.status("gate").queued == 0
        await until(lambda: sender.status("gate") is None)
        replica.gate.set()
        await until(lambda: (frame_counts() - before)["lost refused"] == 8 - 2)
    assert replica.indices() == [0, 1]
    assert frame_counts() - before == {"sent": 8, "lost refused": 6, "dropped closed": 4}


async def test_frames_on_their_way_when_a_camera_moves_are_not_lost_if_the_old_replica_takes_them(make, until):
    old, new, before = Replica(), Replica(), frame_counts()
    old.gate.clear()
    async with serving(old, credit=8) as here, serving(new) as there, sending() as (sender, _):
        await send_more_than_fit(sender, here, make, until)
        sender.assign(make.spec(), there)
        assert sender.send(make.sample(index=12, fresh=True))
        old.gate.set()
        await until(lambda: new.indices() == [12] and old.closed == [("gate", False)])
        await until(lambda: sender.status("gate").in_flight == 0)
    assert old.indices() == list(range(8))
    assert frame_counts() - before == {"sent": 9, "dropped no_replica": 4}


@pytest.mark.parametrize("ending", ["close", "release"])
async def test_frames_that_no_replica_acknowledges_are_lost(make, until, ending):
    """Those of a camera that has left included: it is closed behind them."""
    replica, before = Replica(), frame_counts()
    replica.gate.clear()
    async with sending() as (sender, lost):
        async with serving(replica, credit=4) as address:
            for camera in ("gate", "yard"):
                sender.assign(make.spec(camera), address)
                assert all(sender.send(make.sample(camera, i)) for i in range(6))
            await until(lambda: all(sender.status(camera).in_flight == 4 for camera in ("gate", "yard")))
            getattr(sender, ending)("gate")
            await until(lambda: sender.status("gate") is None)
        await until(lambda: lost)
        counts = {"sent": 8, "lost unacknowledged": 8, "dropped closed": 2, "dropped no_replica": 2}
        assert frame_counts() - before == counts
    assert replica.indices() == replica.indices("yard") == []


async def test_a_closing_camera_that_is_assigned_again_counts_the_frames_it_had_queued(make, until):
    replica, before = Replica(), frame_counts()
    replica.gate.clear()
    async with serving(replica, credit=1) as address, sending() as (sender, _):
        sender.assign(make.spec(), address)
        assert all(sender.send(make.sample(index=i)) for i in range(5))
        await until(lambda: sender.status("gate").in_flight == 1)
        sender.close("gate", flush=True)
        sender.assign(make.spec(), address)
        assert sender.send(make.sample(index=5, fresh=True))
        replica.gate.set()
        await until(lambda: replica.indices() == [0, 5])
        assert frame_counts() - before == {"sent": 2, "dropped closed": 4}


async def test_a_sender_that_stops_counts_what_it_has_not_sent_and_what_was_not_acknowledged(make, until):
    replica, before = Replica(), frame_counts()
    replica.gate.clear()
    async with serving(replica, credit=4) as address, sending() as (sender, _):
        sender.assign(make.spec(), address)
        assert all(sender.send(make.sample(index=i)) for i in range(6))
        await until(lambda: sender.status("gate").in_flight == 4)
        await sender.stop(0.0)
        assert frame_counts() - before == {"sent": 4, "lost unacknowledged": 4, "dropped closed": 2}
    assert replica.indices() == []


async def test_a_defect_in_the_replica_costs_one_camera_a_window(make, until, caplog):
    class Defective(Replica):
        async def on_frame(self, sample, arrived_s):
            if (sample.stream, sample.index) == ("gate", 1):
                raise RuntimeError("index out of range")
            await super().on_frame(sample, arrived_s)

    replica = Defective()
    async with serving(replica) as address, sending() as (sender, lost):
        for camera in ("gate", "yard"):
            sender.assign(make.spec(camera), address)
            sender.send(make.sample(camera, 0))
            sender.send(make.sample(camera, 1))
        await until(lambda: lost and len(replica.frames["yard"]) == 2)
        assert [stream.camera for stream in lost] == ["gate"]
        assert "index out of range" in lost[0].reason
        assert "index out of range" in caplog.text
        assert sender.send(make.sample("gate", 2, fresh=True))
        await until(lambda: replica.indices() == [0, 2])


async def test_a_refused_specification_is_told(make, until):
    async with serving(Replica()) as address, sending() as (sender, lost):
        spec = make.spec()
        sender.assign(type(spec)("gate", spec.questions, refresh="unheard_of"), address)
        await until(lambda: lost)
        assert "unheard_of" in lost[0].reason


async def test_close_with_flush_comes_after_the_frames(make, until):
    replica = Replica()
    async with serving(replica, credit=1) as address, sending() as (sender, _):
        sender.assign(make.spec(), address)
        for i in range(5):
            sender.send(make.sample(index=i))
        sender.close("gate", flush=True)
        assert not sender.send(make.sample(index=5))
        await until(lambda: replica.closed)
        assert replica.indices() == [0, 1, 2, 3, 4]
        assert replica.closed == [("gate", True)]
        assert sender.status("gate") is None
    assert replica.lost == [], "a closed camera is not lost"


async def test_a_newer_decoder_takes_the_camera_over(make, until):
    replica = Replica()
    async with serving(replica) as address, sending() as (old, lost), sending() as (new, _):
        old.assign(make.spec(), address)
        old.send(make.sample(index=0))
        await until(lambda: replica.indices() == [0])
        new.assign(make.spec(), address)
        new.send(make.sample(index=10, fresh=True))
        await until(lambda: replica.indices() == [0, 10])
        old.send(make.sample(index=1, fresh=True))
        await until(lambda: lost)
        assert "another decoder" in lost[0].reason
        await old.stop(0.0)
        new.send(make.sample(index=11))
        await until(lambda: replica.indices() == [0, 10, 11])
        assert replica.lost == [], "it belongs to the newer connection"
        # With what was done for the other one.
        await until(lambda: new.status("gate").windows.closed == 3)


async def test_a_released_camera_stays_open_for_the_decoder_that_has_it_next(make, until):
    replica = Replica()
    async with serving(replica) as address, sending() as (old, _), sending() as (new, lost):
        old.confirm(5)
        old.assign(make.spec(), address)
        assert old.send(make.sample(index=0))
        await until(lambda: replica.indices() == [0])
        old.release("gate")
        assert old.status("gate") is None
        assert not old.send(make.sample(index=1))
        new.confirm(6)
        new.assign(make.spec(), address)
        assert new.send(make.sample(index=100, fresh=True))
        await until(lambda: replica.indices() == [0, 100])
    assert not replica.closed
    assert lost == []


async def test_cameras_that_pass_from_decoder_to_decoder_leave_nothing_at_the_replica(make, until):
    replica = Replica()
    names = [f"camera-{number}" for number in range(30)]

    def queues():
        return sorted(task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("frames of"))

    async with serving(replica) as address, sending() as (old, _), sending() as (new, lost):
        old.assign(make.spec("gate"), address)
        for name in names:
            old.assign(make.spec(name), address)
        await until(lambda: len(replica.opened) == 31)
        for name in names:
            old.release(name)
            new.assign(make.spec(name), address)
        await until(lambda: len(replica.opened) == 61)
        for name in names:
            new.close(name)
        await until(lambda: len(replica.closed) == 30)
        await until(lambda: queues() == ["frames of gate"])
    assert lost == []


async def test_a_connection_that_is_cancelled_while_it_closes_loses_its_cameras(make, until):
    replica, opened = Replica(), frames_pb2.StreamOpen(camera="gate", spec_json=spec_to_json(make.spec()))

    class Call:
        messages = iter([frames_pb2.FrameMessage(open=opened)])

        async def read(self):
            if (message := next(self.messages, None)) is None:
                await asyncio.Event().wait()
            return message

        async def write(self, _):
            pass

        send_initial_metadata = write

    sending = asyncio.create_task(FramesServicer(replica).Send(None, Call()))
    await until(lambda: len(replica.opened) == 1)
    while not sending.done():
        sending.cancel()
        await asyncio.sleep(0)
    assert replica.lost == ["gate"]


async def test_a_released_camera_that_no_decoder_opens_is_lost(make, until):
    """Its decoder died meanwhile: the replica must not keep its window for as long as the other one is connected."""
    replica = Replica()
    async with serving(replica) as address, sending() as (sender, _):
        for camera in ("gate", "yard"):
            sender.assign(make.spec(camera), address)
        await until(lambda: len(replica.opened) == 2)
        sender.release("gate")
        await until(lambda: replica.lost == ["gate"])
        assert replica.closed == []


async def test_a_closing_camera_that_is_assigned_to_another_replica_is_closed_at_the_first(make, until):
    first, second = Replica(), Replica()
    async with serving(first) as here, serving(second) as there, sending() as (sender, _):
        for camera in ("gate", "yard"):
            sender.assign(make.spec(camera), here)
        await until(lambda: len(first.opened) == 2)
        sender.close("gate")
        sender.assign(make.spec("gate"), there)
        await until(lambda: first.closed == [("gate", False)])
        await until(lambda: [spec.stream for spec in second.opened] == ["gate"])


async def test_a_decoder_that_stood_still_is_told_with_its_next_frame_and_opens_the_camera_again(make, until):
    """Another decoder had the camera meanwhile, and let it go: neither side has seen the connection break."""
    replica = Replica()
    async with serving(replica) as address, sending() as (old, lost), sending() as (new, _):
        old.confirm(5)
        old.assign(make.spec(), address)
        assert old.send(make.sample(index=0))
        await until(lambda: replica.indices() == [0])
        new.confirm(7)
        new.assign(make.spec(), address)
        assert new.send(make.sample(index=100, fresh=True))
        await until(lambda: replica.indices() == [0, 100])
        new.close("gate")
        await until(lambda: replica.closed == [("gate", False)])
        assert old.send(make.sample(index=1)), "nobody has told it yet"
        await until(lambda: lost)
        assert [(event.refused, event.frames) for event in lost] == [("not_open", 1)]
        assert "another decoder" in old.status("gate").refused
        assert not old.send(make.sample(index=2)), "only a fresh anchor may follow"
        assert len(replica.opened) == 2, "it is opened with a frame, and not over and over"
        assert old.send(make.sample(index=3, fresh=True))
        assert old.send(make.sample(index=4))
        await until(lambda: replica.indices() == [0, 100, 3, 4])
        assert len(replica.opened) == 3
        await until(lambda: old.status("gate").windows.done == 4)
        assert old.status("gate").refused == ""
        assert len(lost) == 1


def test_a_refusal_stands_until_a_fresh_frame_follows_it(make):
    """Frames that were on their way behind the refused one are discarded, and acknowledged without a reason."""
    lane = Lane(make.spec(), "replica:1", term=5, wants_fresh=False, in_flight=deque([1, 2]))
    refusal = {"refusal": frames_pb2.FRAME_REFUSAL_NOT_OPEN, "refused": "another decoder sends it"}
    assert lane.acknowledge(frames_pb2.FrameAck(camera="gate", index=1, **refusal)).refused == "not_open"
    assert lane.acknowledge(frames_pb2.FrameAck(camera="gate", index=2)) is None
    assert (lane.refused, list(lane.in_flight)) == ("another decoder sends it", [])
    assert lane.enqueue(make.sample(index=3, fresh=True), frames_pb2.Frame(), 8) == "queued"
    assert lane.acknowledge(frames_pb2.FrameAck(camera="gate", index=3)) is None
    assert lane.refused == ""


async def test_a_refusal_of_what_was_sent_before_a_camera_was_opened_again_opens_it_no_third_time(make, until):
    """A thawed replica refuses each random access frame of its backlog, the last of them when the camera is open."""
    opened, refused, taken = [], [0, 1, 2], []

    class Thawed(frames_pb2_grpc.FramesServicer):
        async def Send(self, request_iterator, context):
            async def tell(index, **others):
                await context.write(frames_pb2.FrameAck(camera="gate", index=index, credit=8, **others))

            not_open = {"refusal": frames_pb2.FRAME_REFUSAL_NOT_OPEN, "refused": "another decoder sends it now"}
            while (message := await context.read()) is not grpc.aio.EOF:
                if message.HasField("open"):
                    opened.append(message.open.camera)
                    for index in refused[1:] if len(opened) > 1 else ():
                        await tell(index, frames_lost=1, **not_open)
                    await tell(0, opened=True)
                elif message.frame.index == refused[-1]:
                    await tell(refused[0], frames_lost=1, **not_open)
                elif message.frame.index > refused[-1]:
                    taken.append(message.frame.index)
                    await tell(taken[-1], frames_taken=1)

    async with rpc_serving.serving(Thawed()) as address, sending() as (sender, lost):
        sender.assign(make.spec(), address)
        assert all(sender.send(make.sample(index=index, fresh=True)) for index in refused)
        await until(lambda: lost)
        assert sender.send(make.sample(index=3, fresh=True))
        await until(lambda: taken)
        await until(lambda: not sender.status("gate").in_flight)
        assert sender.send(make.sample(index=4)), "nothing of it was lost"
        await until(lambda: taken == [3, 4])
        assert opened == ["gate", "gate"]
        assert (len(lost), sender.status("gate").lost, sender.status("gate").refused) == (1, 3, "")


async def test_a_camera_is_not_taken_from_the_decoder_that_has_the_newer_assignment(make, until):
    replica = Replica()
    async with serving(replica) as address, sending() as (old, lost), sending() as (new, kept):
        old.confirm(5)
        old.assign(make.spec(), address)
        assert old.send(make.sample(index=0))
        await until(lambda: replica.indices() == [0])
        new.confirm(7)
        new.assign(make.spec(), address)
        assert new.send(make.sample(index=100, fresh=True))
        await until(lambda: replica.indices() == [0, 100])
        for index in (1, 2, 3):
            told = len(lost)
            assert old.send(make.sample(index=index, fresh=True))
            # The first time the frame is refused, later the opening and the frame behind it.
            await until(lambda told=told: len(lost) > told and not old.status("gate").in_flight)
        assert {event.refused for event in lost} == {"not_open"}
        assert new.send(make.sample(index=101)), "nothing of it was taken away"
        await until(lambda: replica.indices() == [0, 100, 101])
        # Of its own: the camera is this one's now, as the controller has it.
        old.confirm(8)
        assert old.send(make.sample(index=4, fresh=True))
        await until(lambda: replica.indices() == [0, 100, 101, 4])
        assert kept == []
        old.close("gate")
        await until(lambda: replica.closed)
        # Without a word from the controller: nobody else has it.
        assert new.send(make.sample(index=102))
        await until(lambda: kept)
        assert new.send(make.sample(index=103, fresh=True))
        await until(lambda: replica.indices() == [0, 100, 101, 4, 103])


async def test_a_decoder_that_connects_again_does_not_take_cameras_that_are_no_longer_its_own(make, until):
    replica = Replica()
    async with AsyncExitStack() as stack, sending() as (old, lost), sending() as (new, kept):
        address = await stack.enter_async_context(serving(replica))
        new.confirm(7)
        new.assign(make.spec(), address)
        assert new.send(make.sample(index=100, fresh=True))
        await until(lambda: replica.indices() == [100])
        old.confirm(5)
        old.assign(make.spec(), address)
        assert old.send(make.sample(index=0, fresh=True))
        await until(lambda: lost)
        old.close("gate")
        assert new.send(make.sample(index=101))
        await until(lambda: replica.indices() == [100, 101] and old.status("gate") is None)
        assert (replica.closed, kept) == ([], []), "who does not have it cannot close it"


async def test_a_camera_that_the_replica_does_not_have_any_more_is_opened_again(make, until):
    class Forgetful(Replica):
        async def on_frame(self, sample, arrived_s):
            if sample.index == 1:
                raise UnknownCameraError("camera 'gate' is not open here")
            await super().on_frame(sample, arrived_s)

    replica = Forgetful()
    async with serving(replica) as address, sending() as (sender, lost):
        sender.assign(make.spec(), address)
        assert sender.send(make.sample(index=0))
        assert sender.send(make.sample(index=1))
        await until(lambda: lost)
        assert [(event.refused, event.reason) for event in lost] == [("not_open", "camera 'gate' is not open here")]
        assert sender.send(make.sample(index=2, fresh=True))
        await until(lambda: replica.indices() == [0, 2])
        assert len(replica.opened) == 2


async def test_a_camera_that_is_closed_and_opened_at_once_belongs_to_its_connection(make, until):
    replica = Replica()
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving(replica))
        async with sending() as (sender, _):
            sender.assign(make.spec(), address)
            assert sender.send(make.sample(index=0))
            sender.close("gate", flush=True)
            await until(lambda: sender.status("gate") is None)
            sender.assign(make.spec(), address)
            assert sender.send(make.sample(index=1, fresh=True))
            await until(lambda: replica.indices() == [0, 1])
            await stack.aclose()
            await until(lambda: replica.lost == ["gate"])


def test_camera_threads_use_it_from_outside_the_loop(make):
    """As a decoder does: gRPC on a loop thread, everything else on threads."""
    with EventLoopThread() as grpc_thread:
        lost = []

        async def build():
            replica = Replica()
            server = RpcServer()
            server.add(FramesServicer(replica))
            port = server.bind("127.0.0.1", 0)
            await server.start()
            return replica, server, f"127.0.0.1:{port}", FrameSender(lost.extend)

        replica, server, address, sender = grpc_thread.run(build(), 10.0)
        sender.assign(make.spec(), address)
        assert sender.send(make.sample(index=0))
        sender.close("gate", flush=True)
        grpc_thread.run(sender.stop(5.0), 10.0)
        grpc_thread.run(server.stop(1.0), 10.0)
        assert replica.indices() == [0]
        assert replica.closed == [("gate", True)]
        assert lost == []
