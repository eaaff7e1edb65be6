"""From Camera resources to cameras and back: what is asked for is done, what cannot be done is said."""

import asyncio
import contextlib
import logging

from camera_cluster import CLUSTER, KUBERNETES, CameraCluster
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reconciler_rig import Rig
from waiting import until_async

from cluster.config import CameraEntry
from cluster.control.cameras.managed import ManagedCamera
from cluster.errors import CapacityError, UnavailableError
from cluster.types import LastAnswer


async def test_cameras_come_change_and_go_with_their_resources(kube):
    cluster = CameraCluster()
    kube.apply("gate", {"source": "rtsp://10.0.0.1/", "window": {"strideSeconds": 4}})
    async with Rig(kube, cluster) as rig:
        await rig.condition("gate", "Accepted", "True", "Accepted")
        settings = cluster.directory.settings("gate")
        assert (settings.source.reveal(), settings.window.stride_s, settings.window.length_s) == (
            "rtsp://10.0.0.1/",
            4,
            40,
        )
        kube.apply("gate", {"source": "rtsp://10.0.0.1/", "priority": "critical"})
        kube.apply("yard", {})
        await until_async(lambda: cluster.priorities() == {"gate": "critical", "yard": "normal"})
        kube.delete("gate")
        await until_async(lambda: cluster.managers() == {"yard": KUBERNETES})
        assert sorted(cluster.calls) == [("add", "gate"), ("add", "yard"), ("remove", "gate"), ("update", "gate")]


async def test_the_status_tells_how_the_camera_does(kube):
    cluster = CameraCluster()
    kube.apply("gate", {"source": "rtsp://10.0.0.1/"})
    async with Rig(kube, cluster) as rig:
        await rig.condition("gate", "Running", "False", "Waiting")
        cluster.running("gate", width=1280, height=720)
        cluster.answered("gate", LastAnswer("person", 0.714, True, 5), latency_s=1.234)
        assert await rig.condition("gate", "Running", "True", "Running") == ""
        status = kube.status("gate")
        conditions = status.pop("conditions")
        assert {each["type"] for each in conditions} == {"Accepted", "Running", "Conflict"}
        assert status == {
            "observedGeneration": 1,
            "manager": "kubernetes",
            "state": "running",
            "source": "rtsp://10.0.0.1/",
            "decoder": "decoder-0",
            "replica": "replica-0",
            "rung": "full",
            "lagSeconds": 1.23,
            "lastAnswer": "person 0.71 yes",
            "answers": [{"question": "person", "score": 0.71, "positive": True}],
        }


async def test_nonsense_is_a_condition_and_changes_nothing(kube):
    cluster = CameraCluster()
    kube.apply("gate", {"priority": "critical"})
    kube.apply("yard", {"window": {"strideSecond": 1}})
    async with Rig(kube, cluster) as rig:
        said = await rig.condition("yard", "Accepted", "False", "Invalid")
        assert "spec.window.strideSecond: unknown key; did you mean 'strideSeconds'?" in said
        await rig.condition("gate", "Accepted", "True", "Accepted")
        kube.apply("gate", {"priority": "urgent", "window": 7})
        said = await rig.condition("gate", "Accepted", "False", "Invalid")
        assert said.startswith("camera gate: spec.priority: must be 'critical', 'normal' or 'background', not 'urgent'")
        assert "; camera gate: spec.window: must be a section with keys of its own, not 7" in said
        assert cluster.priorities() == {"gate": "critical"}, "it goes on with what it had"
        assert kube.status("gate")["observedGeneration"] == 2
        kube.apply("gate", {"window": {"lengthSeconds": 4, "strideSeconds": 8}})
        right = "camera gate: window.strideSeconds: must not exceed the window's lengthSeconds = 4, not 8"
        await until_async(lambda: kube.condition("gate", "Accepted")[2].startswith(right), right)
        kube.apply("gate", {"priority": "background"})
        await rig.condition("gate", "Accepted", "True", "Accepted")
        assert cluster.priorities() == {"gate": "background"}


async def test_another_managers_camera_is_a_conflict_until_it_is_taken_over_or_gone(kube):
    cluster = CameraCluster()
    cluster.table.add(ManagedCamera(entry=CameraEntry(name="gate")), 0.0)
    cluster.table.add(ManagedCamera(entry=CameraEntry(name="yard"), manager="north"), 0.0)
    kube.apply("gate", {"priority": "critical"})
    kube.apply("yard", {"priority": "critical"})
    async with Rig(kube, cluster) as rig:
        said = await rig.condition("gate", "Conflict", "True", "ManagedElsewhere")
        assert said.startswith("camera 'gate' was added over the command line or the API")
        said = await rig.condition("yard", "Conflict", "True", "ManagedElsewhere")
        assert "belongs to the files that were applied as 'north'" in said
        assert (await rig.condition("yard", "Accepted", "False", "Conflict")) == said
        assert cluster.managers() == {"gate": CLUSTER, "yard": "north"}
        assert kube.status("gate")["manager"] == CLUSTER
        kube.apply("gate", {"priority": "critical"}, takeover=True)
        await rig.condition("gate", "Conflict", "False", "None")
        assert cluster.priorities() == {"gate": "critical"}
        # Its owner lets go of it: the next comparison finds out.
        cluster.table.remove("yard", manager="north")
        await rig.condition("yard", "Conflict", "False", "None")
        # And somebody takes one from Kubernetes: it is theirs, also when the resource goes.
        cluster.table.update(ManagedCamera(entry=CameraEntry(name="yard"), manager="north"), 0.0, takeover=True)
        await rig.condition("yard", "Conflict", "True", "ManagedElsewhere")
        kube.delete("yard")
        await until_async(lambda: "yard" not in rig.watch.snapshot())
        await rig.reconciler.reconcile()
        assert cluster.managers() == {"gate": KUBERNETES, "yard": "north"}


async def test_credentials_come_from_a_secret_and_are_nowhere_else(kube, caplog):
    caplog.set_level(logging.DEBUG)
    cluster = CameraCluster()
    spec = {"source": "rtsp://10.0.0.1/stream", "credentials": {"secretName": "door"}}
    kube.apply("gate", spec)
    async with Rig(kube, cluster) as rig:
        said = await rig.condition("gate", "Accepted", "False", "Invalid")
        assert said == "there is no Secret 'door' in namespace 'yard'"
        kube.secret("door", username="viewer", password="\n")
        empty = "camera gate: spec.credentials: Secret 'door' has no 'password'"
        await until_async(lambda: kube.condition("gate", "Accepted")[2] == empty)
        kube.secret("door", username="viewer", password="hunter2@/\n")
        await rig.condition("gate", "Accepted", "True", "Accepted")
        assert cluster.directory.settings("gate").source.reveal() == "rtsp://viewer:hunter2%40%2F@10.0.0.1/stream"
        assert kube.status("gate")["source"] == "rtsp://viewer:***@10.0.0.1/stream"
        # A password that is changed reaches the camera with the next comparison.
        kube.secret("door", username="viewer", password="correct-horse")
        await until_async(lambda: "correct-horse" in cluster.directory.settings("gate").source.reveal())
        kube.apply("gate", {**spec, "source": "rtsp://other:battery@10.0.0.1/"})
        await rig.condition("gate", "Accepted", "False", "Invalid")
        everything = caplog.text + str(kube.status_writes)
        for secret in ("hunter2", "correct-horse", "battery"):
            assert secret not in everything


async def test_a_resource_made_anew_is_another_camera(kube):
    cluster = CameraCluster()
    kube.apply("gate", {})
    async with Rig(kube, cluster) as rig:
        await until_async(lambda: cluster.managers())
        with kube.lock:
            kube.delete("gate")
            kube.apply("gate", {})
        await until_async(lambda: ("remove", "gate") in cluster.calls)
        await until_async(lambda: cluster.managers())
        await rig.condition("gate", "Accepted", "True", "Accepted")


async def test_what_was_deleted_while_nobody_looked_is_removed(kube):
    cluster = CameraCluster()
    for name, manager in (("old", KUBERNETES), ("kept", KUBERNETES), ("other", CLUSTER)):
        cluster.table.add(ManagedCamera(entry=CameraEntry(name=name), manager=manager, uid=""), 0.0)
    kube.apply("kept", {})
    kube.refuse["list"] = [503, 403]
    async with Rig(kube, cluster):
        await until_async(lambda: cluster.managers() == {"kept": KUBERNETES, "other": CLUSTER})
        assert cluster.calls == [("remove", "old")]


async def test_a_camera_that_an_upgrade_left_out_follows_its_resource(kube):
    """Its stored settings are of no use: deleted, made anew or put right, its resource decides all the same."""
    cluster = CameraCluster()
    unusable = {"window": {"stride_s": 1000}}
    names = {"gone": "", "anew": "an-earlier-one", "right": "", "wrong": ""}
    cluster.table.load(
        [
            ManagedCamera(
                entry=CameraEntry.model_validate({"name": name, **unusable}), manager=KUBERNETES, uid=uid, life=name
            )
            for name, uid in names.items()
        ],
        0.0,
    )
    assert cluster.table.left_out == {name: name for name in names}
    kube.apply("anew", {})
    kube.apply("right", {})
    kube.apply("wrong", {"window": {"strideSeconds": 1000}})
    async with Rig(kube, cluster) as rig:
        await rig.condition("wrong", "Accepted", "False", "Invalid")
        await until_async(lambda: cluster.managers() == {"anew": KUBERNETES, "right": KUBERNETES})
        await until_async(lambda: cluster.table.left_out == {"wrong": "wrong"})
    assert cluster.directory.status("right").life == "right"
    assert cluster.directory.status("anew").life != "anew"


async def test_no_room_is_said_and_tried_again(kube):
    cluster = CameraCluster()
    cluster.refuse = CapacityError("the fleet is full")
    kube.apply("gate", {})
    async with Rig(kube, cluster) as rig:
        assert await rig.condition("gate", "Accepted", "False", "NoRoom") == "the fleet is full"
        cluster.refuse = None
        await rig.condition("gate", "Accepted", "True", "Accepted")


async def test_a_camera_that_cannot_be_stored_now_keeps_no_status_of_the_others(kube):
    cluster = CameraCluster()
    kube.apply("gate", {})
    async with Rig(kube, cluster) as rig:
        await rig.condition("gate", "Accepted", "True", "Accepted")
        cluster.refuse = UnavailableError("the cameras cannot be written: the disk is full")
        kube.apply("yard", {})
        await until_async(lambda: cluster.calls.count(("add", "yard")) > 2)
        cluster.running("gate")
        await rig.condition("gate", "Running", "True", "Running")
        cluster.refuse = None
        await rig.condition("yard", "Accepted", "True", "Accepted")


async def test_a_controller_that_restarts_is_waited_for(kube):
    cluster = CameraCluster()
    cluster.away = True
    kube.apply("gate", {})
    async with Rig(kube, cluster):
        await asyncio.sleep(0.3)
        assert not cluster.calls
        cluster.away = False
        await until_async(lambda: cluster.managers() == {"gate": KUBERNETES})


async def test_conflicting_writes_of_a_status_are_read_again_and_repeated(kube):
    cluster = CameraCluster()
    kube.apply("gate", {})
    kube.conflicts = 2
    async with Rig(kube, cluster) as rig:
        await rig.condition("gate", "Accepted", "True", "Accepted")
        assert kube.objects["gate"]["metadata"]["labels"], "the other one's label is still there"
        assert kube.conflicts == 0


async def test_statuses_are_written_when_something_changed_and_not_more_often_than_said(kube):
    cluster = CameraCluster()
    names = [f"cam-{number}" for number in range(6)]
    for name in names:
        kube.apply(name, {})
    # Two writes a turn: everybody gets one in three turns, and no one a second one before that.
    async with Rig(kube, cluster, status_per_s=20, status_s=0.1):
        await until_async(lambda: len(kube.status_writes) >= 6)
        assert sorted(name for name, _ in kube.status_writes[:6]) == names
        await asyncio.sleep(0.3)
        settled = len(kube.status_writes)
        for number in range(20):
            cluster.answered("cam-0", LastAnswer("person", number / 20, False, number))
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert len(kube.status_writes) == settled, "figures alone wait for status_refresh_s"
        cluster.running("cam-0")
        await until_async(lambda: kube.status("cam-0")["state"] == "running")
        assert len(kube.status_writes) == settled + 1


async def test_a_reconciler_that_starts_again_writes_no_status_that_is_right(kube):
    cluster = CameraCluster()
    names = [f"cam-{number}" for number in range(3)]
    for name in names:
        kube.apply(name, {})
    async with Rig(kube, cluster) as rig:
        for name in names:
            await rig.condition(name, "Running", "False", "Waiting")
        await asyncio.sleep(0.3)
    settled = len(kube.status_writes)
    kube.apply("late", {})
    async with Rig(kube, cluster) as rig:
        await rig.condition("late", "Accepted", "True", "Accepted")
    assert {name for name, _ in kube.status_writes[settled:]} == {"late"}


async def test_a_server_that_takes_no_status_is_not_asked_for_each_camera(kube, caplog):
    cluster = CameraCluster()
    for number in range(12):
        kube.apply(f"cam-{number}", {})
    kube.refuse["status"] = [500] * 8
    async with Rig(kube, cluster):
        await until_async(lambda: not kube.refuse["status"])
        await until_async(lambda: all(kube.status(name) for name in kube.objects))
    rounds = [record.created for record in caplog.records if "cannot write the status" in record.message]
    assert len(rounds) == 8
    assert rounds[4] - rounds[3] > 0.05, "four at a time, then it waits for the next round"


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("apply"), st.sampled_from("abc"), st.sampled_from(["critical", "normal", "background"])),
        st.tuples(st.just("nonsense"), st.sampled_from("abc"), st.none()),
        st.tuples(st.just("delete"), st.sampled_from("abc"), st.none()),
        st.tuples(st.just("disconnect"), st.none(), st.none()),
        st.tuples(st.just("expire"), st.none(), st.none()),
        st.tuples(st.just("away"), st.booleans(), st.none()),
        st.tuples(st.just("pause"), st.none(), st.none()),
    ),
    max_size=15,
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=ACTS)
def test_whatever_happens_the_cameras_end_like_the_resources(kube, acts):
    async def play():
        cluster = CameraCluster()
        async with Rig(kube, cluster, status_s=0.1) as rig:
            for act, what, value in acts:
                if act == "apply":
                    kube.apply(what, {"priority": value})
                elif act == "nonsense":
                    kube.apply(what, {"priority": 7})
                elif act == "delete":
                    kube.delete(what)
                elif act == "away":
                    cluster.away = what
                elif act == "pause":
                    await asyncio.sleep(0.02)
                else:
                    getattr(kube, act)()
            cluster.away = False
            right = {
                name: body["spec"]["priority"] for name, body in kube.objects.items() if body["spec"]["priority"] != 7
            }
            wrong = kube.objects.keys() - right.keys()

            def same():
                found = cluster.priorities()
                return {
                    n: p for n, p in found.items() if n not in wrong
                } == right and found.keys() <= kube.objects.keys()

            await until_async(same, acts)
            for name in wrong:
                await rig.condition(name, "Accepted", "False", "Invalid")

    with contextlib.suppress(AssertionError):
        for name in list(kube.objects):
            kube.delete(name)
    asyncio.run(play())
