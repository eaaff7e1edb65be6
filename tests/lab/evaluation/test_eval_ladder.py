"""Ladders from results of evaluations: what was measured is taken, what was not is marked."""

import json
from pathlib import Path

import pytest

from actors.cli import main
from cluster.config.camera import WindowConfig
from cluster.control.ladder import Ladder, default
from cluster.errors import ConfigError
from cluster.lab.evaluation.ladder import build_ladder, read_accuracy_results
from cluster.lab.evaluation.settings import LADDER, WindowShape, make_grid
from cluster.models.catalog import locate


def row(setting: str, f1: float, kept: int, full: int = 1000) -> dict:
    return {"setting": setting, "f1": f1, "f1_low": f1 - 0.1, "f1_high": f1 + 0.1, "kept": kept, "tokens_full": full}


def results(tmp_path: Path, *rows: dict) -> dict:
    file = tmp_path / "accuracy.json"
    file.write_text(json.dumps({"bench": "accuracy", "rows": rows, "notes": ["videos: 3", "model: m"]}))
    return read_accuracy_results(file)


def test_every_rung_is_read_off_its_row(tmp_path) -> None:
    found = build_ladder(
        results(
            tmp_path,
            row("full", 0.9, 1000),
            row("ladder full", 0.8, 400),
            row("ladder prune", 0.76, 300),
            row("ladder refresh", 0.72, 300),
            row("ladder stride", 0.74, 300),
            row("ladder fps", 0.4, 200, full=500),
        )
    )
    assert [rung.name for rung in found.rungs] == ["full", "prune", "refresh", "stride", "fps", "shed"]
    assert [rung.f1 for rung in found.rungs] == pytest.approx([1, 0.95, 0.9, 0.9, 0.5, 0])
    assert [rung.kept for rung in found.rungs[:5]] == pytest.approx([1, 0.75, 0.75, 0.75, 1.0])
    assert all("measured" in rung.source for rung in found.rungs[:5])
    assert "5 of 5 rungs measured: videos: 3" in found.source
    found.save(tmp_path)
    assert Ladder.load(tmp_path) == found


def test_two_videos_give_a_ladder_without_intervals(tmp_path) -> None:
    unsure = {"f1_low": None, "f1_high": None}
    found = build_ladder(
        results(tmp_path, row("ladder full", 0.8, 400) | unsure, row("ladder prune", 0.6, 400) | unsure)
    )
    assert [rung.f1 for rung in found.rungs[:2]] == pytest.approx([1, 0.75])
    assert [rung.source for rung in found.rungs[:2]] == ["measured: F1 0.800", "measured: F1 0.600 of 0.800"]


def test_rungs_without_a_row_fall_as_in_the_default_ladder_and_say_so(tmp_path) -> None:
    found = build_ladder(results(tmp_path, row("replenish + anchors", 0.8, 400), row("ladder prune", 0.4, 400)))
    assert found.rungs[1].f1 == pytest.approx(0.5)
    guesses = default().rungs
    assert found.rungs[2].f1 == pytest.approx(0.5 * guesses[2].f1 / guesses[1].f1, abs=1e-4)
    assert [rung.source.split(":")[0] for rung in found.rungs[1:5]] == ["measured", "derived", "derived", "derived"]
    assert "2 of 5" in found.source


def test_results_without_full_quality_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="--settings ladder"):
        build_ladder(results(tmp_path, row("ladder prune", 0.8, 400)))


@pytest.mark.parametrize("text", ["{", "[]", '{"bench": "window", "rows": []}', '{"bench": "accuracy"}'])
def test_files_that_are_no_results_are_refused(tmp_path, text) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ConfigError, match=r"not an evaluation result|is not JSON"):
        read_accuracy_results(tmp_path / "r.json")
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json: No such file"):
        read_accuracy_results(tmp_path / "none.json")


def test_the_grid_measures_every_rung_with_what_it_changes() -> None:
    settings = {setting.name: setting for setting in make_grid("ladder", WindowShape())}
    assert set(settings) == {"full", *(f"ladder {step.name}" for step in LADDER)}
    stride = settings["ladder stride"]
    assert (stride.shape.stride_s, stride.shape.fps, stride.budget) == (8.0, 2.0, 0.0)
    assert dict(stride.options) == {"margin": 6.75}
    assert settings["ladder fps"].shape.fps == 1.0
    full, production = settings["ladder full"], WindowConfig()
    assert (full.options, full.refresh, full.budget) == ((), production.refresh, production.refresh_budget)
    # A camera steps down under its own policy: a rung sets no more than the budget.
    assert {each.refresh for name, each in settings.items() if name != "full"} == {production.refresh}


def test_the_bundled_models_ladder_was_measured_throughout() -> None:
    found = Ladder.load(Path(locate("demo")))
    assert "5 of 5 rungs measured" in found.source
    assert found.floor == 4


def test_the_command_writes_a_models_ladder_and_shows_it(tmp_path, capsys) -> None:
    rows = [row("ladder full", 0.8, 400), row("ladder stride", 0.6, 400)]
    (tmp_path / "r.json").write_text(json.dumps({"bench": "accuracy", "rows": rows, "notes": []}))
    assert main(["eval", "ladder", str(tmp_path / "r.json"), "--model", str(tmp_path)]) == 0
    assert Ladder.load(tmp_path).rungs[3].f1 == pytest.approx(0.75)
    assert "stride" in capsys.readouterr().out
    assert main(["eval", "ladder", str(tmp_path / "r.json"), "--out", str(tmp_path / "none" / "l.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err
