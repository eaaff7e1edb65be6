"""The controller's state machine: members come, go and come back; cameras stay where they are as long as they can."""

import json
import random
from dataclasses import replace

import pytest

from cluster.config import CameraEntry, QuestionConfig, SightlineConfig, camera_settings
from cluster.control.directory import Directory
from cluster.errors import CameraExistsError, UnknownCameraError
from cluster.types import LastAnswer, PatchGeometry
from cluster.types.reports import CameraReport, DecoderInfo, ReplicaInfo, StreamReport, Totals

QUESTION = QuestionConfig(id="fence", text="Is anyone climbing the fence?")
GEOMETRY = PatchGeometry(patch=14, merge=2, temporal=2)


def camera(name: str, source: str = ""):
    return camera_settings(SightlineConfig(), CameraEntry(name=name, source=source, questions=[QUESTION]))


def decoder(name: str, start: int = 0) -> DecoderInfo:
    return DecoderInfo(name, f"{name}/{start}", f"{name}.{start}:1", "", 1)


def replica(instance: str) -> ReplicaInfo:
    return ReplicaInfo(instance, f"{instance}:1", "", 1, GEOMETRY)


@pytest.fixture
def directory() -> Directory:
    directory = Directory(heartbeat_timeout_s=10)
    directory.join_decoder(decoder("decoder-0"), 0.0)
    directory.join_decoder(decoder("decoder-1"), 0.0)
    directory.join_replica(replica("r1"), 0.0)
    for number in range(4):
        directory.add(camera(f"cam-{number}"))
    return directory


def owners(directory: Directory) -> dict[str, str | None]:
    return {name: directory.route(name).decoder for name in directory.cameras}


def assigned(directory: Directory, name: str) -> set[str]:
    return {c.settings.name for c in directory.assignment(name).cameras}


def test_a_remark_stands_where_the_state_has_no_reason() -> None:
    directory = Directory(remark=lambda settings: f"about {settings.source}")
    directory.join_decoder(decoder("decoder-0"), 0.0)
    directory.add(camera("gate", "rtsp://10.0.0.1/1"))
    assert directory.status("gate").reason == "decoder-0 is starting it"
    for report, reason in (("", "about rtsp://10.0.0.1/1"), ("nothing listens there", "nothing listens there")):
        directory.heartbeat_decoder("decoder-0", "decoder-0/0", [CameraReport("gate", "running", report)], 1.0)
        assert directory.status("gate").reason == reason
        assert directory.status("gate", remarks=False).reason == report
    directory.heartbeat_decoder("decoder-0", "decoder-0/0", [CameraReport("gate", "waiting", "")], 2.0)
    assert directory.status("gate").reason == "", "nobody pushes for it: a remark on answers would hide that"


def test_every_camera_is_assigned_to_exactly_one_decoder(directory: Directory) -> None:
    first, second = assigned(directory, "decoder-0"), assigned(directory, "decoder-1")
    assert first | second == set(directory.cameras)
    assert not first & second
    for assignment in directory.assignment("decoder-0").cameras:
        assert (assignment.geometry, assignment.replica_address) == (GEOMETRY, "r1:1")


def test_a_replica_that_is_to_be_stopped_gets_no_camera_that_it_had_before(directory: Directory) -> None:
    assert directory.join_replica(replica("r2"), 0.0, streams=["gate"]) == "replica-1"
    directory.drain("replica-1")
    directory.add(camera("gate"))
    assert directory.route("gate").replica == "replica-0"


def test_same_camera_again_is_no_error_and_other_settings_are(directory: Directory) -> None:
    directory.check_add(camera("cam-0"), 0.0, force=False)
    with pytest.raises(CameraExistsError, match="remove it first"):
        directory.check_add(camera("cam-0", "rtsp://elsewhere"), 0.0, force=True)


def test_clients_never_see_a_cameras_password_but_its_decoder_does(directory: Directory) -> None:
    source = "rtsp://viewer:hunter2@10.0.0.1/stream1"
    directory.add(camera("secret", source))
    assert directory.status("secret").source == "rtsp://viewer:***@10.0.0.1/stream1"
    running = [c for name in directory.decoders for c in directory.assignment(name).cameras]
    assert [c.settings.source.reveal() for c in running if c.settings.name == "secret"] == [source]


def test_restarted_decoder_keeps_its_cameras_and_their_counts(directory: Directory) -> None:
    before = owners(directory)
    mine = sorted(assigned(directory, "decoder-0"))
    reports = [CameraReport(name, "running", counts={"frames_decoded": 100}, run=f"{name}/0") for name in mine]
    assert directory.heartbeat_decoder("decoder-0", "decoder-0/0", reports, 1.0)
    version = directory.version
    directory.join_decoder(decoder("decoder-0", start=1), 2.0)
    assert directory.version > version
    assert owners(directory) == before
    status = directory.status(mine[0])
    assert (status.state, status.reason) == ("waiting", "decoder-0 is starting it")
    assert not directory.heartbeat_decoder("decoder-0", "decoder-0/0", [], 2.5), "the dead one's heartbeat counted"
    again = [CameraReport(mine[0], "running", counts={"frames_decoded": 7}, run=f"{mine[0]}/1")]
    assert directory.heartbeat_decoder("decoder-0", "decoder-0/1", again, 3.0)
    assert directory.status(mine[0]).state == "running"
    assert directory.status(mine[0]).frames_decoded == 107


def test_silent_decoder_loses_its_cameras_to_the_others(directory: Directory) -> None:
    directory.heartbeat_decoder("decoder-1", "decoder-1/0", [], 9.0)
    directory.heartbeat_replica("r1", [], 9.0)
    assert directory.expire(9.9) == []
    assert directory.expire(10.1) == ["decoder-0"]
    assert set(owners(directory).values()) == {"decoder-1"}
    assert not directory.heartbeat_decoder("decoder-0", "decoder-0/0", [], 11.0)
    directory.join_decoder(decoder("decoder-0"), 11.0, running=["cam-0", "gone"])
    assert len(assigned(directory, "decoder-0")) == 2, "it gets its share, whatever it says it runs"


def test_counts_of_a_camera_that_moves_and_returns_are_summed() -> None:
    directory = Directory(heartbeat_timeout_s=10)
    directory.add(camera("cam"))
    directory.join_replica(replica("r1"), 0.0)
    unsent = []
    for time_s, (name, decoded) in enumerate([("decoder-0", 10), ("decoder-1", 5), ("decoder-0", 40)]):
        directory.join_decoder(decoder(name, start=time_s), float(time_s))
        [assignment] = directory.assignment(name).cameras
        unsent.append(assignment.unsent)
        # Its replica drops windows, too, which are not the decoder's to tell.
        directory.heartbeat_replica("r1", [StreamReport("cam", counts={"windows_dropped": 1000}, run="r")], time_s)
        counts = {"frames_decoded": decoded, "windows_dropped": 2 * decoded}
        report = CameraReport("cam", "running", counts=counts, run=str(time_s))
        assert directory.heartbeat_decoder(name, f"{name}/{time_s}", [report], float(time_s))
        total = directory.status("cam").frames_decoded
        directory.leave_decoder(name)
    assert total == 55
    assert unsent == [0, 20, 30], "where the next decoder goes on to count"


def test_lost_replica_leaves_its_cameras_homeless_until_it_is_back(directory: Directory) -> None:
    directory.heartbeat_replica("r1", [StreamReport("cam-0", 0.5, counts={"windows_done": 3}, run="1")], 1.0)
    directory.leave_replica("replica-0")
    route = directory.route("cam-0")
    assert (route.replica, route.replica_address) == (None, None)
    assert directory.assignment(route.decoder).cameras[0].geometry == GEOMETRY, "decoders go on without a replica"
    assert not directory.heartbeat_replica("r1", [], 2.0)
    assert directory.join_replica(replica("r2"), 3.0) == "replica-0"
    assert directory.route("cam-0").replica_address == "r2:1"
    directory.heartbeat_replica("r2", [StreamReport("cam-0", 0.5, counts={"windows_done": 2}, run="2")], 4.0)
    assert directory.status("cam-0").windows_done == 5


def test_second_replica_takes_over_and_the_first_gets_only_its_share_back(directory: Directory) -> None:
    assert directory.join_replica(replica("r2"), 0.0) == "replica-1"
    directory.leave_replica("replica-0")
    assert {directory.route(name).replica for name in directory.cameras} == {"replica-1"}
    assert directory.join_replica(replica("r3"), 1.0) == "replica-0"
    held = [name for name in directory.cameras if directory.route(name).replica == "replica-0"]
    assert len(held) == 2


def test_joining_twice_is_the_same_replica(directory: Directory) -> None:
    assert directory.join_replica(replica("r1"), 5.0) == "replica-0"
    assert list(directory.replicas) == ["replica-0"]


def test_restarted_controller_leaves_everything_where_it_runs(directory: Directory) -> None:
    directory.join_replica(replica("r2"), 0.0)
    routes = {name: directory.route(name) for name in directory.cameras}
    restarted = Directory()
    for name in reversed(list(directory.decoders)):
        restarted.join_decoder(directory.decoders[name], 0.0, running=assigned(directory, name))
    for name in reversed(list(directory.replicas)):
        streams = [camera for camera, route in routes.items() if route.replica == name]
        assert restarted.join_replica(directory.replicas[name], 0.0, known_as=name, streams=streams) == name
    for name in directory.cameras:
        restarted.add(camera(name))
    assert {name: restarted.route(name) for name in restarted.cameras} == routes


def test_status_joins_both_views_and_ignores_who_does_not_own_the_camera(directory: Directory) -> None:
    owner = directory.route("cam-0").decoder
    other = ({"decoder-0", "decoder-1"} - {owner}).pop()
    answer = LastAnswer("fence", 0.9, True, 48_000_000)
    report = CameraReport("cam-0", "backoff", "refused", retry_in_s=2.0, codec="h264", counts={"gaps": 2}, run="now")
    directory.heartbeat_decoder(owner, f"{owner}/0", [report, CameraReport("unknown", "running")], 1.0)
    last = CameraReport("cam-0", "ended", counts={"gaps": 50}, run="before")
    directory.heartbeat_decoder(other, f"{other}/0", [last], 1.0)
    directory.heartbeat_replica("r1", [StreamReport("cam-0", 0.25, (answer,), {"windows_done": 4}, run="r")], 1.0)
    status = directory.status("cam-0")
    assert (status.state, status.reason, status.retry_in_s, status.codec) == ("backoff", "refused", 2.0, "h264")
    assert (status.decoder, status.replica, status.latency_s) == (owner, "replica-0", 0.25)
    assert status.last_answers == (answer,)
    assert (status.gaps, status.windows_done) == (52, 4), "what it counted before it was moved still counts"


def test_status_tells_of_the_memory_of_the_replica_that_owns_the_camera_now(directory: Directory) -> None:
    assert directory.join_replica(replica("r2"), 0.0) == "replica-1"
    owner = directory.route("cam-0").replica
    instances = {"replica-0": "r1", "replica-1": "r2"}
    other = ({"replica-0", "replica-1"} - {owner}).pop()
    seen = StreamReport("cam-0", memory_bytes=900, memory_frames=7, memory_oldest_s=42.5, memory_state="node: slow")
    directory.heartbeat_replica(instances[owner], [seen], 1.0)
    directory.heartbeat_replica(instances[other], [StreamReport("cam-0", memory_bytes=10**9)], 1.0)
    status = directory.status("cam-0")
    assert (status.memory_bytes, status.memory_frames, status.memory_oldest_s) == (900, 7, 42.5)
    assert status.memory_state == "node: slow"
    directory.heartbeat_replica(instances[owner], [StreamReport("cam-0", memory_bytes=300)], 2.0)
    status = directory.status("cam-0")
    assert (status.memory_bytes, status.memory_frames, status.memory_state) == (300, 0, ""), "not summed: what is now"


def test_removed_camera_is_gone_everywhere(directory: Directory) -> None:
    owner = directory.route("cam-0").decoder
    directory.remove("cam-0")
    assert "cam-0" not in directory.cameras
    assert "cam-0" not in assigned(directory, owner)
    for call in (directory.remove, directory.route, directory.status):
        with pytest.raises(UnknownCameraError, match="no camera"):
            call("cam-0")


def test_what_is_still_said_of_a_removed_camera_is_not_said_of_the_next_one_of_its_name() -> None:
    directory = Directory()
    directory.join_decoder(decoder("decoder-0"), 0.0)
    directory.join_replica(replica("r1"), 0.0)
    directory.add(camera("gate"), life="one")
    directory.remove("gate")
    directory.add(camera("gate"), life="two")
    assert [each.life for each in directory.assignment("decoder-0").cameras] == ["two"]
    late = CameraReport("gate", "running", counts={"windows_dropped": 5}, life="one")
    directory.heartbeat_decoder("decoder-0", "decoder-0/0", [late], 1.0)
    directory.heartbeat_replica("r1", [StreamReport("gate", counts={"windows_done": 7}, life="one")], 1.0)
    status = directory.status("gate")
    assert (status.life, status.state, status.windows_done, status.windows_dropped) == ("two", "waiting", 0, 0)
    directory.heartbeat_replica("r1", [StreamReport("gate", counts={"windows_done": 2}, life="two")], 2.0)
    assert directory.status("gate").windows_done == 2


def test_without_members_a_camera_waits_and_says_why() -> None:
    directory = Directory()
    directory.add(camera("cam"))
    status = directory.status("cam")
    assert (status.state, status.reason) == ("waiting", "no decoder is ready for it yet")
    directory.join_decoder(decoder("decoder-0"), 0.0)
    [assignment] = directory.assignment("decoder-0").cameras
    assert (assignment.geometry, assignment.replica_address) == (None, None)


def test_totals_are_over_runs_each_of_which_is_told_of_many_times() -> None:
    totals = Totals()
    totals.update("a", {"x": 5})
    totals.update("a", {"x": 9, "y": 1})
    assert totals.counts() == {"x": 9, "y": 1}
    totals.update("b", {"x": 10})
    assert totals.counts() == {"x": 19, "y": 1}
    totals.end("a"), totals.end("nobody")
    assert totals.counts() == {"x": 19, "y": 1}
    assert Totals(totals.runs).counts() == totals.counts()
    for run in range(100):
        totals.update(str(run), {"x": 1})
        totals.update("b", {"x": 10 + run})
    assert totals.counts() == {"x": 9 + 109 + 100, "y": 1}
    assert len(totals.runs) < 50


def counted(directory: Directory, name: str = "cam-0") -> tuple[int, int, int]:
    status = directory.status(name)
    return status.windows_done, status.windows_dropped, status.windows_lost


def beat(directory: Directory, at_s: float) -> None:
    """Heartbeats of a decoder that has dropped 3 windows of cam-0 and of a replica that has answered 12; they join
    again where they are asked to, as the same processes."""
    owner = directory.route("cam-0").decoder or "decoder-0"
    dropped = CameraReport("cam-0", "running", counts={"windows_dropped": 3}, run="camera")
    for name in ("decoder-0", "decoder-1"):
        reports = [dropped] if name == owner else []
        if not directory.heartbeat_decoder(name, f"{name}/0", reports, at_s):
            directory.join_decoder(decoder(name), at_s, running=["cam-0"] if reports else [])
            directory.heartbeat_decoder(name, f"{name}/0", reports, at_s)
    answered = StreamReport("cam-0", counts={"windows_done": 12, "windows_lost": 1}, run="stream")
    if not directory.heartbeat_replica("r1", [answered], at_s):
        directory.join_replica(replica("r1"), at_s, known_as="replica-0", streams=["cam-0"])
        directory.heartbeat_replica("r1", [answered], at_s)


def test_who_was_given_up_and_joins_again_is_not_counted_twice(directory: Directory) -> None:
    for at_s in (0.0, 12.0, 24.0, 36.0):
        beat(directory, at_s)
        beat(directory, at_s)
        assert counted(directory) == (12, 3, 1)
        for silent_s in (4.0, 8.0, 12.0):
            directory.expire(at_s + silent_s)
        assert (directory.decoders, directory.replicas) == ({}, {})
        assert counted(directory) == (12, 3, 1)
        # Its cameras' windows are lost, as their decoders count: it has none of them when it comes back.
        assert directory.was_expired("r1")
    beat(directory, 48.0)
    assert not directory.was_expired("r1")


def test_a_later_controller_counts_what_members_say_and_what_nobody_can_say_any_more(directory: Directory) -> None:
    directory = Directory(heartbeat_timeout_s=10)
    directory.join_decoder(decoder("decoder-0"), 0.0)
    directory.join_replica(replica("r1"), 0.0)
    directory.add(camera("cam-0"), life="one")
    dead = StreamReport("cam-0", counts={"windows_done": 5}, life="one", run="dead")
    directory.heartbeat_replica("r1", [dead], 1.0)
    directory.heartbeat_replica("r1", [replace(dead, counts={"windows_done": 2}, run="alive")], 2.0)
    unsent = CameraReport("cam-0", "running", counts={"windows_dropped": 4}, life="one", run="camera")
    directory.heartbeat_decoder("decoder-0", "decoder-0/0", [unsent], 2.0)
    kept = json.loads(json.dumps(directory.export_counts()))
    later = Directory(heartbeat_timeout_s=10)
    later.restore_counts(kept)
    later.join_decoder(decoder("decoder-0"), 0.0)
    later.join_replica(replica("r1"), 0.0)
    later.add(camera("cam-0"), life="one")
    assert counted(later) == (7, 4, 0)
    assert [each.unsent for each in later.assignment("decoder-0").cameras] == [4]
    later.heartbeat_replica("r1", [replace(dead, counts={"windows_done": 3}, run="alive")], 1.0)
    assert later.status("cam-0").windows_done == 8
    another = Directory()
    another.restore_counts(kept)
    another.add(camera("cam-0"), life="two")
    assert another.status("cam-0").windows_done == 0


def test_members_expire_whatever_part_of_the_timeout_a_heartbeat_is() -> None:
    """The controller looks once per heartbeat, which is not a pause of its own."""
    for heartbeat_s in (1.0, 4.0, 6.0, 9.0):
        made = Directory(heartbeat_s=heartbeat_s, heartbeat_timeout_s=10)
        made.join_decoder(decoder("decoder-0"), 0.0)
        made.join_replica(replica("r1"), 0.0)
        gone = [name for look in range(1, 4 + int(10 / heartbeat_s)) for name in made.expire(look * heartbeat_s)]
        assert gone == ["decoder-0", "replica-0"]


def test_a_controller_that_stood_still_itself_gives_nobody_up(directory: Directory) -> None:
    """It has read no heartbeat either: they wait for it."""
    before = owners(directory)
    for second in range(5):
        assert directory.expire(float(second)) == []
    assert directory.expire(30.0) == []
    directory.heartbeat_replica("r1", [], 31.0)
    directory.heartbeat_decoder("decoder-1", "decoder-1/0", [], 31.0)
    for second in (32, 36, 40):
        assert directory.expire(float(second)) == []
    assert owners(directory) == before
    assert directory.expire(40.5) == ["decoder-0"], "it stayed silent"


def test_an_update_keeps_place_and_counts_and_reaches_the_decoder(directory: Directory) -> None:
    before, version = directory.route("cam-0"), directory.version
    owner = str(before.decoder)
    report = CameraReport("cam-0", "running", width=640, height=360, counts={"frames_decoded": 100})
    directory.heartbeat_decoder(owner, f"{owner}/0", [report], 1.0)
    settings = camera("cam-0").model_copy(update={"priority": "critical"})
    directory.update(settings, 2.0)
    assert directory.route("cam-0") == before
    assert directory.version > version
    status = directory.status("cam-0")
    assert (status.state, status.frames_decoded, status.priority) == ("running", 100, "critical")
    assert [each.settings for each in directory.assignment(owner).cameras if each.settings.name == "cam-0"] == [
        settings
    ]
    version = directory.version
    directory.update(settings, 3.0)
    assert directory.version == version, "the same again disturbs nobody"
    with pytest.raises(UnknownCameraError, match="did you mean 'cam-0'"):
        directory.update(camera("cam-00"))


def test_a_change_concerns_those_decoders_whose_assignment_it_changes() -> None:
    """Compared with all assignments before and after each of many random changes. A fleet that is told wholly of every
    change sends each camera again for each that is added."""
    drawn = random.Random(7)
    directory = Directory(heartbeat_timeout_s=1e9)
    for number in range(12):
        directory.join_decoder(decoder(f"decoder-{number}"), 0.0)
    replicas = [directory.join_replica(replica(f"r{number}"), 0.0) for number in range(4)]
    known, sent, settings, cameras, joins = {}, 0, 0, 0, 0

    def change() -> None:
        nonlocal joins
        name = f"cam-{drawn.randrange(120)}"
        there, draw = name in directory.cameras, drawn.random()
        if draw < 0.03:
            gone = drawn.choice(sorted(directory.decoders))
            directory.leave_decoder(gone)
            joins += 1
            directory.join_decoder(decoder(gone, joins), 0.0)
        elif draw < 0.05:
            directory.drain(drawn.choice(replicas), undo=drawn.random() < 0.7)
        elif draw < 0.06:
            joins += 1
            directory.leave_replica(drawn.choice(replicas))
            directory.join_replica(replica(f"again-{joins}"), 0.0)
        elif draw < 0.07:
            directory.keep_decoders([f"decoder-{number}" for number in range(drawn.randint(8, 12))])
        elif not there:
            directory.add(camera(name), life=str(drawn.random()))
        elif draw < 0.4:
            directory.remove(name)
        else:
            directory.update(camera(name, f"rtsp://{drawn.random()}"))

    changes = 600
    for _ in range(changes):
        change()
        for name in sorted(directory.decoders):
            before = known.get(name)
            asked = before.version if before is not None else -1
            concerned, told = directory.concerns(name, asked), directory.assignment(name, asked)
            now = directory.assignment(name)
            known[name] = now
            # What it knew, without what it is not told to keep, and what it is told anew: all of now.
            kept = [each for each in (before.cameras if before is not None else ()) if each.settings.name in told.kept]
            assert sorted([*kept, *told.cameras], key=lambda each: each.settings.name) == list(now.cameras)
            assert len(kept) == len(told.kept)
            sent += concerned
            settings += len(told.cameras)
            cameras += len(now.cameras)
            if not concerned:
                assert before is not None
                assert replace(now, version=before.version) == before, name
    assert sent < changes * 12 / 3, "most changes concern few decoders"
    assert settings < cameras / 10, "and few of a decoder's cameras"


def test_whoever_knows_a_version_is_told_of_the_settings_that_came_since(directory: Directory) -> None:
    """And not of all: alerting asks once a second, also while thousands are added one by one."""
    assert [each.name for each in directory.settings_since(-1)] == directory.cameras
    told = []
    version = directory.declared
    for number in range(20):
        directory.add(camera(f"more-{number}"))
        told += directory.settings_since(version)
        version = directory.declared
    assert [each.name for each in told] == [f"more-{number}" for number in range(20)]
    directory.update(camera("cam-0", "rtsp://elsewhere"))
    directory.remove("cam-1")
    assert [each.name for each in directory.settings_since(version)] == ["cam-0"]
    assert directory.settings_since(directory.declared) == ()
