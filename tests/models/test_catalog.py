"""The catalog is what the loader really has, and refuses in one sentence without torch."""

import json
import subprocess
import sys
import time

import pytest

from cluster.errors import ModelError
from cluster.models import catalog, presets
from cluster.registry import families


def test_every_family_has_a_preset() -> None:
    assert {preset.family for preset in presets.PRESETS.values()} == set(families)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_pass(name: str) -> None:
    catalog.check_model(name)


def checkpoint(folder, config) -> str:
    (folder / "config.json").write_text(config)
    return str(folder)


def test_checkpoint_of_a_known_family_passes(tmp_path) -> None:
    body = {"model_type": "qwen2_5_vl"}
    catalog.check_model(checkpoint(tmp_path, json.dumps(body)))
    body |= {"quantization_config": {"quant_method": "awq"}}
    catalog.check_model(checkpoint(tmp_path, json.dumps(body)), quantised=True)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            '{"model_type": "llava"}',
            "family 'llava'; supported families: internvl, llava_next_video, llava_onevision, qwen2_5_vl",
        ),
        # InternVL3.5-30B-A3B: the family is known, but nothing refused its experts before the cluster had started.
        (
            '{"model_type": "internvl", "text_config": {"model_type": "qwen3_moe"}}',
            "language model of .* is of type 'qwen3_moe'; supported types: llama",
        ),
        ("{}", "no model_type"),
        ("not json", "no model_type"),
        # The library asked for packages that read it, with which it was refused in its turn.
        (
            '{"model_type": "qwen2_5_vl", "quantization_config": {"quant_method": "awq"}}',
            r"is quantised \(method awq\), which is not supported; use the checkpoint it was made from",
        ),
    ],
)
def test_wrong_checkpoint_is_refused(tmp_path, config: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        catalog.check_model(checkpoint(tmp_path, config))


def test_empty_folder_is_refused(tmp_path) -> None:
    with pytest.raises(ModelError, match=r"without config\.json"):
        catalog.check_model(str(tmp_path))


@pytest.mark.parametrize("name", ["tiny-qwen9", "/nowhere/at/all", "./here"])
def test_unknown_name_lists_the_presets(name: str) -> None:
    with pytest.raises(ModelError, match="tiny-qwen2_5_vl"):
        catalog.check_model(name)


def test_a_hub_that_cannot_be_reached_is_said_at_once(monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    begin = time.monotonic()
    with pytest.raises(ModelError, match=r"hub http://127\.0\.0\.1:9 is unreachable: .*refused.* name the folder"):
        catalog.check_model("nobody/no-model-of-this-name")
    assert time.monotonic() - begin < 2 * catalog.HUB_S


def test_a_model_that_was_fetched_before_asks_nobody(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: pytest.fail("the hub was asked"))
    kept = tmp_path / "models--org--model"
    (kept / "snapshots" / "abc").mkdir(parents=True)
    (kept / "snapshots" / "abc" / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc")
    catalog.check_model("org/model")


def test_checking_imports_no_torch() -> None:
    code = "import sys; from cluster.models.catalog import check_model; check_model('tiny-internvl3')"
    code += "; print('torch' in sys.modules or 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
