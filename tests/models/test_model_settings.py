"""``sightline.json``: what a checkpoint says of itself reaches the loader, the engine and its score."""

import json
import math
from pathlib import Path

import pytest
import torch

from cluster.engine.native.engine import NativeEngine
from cluster.errors import ModelError
from cluster.models import catalog
from cluster.models.loading import load_model
from cluster.models.settings import FILE, ModelSettings


def write(folder: Path, body: object) -> Path:
    (folder / FILE).write_text(body if isinstance(body, str) else json.dumps(body))
    return folder


def test_nothing_there_says_nothing(tmp_path: Path) -> None:
    assert ModelSettings.load(tmp_path) == ModelSettings()
    assert ModelSettings.load("some/hub-id") == ModelSettings()


def test_entries_are_read_and_newer_ones_passed_over(tmp_path: Path) -> None:
    body = {
        "window_s": 20,
        "max_pixels": 56000,
        "score_bias": -0.5,
        "threshold": 0.4,
        "thresholds": {"fall": 0.6},
        "questions": {"fall": "Is someone lying on the ground?"},
        "written_by": "a later version",
    }
    settings = ModelSettings.load(write(tmp_path, body))
    assert (settings.window_s, settings.max_pixels, settings.score_bias) == (20, 56000, -0.5)
    assert settings.questions == body["questions"]
    assert settings.threshold_of("fall") == 0.6
    assert settings.threshold_of("fight") == 0.4
    assert ModelSettings().threshold_of("fall") is None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "one JSON object"),
        ({"window_s": 0}, "window_s must be above 0"),
        ({"score_temperature": -1}, "score_temperature must be above 0"),
        ({"score_bias": "much"}, "score_bias must be a number"),
        ({"score_bias": True}, "score_bias must be a number"),
        ('{"score_bias": NaN}', "score_bias must be a number"),
        ({"threshold": 1.5}, "threshold must lie between 0 and 1"),
        ({"thresholds": {"fall": -0.1}}, "threshold must lie between 0 and 1"),
        ({"thresholds": 0.5}, "thresholds must map each kind of event to a number"),
        ({"questions": {"fall": 3}}, "questions must map each kind of event to a text"),
        ({"layer_profile": [0.5, 1.0]}, "non-increasing"),
        ({"layer_profile": [1.0, -0.1]}, "a share per layer"),
        ({"layer_profile": [0, 0]}, "a share per layer"),
        ({"layer_profile": []}, "a share per layer"),
        ({"layer_profile": "linear"}, "a share per layer"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, body: object, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        ModelSettings.load(write(tmp_path, body))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as a checkpoint on disk."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = load_model("tiny-qwen2_5_vl", seed=3)
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder


def test_settings_reach_geometry_and_score(checkpoint: Path) -> None:
    write(checkpoint, {"max_pixels": 84 * 84, "score_temperature": 2.0, "score_bias": -0.75})
    model = load_model(str(checkpoint))
    assert model.geometry.max_pixels == 84 * 84
    assert load_model(str(checkpoint), max_pixels=112 * 112).geometry.max_pixels == 112 * 112
    yes, no = model.yes_no_ids()
    logits = torch.zeros(1, model.text_config.vocab_size)
    logits[0, yes[0]] = 3.0
    margin = math.log(len(yes) - 1 + math.exp(3.0)) - math.log(len(no))
    for given, temperature, bias in (({}, 2.0, -0.75), ({"score_temperature": 1.0, "score_bias": 0.0}, 1.0, 0.0)):
        score = NativeEngine(model, **given)._score(logits).item()
        assert score == pytest.approx(1 / (1 + math.exp(-(margin / temperature + bias))), abs=1e-6)


def test_a_profile_of_other_layers_is_refused(checkpoint: Path) -> None:
    write(checkpoint, {"layer_profile": [2.0, 1.0, 0.9, 0.8, 0.7]})
    with pytest.raises(ModelError, match="layer_profile has 5 entries"):
        load_model(str(checkpoint))


def test_a_preset_says_nothing() -> None:
    model = load_model("tiny-qwen2_5_vl")
    assert model.settings == ModelSettings()
    engine = NativeEngine(model)
    assert (engine._score.temperature, engine._score.bias) == (1.0, 0.0)


def test_a_bundled_model_is_found_by_name(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(checkpoint, {"threshold": 0.3})
    monkeypatch.setitem(catalog.BUNDLED, "demo", checkpoint)
    catalog.check_model("demo")
    assert load_model("demo").settings.threshold == 0.3


def test_an_installation_without_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog.BUNDLED, "demo", tmp_path)
    with pytest.raises(ModelError, match="lacks the bundled model 'demo'"):
        catalog.check_model("demo")
    with pytest.raises(ModelError, match="lacks the bundled model 'demo'"):
        load_model("demo")
