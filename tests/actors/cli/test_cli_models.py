"""``sightline models``: families and cards, for people and for machines."""

import json
import shutil

import pytest
import yaml
from chart_parts import ROOT

from actors.cli import main
from cluster.models.catalog import BUNDLED
from cluster.models.presets import SHAPES
from cluster.registry import families


def test_every_family_is_listed_with_its_engines(tmp_path, capsys):
    out = tmp_path / "models.json"
    assert main(["models", "list", "--json", str(out)]) == 0
    cards = json.loads(out.read_text())
    assert [card["family"] for card in cards] == list(families)
    for card in cards:
        assert card["engines"] == ["native", "vllm"]
        assert card["published"]
        assert {name.split("-")[0] for name in card["presets"]} >= {"tiny", "bench"}
    assert {shape for card in cards for shape in card["shapes"]} == set(SHAPES)
    text = capsys.readouterr().out
    assert all(name in text for name in (*families, "Qwen/Qwen3-VL-8B-Instruct"))


def test_a_card_is_worked_out_from_the_published_shape(capsys):
    """28 layers of 4 heads of 128 channels; 1080p in 448 * 448 pixels is 12x21 groups a second."""
    assert main(["models", "show", "Qwen/Qwen2.5-VL-7B-Instruct", "--json", "-"]) == 0
    card = json.loads(capsys.readouterr().out)
    assert card["kv_token_bytes"] == 2 * 28 * 4 * 128 * 2
    assert card["tokens_per_frame"] == 12 * 21
    assert card["kv_second_bytes"] == 12 * 21 * card["kv_token_bytes"]
    assert card["windows"]["NVIDIA H100"] > card["windows"]["NVIDIA L4"] > 0


@pytest.mark.parametrize(("name", "size"), [("demo", "3.1M parameters"), ("qwen2_5_vl-7b", "8.29B parameters")])
def test_a_small_model_has_a_size_too(capsys, name, size):
    assert main(["models", "show", name]) == 0
    assert size in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("llava_onevision-7b", 196), ("llava_next_video-7b", 144), ("internvl3-8b", 256 + 3)],
)
def test_square_families_have_their_published_tokens(capsys, name, tokens):
    assert main(["models", "show", name, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens_per_frame"] == tokens
    assert main(["models", "show", name]) == 0
    assert f"{tokens} tokens" in capsys.readouterr().out


def test_a_checkpoint_of_the_hubs_cache_has_a_card_and_another_says_how_to_fetch_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("some/model", "some/mo del"):
        assert main(["models", "show", name]) == 2
        said = capsys.readouterr().err
        assert f"unknown model shape '{name}'; fetch its settings first (hf download {name} --include" in said
    folder = tmp_path / "models--some--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    shutil.copytree(BUNDLED["demo"], folder / "snapshots" / ("0" * 40), ignore=lambda *_: ["model.safetensors"])
    assert main(["models", "show", "some/model"]) == 0
    assert "3.1M parameters" in capsys.readouterr().out


@pytest.mark.parametrize("file", ["deploy/compose/nvidia.yaml", "deploy/helm/sightline/values-l4.yaml"])
def test_the_default_model_of_a_deployment_has_a_card(file, capsys):
    values = yaml.safe_load((ROOT / file).read_text())
    assert main(["models", "show", values.get("config", values)["model"]["name"], "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["windows"]["NVIDIA L4"] > 4


def test_an_unknown_model_is_refused_in_a_sentence(capsys):
    assert main(["models", "show", "qwen9"]) == 2
    assert "unknown model shape 'qwen9'" in capsys.readouterr().err
