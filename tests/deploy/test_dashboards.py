"""The dashboards' files: laid out without overlap, every expression valid and of metrics that exist."""

import json
import re
from pathlib import Path

import pytest
import yaml
from dashboards_bench import concrete, panels
from emitted_labels import emitted, unknown_values
from promtool import needs_promtool, promtool

from cluster.memory.tiers.metrics import NodeTierCollector
from cluster.metrics.gpu import GpuCollector
from cluster.replica.memory import MemoryCollector
from cluster.wire.metrics_server import FederatedCollector

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/helm/sightline/dashboards"
FILES = sorted(FOLDER.glob("*.json"))
ALERTS = {
    rule["alert"]
    for group in yaml.safe_load((ROOT / "deploy/helm/sightline/rules/sightline.yaml").read_text())["groups"]
    for rule in group["rules"]
}


UIDS = {"alerts", "cameras", "engine", "fleet", "machines"}
"""Part of links to a dashboard: they never change."""


def test_they_are_all_there():
    assert {path.name for path in FILES} == {f"sightline-{uid}.json" for uid in UIDS}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_dashboard_is_whole(file):
    body = json.loads(file.read_text())
    assert body["uid"] == file.stem
    assert body["tags"] == ["sightline"]
    assert body["templating"]["list"][0]["type"] == "datasource"
    assert {"namespace", "release"} <= {each["name"] for each in body["templating"]["list"]}
    panels = body["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert all(target["legendFormat"] for target in panel["targets"])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_series_of_ours_is_chosen_by_namespace_and_release(file):
    """Those of Python's client and of the alert rules too: two releases have processes of the same names."""
    chosen = '{namespace=~"$namespace",release=~"$release"'
    for panel in json.loads(file.read_text())["panels"]:
        for target in panel.get("targets", ()):
            series = re.findall(r"\b(?:sightline_\w+|process_\w+(?={)|ALERTS\b)", target["expr"])
            assert all(f"{each}{chosen}" in target["expr"] for each in series), panel["title"]
            assert target["expr"].count(chosen) == len(series), panel["title"]


def test_links_of_panels_go_to_runbooks_of_alerts_that_exist():
    links = [
        link for file in FILES for panel in json.loads(file.read_text())["panels"] for link in panel.get("links", ())
    ]
    assert len(links) > 10
    for link in links:
        alert = link["title"].removeprefix("Runbook: ")
        assert alert in ALERTS
        assert link["url"] == f"${{runbooks}}#{alert.lower()}"


@needs_promtool
def test_every_expression_is_valid(tmp_path):
    rules = [
        {"record": "one", "expr": concrete(expression)} for panel in panels(FOLDER) for expression in panel.expressions
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": rules}]}))
    code, said = promtool("check", "rules", "--lint=none", str(file))
    assert code == 0, said


@needs_promtool
def test_what_runs_has_one_line_of_a_kind_whose_processes_agree(tmp_path):
    """Kinds read different parts of the configuration, so their digests always differ."""
    [what] = [each for panel in panels(FOLDER) for each in panel.expressions if "build_info" in each]
    runs = {"gateway": "a", "decoder-0": "b", "decoder-1": "b", "replica-0": "c", "replica-1": "d"}
    series = [
        {"series": f'sightline_build_info{{process="{name}",version="1",config="{digest}"}}', "values": "1x2"}
        for name, digest in runs.items()
    ]
    lines = {("gateway", "a"): 1, ("decoder", "b"): 2, ("replica", "c"): 1, ("replica", "d"): 1}
    expected = [
        {"labels": f'{{kind="{kind}",version="1",config="{digest}"}}', "value": value}
        for (kind, digest), value in lines.items()
    ]
    queries = [{"expr": concrete(what), "eval_time": "1m", "exp_samples": expected}]
    file = tmp_path / "what_runs.yaml"
    file.write_text(
        yaml.safe_dump({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": queries}]})
    )
    code, said = promtool("test", "rules", str(file))
    assert code == 0, said


def test_of_no_tokens_none_are_saved():
    """Kept over full, both 0 while no window comes, is nan and a gap in the chart; with a least divisor 0, and 100 %
    saved."""
    (saved,) = [each for panel in panels(FOLDER) for each in panel.expressions if each.startswith("1 - ")]
    assert "clamp_min" not in saved


def test_variables_become_something_prometheus_evaluates():
    assert concrete('rate(x{camera=~"$camera"}[$__rate_interval])', "30s") == 'rate(x{camera=~".*"}[30s])'


def exported():
    """Names of all series that Sightline's processes may show."""
    from prometheus_client import CollectorRegistry

    from cluster import metrics
    from cluster.memory.tiers.arena import Arena
    from cluster.memory.tiers.stack import TierStack

    registry = CollectorRegistry()
    registry.register(MemoryCollector(TierStack([Arena(8 << 20)])))
    registry.register(FederatedCollector(lambda: {"nobody": "127.0.0.1:9"}))
    registry.register(NodeTierCollector(1, lambda: None))
    families = [*metrics.REGISTRY.collect(), *registry.collect(), *GpuCollector(None, {}).collect()]
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
    return {family.name + suffix for family in families for suffix in suffixes.get(family.type, [""])}


def test_every_metric_of_ours_that_is_named_exists():
    rules = (ROOT / "deploy/helm/sightline/rules/sightline.yaml").read_text()
    named = set(re.findall(r"\bsightline_\w+", rules + "".join(file.read_text() for file in FILES)))
    assert len(named) > 50
    assert named - exported() == set()


def test_every_label_value_of_ours_that_is_named_can_be_emitted():
    expressions = "\n".join(expression for panel in panels(FOLDER) for expression in panel.expressions)
    assert "event=" in expressions
    assert unknown_values(expressions, emitted()) == set()
