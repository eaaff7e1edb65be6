"""The scheduler's and the cost bench on small fleets: figures in bounds, every window accounted for."""

import json
from collections import Counter

import pytest

from cluster.config import ClusterConfig
from cluster.control import costs as cost_models
from cluster.control.costs import load
from cluster.control.demand import Demand
from cluster.control.ladder import default
from cluster.lab.bench.harness import main
from cluster.lab.bench.scheduler import _misses
from cluster.lab.bench.simulated_replica import Camera, Class, Replica, Run
from cluster.types.cameras import Priority


def test_scheduler_figures(tmp_path, capsys) -> None:
    default().save(tmp_path)
    file = tmp_path / "scheduler.json"
    small = ["--streams", "1000", "--replicas", "8", "--seconds", "120", "--ladder", str(tmp_path)]
    assert main(["scheduler", *small, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())["figures"]
    assert figures["silent_losses"] == 0
    assert figures["deadline_misses_critical"] == 0
    assert 1.0 <= figures["placement_balance"] <= 1.10
    assert 1.0 <= figures["moved_on_loss"] <= 1.35, "of a few cameras the worst share is larger than of many"
    assert figures["ladder_vs_drop"] > 1.1
    assert figures["schedule_us_per_window"] > 0
    assert "critical" in capsys.readouterr().out


def test_a_window_that_the_ladder_leaves_out_is_missed_like_a_late_or_a_dropped_one() -> None:
    found = Class(due=9, answered=5, late=1, left_out=2, dropped=Counter(replaced=2))
    assert _misses(Run({Priority.CRITICAL: found}), Priority.CRITICAL) == 5


def test_the_queue_holds_what_productions_does_by_default() -> None:
    """With a stride below a step's time: all that it may hold of one camera, but for what the last step took."""
    replica = Replica([Camera(Demand("c", stride_s=1e-3), 0.0)], cost_models.load("qwen2.5-vl-7b-h100"))
    waiting = {replica.run(0.01).classes[Priority.NORMAL].waiting for _ in range(50)}
    assert max(waiting) == ClusterConfig().window_queue - 1


def test_the_same_seed_simulates_the_same() -> None:
    def run() -> list[float]:
        cameras = [Camera(Demand(f"c{n}"), n / 60, busy=0.5) for n in range(60)]
        found = Replica(cameras, cost_models.load("qwen2.5-vl-7b-h100"), seed=4).run(60)
        return [lag for each in found.classes.values() for lag in each.lags_s]

    first = run()
    assert len(first) > 100
    assert run() == first


def test_costs_are_fitted_to_steps_of_a_real_engine_and_written(tmp_path) -> None:
    out = tmp_path / "costs.json"
    options = ["--model", "tiny-qwen2_5_vl", "--rounds", "4", "--windows", "4", "--max-batch", "2", "--threads", "1"]
    assert main(["cost", *options, "--out", str(out), "--json", str(tmp_path / "bench.json")]) == 0
    found = load(out)
    assert (found.model, found.device) == ("tiny-qwen2_5_vl", "cpu")
    assert found.step_s + found.window_s + found.encoded_s + found.computed_s + found.attended_s > 0
    figures = json.loads((tmp_path / "bench.json").read_text())["figures"]
    assert set(figures) == {"cost_error", "cost_spread"}


@pytest.mark.parametrize("name", ["a100", "h200"])
def test_costs_of_a_gpu_that_is_not_at_hand(tmp_path, name) -> None:
    assert main(["cost", "--platform", name, "--out", str(tmp_path / "c.json")]) == 0
    assert load(tmp_path / "c.json") == load(f"qwen2.5-vl-7b-{name}")
