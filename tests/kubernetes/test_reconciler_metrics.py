"""What the reconciler shows of itself, against a server that breaks: states, passes, changes, watches and ages."""

import asyncio
import math
import time
import urllib.request
from collections import Counter

import pytest
from camera_cluster import CLUSTER, CameraCluster
from kube_server import KubeServer
from reconciler_rig import Rig
from waiting import until_async

from actors import reconciler
from cluster import metrics
from cluster.config import CameraEntry, load_config
from cluster.control.cameras.managed import ManagedCamera
from cluster.errors import CapacityError
from cluster.kubernetes.watch import CameraWatch


def value(name, **labels):
    return metrics.REGISTRY.get_sample_value(f"sightline_{name}", labels) or 0.0


def states():
    return {state: value("camera_resources", state=state) for state in ("accepted", "conflict", "invalid", "no_room")}


class Grown:
    """By how much a series grew since this was made; other tests count in the same process."""

    def __init__(self, name, label):
        self._name, self._label = name, label
        self._before = self._now()

    def _now(self):
        samples = [each for family in metrics.REGISTRY.collect() for each in family.samples]
        name = f"sightline_{self._name}"
        return Counter({each.labels[self._label]: int(each.value) for each in samples if each.name == name})

    def __call__(self):
        return dict(self._now() - self._before)


async def test_resources_are_shown_by_what_became_of_them(kube):
    cluster = CameraCluster()
    cluster.table.add(ManagedCamera(entry=CameraEntry(name="dock"), manager=CLUSTER), 0.0)
    kube.apply("gate", {})
    kube.apply("dock", {})
    kube.apply("yard", {"priority": 7})
    passes = Grown("reconciler_pass_seconds_count", "result")
    async with Rig(kube, cluster):
        await until_async(lambda: states() == {"accepted": 1, "conflict": 1, "invalid": 1, "no_room": 0}, states)
        cluster.refuse = CapacityError("the fleet is full")
        kube.apply("late", {})
        await until_async(lambda: states() == {"accepted": 1, "conflict": 1, "invalid": 1, "no_room": 1}, states)
        assert passes().keys() == {"done"}
        cluster.away = True
        kube.apply("later", {})
        await until_async(lambda: value("camera_resources", state="waiting") == 1, states)
        assert passes().keys() == {"done", "unavailable"}
        cluster.away, cluster.refuse = False, None
        for name in ("dock", "yard"):
            kube.delete(name)
        await until_async(lambda: states() == {"accepted": 3, "conflict": 0, "invalid": 0, "no_room": 0}, states)
        assert value("camera_resources", state="waiting") == 0


async def test_a_defect_met_with_one_camera_counts_as_a_failed_pass(kube):
    cluster = CameraCluster()
    cluster.refuse = RuntimeError("a defect")
    kube.apply("gate", {})
    passes = Grown("reconciler_pass_seconds_count", "result")
    async with Rig(kube, cluster):
        await until_async(lambda: passes().get("failed", 0) >= 1, passes)
        assert value("camera_resources", state="waiting") == 1
        cluster.refuse = None
        await until_async(lambda: states()["accepted"] == 1, states)


async def test_changes_and_statuses_are_those_that_the_cluster_and_the_server_saw(kube):
    cluster = CameraCluster()
    changes, writes = Grown("reconciler_changes_total", "change"), Grown("reconciler_status_writes_total", "result")
    kube.apply("gate", {})
    kube.apply("yard", {})
    kube.conflicts = 2
    async with Rig(kube, cluster) as rig:
        for name in ("gate", "yard"):
            await rig.condition(name, "Accepted", "True", "Accepted")
        kube.refuse["status"] = [500] * 3
        kube.apply("gate", {"priority": "critical"})
        await until_async(lambda: not kube.refuse["status"])
        kube.delete("yard")
        await until_async(lambda: list(cluster.managers()) == ["gate"])
        await until_async(lambda: writes()["written"] == len(kube.status_writes), writes)
    assert changes() == {"added": 2, "changed": 1, "removed": 1}
    found = writes()
    assert found["conflict"] >= 2
    assert found["failed"] == 3


async def test_a_watch_that_broke_and_one_that_expired(kube):
    restarts = Grown("reconciler_watch_restarts_total", "reason")
    kube.apply("gate", {})
    async with Rig(kube, CameraCluster()) as rig:
        await until_async(lambda: rig.watch.snapshot())
        # Again, where it came before the watch was open.
        await until_async(lambda: kube.disconnect() or "broken" in restarts(), restarts)
        assert "expired" not in restarts()
        await until_async(lambda: kube.expire() or "expired" in restarts(), restarts)
        await until_async(lambda: kube.lists >= 2)
    assert restarts().keys() == {"broken", "expired"}, "to stop it is no restart"


class Source:
    """Lists nothing, and then plays the given watches: each ends or raises; after them it says nothing."""

    def __init__(self, *watches):
        self.watches = list(watches)
        self.closed = False

    def list(self):
        return [], "1"

    def watch(self, version):
        if not self.watches:
            while not self.closed:
                time.sleep(0.005)
            return
        error = self.watches.pop(0)
        if error is not None:
            raise error
        yield "BOOKMARK", version

    def close(self):
        self.closed = True


async def test_a_watch_that_ended_in_good_order_and_one_that_met_a_defect():
    restarts = Grown("reconciler_watch_restarts_total", "reason")
    source = Source(None, RuntimeError("a defect"), None)
    watch = CameraWatch(source, lambda: None, wait_s=(0.01, 0.05))
    watch.start()
    await until_async(lambda: restarts() == {"ended": 2, "failed": 1}, restarts)
    assert await asyncio.to_thread(watch.stop)


def ages():
    return tuple(value("reconciler_age_seconds", since=since) for since in ("list", "word"))


def test_ages_are_infinite_before_the_first_list_and_of_each_thing_its_own():
    now = [100.0]
    watch = metrics.WatchMetrics(clock=lambda: now[0])
    assert ages() == (math.inf, math.inf)
    now[0] = 103.0
    watch.listed()
    now[0] = 110.0
    assert ages() == (7.0, 7.0)
    watch.server_responded()
    now[0] = 112.0
    assert ages() == (9.0, 2.0)


async def test_a_server_that_goes_on_talking_is_heard_and_one_that_refuses_is_not(kube):
    async with Rig(kube, CameraCluster()):
        # Bookmarks come all the time; nothing is listed again.
        await until_async(lambda: ages()[1] + 0.2 < ages()[0] < math.inf, ages)
    kube.refuse["list"] = [403] * 1000
    async with Rig(kube, CameraCluster()) as rig:
        await until_async(lambda: rig.watch.trouble)
        assert ages() == (math.inf, math.inf)


async def test_the_actor_has_a_page_from_its_start_on_until_it_stops(kube: KubeServer, monkeypatch):
    monkeypatch.setattr("actors.startup.configure_logging", lambda *_, **__: None)
    kube.refuse["list"] = [403] * 1000
    keys = {"enabled": True, "kubeconfig": str(kube.kubeconfig)}
    running = reconciler.ReconcilerActor(load_config(None, {"kubernetes": keys}), "127.0.0.1")
    page = f"http://{await running.metrics_address()}/metrics"

    def scrape():
        with urllib.request.urlopen(page, timeout=20) as reply:
            return reply.read().decode()

    assert await running.ready()
    text = await asyncio.to_thread(scrape)
    assert 'sightline_reconciler_age_seconds{process="reconciler",since="word"} +Inf' in text
    assert 'sightline_reconciler_watch_restarts_total{process="reconciler",reason="expired"}' in text
    assert 'sightline_camera_resources{process="reconciler",state="no_room"}' in text
    await running.stop()
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(scrape)
