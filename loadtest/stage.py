"""A running load test: the fleet, the listener for answers, and a sample of everything once a second."""

import asyncio
import contextlib
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, fields

from cluster.errors import UnavailableError
from cluster.lab.bench.window_accounting import Account, alert_times, percentile, within
from cluster.types import Answer
from loadtest.fleet import Fleet
from loadtest.footage import Footage
from loadtest.machine import Machine, Page, fetch, grown, level
from loadtest.profile import Profile
from loadtest.result import LATE_S, Measurement, Spread, Tick, occupancy
from loadtest.rtsp import RtspCameras, reachable_from
from loadtest.target import Listener, Target

READY_S = 15.0
PROCESSES_EVERY, RUNGS_EVERY = 5, 10
SETTLE_STRIDES = 2.0
CHURN_S = 0.25
TOKEN_KINDS = ("full", "kept", "reused", "refreshed", "new", "query", "encoded")


@dataclass(frozen=True, slots=True)
class Mark:
    """Start of a measurement: time, and the counters at that time."""

    at_s: float
    sent: Counter[str]
    page: Page


class Stage:
    """A running load test, made by :func:`on_stage`; call all methods on its event loop. ``ticks``: one per second."""

    def __init__(self, target: Target, fleet: Fleet, on_tick: Callable[[Tick], None]) -> None:
        self.target, self.fleet = target, fleet
        self.profile, self.stride_s = fleet.profile, fleet.stride_s
        self.listener = Listener(target.gateway, self._saw, credentials=target.credentials)
        self.ticks: list[Tick] = []
        self.began_s = time.monotonic()
        self.processes: dict[str, int] = {}
        self._on_tick = on_tick
        self._recent: list[float] = []
        self._slowest_s = 0.0
        self._late: array[float] = array("d")
        self._machine = Machine()

    # -- measuring ------------------------------------------------------------------------------
    async def warm_up(self, streams: int) -> None:
        """Bring the fleet to ``streams`` cameras and wait for the warm-up, by default until windows are full."""
        if streams < len(self.fleet.cameras):
            await self.fleet.shrink(streams)
        begun_s = await self.fleet.grow(streams)
        warmup_s = self.profile.warmup_s
        if warmup_s is None:
            warmup_s = self.target.config.window.length_s + self.stride_s
        await asyncio.sleep(max(0.0, begun_s - time.monotonic()) + warmup_s)

    async def measure(self, seconds: float) -> Measurement:
        """Measure for ``seconds``, then wait until all due windows are accounted for."""
        mark = await self.mark()
        await asyncio.sleep(seconds)
        return await self.conclude(mark)

    async def mark(self) -> Mark:
        """Start a measurement."""
        page = await self._page()
        self.fleet.pacer.take_lateness()
        self._late = array("d")
        return Mark(time.monotonic(), self.fleet.sent(), page)

    async def conclude(self, mark: Mark) -> Measurement:
        """Conclude the measurement from ``mark`` until now, after waiting for due windows (:meth:`settle`)."""
        until_s, sent = time.monotonic(), self.fleet.sent()
        sent.subtract(mark.sent)
        late = sorted([*self._late, *self.fleet.pacer.take_lateness()])
        await self.settle(until_s)
        from_s, began_s, stride_s = mark.at_s, self.began_s, self.stride_s
        cameras = self.fleet.everyone()
        every = [camera.ledger.slots(until_s) for camera in cameras]
        accounts = self._accounts(until_s)
        total = {each.name: sum(getattr(one, each.name) for one in accounts) for each in fields(Account)}
        inside = [slot for slots in every for slot in within(slots, from_s, until_s)]
        seen = [slot for slot in inside if slot.seen_s is not None]
        alerts: list[float] = []
        for camera, slots in zip(cameras, every, strict=True):
            # Only windows that are due later can show what begins in the last stride.
            end_s = min(until_s, camera.ledger.until_s) - stride_s
            alerts += alert_times(slots, stride_s, max(from_s, camera.ledger.began_s), end_s)
        return Measurement(
            streams=sum(camera.ledger.until_s >= until_s for camera in cameras),
            stride_s=stride_s,
            from_s=from_s - began_s,
            until_s=until_s - began_s,
            answered=total.pop("seen"),
            **total,
            measured=len(inside),
            missing=len(inside) - len(seen),
            on_time=sum(slot.lag_s <= stride_s for slot in seen),
            gated=sum(slot.gated for slot in seen),
            lag=Spread.of([slot.lag_s for slot in inside]),
            alert=Spread.of(alerts),
            replica=Spread.of([slot.latency_s for slot in seen if not slot.gated]),
            late=Spread.of(late),
            late_share=sum(seconds > LATE_S for seconds in late) / max(1, len(late)),
            packets=sent["packets"],
            packets_dropped=sent["dropped"],
            packets_refused=sent["cluster_dropped"],
            packets_lost=sent["lost"],
            reconnects=sent["reconnects"],
            missed_answers=self.listener.missed,
            breaks=self.listener.breaks,
            tokens={kind: sum(getattr(slot.tokens, kind, 0) for slot in seen) for kind in TOKEN_KINDS},
            lost=_lost(mark.page, await self._page()),
            failures=tuple(self.fleet.failures),
            rungs=occupancy([tick for tick in self.ticks if tick.at_s + began_s >= from_s]),
            unaccounted={
                camera.name: tuple(round(slot.end_s - began_s, 2) for slot in slots if slot.seen_s is None)
                for camera, slots, each in zip(cameras, every, accounts, strict=True)
                if each.silent or each.extra
            },
        )

    async def settle(self, until_s: float) -> None:
        """Wait until every window due by ``until_s`` is answered, counted, or in flight for no longer than the slowest
        answer took; at most two strides and two heartbeats."""
        heartbeat_s = self.target.config.cluster.heartbeat_s
        deadline_s = until_s + SETTLE_STRIDES * self.stride_s + 2 * heartbeat_s
        while True:
            # Try again if the gateway is restarting.
            with contextlib.suppress(UnavailableError):
                await self.fleet.statuses()
            if time.monotonic() >= deadline_s or not any(each.silent for each in self._accounts(until_s)):
                return
            await asyncio.sleep(min(0.5, self.stride_s / 4))

    def _accounts(self, until_s: float) -> list[Account]:
        """Accounts of every camera's windows due by ``until_s``, in the order of :meth:`Fleet.everyone`.

        A window may be in flight for two strides longer than the slowest answer took, since lags may grow. If the
        cluster keeps up none may, as :meth:`settle` waits for its last answers.
        """
        stride_s, slowest_s = self.stride_s, self._slowest_s
        patience_s = slowest_s + SETTLE_STRIDES * stride_s if slowest_s > stride_s else 0.0
        listened, since_s = self.listener.complete, until_s - patience_s
        return [
            camera.account(camera.ledger.slots(until_s), listened=listened, since_s=since_s)
            for camera in self.fleet.everyone()
        ]

    async def refresh_processes(self) -> None:
        """Update ``processes``, their ids by name."""
        self.processes = await asyncio.to_thread(self.target.processes)

    # -- background tasks -----------------------------------------------------------------------
    def _saw(self, answer: Answer, seen_s: float) -> None:
        camera = self.fleet.saw(answer, seen_s)
        if camera is not None:
            lag_s = seen_s - camera.ledger.began_s - answer.end / 1e6
            self._recent.append(lag_s)
            self._slowest_s = max(self._slowest_s, lag_s)

    async def watch(self) -> None:
        """Record a tick every second, until cancelled."""
        sent, at_s, number = self.fleet.sent(), time.monotonic(), 0
        rungs: dict[str, float] = {}
        while True:
            await asyncio.sleep(1.0)
            if number % PROCESSES_EVERY == 0:
                await self.refresh_processes()
            if number % RUNGS_EVERY == 0:
                rungs = level(await self._page(), "sightline_ladder_cameras", "rung")
            number += 1
            late = self.fleet.pacer.take_lateness()
            self._late.extend(late)
            lags, self._recent = self._recent, []
            now, now_s = self.fleet.sent(), time.monotonic()
            use = await asyncio.to_thread(self._machine.look, self.processes)
            tick = Tick(
                at_s=now_s - self.began_s,
                streams=len(self.fleet.cameras),
                answers=len(lags),
                lag_p50_s=percentile(lags, 0.5),
                lag_p99_s=percentile(lags, 0.99),
                late_p99_s=percentile(list(late), 0.99),
                sent_bytes_s=(now["bytes"] - sent["bytes"]) / (now_s - at_s),
                use=use,
                rungs=rungs,
            )
            sent, at_s = now, now_s
            self.ticks.append(tick)
            self._on_tick(tick)

    async def storms(self) -> None:
        """Trigger the profile's storms, until cancelled."""
        storm = self.profile.storm
        while storm is not None:
            await asyncio.sleep(storm.every_s)
            self.fleet.storm(storm.share)

    async def churn(self) -> None:
        """Replace cameras at the profile's churn rate, until cancelled."""
        due = 0.0
        async with asyncio.TaskGroup() as group:
            while self.profile.churn_per_min:
                await asyncio.sleep(CHURN_S)
                due += self.profile.churn_per_min * len(self.fleet.cameras) * CHURN_S / 60
                for _ in range(int(due)):
                    group.create_task(self.fleet.replace_one())
                due %= 1

    async def _page(self) -> Page:
        if self.target.metrics is None:
            return {}
        return await asyncio.to_thread(fetch, self.target.metrics, self.target.credentials)


def _lost(before: Page, after: Page) -> dict[str, int]:
    lost: Counter[str] = grown(before, after, "sightline_windows_total", "reason", {"result": "dropped"})
    lost += grown(before, after, "sightline_windows_total", "result", {"result": "lost"})
    return dict(lost)


@contextlib.asynccontextmanager
async def on_stage(
    target: Target,
    profile: Profile,
    footage: Mapping[str, Footage],
    *,
    on_tick: Callable[[Tick], None] = lambda _: None,
    prefix: str = "load",
) -> AsyncIterator[Stage]:
    """Context of a running load test; stops its cameras on exit and removes them from a cluster it did not start.
    Raises ``UnavailableError``: no gateway answers."""
    rtsp = None
    if profile.transport == "rtsp":
        rtsp = RtspCameras() if target.own else RtspCameras("0.0.0.0", reachable_from(target.gateway))
        await rtsp.start()
    stage = Stage(target, Fleet(target, profile, footage, prefix=prefix, rtsp=rtsp), on_tick)
    try:
        async with asyncio.TaskGroup() as group:
            beside = (stage.listener.run(), stage.watch(), stage.storms(), stage.churn())
            parts = [group.create_task(part) for part in beside]
            try:
                await stage.listener.ready(READY_S)
                yield stage
            finally:
                for part in parts:
                    part.cancel()
                await asyncio.wait(parts)
                await stage.fleet.close(remove=not target.own)
                if rtsp is not None:
                    await rtsp.close()
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
