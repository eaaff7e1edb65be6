"""What vLLM is given to serve: the same function with wider heads, and arguments that are checked before it starts."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from cluster.engine.base import Engine
from cluster.engine.vllm.engine import VllmEngine
from cluster.engine.vllm.plugin import ARCHITECTURE
from cluster.engine.vllm.served_model import write_model_folder
from cluster.engine.vllm.settings import VllmSettings, check_version, engine_arguments, version_text
from cluster.engine.window.score import why_ids
from cluster.errors import ConfigError, ModelError
from cluster.lab.bench.soak import SyntheticCamera
from cluster.models.checkpoint import Checkpoint, untrained
from cluster.models.loading import initialise, load_model
from cluster.models.presets import PRESETS
from cluster.registry import families
from cluster.types import Question, StreamSpec


def has_vllm() -> bool:
    try:
        return bool(version_text())
    except ConfigError:
        return False


# Text alone has equal axes and nothing added, so that transformers' causal models are the oracle for the written form.
CAUSAL = {
    "tiny-internvl3": Qwen2ForCausalLM,
    "tiny-qwen3_vl": Qwen3ForCausalLM,
    "tiny-llava_next_video": LlamaForCausalLM,
}


def served_logits(folder: Path, kind: Any, embeds: torch.Tensor) -> torch.Tensor:
    body = json.loads((folder / "config.json").read_text())
    config = kind.config_class(**{k: v for k, v in body.items() if k != "architectures"})
    model = kind(config).eval()
    missing = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}
    padded = torch.nn.functional.pad(embeds, (0, config.hidden_size - embeds.shape[-1]))
    with torch.no_grad():
        return model(inputs_embeds=padded[None]).logits[0]


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("sizes", [None, [16, 64], [32, 64], [48]])
def test_wider_heads_compute_the_same(tmp_path: Path, name: str, sizes: list[int] | None) -> None:
    model: Any = load_model(name)
    served = write_model_folder(model, tmp_path, sizes)
    ids = torch.arange(20) * 7 % 500
    embeds = model.embed(ids)[:, : model.text_config.hidden_size]
    with torch.no_grad(), model._library_attention():
        expected = model.model(input_ids=ids[None]).logits[0]
    assert served.width == (1 + model.deepstack) * 4 * (sizes[0] if sizes else 16)
    torch.testing.assert_close(served_logits(tmp_path, CAUSAL[name], embeds), expected, atol=2e-5, rtol=1e-5)


def test_the_language_model_of_internvl35_is_served(tmp_path: Path) -> None:
    """Qwen3, which vLLM has as the language model of Qwen3-VL. It was refused."""
    preset = PRESETS["tiny-internvl3"]
    text = preset.text | {"model_type": "qwen3", "head_dim": 32}
    whole, tokenizer = untrained(families.get("internvl"), text, preset.vision)
    initialise(whole, 0)
    checkpoint = Checkpoint(whole.eval(), tokenizer, torch.device("cpu"), torch.float32, random_weights=True)
    model: Any = families.get("internvl")(checkpoint)
    write_model_folder(model, tmp_path, None)
    ids = torch.arange(20) * 7 % 500
    with torch.no_grad(), model._library_attention():
        expected = whole(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(served_logits(tmp_path, Qwen3ForCausalLM, model.embed(ids)), expected)


@pytest.mark.parametrize(
    ("name", "interleaved", "sections"),
    [
        ("tiny-qwen2_5_vl", False, [2, 3, 11]),
        ("tiny-qwen2_vl", False, [2, 3, 11]),
        # What is not a row's or a column's pair is time's.
        ("tiny-qwen3_vl", True, [12, 2, 2]),
        ("tiny-internvl3", False, [6, 1, 9]),
    ],
)
def test_the_configuration_is_of_our_class_with_three_axes(
    tmp_path: Path, name: str, interleaved: bool, sections: list[int]
) -> None:
    model = load_model(name)
    served = write_model_folder(model, tmp_path, [32])
    body = json.loads((tmp_path / "config.json").read_text())
    assert body["architectures"] == [ARCHITECTURE]
    assert body["rope_parameters"]["mrope_section"] == sections
    assert body["rope_parameters"]["mrope_interleaved"] is interleaved
    assert body["rope_parameters"]["rope_theta"] == pytest.approx(1e12)
    assert body["sightline_largest_item"] >= model.geometry.grid(112, 112).tokens
    # Two of keys and values, three layers, two heads of 32, four bytes.
    assert served.kv_bytes == 2 * 3 * 2 * 32 * 4


def test_rotary_embeddings_of_internvl3_are_served(tmp_path: Path) -> None:
    """Its published config.json has ``dynamic``: the default ones up to the largest position. It was refused."""
    model: Any = load_model("tiny-internvl3")
    rope = {"rope_type": "dynamic", "type": "dynamic", "factor": 2.0, "rope_theta": 1e6}
    model.text_config.rope_parameters = rope
    write_model_folder(model, tmp_path, None)
    written = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    assert written == {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [6, 1, 1],
        "mrope_interleaved": False,
    }


@pytest.mark.parametrize("family", families)
def test_a_checkpoint_gives_the_language_model_and_nothing_else(tmp_path: Path, family: str) -> None:
    pytest.importorskip("vllm.version", reason="vLLM is not installed here (make setup-vllm)")
    from cluster.engine.vllm.model import SightlineWindowModel

    (name,) = (name for name, preset in PRESETS.items() if preset.family == family and name.startswith("tiny-"))
    model: Any = load_model(name)
    model.model.save_pretrained(tmp_path)
    saved, within = load_file(tmp_path / "model.safetensors"), model.model.state_dict()
    # As transformers writes it, which are names of before 4.52 for some families, and as it has it since.
    for tensors in (saved, within):
        kept = [name for name in tensors if SightlineWindowModel.hf_to_vllm_mapper.map_name(name) is not None]
        named = {SightlineWindowModel.hf_to_vllm_mapper.map_name(name): tensors[name] for name in kept}
        named.pop("lm_head.weight", None)
        expected = {f"model.{name}": value for name, value in model.model.model.language_model.state_dict().items()}
        assert named.keys() == expected.keys()
        assert all(torch.equal(named[name], value) for name, value in expected.items())


def test_models_that_are_not_served(tmp_path: Path) -> None:
    model = load_model("tiny-qwen2_5_vl")
    with pytest.raises(ModelError, match="supports head sizes up to 8"):
        write_model_folder(model, tmp_path, [8])
    rope = model.text_config.rope_parameters
    model.text_config.rope_parameters = {**rope, "rope_type": "linear"}
    with pytest.raises(
        ModelError, match=r"rotary embeddings of type default, dynamic, yarn, but this model's are 'linear'"
    ):
        write_model_folder(model, tmp_path, None)
    model.text_config.model_type = "gemma"
    with pytest.raises(ModelError, match="serves language models of type llama, qwen2"):
        write_model_folder(model, tmp_path, None)


def test_a_pipeline_whose_first_stage_cannot_add_embeddings_is_refused(tmp_path: Path) -> None:
    # Of three layers, the first two add.
    served = write_model_folder(load_model("tiny-qwen3_vl"), tmp_path, [32])
    assert engine_arguments(served, torch.float32, {"pipeline_parallel_size": 1}, cpu=False)
    with pytest.raises(ConfigError, match="lower pipeline_parallel_size to 1"):
        engine_arguments(served, torch.float32, {"pipeline_parallel_size": 2}, cpu=False)


@pytest.mark.parametrize(
    "gpus", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"kv_cache_dtype": "fp8"}]
)
def test_the_memory_for_kv_is_each_gpus(tmp_path: Path, gpus: dict[str, Any]) -> None:
    """What holds a prompt's half of the heads or layers was refused, and so was KV of one byte."""
    served = write_model_folder(load_model("tiny-qwen2_5_vl"), tmp_path, None)
    # 8192 tokens and a block of 16.
    given = {"max_model_len": 8192, "kv_cache_memory_bytes": served.kv_bytes * (8192 + 16) // 2}
    with pytest.raises(ConfigError, match=r"too small for one prompt of 8192 tokens, which needs 6\.0 MiB"):
        engine_arguments(served, torch.float32, given, cpu=False)
    assert engine_arguments(served, torch.float32, given | gpus, cpu=False)


@pytest.mark.parametrize("text", ["0.31.2", "0.34.0", "1.0", "dev"])
def test_versions_outside_the_tested_range(text: str) -> None:
    with pytest.raises(ConfigError, match=r"tested with vLLM from 0\.32 to below 0\.34"):
        check_version(text)


def test_versions_inside_the_tested_range() -> None:
    check_version("0.32.0")
    check_version("0.33.1+cu130")


@pytest.mark.skipif(has_vllm(), reason="vLLM is installed here")
def test_without_vllm_the_engine_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"make setup-vllm"):
        VllmEngine(load_model("tiny-qwen2_5_vl"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_paralel_size": 2}, "did you mean tensor_parallel_size"),
        ({"xyzzy": 1}, "vllm serve --help"),
        ({"model": "other"}, "is set by Sightline"),
        ({"revision": "v2"}, "is set by Sightline"),
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


def test_a_window_that_opens_at_the_anchor_before_it_fits_what_vllm_takes() -> None:
    """Its seconds before its start were not counted: vLLM refused windows of a busy camera that had been admitted."""
    model = load_model("tiny-qwen2_5_vl")
    engine = VllmEngine.__new__(VllmEngine)
    Engine.__init__(engine, model, max_new_tokens=4)
    engine._tiers = engine._checkpoints = None
    engine._system, engine._why, engine.core = model.system_ids(), why_ids(model), SimpleNamespace(max_tokens=0)
    spec = StreamSpec("cam", (Question("q", "Is anyone there?"),), 6.0, 2.0, lookback_s=8.0, static_gate=False)
    with pytest.raises(ConfigError, match=r"may have \d+ tokens") as refused:
        engine.admit(spec)
    engine.core.max_tokens = int(re.findall(r"may have (\d+) tokens", str(refused.value))[0]) + 1
    engine.admit(spec)
    with pytest.raises(ConfigError, match=r"may have \d+ tokens"):
        # An explanation takes more.
        engine.admit(replace(spec, stream="why", questions=(replace(spec.questions[0], explain=True),)))
    camera = SyntheticCamera("cam", model.geometry, width=112, height=112, kept=0.9, anchor_every=8)
    around = len(engine._system) + len(model.question_ids("Is anyone there?")) + 1
    longest = 0
    for sample in itertools.islice(camera, 24):
        for request in engine.push(sample):
            frames = engine._streams["cam"].window_frames(request.start, request.end)
            longest = max(longest, around + sum(frame.size for frame in frames))
    assert 0.75 * engine.core.max_tokens < longest <= engine.core.max_tokens
