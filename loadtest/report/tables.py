"""The tables of a load test's page and screen: a title, heads, and rows of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.lab.report.charts import compact
from loadtest.result import FaultResult, Measurement, Spread, seconds_text
from loadtest.run import SearchResult


@dataclass(frozen=True, slots=True)
class Table:
    """``bad``: rows that tell of something that should not be."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bad: frozenset[int] = frozenset()


def windows_table(found: Measurement) -> Table:
    """What became of every window."""
    whose = f"of {', '.join(found.unaccounted)}"
    rows = [
        ("due", compact(found.due), "over all cameras, from their beginning on"),
        ("answered", compact(found.answered), f"{compact(found.gated)} by the static gate while it was measured"),
        ("answered unheard", compact(found.unseen), "while the gateway was away or this listener was too slow"),
        ("given up and counted", compact(found.given_up), f"the cluster's own count: {reasons_text(found)}"),
        ("still on their way", compact(found.overdue), "for no longer than the slowest answer took"),
        ("silently missing", str(found.silent), whose if found.silent else "must be 0"),
        ("counted, never due", str(found.extra), whose if found.extra else "must be 0"),
    ]
    bad = {5} if found.silent else set()
    return Table("Windows", ("windows", "count", ""), tuple(rows), frozenset(bad | ({6} if found.extra else set())))


def reasons_text(found: Measurement) -> str:
    """``3 late, 2 lost``: while it was measured, pieces of windows that a fresh start cut off among them."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(found.lost.items())) or "none"


def times_table(found: Measurement) -> Table:
    """Lags and what else takes time."""
    named = (
        ("window's end to answer", found.lag),
        ("something begins to first answer of it", found.alert),
        ("last frame at the replica to answer, computed windows", found.replica),
        ("a packet is due to it is sent", found.late),
    )
    return Table("Times", ("", "p50", "p95", "p99", "most"), tuple((name, *_cells(spread)) for name, spread in named))


def tokens_table(found: Measurement) -> Table:
    """Where the tokens of the answers came from."""
    full = found.tokens.get("full", 0)
    rows = [
        (kind, compact(count), f"{100 * count / full:.1f} %" if full else "–")
        for kind, count in found.tokens.items()
        if kind != "encoded"
    ]
    return Table("Tokens of the answered windows", ("", "tokens", "of full"), tuple(rows))


def rungs_table(found: Measurement) -> Table:
    """How many cameras stood where on the quality ladder."""
    rows = tuple((rung, f"{100 * share:.1f} %") for rung, share in found.rungs.items())
    return Table("Quality ladder", ("rung", "share of the cameras"), rows)


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
    rows = tuple(
        (
            each.name,
            each.victim,
            str(each.struck),
            seconds_text(each.recovery_s),
            f"{each.recovery_strides:.1f} strides" if each.recovery_s < float("inf") else "–",
        )
        for each in faults
    )
    heads = ("fault", "to", "cameras", "all on time again after", "")
    return Table("Faults", heads, rows, frozenset(i for i, each in enumerate(faults) if each.recovery_strides > 2))


def search_table(results: Sequence[SearchResult]) -> Table:
    """Every try."""
    rows: list[tuple[str, ...]] = []
    bad: set[int] = set()
    for each in results:
        for one in each.tries:
            if not one.stable:
                bad.add(len(rows))
            start = "fresh start" if one.fresh else ""
            rows.append(
                (str(each.replicas), str(one.streams), one.phase, "yes" if one.stable else "no", start, one.note)
            )
    heads = ("replicas", "streams", "search", "kept up", "", "why not")
    return Table("Measurements", heads, tuple(rows), frozenset(bad))


def _cells(spread: Spread) -> tuple[str, ...]:
    return tuple(seconds_text(value) for value in (spread.p50, spread.p95, spread.p99, spread.most))
