"""The report: figures, verdicts in words, a page that stands alone, and what the simulator is told."""

import html.parser
import json
import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from tooltips import get_tooltips
from toy_cluster import config, profile

from actors.cli import main
from cluster.config import load_config
from cluster.errors import SightlineError
from cluster.files import json_text
from cluster.lab.bench.window_accounting import CameraWindows
from cluster.lab.city.mix import Mix
from cluster.lab.report.charts import svg
from cluster.lab.report.page import write_files
from cluster.types import Answer, Timing, TokenCount
from loadtest.agent import FedAgent
from loadtest.fleet import QUESTION, Camera
from loadtest.footage import StreamHeader
from loadtest.machine import MachineUse
from loadtest.profile import kind_at, script
from loadtest.report import Facts, page, run_charts, run_json, search_json, search_text, verdict_text
from loadtest.result import FaultResult, Measurement, Spread, Tick, Verdict
from loadtest.run import RunResult, SearchResult, city
from loadtest.search import Try

GOOD = Measurement(
    streams=10,
    stride_s=8.0,
    from_s=50.0,
    until_s=110.0,
    due=140,
    answered=140,
    unseen=0,
    given_up=0,
    overdue=0,
    silent=0,
    measured=75,
    missing=0,
    on_time=75,
    gated=30,
    lag=Spread(0.4, 0.9, 1.2, 1.5),
    alert=Spread(4.4, 8.1, 8.9, 9.2),
    replica=Spread(0.1, 0.2, 0.3, 0.4),
    late=Spread(0.001, 0.004, 0.01, 0.02),
    late_share=0.0,
    packets=3000,
    packets_dropped=0,
    packets_refused=0,
    packets_lost=0,
    reconnects=0,
    missed_answers=0,
    breaks=0,
    tokens={"full": 1000, "kept": 400, "reused": 200, "refreshed": 50, "new": 150, "query": 20, "encoded": 150},
    lost={"late": 3},
)
NEVER = Spread(1.0, 2.0, math.inf, math.inf)
FACTS = Facts("Load test", "steady", profile(about="Some <street>."), {"engine": "simulated"}, simulated=True)
KILLED = FaultResult("kill-replica", "replica-1", 60.0, 5, 9.6, 8.0)
LOST = replace(KILLED, name="freeze-decoder", recovery_s=math.inf)


def tick(at_s: float) -> Tick:
    use = MachineUse({"replica": 0.5, "generator": 0.1}, {"replica": 2**20}, 0.4, 0.2, 1e6, {"GPU 0 computing": 0.5})
    return Tick(at_s, 10, 3, 0.4, 1.2, 0.01, 5e5, use)


def run_result(**changes) -> RunResult:
    return replace(RunResult(GOOD, ticks=tuple(tick(float(s)) for s in range(5))), **changes)


def searches() -> list[SearchResult]:
    tries = (Try(8, True, "coarse"), Try(8, True, "coarse"), Try(16, False, "coarse", limit="cluster", note="too late"))
    one = SearchResult(1, 8, "cluster", tries, GOOD, (tick(1.0),))
    return [one, replace(one, replicas=2, streams=15, limit="generator")]


def test_a_good_run() -> None:
    assert GOOD.verdict == Verdict(True)
    assert verdict_text(run_result()) == ("The cluster kept up with 10 streams.", True)
    body = json.loads(json_text(run_json(FACTS, run_result())))
    assert body["figures"]["silent_losses"] == 0
    assert body["figures"]["answered_share"] == 1
    assert body["figures"]["lag_p99_s"] == 1.2
    assert "recovery_s" not in body["figures"]
    assert body["runs"][0]["lag"]["p50"] == 0.4


@pytest.mark.parametrize(
    ("changes", "limit", "word"),
    [
        ({"lag": NEVER}, "cluster", "p99 lag is never, above the stride of 8 s"),
        ({"lag": Spread(1, 2, 8.1, 9)}, "cluster", "p99 lag is 8.1 s"),
        ({"missing": 1}, "cluster", "98.7 % of windows were answered"),
        ({"silent": 2}, "cluster", "2 windows were neither answered nor counted"),
        ({"extra": 13}, "cluster", "13 windows were counted that were never due"),
        ({"late_share": 0.3}, "generator", "outpaced by its own machine"),
        ({"late_share": 0.3, "lag": NEVER}, "generator", "p99 lag is never"),
        ({"failures": ("load-1: refused",)}, "cluster", "the first: load-1: refused"),
        ({"measured": 0, "lag": Spread.of([])}, "cluster", "no window was due"),
    ],
)
def test_what_makes_a_test_unstable_and_whose_limit_it_was(changes, limit, word) -> None:
    verdict = replace(GOOD, **changes).verdict
    assert (verdict.stable, verdict.limit) == (False, limit)
    assert any(word in reason for reason in verdict.reasons)
    text, good = verdict_text(run_result(measurement=replace(GOOD, **changes)))
    assert (good, text.startswith("10 streams were too many")) == (False, True)


def test_one_missing_window_in_a_hundred_is_allowed_and_two_are_not() -> None:
    assert replace(GOOD, measured=100, missing=1).verdict.stable
    assert not replace(GOOD, measured=100, missing=2).verdict.stable


def test_faults_count_by_the_slowest_and_losses_over_the_whole_test() -> None:
    during = replace(GOOD, silent=1)
    result = run_result(faults=(KILLED,), during=during)
    figures = run_json(FACTS, result)["figures"]
    assert (figures["recovery_s"], figures["recovery_strides"], figures["silent_losses"]) == (9.6, 1.2, 1)
    assert not verdict_text(result)[1]
    assert verdict_text(run_result(faults=(KILLED,), during=GOOD))[1]
    lost = run_result(faults=(KILLED, LOST), during=GOOD)
    assert verdict_text(lost) == ("After freeze-decoder not all cameras were on time again.", False)
    refused = run_result(faults=(KILLED,), during=replace(GOOD, failures=("load-1: refused",)))
    assert verdict_text(refused) == ("1 cameras failed during faults, the first: load-1: refused.", False)
    body = json.loads(json_text(run_json(FACTS, lost)))
    assert body["figures"]["recovery_s"] is None, "it never recovered"
    assert [each["recovered"] for each in body["faults"]] == [True, False]


def test_what_cameras_said_is_no_markup_on_a_terminal(monkeypatch, capsys) -> None:
    found = run_result(measurement=replace(GOOD, failures=("load-1: [rtsp @ 0x1] [/stream] refused",)))
    target = SimpleNamespace(config=load_config(None), own=False)
    monkeypatch.setattr("actors.cli.loadtest._footage", lambda *_: {})
    monkeypatch.setattr("actors.cli.loadtest._target", lambda *_, **__: nullcontext(target))
    monkeypatch.setattr("loadtest.run.run_test", AsyncMock(return_value=found))
    assert main(["loadtest", "run", "-g", "127.0.0.1:1"]) == 1
    said = capsys.readouterr()
    sentence = "10 streams were too many: 1 cameras failed, the first: load-1: [rtsp @ 0x1] [/stream] refused"
    assert sentence in said.out
    assert sentence in said.err


def test_a_search_says_the_limit_and_how_replicas_scale() -> None:
    figures = search_json(FACTS, searches(), two_cores=True)["figures"]
    assert figures["streams"] == figures["streams_two_cores"] == 15
    assert figures["scaling_efficiency"] == pytest.approx(15 / 16)
    assert "streams_two_cores" not in search_json(FACTS, searches()[:1], two_cores=False)["figures"]
    assert "scaling_efficiency" not in search_json(FACTS, searches()[:1], two_cores=False)["figures"]
    text = search_text(searches())
    assert "1 replica kept up with 8 streams; beyond that the cluster did not" in text
    assert (
        "2 replicas kept up with 15 streams, 7.5 each; beyond that the load generator's own machine was the limit"
        in text
    )


def test_what_was_sustained_at_reduced_quality_says_so() -> None:
    """At twice the stride half as many windows are due, all of which can be answered."""
    reduced = replace(GOOD, rungs={"full": 0.35, "stride": 0.65})
    assert verdict_text(run_result(measurement=reduced)) == (
        "The cluster kept up with 10 streams, 65.0 % of them below full quality.",
        True,
    )
    assert run_json(FACTS, run_result(measurement=reduced))["figures"]["reduced_share"] == 0.65
    one, two = searches()
    tries = (*one.tries, Try(15, True, "fine", reduced_share=0.65), Try(16, True, "fine", reduced_share=1.0))
    found = [one, replace(two, tries=tries, best=reduced)]
    assert search_json(FACTS, found, two_cores=False)["figures"]["reduced_share"] == 0.65
    text = search_text(found)
    assert "1 replica kept up with 8 streams;" in text
    assert "2 replicas kept up with 15 streams, 7.5 each, 65.0 % of them below full quality;" in text
    shown = page(FACTS, found)
    assert "Quality ladder" in shown
    assert "65.0 %" in shown


class Links(html.parser.HTMLParser):
    """Collects what a page would fetch, and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href")]


@pytest.mark.parametrize("found", [run_result(faults=(KILLED, LOST), during=GOOD), searches(), run_result(ticks=())])
def test_the_page_stands_alone_and_says_that_no_model_ran(tmp_path, found) -> None:
    path = tmp_path / "deep" / "report.html"
    write_files(path.parent, {path.name: page(FACTS, found)})
    text = path.read_text()
    links = Links()
    links.feed(text)
    assert links.fetched == []
    assert "script" not in links.tags
    assert "http" not in text
    assert "url(" not in text
    assert "No model ran" in text
    assert "Some &lt;street&gt;." in text
    assert ("svg" in links.tags) == (not isinstance(found, RunResult) or bool(found.ticks))
    assert "No model ran" not in page(replace(FACTS, simulated=False), found)


def test_every_chart_shades_what_a_fault_cost() -> None:
    ticks = tuple(tick(float(second)) for second in range(121))
    drawn = run_charts(ticks, (KILLED, replace(LOST, at_s=90.0)), 8.0)
    for figure in drawn.values():
        # From second 60 for 9.6 s, and from second 90 to the end at 120: it never healed.
        spans = [(bar.get_x(), bar.get_width()) for bar in shades(figure)]
        assert spans == [(60, pytest.approx(9.6)), (90, pytest.approx(30))]
        assert [get_tooltips(bar) for bar in shades(figure)] == [
            ["kill-replica: replica-1; on time again after 9.6 s"],
            ["freeze-decoder: replica-1; not on time again"],
        ]
        assert {"kill-replica", "freeze-decoder"} <= {text.get_text().strip() for text in figure.axes[0].texts}
        assert "<title>kill-replica: replica-1; on time again after 9.6 s</title>" in svg(figure)
    assert len(drawn) >= 6
    assert not any(shades(figure) for figure in run_charts(ticks, (), 8.0).values())
    # After the last tick there is nothing to shade.
    assert not any(shades(figure) for figure in run_charts(ticks, (replace(LOST, at_s=130.0),), 8.0).values())


def shades(figure):
    """Over the whole height, behind the lines."""
    (axes,) = figure.axes
    for bar in axes.patches:
        assert (bar.get_y(), bar.get_height()) == (0, 1)
        assert bar.get_transform() != axes.transData
    return list(axes.patches)


def test_the_charts_hold_every_tick_with_its_unit() -> None:
    drawn = run_charts([tick(float(second)) for second in range(5)], (), 8.0)
    lines = {
        (title, line.get_label()): [tuple(point) for point in line.get_xydata()]
        for title, figure in drawn.items()
        for line in figure.axes[0].lines
    }
    assert lines["Lag of answers", "p99"] == [(second, 1.2) for second in range(5)]
    assert lines["Lag of answers", "one stride"] == [(second, 8.0) for second in range(5)]
    assert lines["Cores in use", "replica"] == [(second, 0.5) for second in range(5)]
    assert lines["Network throughput", "video from cameras"] == [(second, 0.5) for second in range(5)]
    assert lines["GPUs", "GPU 0 computing"] == [(second, 0.5) for second in range(5)]
    # A GPU that does not say how much it decodes has no line for it.
    assert ("GPUs", "GPU 0 decoding") not in lines
    assert {figure.axes[0].get_xlabel() for figure in drawn.values()} == {"seconds since the test began"}
    units = {title: figure.axes[0].get_ylabel() for title, figure in drawn.items()}
    assert units["Lag of answers"] == "seconds"
    assert units["Network throughput"] == "MB/s"


def test_a_page_that_cannot_be_written_says_so_and_leaves_the_last(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "report.html").write_text("before")
    with pytest.raises(UnicodeEncodeError):
        write_files(tmp_path, {"report.html": "\ud800"})
    assert (tmp_path / "report.html").read_text() == "before"
    with pytest.raises(SightlineError, match="choose another path"):
        write_files(tmp_path / "file", {"report.html": page(FACTS, run_result())})


# -- what the simulator is told -------------------------------------------------------------------
def camera(number: int, gated: bool) -> Camera:
    settings = profile(mix={"busy": 0.5, "quiet": 0.5})
    ledger = CameraWindows(f"c{number}", 0.0, 0.5)
    # Frames of 50 tokens, ten in ten seconds at two samples a second; anchors are every other one and whole.
    tokens = TokenCount(full=500, kept=325, reused=0, refreshed=0, new=0, query=20, encoded=0)
    for window in range(4):
        end = (window + 1) * 500_000
        ledger.saw(Answer(ledger.name, window, 0, end, "q", 0.1, False, "", gated, tokens, Timing()), end / 1e6 + 0.1)
    agent = FedAgent(StreamHeader("h264", 64, 64, b""), "127.0.0.1:1", ledger.name)
    return Camera(script(settings, number), ledger, agent)


def test_the_simulator_is_told_what_was_measured_of_each_kind_of_camera() -> None:
    settings = profile(mix={"busy": 0.5, "quiet": 0.5})
    loaded = config()
    window = loaded.window.model_copy(update={"length_s": 10.0})
    sampling = loaded.sampling.model_copy(update={"fps": 2.0, "anchor_interval_s": 2.0})
    scheduling = loaded.scheduling.model_copy(update={"step_budget_s": 0.3})
    loaded = loaded.model_copy(update={"window": window, "sampling": sampling, "scheduling": scheduling})
    kinds = {number: kind_at(settings, script(settings, number).rank, 0.0) for number in range(6)}
    cameras = [camera(number, gated=kind == "quiet") for number, kind in kinds.items()]
    found = replace(GOOD, from_s=0.0, until_s=2.1, measured=24, missing=0, gated=12, lost={"late": 21})
    stage = SimpleNamespace(
        target=SimpleNamespace(config=loaded),
        profile=settings,
        fleet=SimpleNamespace(everyone=lambda: cameras, questions=(QUESTION,)),
        began_s=0.0,
    )
    told = city(stage, found)
    classes = {each.name: each for each in Mix.model_validate(told["mix"]).classes}
    assert {kind: each.share for kind, each in classes.items()} == {
        kind: list(kinds.values()).count(kind) for kind in ("busy", "quiet")
    }
    assert (classes["busy"].activity.busy, classes["quiet"].activity.busy) == (1.0, 0.0)
    # 65 % kept: half of the frames are whole, so the others keep 30 %.
    assert classes["busy"].activity.kept == pytest.approx(0.3)
    assert classes["busy"].frame_tokens == 50
    assert told["measured"]["gated_per_s"] == pytest.approx(12 / 2.1)
    assert told["measured"]["answered_per_s"] == pytest.approx(12 / 2.1)
    assert told["measured"]["dropped_per_s"] == pytest.approx(10)
    assert told["budget_s"] == 0.3
    json.dumps(told)
