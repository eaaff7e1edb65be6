"""A load test of a whole cluster, as an operator runs it: a few cameras, real processes, one of them killed."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from actors.cli import main
from cluster.control.costs import CostModel, save

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

STRIDE_S = 3.0


@pytest.fixture
def settings(tmp_path) -> Path:
    """Two replicas that stand in for a tiny model, each far from its limit."""
    costs = CostModel("tiny-qwen2_5_vl", "test", "by hand", 0.01, 0.005, 0.0, 1e-6, 0.0, spread=0.1, error=0.0)
    save(costs, tmp_path / "costs.json")
    body = {
        "engine": "simulated",
        "model": {"name": "tiny-qwen2_5_vl"},
        "simulated": {"costs": str(tmp_path / "costs.json")},
        "gateway": {"port": 0, "http_port": 0},
        "sampling": {"anchor_interval_s": 3},
        "window": {"length_s": 6, "stride_s": STRIDE_S},
        "questions": [{"id": "person", "text": "Is there a person?"}],
        "cluster": {"replicas": 2, "heartbeat_s": 0.5, "start_timeout_s": 300, "log_dir": str(tmp_path / "logs")},
    }
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(body))
    profile = tmp_path / "profile.yaml"
    profile.write_text("{streams: 6, width: 160, height: 96, mix: {busy: 0.5, quiet: 0.5}, ramp_s: 1, measure_s: 9}")
    return path


def test_a_cluster_keeps_up_and_recovers_from_a_killed_replica(settings, tmp_path, capsys, monkeypatch) -> None:
    # A machine that is busy with other work is not the limit.
    monkeypatch.setattr("loadtest.stage.LATE_S", 2.0)
    out, page = tmp_path / "load.json", tmp_path / "load.html"
    arguments = ["-c", str(settings), "--profile", str(tmp_path / "profile.yaml"), "--fault", "kill-replica"]
    assert main(["loadtest", "run", *arguments, "--json", str(out), "--out", str(page)]) == 0, capsys.readouterr().err
    body = json.loads(out.read_text())
    assert body["figures"]["silent_losses"] == 0
    assert body["figures"]["stable"] == 1
    assert body["simulated"] is True
    [run] = body["runs"]
    assert run["due"] == run["answered"] + run["unseen"] + run["given_up"] + run["overdue"]
    assert run["tokens"]["full"] > run["tokens"]["kept"] > 0
    [fault] = body["faults"]
    assert (fault["victim"].split("-")[0], fault["recovered"]) == ("replica", True)
    assert fault["struck"] == 3
    # Nobody can be on time again before a window has ended; a camera that moved begins anew, so two strides and a bit.
    assert 0 < fault["recovery_s"] < 5 * STRIDE_S
    assert sum(each["share"] for each in run["city"]["mix"]["classes"]) == 6
    assert run["city"]["cost"] == asdict(CostModel(**run["city"]["cost"]))
    assert "No model ran" in page.read_text()
    assert "The cluster kept up with 6 streams" in capsys.readouterr().out
