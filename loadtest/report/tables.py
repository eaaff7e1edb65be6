"""The tables of a load test's page and screen."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.lab.report.number_format import compact, seconds_text
from cluster.lab.report.page import Table
from loadtest.result import FaultResult, Measurement
from loadtest.run import RunResult, SearchResult


def run_tables(found: RunResult) -> list[Table]:
    """All tables of one test."""
    measured = found.measurement
    shown = [faults_table(found.faults)] if found.faults else []
    shown += [times_table(measured), windows_table(found.during or measured)]
    if measured.rungs:
        rungs = [(rung, f"{100 * share:.1f} %") for rung, share in measured.rungs.items()]
        shown.append(Table("Quality ladder", ("rung", "share of the cameras"), rungs))
    return [*shown, tokens_table(measured), packets_table(measured)]


def search_tables(found: Sequence[SearchResult]) -> list[Table]:
    """The tries, and the times at the most streams of all."""
    best = max(found, key=lambda each: each.streams).best
    return [search_table(found), *([] if best is None else [times_table(best), windows_table(best)])]


def windows_table(found: Measurement) -> Table:
    """What became of every window."""
    whose = f"of {', '.join(found.unaccounted)}"
    # While it was measured, pieces of windows that a fresh start cut off among them.
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(found.lost.items())) or "none"
    rows = [
        ("due", compact(found.due), "over all cameras, from their beginning on"),
        ("answered", compact(found.answered), f"{compact(found.gated)} by the static gate while it was measured"),
        ("answered unheard", compact(found.unseen), "while the gateway was away or this listener was too slow"),
        ("given up and counted", compact(found.given_up), f"the cluster's own count: {reasons}"),
        ("still on their way", compact(found.overdue), "for no longer than the slowest answer took"),
        ("silently missing", str(found.silent), whose if found.silent else "must be 0"),
        ("counted, never due", str(found.extra), whose if found.extra else "must be 0"),
    ]
    bad = frozenset(place for place, count in ((5, found.silent), (6, found.extra)) if count)
    return Table("Windows", ("windows", "count", ""), rows, bad)


def times_table(found: Measurement) -> Table:
    """Lags and what else takes time."""
    named = {
        "window's end to answer": found.lag,
        "something begins to first answer of it": found.alert,
        "last frame at the replica to answer, computed windows": found.replica,
        "a packet is due to it is sent": found.late,
    }
    rows = [(name, *map(seconds_text, (each.p50, each.p95, each.p99, each.most))) for name, each in named.items()]
    return Table("Times", ("", "p50", "p95", "p99", "most"), rows)


def tokens_table(found: Measurement) -> Table:
    """Where the tokens of the answers came from."""
    full = found.tokens.get("full", 0)
    rows = [
        (kind, compact(count), f"{100 * count / full:.1f} %" if full else "–")
        for kind, count in found.tokens.items()
        if kind != "encoded"
    ]
    return Table("Tokens of the answered windows", ("", "tokens", "of full"), rows)


def packets_table(found: Measurement) -> Table:
    """The way to the cluster."""
    rows = (
        ("packets that the cluster took", compact(found.packets)),
        ("packets kept from arriving, as the profile or a fault wants it", compact(found.packets_lost)),
        ("packets dropped by agents whose buffers were full", compact(found.packets_dropped)),
        ("packets dropped by the cluster", compact(found.packets_refused)),
        ("reconnects of cameras", str(found.reconnects)),
        ("answers that the gateway dropped on the way here", str(found.missed_answers)),
        ("times it hung up on who listens for them", str(found.breaks)),
    )
    return Table("The way to the cluster and back", ("", "count"), rows)


def faults_table(faults: Sequence[FaultResult]) -> Table:
    """What was done, and how long it showed."""
    rows = [
        (
            each.name,
            each.victim,
            str(each.struck),
            seconds_text(each.recovery_s),
            f"{each.recovery_strides:.1f} strides" if each.recovery_s < float("inf") else "–",
        )
        for each in faults
    ]
    heads = ("fault", "to", "cameras", "all on time again after", "")
    return Table("Faults", heads, rows, frozenset(i for i, each in enumerate(faults) if each.recovery_strides > 2))


def search_table(results: Sequence[SearchResult]) -> Table:
    """Every try."""
    tries = [(str(each.replicas), one) for each in results for one in each.tries]
    rows = [
        (
            replicas,
            str(one.streams),
            one.phase,
            "yes" if one.stable else "no",
            "fresh start" if one.fresh else "",
            one.note,
        )
        for replicas, one in tries
    ]
    heads = ("replicas", "streams", "search", "kept up", "", "why not")
    return Table("Measurements", heads, rows, frozenset(i for i, (_, one) in enumerate(tries) if not one.stable))
