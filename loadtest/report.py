"""Report of a load test: JSON with figures, verdicts in words, tables, charts, and a self-contained page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cluster.lab.bench.harness import machine
from cluster.lab.report.charts import Axis, Point, Series, Span, chart
from cluster.lab.report.number_format import compact, seconds_text
from cluster.lab.report.page import Page, Section, Table
from loadtest.profile import Profile
from loadtest.result import FaultResult, Measurement, Tick
from loadtest.run import RunResult, SearchResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Facts:
    """What was tested, shown at the top of the page. ``cluster``: setting -> value, as displayed."""

    title: str
    profile_name: str
    profile: Profile
    cluster: Mapping[str, str]
    simulated: bool


def run_json(facts: Facts, result: RunResult) -> dict[str, Any]:
    """JSON of a test at a fixed number of streams."""
    body = {
        "loadtest": "run",
        "figures": run_figures(result),
        "verdict": asdict(result.measurement.verdict),
        "faults": [
            asdict(each) | {"recovered": math.isfinite(each.recovery_s), "recovery_strides": each.recovery_strides}
            for each in result.faults
        ],
        "runs": [{**_measurement(result.measurement), "city": result.city}],
        "during_faults": None if result.during is None else _measurement(result.during),
        "others_cores": _others(result.ticks),
        "ticks": [asdict(tick) for tick in result.ticks],
    }
    return body | _about(facts)


def search_json(facts: Facts, results: Sequence[SearchResult], *, two_cores: bool) -> dict[str, Any]:
    """JSON of searches, one per number of replicas; ``two_cores``: see :func:`search_figures`."""
    searches = [
        {
            "replicas": each.replicas,
            "streams": each.streams,
            "limit": each.limit,
            "tries": [asdict(one) for one in each.tries],
            "others_cores": _others(each.ticks),
            "best": None if each.best is None else _measurement(each.best),
        }
        for each in results
    ]
    figures = search_figures(results, two_cores=two_cores)
    return {"loadtest": "search", "figures": figures, "searches": searches} | _about(facts)


def run_figures(result: RunResult) -> dict[str, float]:
    """Figures of a test; ``recovery_s`` and ``recovery_strides`` are those of the slowest recovery."""
    found = result.measurement
    figures = {
        "streams": float(found.streams),
        "stable": float(found.verdict.stable),
        "silent_losses": float(result.whole.silent),
        "counted_twice": float(result.whole.extra),
        "answered_share": found.answered_share,
        "reduced_share": found.reduced_share,
        "lag_p50_s": found.lag.p50,
        "lag_p95_s": found.lag.p95,
        "lag_p99_s": found.lag.p99,
        "alert_p50_s": found.alert.p50,
        "alert_p99_s": found.alert.p99,
        "generator_late_p99_s": found.late.p99,
    }
    if result.faults:
        figures["recovery_s"] = max(each.recovery_s for each in result.faults)
        figures["recovery_strides"] = max(each.recovery_strides for each in result.faults)
    return figures


def search_figures(results: Sequence[SearchResult], *, two_cores: bool) -> dict[str, float]:
    """Figures of searches. ``streams``: the maximum; ``reduced_share``: largest share of cameras below full quality
    in what counts as stable; ``scaling_efficiency``: streams per replica with the most replicas over those with the
    fewest; ``streams_two_cores``: only if ``two_cores`` says that its conditions are met."""
    figures = {"silent_losses": float(sum(each.silent for each in results))}
    figures |= {f"streams_{each.replicas}_replicas": float(each.streams) for each in results}
    figures["streams"] = float(max(each.streams for each in results))
    figures["reduced_share"] = max(each.reduced_share for each in results)
    least, most = min(results, key=lambda r: r.replicas), max(results, key=lambda r: r.replicas)
    if most.replicas > least.replicas and least.streams:
        figures["scaling_efficiency"] = most.streams / most.replicas / (least.streams / least.replicas)
    if two_cores:
        figures["streams_two_cores"] = figures["streams"]
    return figures


def _others(ticks: Sequence[Tick]) -> float:
    """Mean number of cores used by other programs."""
    return sum(tick.use.others for tick in ticks) / max(1, len(ticks))


def _about(facts: Facts) -> dict[str, Any]:
    return {
        "title": facts.title,
        "profile": {"name": facts.profile_name, **facts.profile.model_dump(mode="json")},
        "cluster": dict(facts.cluster),
        "simulated": facts.simulated,
        "machine": machine(),
    }


def _measurement(found: Measurement) -> dict[str, Any]:
    return {**asdict(found), "answered_share": found.answered_share, "verdict": asdict(found.verdict)}


OTHERS = 0.25
"""Cores that other programs may use without being reported."""

_SIMULATED = (
    "No model ran: the simulated engine answered at random and took the time given by a cost model. "
    "Cameras, sockets, decoding, scheduling and processes are real."
)


def page(facts: Facts, found: RunResult | Sequence[SearchResult]) -> str:
    """The report as an HTML page."""
    notices = [_SIMULATED] if facts.simulated else []
    if isinstance(found, RunResult):
        head, good = verdict_text(found)
        drawn = run_charts(found.ticks, found.faults, found.measurement.stride_s)
        shown, ticks = run_tables(found), found.ticks
    else:
        head, good = search_text(found), True
        best = max(found, key=lambda each: each.streams)
        drawn = {"The search": search_chart(found)}
        drawn |= run_charts(best.ticks, (), best.best.stride_s) if best.best is not None else {}
        shown, ticks = search_tables(found), tuple(tick for each in found for tick in each.ticks)
    if others := others_text(ticks):
        notices.append(others)
    told = [("profile", f"{facts.profile_name}: {facts.profile.about}"), *facts.cluster.items()]
    section = Section(charts=drawn, tables=shown)
    return Page(facts.title, head, good, notices, facts=told, sections=[section]).html()


def verdict_text(found: RunResult) -> tuple[str, bool]:
    """Result of a test in one sentence, and whether it is a success."""
    verdict, measured = found.measurement.verdict, found.measurement
    if not verdict.stable:
        return f"{measured.streams} streams were too many: {'; '.join(verdict.reasons)}.", False
    if found.whole.silent:
        return f"{found.whole.silent} windows were neither answered nor counted during faults.", False
    if found.whole.extra:
        return f"{found.whole.extra} windows were counted that were never due during faults.", False
    if found.during is not None and (failures := found.during.failures):
        return f"{len(failures)} cameras failed during faults, the first: {failures[0]}.", False
    if never := [each.name for each in found.faults if math.isinf(each.recovery_s)]:
        return f"After {', '.join(never)} not all cameras were on time again.", False
    return f"The cluster kept up with {measured.streams} streams{_reduced(measured.reduced_share)}.", True


def others_text(ticks: Sequence[Tick]) -> str:
    """A notice if other programs used a relevant share of the machine, else empty."""
    cores = _others(ticks)
    if cores < OTHERS:
        return ""
    return (
        f"Other programs used {cores:.1f} cores of this machine during the test: with the machine to itself, the "
        "cluster would keep up with more."
    )


def search_text(found: Sequence[SearchResult]) -> str:
    """One sentence per number of replicas."""
    sentences = []
    for each in found:
        replicas = "1 replica" if each.replicas == 1 else f"{each.replicas} replicas"
        beyond = {
            "generator": "beyond that the load generator's own machine was the limit, not the cluster",
            "cluster": "beyond that the cluster did not keep up",
            None: "more were not tried",
        }[each.limit]
        share = "" if each.replicas == 1 else f", {each.streams / each.replicas:.1f} each"
        share += _reduced(each.reduced_share)
        sentences.append(f"{replicas} kept up with {each.streams} streams{share}; {beyond}.")
    return " ".join(sentences)


def _reduced(share: float) -> str:
    return f", {100 * share:.1f} % of them below full quality" if share else ""


# -- tables --
def run_tables(found: RunResult) -> list[Table]:
    """All tables of a test."""
    measured = found.measurement
    shown = [_faults_table(found.faults)] if found.faults else []
    shown += [_times_table(measured), _windows_table(found.whole), *_rungs_tables(measured)]
    return [*shown, _tokens_table(measured), _packets_table(measured)]


def search_tables(found: Sequence[SearchResult]) -> list[Table]:
    """Every try, and the times, windows and rungs of the best measurement."""
    tries = [(str(each.replicas), one) for each in found for one in each.tries]
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
    shown = [Table("Measurements", heads, rows, frozenset(i for i, (_, one) in enumerate(tries) if not one.stable))]
    best = max(found, key=lambda each: each.streams).best
    return shown if best is None else [*shown, _times_table(best), _windows_table(best), *_rungs_tables(best)]


def _rungs_tables(found: Measurement) -> list[Table]:
    rungs = [(rung, f"{100 * share:.1f} %") for rung, share in found.rungs.items()]
    return [Table("Quality ladder", ("rung", "share of the cameras"), rungs)] if rungs else []


def _windows_table(found: Measurement) -> Table:
    whose = f"of {', '.join(found.unaccounted)}"
    # Within the measurement, including partial windows cut off by a restart.
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(found.lost.items())) or "none"
    rows = [
        ("due", compact(found.due), "all cameras, since their start"),
        ("answered", compact(found.answered), f"{compact(found.gated)} by the static gate during the measurement"),
        ("answered, not received", compact(found.unseen), "while the gateway was down or the listener too slow"),
        ("given up and counted", compact(found.given_up), f"as counted by the cluster: {reasons}"),
        ("in flight", compact(found.overdue), "for no longer than the slowest answer took"),
        ("silently missing", str(found.silent), whose if found.silent else "must be 0"),
        ("counted, never due", str(found.extra), whose if found.extra else "must be 0"),
    ]
    bad = frozenset(place for place, count in ((5, found.silent), (6, found.extra)) if count)
    return Table("Windows", ("windows", "count", ""), rows, bad)


def _times_table(found: Measurement) -> Table:
    named = {
        "end of window to answer (below 0: its last frame comes earlier)": found.lag,
        "start of an event to first answer that can show it": found.alert,
        "last frame at the replica to answer, computed windows": found.replica,
        "delay of packets in the load generator": found.late,
    }
    rows = [(name, *map(seconds_text, (each.p50, each.p95, each.p99, each.most))) for name, each in named.items()]
    return Table("Times", ("", "p50", "p95", "p99", "max"), rows)


def _tokens_table(found: Measurement) -> Table:
    full = found.tokens.get("full", 0)
    rows = [
        (kind, compact(count), f"{100 * count / full:.1f} %" if full else "–")
        for kind, count in found.tokens.items()
        if kind != "encoded"
    ]
    return Table("Tokens of the answered windows", ("", "tokens", "of full"), rows)


def _packets_table(found: Measurement) -> Table:
    rows = (
        ("packets accepted by the cluster", compact(found.packets)),
        ("packets withheld by the profile or a fault", compact(found.packets_lost)),
        ("packets dropped by agents with full buffers", compact(found.packets_dropped)),
        ("packets dropped by the cluster", compact(found.packets_refused)),
        ("reconnects of cameras", str(found.reconnects)),
        ("answers dropped by the gateway", str(found.missed_answers)),
        ("broken result streams", str(found.breaks)),
    )
    return Table("Transport", ("", "count"), rows)


def _faults_table(faults: Sequence[FaultResult]) -> Table:
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
    heads = ("fault", "victim", "cameras", "all on time again after", "")
    return Table("Faults", heads, rows, frozenset(i for i, each in enumerate(faults) if each.recovery_strides > 2))


# -- charts --
def run_charts(ticks: Sequence[Tick], faults: Sequence[FaultResult], stride_s: float) -> dict[str, Figure]:
    """Charts over the test by title: lag, streams and answers, cores, network …; recovery from faults is shaded."""
    drawn: dict[str, Figure] = {}
    spans = [_span(each) for each in faults]

    def draw(title: str, unit: Axis, lines: Mapping[str, Sequence[float]]) -> None:
        series = [
            Series(name, [Point(tick.at_s, value) for tick, value in zip(ticks, values, strict=True)], marked=False)
            for name, values in lines.items()
        ]
        if lines:
            drawn[title] = chart(title, series, Axis("seconds since the test began", low=0), unit, spans)

    if not ticks:
        return drawn
    uses = [tick.use for tick in ticks]
    # A frame closes its window one sample early, so lags may be negative.
    lags = {"p50": [tick.lag_p50_s for tick in ticks], "p99": [tick.lag_p99_s for tick in ticks]}
    draw("Lag of answers", Axis("seconds"), lags | {"one stride": [stride_s] * len(ticks)})
    streams = {"streams": [tick.streams for tick in ticks], "answers a second": [tick.answers for tick in ticks]}
    draw("Streams and answers", Axis("count", low=0), streams)
    roles = sorted({role for use in uses for role in use.cores})
    cores = {role: [use.cores.get(role, 0.0) for use in uses] for role in roles}
    draw("Cores in use", Axis("cores", low=0), cores | {"other programs": [use.others for use in uses]})
    rates = {
        "video from cameras": [tick.sent_bytes_s / 1e6 for tick in ticks],
        "all interfaces": [use.network_bytes_s / 1e6 for use in uses],
    }
    draw("Network throughput", Axis("MB/s", low=0), rates)
    late = {"packets sent late": [1000 * tick.late_p99_s for tick in ticks]}
    draw("Delay of the load generator (p99)", Axis("milliseconds", low=0), late)
    rungs = dict.fromkeys(rung for tick in ticks for rung, cameras in tick.rungs.items() if cameras)
    ladder = {rung: [tick.rungs.get(rung, 0.0) for tick in ticks] for rung in rungs}
    draw("Cameras on the quality ladder", Axis("cameras", low=0), ladder)
    names = sorted({name for use in uses for name in use.gpus})
    gpus = {name: [use.gpus.get(name, math.nan) for use in uses] for name in names}
    draw("GPUs", Axis("share of the time", low=0, high=1, percent=True), gpus)
    return drawn


def _span(fault: FaultResult) -> Span:
    """Span from a fault until all affected cameras were on time again, or to the end if they never were."""
    healed = math.isfinite(fault.recovery_s)
    told = f"on time again after {fault.recovery_s:.1f} s" if healed else "not on time again"
    return Span(fault.at_s, fault.at_s + fault.recovery_s, fault.name, f"{fault.name}: {fault.victim}; {told}")


def search_chart(results: Sequence[SearchResult]) -> Figure:
    """Every try of every search, in order."""
    series = [
        Series(
            f"{each.replicas} replicas, {word}",
            [Point(at, one.streams, text=one.note) for at, one in enumerate(each.tries, 1) if one.stable is stable],
            joined=False,
        )
        for each in results
        for stable, word in ((True, "kept up"), (False, "did not"))
    ]
    return chart("The search", series, Axis("measurement", low=0), Axis("streams", low=0))
