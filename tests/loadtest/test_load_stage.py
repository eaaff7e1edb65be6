"""The whole generator against a toy cluster: real sockets, and every fate that a window can have."""

import asyncio
import math
import signal
import subprocess
import time
from dataclasses import replace
from itertools import pairwise

import psutil
import pytest
from toy_cluster import STRIDE_S, ToyCluster, footage, profile
from waiting import until_async

from cluster.config import parse_camera
from cluster.control.cameras.managed import ManagedCamera, written_keys
from cluster.errors import CapacityError, ConfigError, SightlineError, UnavailableError
from loadtest.faults import inject
from loadtest.profile import Storm, script
from loadtest.run import city, run_search, run_test
from loadtest.search import Search, Try
from loadtest.stage import on_stage
from loadtest.target import Target

CLIPS = {"busy": footage()}

# For tests that fail where an answer takes longer than a stride.
LONG_STRIDE_S = 0.5


@pytest.fixture(autouse=True)
def near(monkeypatch):
    """Cameras of this machine connect at once."""
    monkeypatch.setattr("loadtest.fleet.CONNECT_S", 0.1)


@pytest.fixture
def unhurried(monkeypatch):
    """A machine that is busy with other tests is not the limit."""
    monkeypatch.setattr("loadtest.stage.LATE_S", 2.0)


async def test_a_cluster_that_answers_everything_is_stable(unhurried) -> None:
    toy, ticks = ToyCluster(stride_s=LONG_STRIDE_S), []
    async with toy.target() as target:
        found = await run_test(target, profile(warmup_s=0.6, measure_s=1.5), CLIPS, on_tick=ticks.append)
    measured = found.measurement
    assert measured.verdict.stable, measured.verdict
    assert measured.streams == 4
    assert measured.due == measured.answered >= 4 * 4
    assert (measured.silent, measured.given_up, measured.missing, measured.failures) == (0, 0, 0, ())
    assert -0.1 < measured.lag.p50 < LONG_STRIDE_S
    # A moment of a stride waits for half of it on average, and for the answer.
    assert LONG_STRIDE_S / 4 < measured.alert.p50 - measured.lag.p50 < LONG_STRIDE_S
    assert measured.tokens["full"] == 100 * measured.measured
    assert [tick.streams for tick in ticks][-1] == 4
    assert measured.packets > 0 == measured.packets_dropped
    written = written_keys(toy.entries["load-00000"])
    assert (written.get("source"), written["questions"][0]["id"]) == (None, "person")
    assert written["window"]["stride_s"] == LONG_STRIDE_S


async def test_a_simulation_is_told_every_cameras_phase() -> None:
    async with ToyCluster().target() as target:
        target = replace(target, config=target.config.model_copy(update={"engine": "simulated"}))
        found = await run_test(target, profile(), CLIPS)
    assert found.city is not None
    assert [each["share"] for each in found.city["mix"]["classes"]] == [4]
    assert found.city["phases"] == [script(profile(), number).phase for number in range(4)]


async def test_windows_that_vanish_are_found_and_windows_that_are_counted_are_not_silent() -> None:
    toy = ToyCluster(lambda camera, window: {2: "lose", 3: "drop"}.get(window, 0.0) if camera == "load-00001" else 0.0)
    async with toy.target() as target, stage_on(target) as stage:
        await stage.warm_up(4)
        mark = await stage.mark()
        await until_async(lambda: toy.cameras["load-00001"].window > 4)
        found = await stage.conclude(mark)
    assert (found.silent, found.given_up) == (1, 1)
    assert found.due == found.answered + 2
    assert not found.verdict.stable
    assert any("neither answered nor counted" in reason for reason in found.verdict.reasons)


async def test_late_answers_are_the_clusters_limit() -> None:
    toy = ToyCluster(lambda *_: 2 * STRIDE_S)
    async with toy.target() as target:
        found = (await run_test(target, profile(warmup_s=0.9), CLIPS)).measurement
    assert found.lag.p50 > STRIDE_S
    assert found.silent == 0, "late is not lost"
    assert (found.verdict.stable, found.verdict.limit) == (False, "cluster")
    assert found.on_time == 0


async def test_a_generator_that_stalls_says_that_it_was_the_limit() -> None:
    toy = ToyCluster()
    async with toy.target() as target, stage_on(target) as stage:
        await stage.warm_up(4)
        # From now on no tick comes for a second.
        ticks = len(stage.ticks)
        await until_async(lambda: len(stage.ticks) > ticks)
        mark = await stage.mark()
        await asyncio.sleep(0.2)
        # What a machine without time for the generator does to it.
        time.sleep(0.4)  # noqa: ASYNC251
        await asyncio.sleep(0.1)
        verdict = (await stage.conclude(mark)).verdict
    assert (verdict.stable, verdict.limit) == (False, "generator")
    assert any("outpaced by its own machine" in reason for reason in verdict.reasons)


def stage_on(target: Target, **changes):
    return on_stage(target, profile(**changes), CLIPS)


async def test_phases_are_kept_and_packets_go_on_without_holes() -> None:
    toy = ToyCluster()
    async with toy.target() as target, stage_on(target, phases="even") as stage:
        await stage.warm_up(4)
        begins = sorted(camera.ledger.began_s % STRIDE_S for camera in stage.fleet.cameras.values())
        gaps = [b - a for a, b in pairwise(begins)]
        assert gaps == pytest.approx([STRIDE_S / 4] * 3)
        await until_async(lambda: all(len(camera.packets) > 10 for camera in toy.cameras.values()))
        for camera in toy.cameras.values():
            assert camera.packets == list(range(len(camera.packets)))


async def test_connections_that_break_come_back_and_lose_nothing() -> None:
    toy = ToyCluster(stride_s=LONG_STRIDE_S)
    async with toy.target() as target, stage_on(target) as stage:
        await stage.warm_up(3)
        mark = await stage.mark()
        assert len(stage.fleet.storm(1.0)) == 3
        await until_async(lambda: all(len(camera.sessions) == 2 for camera in toy.cameras.values()))
        # A window that is in flight for less than the slowest answer took would be missing.
        cameras = stage.fleet.everyone()
        await until_async(lambda: all(slot.seen_s for each in cameras for slot in each.ledger.slots(time.monotonic())))
        found = await stage.conclude(mark)
        assert found.reconnects == 3
        assert (found.silent, found.missing) == (0, 0)
        for camera in toy.cameras.values():
            assert camera.packets == list(range(len(camera.packets)))
            assert len(camera.sessions) == 2
            assert len(set(camera.sessions)) == 1


async def test_a_profile_brings_storms_churn_and_losses() -> None:
    toy = ToyCluster()
    weather = {"storm": Storm(every_s=0.6, share=0.5), "churn_per_min": 1.0, "loss": 0.2, "streams": 30}
    async with toy.target() as target, stage_on(target, **weather) as stage:
        await stage.warm_up(30)
        mark = await stage.mark()
        await until_async(lambda: (stage.fleet.sent() - mark.sent)["reconnects"] >= 15)
        await until_async(lambda: len(toy.added) > 30, "somebody leaves and another comes")
        found = await stage.conclude(mark)
    assert found.packets_lost > 0.1 * found.packets
    # The one that left and the one that came may have had no window in the meantime.
    assert found.streams >= 29
    assert (found.silent, found.failures) == (0, ())


async def test_a_camera_leaves_once() -> None:
    toy = ToyCluster()
    async with toy.target() as target, stage_on(target) as stage:
        await stage.warm_up(1)
        await asyncio.gather(stage.fleet.replace_one(), stage.fleet.replace_one())
        assert toy.added == ["load-00000", "load-00001"]


async def test_cameras_come_and_go_while_the_gateway_restarts(unhurried) -> None:
    """As with churn beside ``kill-gateway``: who cannot reach it asks again."""
    toy = ToyCluster()
    async with toy.target() as target, stage_on(target) as stage:
        await stage.warm_up(2)
        get, away = toy.get_camera, iter([True, True])

        async def restarting(name):
            if name != "load-00002" and next(away, False):
                raise UnavailableError("the gateway restarts")
            return await get(name)

        toy.get_camera = restarting
        await stage.fleet.replace_one()
        assert (len(stage.fleet.cameras), len(toy.added)) == (2, 3)
        found = await stage.conclude(await stage.mark())
    assert (found.silent, found.failures) == (0, ())


async def test_packets_of_a_camera_that_leaves_stay_counted() -> None:
    async with ToyCluster().target() as target, stage_on(target) as stage:
        await stage.warm_up(2)
        before = stage.fleet.sent()
        leaving = asyncio.create_task(stage.fleet.shrink(1))
        await asyncio.sleep(0.1)
        assert stage.fleet.sent()["packets"] >= before["packets"] > 0
        await leaving
        assert stage.fleet.sent()["packets"] >= before["packets"]


async def test_a_simulation_is_told_how_many_cameras_there_were_at_a_time() -> None:
    async with ToyCluster().target() as target, stage_on(target) as stage:
        await stage.warm_up(3)
        await stage.fleet.replace_one()
        await asyncio.sleep(max(camera.ledger.began_s for camera in stage.fleet.everyone()) - time.monotonic())
        found = city(stage, await stage.measure(0.75))
    assert [each["share"] for each in found["mix"]["classes"]] == [3]


async def test_cameras_of_a_cluster_of_somebody_elses_are_gone_afterwards() -> None:
    toy = ToyCluster()
    async with toy.target(own=False) as target, stage_on(target) as stage:
        await stage.warm_up(3)
        await stage.warm_up(1)
        assert list(toy.cameras) == ["load-00000"]
        assert len(stage.fleet.everyone()) == 3
    assert toy.cameras == {}


async def test_nor_does_a_test_that_ends_early_leave_cameras_there() -> None:
    toy = ToyCluster()
    add = toy.add_camera

    async def full(managed, *given, **options):
        if managed.entry.name == "load-00002":
            raise CapacityError("the cluster is full")
        return await add(managed, *given, **options)

    toy.add_camera = full
    async with toy.target(own=False) as target:
        with pytest.raises(CapacityError, match="full"):
            await run_test(target, profile(), CLIPS)
        assert (len(toy.added), toy.cameras) == (3, {})
        async with stage_on(target) as stage:
            await stage.warm_up(2)
            leaving = asyncio.create_task(stage.fleet.replace_one())
            await asyncio.sleep(0.1)
            leaving.cancel()
        assert toy.cameras == {}


async def test_nobody_there_and_a_refused_camera_end_it_with_a_sentence(monkeypatch) -> None:
    monkeypatch.setattr("loadtest.stage.READY_S", 1.0)
    toy = ToyCluster()
    async with toy.target() as target:
        nobody = Target("127.0.0.1:1", None, target.config, dict, own=False)
        with pytest.raises(UnavailableError, match="no Sightline gateway answers at 127"):
            async with asyncio.timeout(40):
                await run_test(nobody, profile(), CLIPS)
        await toy.add_camera(ManagedCamera(entry=parse_camera("taken")))
        async with stage_on(target) as stage:
            await stage.fleet.grow(1)
            del toy.cameras["load-00000"]
            stage.fleet.storm(1.0)
            await until_async(lambda: stage.fleet.failures)
            assert "load-00000" in stage.fleet.failures[0]


async def test_an_agent_that_breaks_is_no_loss_of_the_cluster(monkeypatch) -> None:
    async def broken(self) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr("loadtest.agent.FedAgent.run", broken)
    async with ToyCluster().target() as target, stage_on(target) as stage:
        await stage.fleet.grow(1)
        await until_async(lambda: stage.fleet.failures)
    assert stage.fleet.failures == ["load-00000: RuntimeError('no such thing')"]


async def test_the_search_finds_where_answers_begin_to_be_late(unhurried) -> None:
    """One camera is answered in time, more are not."""
    toy = ToyCluster(stride_s=LONG_STRIDE_S)
    toy.fate = lambda *_: 0.0 if len(toy.cameras) <= 1 else 2 * LONG_STRIDE_S
    search = Search(first=1, most=64)
    tried, saved = [], []
    async with toy.target() as target:
        quick = profile(warmup_s=0.6, measure_s=0.6)
        found = await run_search(
            target,
            quick,
            CLIPS,
            search,
            save=lambda: saved.append(len(search.tries)),
            on_result=lambda one, _: tried.append(one),
        )
    assert (found.streams, found.limit, found.silent) == (1, "cluster", 0)
    assert [each.streams for each in tried][:3] == [1, 1, 2]
    assert saved == list(range(1, len(tried) + 1))
    assert found.best is not None
    assert found.best.streams == 1
    # From one start to the next, which its charts show in a row.
    assert [tick.at_s for tick in found.ticks] == sorted(tick.at_s for tick in found.ticks)


async def test_what_too_many_cameras_lost_does_not_count_against_fewer(unhurried, monkeypatch) -> None:
    monkeypatch.setattr("loadtest.fleet.LEAVE_S", 0.0)
    toy = ToyCluster(stride_s=LONG_STRIDE_S)
    toy.fate = lambda *_: "lose" if len(toy.cameras) > 1 else 0.0
    async with toy.target(heartbeat_s=0.1) as target:
        quick = profile(warmup_s=0.6, measure_s=0.6)
        search = Search(first=2, most=64)
        found = await run_search(target, quick, CLIPS, search)
        resumed = await run_search(target, quick, CLIPS, search)
    assert (found.streams, found.limit) == (1, "cluster")
    assert found.silent > 0
    assert resumed.silent == found.silent, "what was lost before an interruption was lost"


async def test_a_running_cluster_has_the_replicas_that_its_gateway_lists() -> None:
    # A search that was finished before.
    toy, search = ToyCluster(), Search(tries=[Try(1, False, "coarse")])
    for own, number in ((False, 3), (True, 1)):
        async with toy.target(own=own) as target:
            assert await asyncio.to_thread(target.replicas) == number
            if not own:
                found = await run_search(target, profile(), CLIPS, search)
                assert found.replicas == 3


def bystander() -> subprocess.Popen[bytes]:
    """A process to do things to."""
    return subprocess.Popen(["sleep", "600"])


# -- faults -------------------------------------------------------------------------------------
async def test_recovery_is_when_the_last_camera_is_on_time_again() -> None:
    """A process that stops for three seconds; while it does, the cluster answers nothing."""
    victim = bystander()
    toy = ToyCluster(stride_s=LONG_STRIDE_S)

    def stopped() -> bool:
        return psutil.Process(victim.pid).status() == psutil.STATUS_STOPPED

    toy.fate = lambda *_: "drop" if stopped() else 0.0
    try:
        async with toy.target(processes=lambda: {"replica-0": victim.pid}) as target, stage_on(target) as stage:
            await stage.warm_up(4)
            found = await inject(stage, "freeze-replica")
            assert not stopped()
    finally:
        victim.kill()
        victim.wait()
    assert (found.victim, found.struck) == ("replica-0", 4)
    # Frozen for three seconds, then one more stride until the next window ends.
    assert 3.0 < found.recovery_s < 3.0 + 2 * LONG_STRIDE_S + 0.5


async def test_a_fault_that_nobody_notices_is_over_with_the_next_window() -> None:
    victim = bystander()
    toy = ToyCluster(stride_s=LONG_STRIDE_S)
    async with toy.target(processes=lambda: {"controller": victim.pid}) as target, stage_on(target) as stage:
        await stage.warm_up(4)
        found = await inject(stage, "kill-controller")
    assert victim.wait(5) == -signal.SIGKILL
    # A stride, and what a busy machine adds.
    assert found.recovery_s < 3.0
    assert found.struck == 4


async def test_a_struck_camera_that_leaves_is_not_waited_for() -> None:
    toy = ToyCluster()
    async with toy.target() as target, stage_on(target) as stage:
        await stage.warm_up(3)
        toy.fate = lambda camera, _: "drop" if camera == "load-00000" else 0.0
        struck = asyncio.create_task(inject(stage, "cut-connections"))
        await asyncio.sleep(0.1)
        await stage.fleet.remove("load-00000")
        assert (await struck).recovery_s < 4.0
        # Nobody is left to tell whether it is over, so there is nothing to wait for.
        struck = asyncio.create_task(inject(stage, "cut-connections"))
        await asyncio.sleep(0.1)
        await stage.fleet.shrink(0)
        async with asyncio.timeout(20):
            assert math.isinf((await struck).recovery_s)


async def test_what_never_recovers_is_said_to_after_a_while(monkeypatch) -> None:
    monkeypatch.setattr("loadtest.faults.PATIENCE_S", 1.0)
    monkeypatch.setattr("loadtest.faults.PATIENCE_STRIDES", 0.0)
    toy = ToyCluster()
    async with toy.target() as target, stage_on(target) as stage:
        await stage.warm_up(2)
        toy.fate = lambda *_: "drop"
        found = await inject(stage, "cut-connections")
    assert math.isinf(found.recovery_s)


async def test_faults_that_cannot_be_done_are_refused(tmp_path) -> None:
    toy = ToyCluster()
    async with toy.target(own=False) as target, stage_on(target) as stage:
        await stage.warm_up(1)
        with pytest.raises(ConfigError, match="started by the load test"):
            await inject(stage, "kill-replica")
        assert (await inject(stage, "cut-connections")).victim == "every connection"
    async with toy.target() as target, stage_on(target) as stage:
        await stage.warm_up(1)
        with pytest.raises(SightlineError, match="no replica serves a camera"):
            await inject(stage, "kill-replica")
        with pytest.raises(SightlineError, match="no process 'redis'"):
            await inject(stage, "kill-redis")
