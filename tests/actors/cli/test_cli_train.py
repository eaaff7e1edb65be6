import json

import pytest

from actors.cli import main
from actors.cli.train import _minutes, demo_model
from cluster.errors import ConfigError
from cluster.lab.training import run
from cluster.models.loading import load_model


def test_minutes_are_given_per_stage():
    assert _minutes(["windows=45"], {"tower": 12.0, "windows": 50.0}) == {"tower": 12.0, "windows": 45.0}


@pytest.mark.parametrize("option", ["windows", "windows=soon", "attic=3", "windows=0"])
def test_minutes_that_cannot_be_are_refused(option):
    with pytest.raises(ConfigError, match="--minutes"):
        _minutes([option], {"windows": 50.0})


def test_an_unknown_stage_is_refused_by_name(tmp_path, capsys):
    assert main(["train", "demo-model", "--out", str(tmp_path), "--stage", "tower", "--stage", "attic"]) == 2
    assert "error: unknown stage 'attic'; there are: tower" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_drawn(capsys):
    assert main(["train", "demo-model", "--preset", "tiny", "--out", "/proc/none", "--stage", "windows"]) == 1
    assert "error: cannot write /proc/none" in capsys.readouterr().err


def test_a_short_run_leaves_a_model_that_loads_and_a_log(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_INIT_EXAMPLES", 2)
    monkeypatch.setattr(run, "_EXPORT_SCENES", 1)
    demo_model(
        out=tmp_path, stage=["tower", "windows", "export"], minutes=None, steps=2, batch=1, rate=None, preset="tiny",
        begin_with=None, optimizer="muon", device="cpu", threads=1, workers=0,
        seed=0, resume=True, validation_scenes=0,
    )  # fmt: skip
    assert {"tower.pt", "windows.pt", "model"} <= {path.name for path in tmp_path.iterdir()}
    model = load_model(str(tmp_path / "model"))
    assert not model.random_weights
    assert json.loads((tmp_path / "model" / "sightline.json").read_text())["window_s"] == 20.0
