"""The scheduler's and the cost bench on small fleets: figures in bounds, every window accounted for."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from cluster.config.cluster import ClusterConfig, SchedulingConfig
from cluster.control import costs as cost_models
from cluster.control.costs import load
from cluster.control.demand import Demand
from cluster.control.ladder import default
from cluster.lab.bench.harness import main
from cluster.lab.bench.scheduler import STRIDE_S, _row, overloaded
from cluster.lab.city.plan import FULL
from cluster.lab.city.replica import EngineSettings
from cluster.lab.city.result import Figures
from cluster.lab.city.tally import Tally
from cluster.types.cameras import Priority


def test_scheduler_figures(tmp_path, capsys, monkeypatch) -> None:
    default().save(tmp_path)
    file = tmp_path / "scheduler.json"
    # A camera has all its first windows in five strides.
    monkeypatch.setattr("cluster.lab.bench.scheduler.WARMUP_S", 40.0)
    small = ["--streams", "500", "--replicas", "4", "--seconds", "60", "--ladder", str(tmp_path)]
    assert main(["scheduler", *small, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())["figures"]
    assert figures["silent_losses"] == 0
    assert figures["deadline_misses_critical"] == 0
    assert 1.0 <= figures["placement_balance"] <= 1.10
    assert 1.0 <= figures["moved_on_loss"] <= 1.35, "of a few cameras the worst share is larger than of many"
    assert figures["ladder_vs_drop"] > 1.1
    assert figures["schedule_us_per_window"] > 0
    assert "critical" in capsys.readouterr().out


def test_a_window_that_the_ladder_leaves_out_is_counted_beside_late_and_dropped_ones() -> None:
    """Four windows at twice the stride that was asked for, one of which found its camera shed."""
    tally = Tally(bins=1, bin_s=100.0, rungs=1)
    ends, rank = np.arange(4.0), np.full(4, Priority.CRITICAL.rank)
    twice = np.full(4, 2 * STRIDE_S)
    tally.close(ends, rank, twice, np.zeros(4, dtype=np.int64))
    tally.answer(ends[:2], rank[:2], np.array([1.0, 17.0]), twice[:2], twice[:2], ends[:2])
    tally.drop(ends[2:3], rank[2:3], "late")
    tally.drop(ends[3:], rank[3:], "shed")
    run = SimpleNamespace(tally=tally, first=0, by_priority=lambda: {Priority.CRITICAL: Figures.of(tally)})
    row = _row("2x", run, Priority.CRITICAL)
    assert (row["due"], row["answered"], row["late"], row["left_out"], row["dropped"]) == (8, 2, 1, 5, 1)
    assert row["quality"] == 0.5


def test_the_queue_and_its_steps_are_productions_by_default() -> None:
    cluster, scheduling = ClusterConfig(), SchedulingConfig()
    assert EngineSettings() == EngineSettings(cluster.max_batch, cluster.window_queue, scheduling.step_budget_s)


def test_random_drops_are_the_share_that_was_asked_for_and_the_seed_decides_which() -> None:
    cameras = [Demand(f"c{n}", busy=0.5) for n in range(60)]
    model = cost_models.load("qwen2.5-vl-7b-h100")
    first, again, other = (overloaded(cameras, model, FULL, drop=0.3, seed=seed) for seed in (4, 4, 5))
    assert first.balance == again.balance != other.balance
    computed = first.balance.answered + first.balance.dropped
    assert first.balance.dropped == pytest.approx(0.3 * computed, rel=0.1)
    assert set(first.figures.dropped) == {"random"}


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
