"""From the books of a fleet to the numbers of a measurement. No clock, no sockets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.lab.bench.window_accounting import CameraBooks, Slot, alert_times, within
from loadtest.fleet import Camera, Sent
from loadtest.result import LATE_S, Measurement, Spread, Tick

TOKEN_KINDS = ("full", "kept", "reused", "refreshed", "new", "query", "encoded")


@dataclass(frozen=True, slots=True)
class Span:
    """What was measured: ``[from_s, until_s)`` of the generator's clock, and what happened beside the windows.

    ``patience_s``: a window that was due for longer when the measurement ended is no longer on its way.
    """

    from_s: float
    until_s: float
    before: Sent
    after: Sent
    late: Sequence[float]
    lost: Mapping[str, int]
    missed_answers: int
    breaks: int
    failures: Sequence[str]
    rungs: Mapping[str, float]
    patience_s: float


def summarise(cameras: Sequence[Camera], span: Span, *, began_s: float, stride_s: float, listened: bool) -> Measurement:
    """See :class:`Measurement`; ``began_s``: when the test did; ``listened``: see :func:`account`."""
    from_s, until_s = span.from_s, span.until_s
    every = [(camera, camera.books.slots(until_s)) for camera in cameras]
    inside = [slot for _, slots in every for slot in within(slots, from_s, until_s)]
    seen = [slot for slot in inside if slot.seen_s is not None]
    # What begins in the last stride can only be told by a window that is due afterwards.
    alerts = [t for camera, slots in every for t in _alerts(camera.books, slots, from_s, until_s - stride_s)]
    since_s = until_s - span.patience_s
    accounts = [camera.account(slots, listened=listened, since_s=since_s) for camera, slots in every]
    unaccounted = {
        camera.name: tuple(round(slot.end_s - began_s, 2) for slot in slots if slot.seen_s is None)
        for (camera, slots), each in zip(every, accounts, strict=True)
        if each.silent or each.extra
    }
    return Measurement(
        streams=sum(camera.books.until_s >= until_s for camera in cameras),
        stride_s=stride_s,
        from_s=from_s - began_s,
        until_s=until_s - began_s,
        due=sum(each.due for each in accounts),
        answered=sum(each.seen for each in accounts),
        unseen=sum(each.unseen for each in accounts),
        given_up=sum(each.given_up for each in accounts),
        overdue=sum(each.overdue for each in accounts),
        silent=sum(each.silent for each in accounts),
        extra=sum(each.extra for each in accounts),
        measured=len(inside),
        missing=len(inside) - len(seen),
        on_time=sum(slot.lag_s <= stride_s for slot in seen),
        gated=sum(slot.gated for slot in seen),
        lag=Spread.of([slot.lag_s for slot in inside]),
        alert=Spread.of(alerts),
        replica=Spread.of([slot.latency_s for slot in seen if not slot.gated]),
        late=Spread.of(span.late),
        late_share=sum(seconds > LATE_S for seconds in span.late) / max(1, len(span.late)),
        packets=span.after.packets - span.before.packets,
        packets_dropped=span.after.dropped - span.before.dropped,
        packets_refused=span.after.refused - span.before.refused,
        packets_lost=span.after.lost - span.before.lost,
        reconnects=span.after.reconnects - span.before.reconnects,
        missed_answers=span.missed_answers,
        breaks=span.breaks,
        tokens={kind: sum(getattr(slot.tokens, kind, 0) for slot in seen) for kind in TOKEN_KINDS},
        lost=dict(span.lost),
        failures=tuple(span.failures),
        rungs=dict(span.rungs),
        unaccounted=unaccounted,
    )


def occupancy(ticks: Sequence[Tick]) -> dict[str, float]:
    """Share of the cameras on each rung over these seconds."""
    total: dict[str, float] = {}
    for tick in ticks:
        for rung, cameras in tick.rungs.items():
            total[rung] = total.get(rung, 0.0) + cameras
    everyone = sum(total.values())
    return {rung: cameras / everyone for rung, cameras in total.items() if cameras} if everyone else {}


def _alerts(books: CameraBooks, slots: Sequence[Slot], from_s: float, until_s: float) -> list[float]:
    return alert_times(slots, books.stride_s, max(from_s, books.began_s), min(until_s, books.until_s - books.stride_s))
