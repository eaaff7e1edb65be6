"""``sightline models``: families and cards, for people and for machines."""

import json

import pytest

from actors.cli import main
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
    assert all(name in text for name in families)


def test_a_card_is_worked_out_from_the_published_shape(capsys):
    """28 layers of 4 heads of 128 channels; 1080p in 448 * 448 pixels is 12x21 groups a second."""
    assert main(["models", "show", "Qwen/Qwen2.5-VL-7B-Instruct", "--json", "-"]) == 0
    card = json.loads(capsys.readouterr().out)
    assert card["kv_token_bytes"] == 2 * 28 * 4 * 128 * 2
    assert card["tokens_per_frame"] == 12 * 21
    assert card["kv_second_bytes"] == 12 * 21 * card["kv_token_bytes"]
    assert card["windows"]["NVIDIA H100"] > card["windows"]["NVIDIA L4"] > 0


@pytest.mark.parametrize(("name", "size"), [("demo", "3.1M parameters"), ("qwen2_5_vl-7b", "7.75B parameters")])
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


def test_an_unknown_model_is_refused_in_a_sentence(capsys):
    assert main(["models", "show", "qwen9"]) == 2
    assert "unknown model shape 'qwen9'" in capsys.readouterr().err
