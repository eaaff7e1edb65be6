"""Presets, checkpoints and everything that can be wrong with them."""

import json
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from cluster.config import SightlineConfig, load_config
from cluster.engine.vllm.served_model import write_model_folder
from cluster.errors import ConfigError, ModelError
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.stack import TierStack
from cluster.models.checkpoint import normalise, weights_digest
from cluster.models.loading import load_model, load_shape
from cluster.models.presets import PRESETS
from cluster.models.settings import ModelSettings
from cluster.registry import families
from cluster.replica.engine import load_configured, make_simulated

QUESTION = "Is there a fire or smoke?"


@pytest.fixture
def saved(model, tmp_path):
    model.model.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_log_has_no_progress_bar(saved, capfd):
    load_model(str(saved))
    assert "Loading weights" not in capfd.readouterr().err


def test_a_saved_checkpoint_gives_the_same_logits(model, saved, make_frame):
    loaded = load_model(str(saved))
    grid = model.geometry.grid(160, 120)
    frames = [make_frame(grid) for _ in range(2)]
    assert type(loaded) is type(model)
    assert model.random_weights
    assert not loaded.random_weights
    saved_weights = loaded.model.state_dict()
    assert all(torch.equal(saved_weights[name], weight) for name, weight in model.model.state_dict().items())
    # Not to the last bit: weights mapped from a file are aligned otherwise, and so are the kernels' partial sums.
    torch.testing.assert_close(
        loaded.reference_logits(frames, [0.0, 1.0], QUESTION), model.reference_logits(frames, [0.0, 1.0], QUESTION)
    )
    assert loaded.yes_no_ids() == model.yes_no_ids()


def test_the_image_processor_of_a_checkpoint_is_heeded(model, saved, make_frame):
    grid = model.geometry.grid(160, 120)
    frame = make_frame(grid)
    settings = {"image_mean": [0.3, 0.5, 0.7], "image_std": [0.4, 0.5, 0.6], "image_processor_type": "X"}
    (saved / "preprocessor_config.json").write_text(json.dumps(settings))
    loaded = load_model(str(saved))
    assert (loaded.mean, loaded.std) == ((0.3, 0.5, 0.7), (0.4, 0.5, 0.6))
    assert not torch.allclose(loaded.encode([frame])[0].embeds, model.encode([frame])[0].embeds, atol=1e-3)


@pytest.mark.parametrize(
    ("body", "factor", "mean", "std"),
    [
        ({"do_normalize": False}, 1 / 255, (0, 0, 0), (1, 1, 1)),
        (
            {"do_rescale": False, "image_mean": [128, 127, 126], "image_std": [70, 71, 72]},
            1,
            (128, 127, 126),
            (70, 71, 72),
        ),
        ({"rescale_factor": 2 / 255, "image_mean": [1, 1, 1], "image_std": [1, 1, 1]}, 2 / 255, (1, 1, 1), (1, 1, 1)),
        ({"do_normalize": False, "do_rescale": False}, 1, (0, 0, 0), (1, 1, 1)),
    ],
)
def test_every_key_of_the_processor_that_changes_pixels_counts(internvl, tmp_path, body, factor, mean, std):
    """Only mean and deviation did."""
    internvl.model.save_pretrained(tmp_path)
    internvl.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(body))
    loaded = load_model(str(tmp_path))
    pixels = torch.tensor([0, 60, 255], dtype=torch.uint8)
    shown = normalise(pixels.view(1, 1, 3, 1, 1), loaded.mean, loaded.std, torch.float32).flatten()
    torch.testing.assert_close(shown, (pixels * factor - torch.tensor(mean)) / torch.tensor(std))


def test_frames_are_shown_as_the_processor_of_videos_shows_them(internvl, tmp_path):
    internvl.model.save_pretrained(tmp_path)
    internvl.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.1, 0.1, 0.1]}')
    assert load_model(str(tmp_path)).mean == (0.1, 0.1, 0.1)
    (tmp_path / "video_preprocessor_config.json").write_text('{"image_mean": [0.2, 0.2, 0.2]}')
    assert load_model(str(tmp_path)).mean == (0.2, 0.2, 0.2)
    both = {"image_processor": {"image_mean": [0.3, 0.3, 0.3]}, "video_processor": {"image_mean": [0.4, 0.4, 0.4]}}
    (tmp_path / "processor_config.json").write_text(json.dumps(both))
    assert load_model(str(tmp_path)).mean == (0.4, 0.4, 0.4)


@pytest.mark.parametrize(
    "body",
    ['{"image_std": [0, 1, 1]}', '{"image_mean": [0.5]}', '{"rescale_factor": 0}', '{"image_mean": "half"}', "{"],
)
def test_a_processor_that_makes_no_pixels_is_refused(internvl, tmp_path, body):
    internvl.model.save_pretrained(tmp_path)
    internvl.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(body)
    with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
        load_model(str(tmp_path))


def test_a_chat_template_that_asks_otherwise_is_refused(model, saved):
    """Its checkpoint was asked in a way it was not trained for, and nobody was told."""
    asked = "{% for message in messages %}{{ message.content }}{% endfor %}"
    answer = "{% if add_generation_prompt %}[/INST]{% endif %}"
    for template in (f"[INST]{asked}{answer}", _published(model) + "<think>", "{% broken"):
        (saved / "chat_template.jinja").write_text(template)
        with pytest.raises(ModelError, match="the chat template of"):
            load_model(str(saved))
    (saved / "chat_template.jinja").write_text(_published(model))
    assert load_model(str(saved)).chat_answer == model.chat_answer
    (saved / "chat_template.jinja").unlink()
    # Of processors, as library versions before 5 saved them.
    (saved / "chat_template.json").write_text(json.dumps({"chat_template": asked}))
    with pytest.raises(ModelError, match="the chat template of"):
        load_model(str(saved))
    # Beside a tokenizer that kept its language model's template, and with a system prompt of its own.
    (saved / "chat_template.jinja").write_text(f"[INST]{asked}{answer}")
    other = _published(model).replace("You are a helpful assistant.", "You are Qwen.")
    (saved / "chat_template.json").write_text(json.dumps({"chat_template": other}))
    assert load_model(str(saved)).chat_answer == model.chat_answer


def _published(model):
    """The template of the family's published checkpoints, without what writes pictures."""
    parts = "{% for part in message.content %}{{ part.text }}{% endfor %}"
    if model.family == "llava_next_video":
        turn = "{{ message.role.upper() }}: " + parts + " "
        return (
            "{% for message in messages %}" + turn + "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
        )
    system = "{% if loop.first %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    after_role, after_turn = (" ", "") if model.family == "llava_onevision" else ("\n", "\n")
    turn = "<|im_start|>{{ message.role }}" + after_role + parts + "<|im_end|>" + after_turn
    opening = system if model.family in ("qwen2_vl", "qwen2_5_vl") else ""
    answer = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    return "{% for message in messages %}" + opening + turn + "{% endfor %}" + answer


def test_the_settings_of_a_checkpoint_from_the_hub_are_heeded(qwen, offline, tmp_path, monkeypatch):
    """Its scores went without its calibration."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--some--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    folder = kept / "snapshots" / "abc"
    qwen.model.save_pretrained(folder)
    qwen.tokenizer.save_pretrained(folder)
    assert load_model("some/model").settings == ModelSettings()
    (folder / "sightline.json").write_text('{"score_temperature": 2.5, "max_pixels": 3136}')
    loaded = load_model("some/model")
    assert (loaded.settings.score_temperature, loaded.geometry.max_pixels) == (2.5, 3136)


@pytest.mark.parametrize("shard", ["1GB", "100KB"])
def test_a_checkpoint_in_the_hubs_cache_asks_the_hub_nothing(qwen, tmp_path, monkeypatch, shard):
    """Behind a hub that refused connections, each of its files took half a minute, four in all."""
    kept = tmp_path / "models--some--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    folder = kept / "snapshots" / "abc"
    qwen.model.save_pretrained(folder, max_shard_size=shard)
    qwen.tokenizer.save_pretrained(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("the hub was asked"))
    loaded = load_model("some/model")
    assert torch.equal(loaded.model.lm_head.weight, qwen.model.lm_head.weight)
    # By this name vLLM finds the same weights.
    assert loaded.model.name_or_path == str(folder)
    sorted(folder.glob("*.safetensors"))[-1].unlink()
    with pytest.raises(pytest.fail.Exception, match="the hub was asked"):
        load_model("some/model")


def test_max_pixels_bounds_native_resolution(qwen):
    assert load_model("tiny-qwen2_5_vl", max_pixels=56 * 56).geometry.grid(1920, 1080).tokens <= 4
    assert qwen.geometry.grid(1920, 1080).tokens > 4


def test_the_configurations_max_pixels_reaches_decoders_and_both_engines():
    """Decoders cut pictures by the geometry that their replica tells them."""
    wide = {"name": "tiny-qwen2_5_vl", "max_pixels": 224 * 224}
    config = load_config(None, {"model": wide})
    assert load_configured(config, 1).geometry.max_pixels == 224 * 224
    simulated = SightlineConfig.model_validate(
        {"engine": "simulated", "model": wide | {"name": "demo"}, "simulated": {"costs": "demo-cpu"}}
    )
    engine, _ = make_simulated(simulated, TierStack([Arena(1 << 20)]), "r")
    assert engine.geometry.max_pixels == 224 * 224
    square = load_config(None, {"model": wide | {"name": "tiny-internvl3"}})
    with pytest.raises(ConfigError, match=r"model\.max_pixels: frames of family internvl are always 112x112"):
        load_configured(square, 1)


def test_a_seed_makes_the_weights(qwen):
    def weights(seed):
        return torch.cat([p.flatten() for p in load_model("tiny-qwen2_5_vl", seed=seed).model.parameters()])

    assert torch.equal(weights(0), torch.cat([p.flatten() for p in qwen.model.parameters()]))
    assert not torch.equal(weights(0), weights(1))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_loads_and_is_of_its_family(name):
    model = load_model(name)
    assert model.family == PRESETS[name].family
    assert model.random_weights
    assert not any(parameter.requires_grad for parameter in model.model.parameters())
    size = sum(parameter.numel() for parameter in model.model.parameters())
    low, high = {"tiny": (0, 1e6), "demo": (1e6, 8e6), "bench": (50e6, 62e6), "kv7b": (50e6, 62e6)}[name.split("-")[0]]
    assert low < size < high


@pytest.mark.parametrize(
    ("hub_id", "parameters"),
    [
        ("Qwen/Qwen2-VL-7B-Instruct", 8_291_375_616),
        ("Qwen/Qwen2.5-VL-3B-Instruct", 3_754_622_976),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 8_292_166_656),
        ("Qwen/Qwen3-VL-4B-Instruct", 4_437_815_808),
        ("Qwen/Qwen3-VL-8B-Instruct", 8_767_123_696),
        ("OpenGVLab/InternVL3-8B-hf", 7_944_373_760),
    ],
)
def test_a_published_shape_has_as_many_weights_as_its_checkpoint(hub_id, parameters):
    """Most have an output head beside the embedding, which ``models show`` left out: 1.1 GB of a 7B model."""
    assert sum(parameter.numel() for parameter in load_shape(hub_id).model.parameters()) == parameters


def test_every_family_has_a_preset():
    assert {preset.family for preset in PRESETS.values()} == set(families.names())


def one_line(error) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.fixture
def offline(monkeypatch):
    # A hub id is looked up over the network; here the network is refused, as it is for many users.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_neither_preset_nor_path_nor_hub_id(offline):
    with pytest.raises(ModelError) as error:
        load_model("nobody/no-such-model")
    message = one_line(error)
    assert "nobody/no-such-model" in message
    assert "tiny-qwen2_5_vl" in message


def test_a_path_that_is_not_there(offline, tmp_path):
    with pytest.raises(ModelError) as error:
        load_model(str(tmp_path / "gone"))
    assert "gone" in one_line(error)


def test_a_checkpoint_of_another_family(tmp_path):
    # One that the library has, and one whose repository brings code, which it offered to run.
    for family, more in (("bert", {}), ("internvl_chat", {"auto_map": {"AutoConfig": "configuration.Config"}})):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family} | more))
        for load in (load_model, load_shape):
            with pytest.raises(ModelError) as error:
                load(str(tmp_path))
            message = one_line(error)
            assert f"family '{family}'" in message
            assert "qwen2_5_vl" in message


@pytest.mark.parametrize(
    "content", ["{", "{}", '{"model_type": "no-such-type"}', '{"model_type": "qwen2_5_vl", "vision_config": 5}']
)
def test_a_broken_config(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError) as error:
        load_model(str(tmp_path))
    assert str(tmp_path) in one_line(error)


def test_an_empty_directory(tmp_path):
    with pytest.raises(ModelError) as error:
        load_model(str(tmp_path))
    assert str(tmp_path) in one_line(error)


def test_a_checkpoint_without_weights(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(ModelError) as error:
        load_model(str(saved))
    assert str(saved) in one_line(error)


def test_a_truncated_checkpoint(saved):
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError) as error:
        load_model(str(saved))
    assert str(saved) in one_line(error)


def test_a_checkpoint_that_lacks_some_weights(saved, model):
    """The library would fill them at random and only warn: answers would be noise."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(saved / "model.safetensors")
    dropped = next(name for name in tensors if "layers.1" in name)
    del tensors[dropped]
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lacks"):
        load_model(str(saved))


@pytest.mark.parametrize(
    "extra", ["self_attn.o_proj.bias", "self_attn.q_proj.lora_A.weight", "self_attn.rotary_emb.inv_freq"]
)
def test_a_checkpoint_with_weights_that_its_config_leaves_out(saved, extra):
    """The library would drop them: a bias, an adapter that was not merged."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(saved / "model.safetensors")
    name = next(name for name in tensors if name.endswith("0.self_attn.q_proj.weight") and "vision" not in name)
    tensors[name.replace("self_attn.q_proj.weight", extra)] = torch.ones(4)
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    if extra.endswith("inv_freq"):
        # Of old files; it is computed.
        load_model(str(saved))
        return
    with pytest.raises(ModelError, match=f"1 layer weights that its config.json does not account for, .*{extra};"):
        load_model(str(saved))


def test_a_checkpoint_whose_tower_has_more_layers_than_its_config_says(saved):
    """Towers whose layers are called blocks, or layer, ran without the last ones."""
    config = json.loads((saved / "config.json").read_text())
    config["vision_config"] |= {key: 2 for key in ("depth", "num_hidden_layers") if key in config["vision_config"]}
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"layer weights that its config.json does not account for"):
        load_model(str(saved))


def change_text_config(folder, **entries):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= entries
    (folder / "config.json").write_text(json.dumps(config))


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
SLIDES = "attend over a sliding window of 16 tokens"


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        (SLIDES, {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0, "layer_types": None}),
        (SLIDES, {"model_type": "mistral", "sliding_window": 16, "layer_types": None}),
        ("type 'ernie4_5'", {"model_type": "ernie4_5"}),
        ("type 'granite'", {"model_type": "granite"}),
        ("type 'gemma3_text'", {"model_type": "gemma3_text", "rope_parameters": None, "layer_types": None}),
        ("longrope", {"rope_parameters": LONG}),
        ("", {"use_sliding_window": False, "sliding_window": 16, "layer_types": None}),
        ("", {"model_type": "mistral", "sliding_window": None}),
    ],
)
def test_a_language_model_that_computes_otherwise(tmp_path, internvl, reason, change):
    """Its weights fit our layers, and every answer was noise. It is refused before they are read."""
    internvl.model.save_pretrained(tmp_path)
    internvl.tokenizer.save_pretrained(tmp_path)
    change_text_config(tmp_path, **change)
    with pytest.raises(ModelError, match=reason) if reason else nullcontext():
        load_shape(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=reason or "cannot be loaded"):
        load_model(str(tmp_path))


def test_a_quantised_checkpoint_on_the_native_engine(saved):
    """The library ignores a method that it does not know, and reads what is quantised as if it were not."""
    change_text_config(saved, quantization_config={"quant_method": "modelopt"})
    with pytest.raises(ModelError, match=r"is quantised \(method modelopt\)"):
        load_model(str(saved))


def test_a_quantised_checkpoint_for_vllm(model, saved, make_frame, tmp_path_factory):
    """All of it was read by the library, which asked for packages that quantised layers need."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(saved / "model.safetensors")
    linear = [name for name in tensors if "vis" not in name and name.endswith("proj.weight")]
    packed = {name.replace("weight", "qweight"): tensors.pop(name).to(torch.int8) for name in linear}
    save_file(tensors | packed, saved / "model.safetensors", metadata={"format": "pt"})
    config, method = json.loads((saved / "config.json").read_text()), {"quant_method": "awq", "bits": 4}
    (saved / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    with pytest.raises(ModelError, match=r"is quantised \(method awq\), which is not supported"):
        load_model(str(saved))
    loaded = load_model(str(saved), without_layers=True)
    frames, ids = [make_frame(model.geometry.grid(160, 120))], torch.arange(20)
    torch.testing.assert_close(loaded.encode(frames)[0].embeds, model.encode(frames)[0].embeds)
    assert torch.equal(loaded.embed(ids), model.embed(ids))
    assert len(loaded.layers) == len(model.layers)
    assert loaded.fingerprint == load_model(str(saved), without_layers=True).fingerprint
    folder = tmp_path_factory.mktemp("served")
    assert write_model_folder(loaded, folder, None).weights == str(saved)
    body = json.loads((folder / "config.json").read_text())
    assert (body["quantization_config"], body["num_hidden_layers"]) == (method, len(model.layers))
    # A tower in float8 has the shapes of one that is not: it was read without its scales.
    tower = next(name for name in tensors if "vis" in name and name.endswith(".weight"))
    save_file(tensors | {f"{tower}_scale": torch.ones(1)}, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"1 layer weights .* first being \S*{tower.split('.')[-2]}\.weight_scale"):
        load_model(str(saved), without_layers=True)


def test_layers_of_a_checkpoint_for_vllm_are_left_to_it(model, saved, make_frame, tmp_path_factory):
    """The replica held all of it on one GPU before vLLM spread it over several: what needs several found no room."""
    config = load_config(None, {"engine": "vllm", "model": {"name": str(saved)}})
    loaded = load_configured(config, 1)
    absent = {name for name, parameter in loaded.model.named_parameters() if parameter.is_meta}
    assert absent == {name for name, _ in model.model.named_parameters() if ".language_model.layers." in name}
    frames, ids = [make_frame(model.geometry.grid(160, 120))], torch.arange(20)
    torch.testing.assert_close(loaded.encode(frames)[0].embeds, model.encode(frames)[0].embeds)
    assert torch.equal(loaded.embed(ids), model.embed(ids))
    assert torch.equal(loaded.model.lm_head.weight, model.model.lm_head.weight)
    folder = tmp_path_factory.mktemp("served")
    assert write_model_folder(loaded, folder, None).weights == str(saved)
    assert not list(folder.glob("*.safetensors"))
    # Wider heads are written from the checkpoint.
    written = []
    for each in (loaded, load_model(str(saved))):
        write_model_folder(each, folder, [32])
        written.append((folder / "model.safetensors").read_bytes())
    assert written[0] == written[1]


def test_a_head_of_its_own_counts_though_the_config_leaves_it_out(internvl, tmp_path):
    """The published InternVL3, of which `models show` forgot 1.1 GB."""
    from safetensors.torch import load_file, save_file

    internvl.model.save_pretrained(tmp_path)
    internvl.tokenizer.save_pretrained(tmp_path)
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    head = torch.randn(next(weight.shape for name, weight in tensors.items() if "embed_tokens" in name))
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "tie_word_embeddings"}))
    tied, shape = load_shape("tiny-internvl3"), load_shape(str(tmp_path))
    sizes = [sum(weight.numel() for weight in each.model.parameters()) for each in (tied, shape)]
    assert sizes[1] - sizes[0] == head.numel()
    assert torch.equal(load_model(str(tmp_path)).model.lm_head.weight, head)


def test_a_digest_has_every_weight():
    """It took 32 values of each. It knows weights, and no family's names."""
    loaded = load_model("tiny-qwen2_5_vl")
    before, marks = weights_digest(loaded.model), set()
    for weight in loaded.model.parameters():
        flat = weight.data.view(-1)
        place = len(marks) * 7919 % len(flat)
        kept = flat[place].clone()
        flat[place] += 1
        marks.add(weights_digest(loaded.model))
        flat[place] = kept
    assert len(marks | {before}) == len(list(loaded.model.parameters())) + 1
    assert weights_digest(loaded.model) == before


def test_a_fingerprint_has_what_else_kv_depends_on(saved, tmp_path_factory):
    """It had neither rotary base nor pixels: other models' KV was taken for ours."""
    loaded = load_model(str(saved))
    (elsewhere := tmp_path_factory.mktemp("elsewhere") / "copy").symlink_to(saved)
    assert load_model(str(elsewhere)).fingerprint == loaded.fingerprint
    (saved / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.3, 0.5, 0.7]}))
    shown = load_model(str(saved)).fingerprint
    config = json.loads((saved / "config.json").read_text())
    change_text_config(saved, rope_parameters=config["text_config"]["rope_parameters"] | {"rope_theta": 77.0})
    assert len({loaded.fingerprint, shown, load_model(str(saved)).fingerprint}) == 3


def test_a_checkpoint_without_tokenizer(saved):
    for path in [*saved.glob("token*"), *saved.glob("special*")]:
        path.unlink()
    with pytest.raises(ModelError) as error:
        load_model(str(saved))
    message = one_line(error)
    assert "tokenizer" in message
    assert str(saved) in message


def test_a_tokenizer_of_another_family(tmp_path, qwen, internvl):
    qwen.model.save_pretrained(tmp_path)
    internvl.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no token '<\|vision_start\|>'"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("device", ["cuda:7", "toaster", "meta"])
def test_a_device_that_is_not_there(device):
    with pytest.raises(ModelError) as error:
        load_model("tiny-qwen2_5_vl", device=device)
    message = one_line(error)
    assert device in message
    assert "cpu" in message


def test_a_device_that_fails_without_a_word(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError

    monkeypatch.setattr(torch, "ones", fails)
    with pytest.raises(ModelError, match=r"device 'cpu' is not available here \(RuntimeError\)"):
        load_model("tiny-qwen2_5_vl")


def test_an_unknown_dtype():
    with pytest.raises(ConfigError, match="there are: float32, bfloat16, float16, float8"):
        load_model("tiny-qwen2_5_vl", dtype="float4")


def test_a_window_that_is_no_multiple_of_a_group(tmp_path, qwen):
    qwen.model.save_pretrained(tmp_path)
    qwen.tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["window_size"] = 60
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="window_size 60"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("change", [{"vision_feature_select_strategy": "full"}, {"vision_feature_layer": [-1, -2]}])
def test_an_internvl_head_that_is_not_supported(tmp_path, internvl, change):
    internvl.model.save_pretrained(tmp_path)
    internvl.tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match="vision_feature"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(model, make_frame, dtype):
    half = load_model(
        next(n for n in PRESETS if n.startswith("tiny-") and PRESETS[n].family == model.family), dtype=dtype
    )
    grid = model.geometry.grid(160, 120)
    frames = [make_frame(grid)]
    (tokens,), (expected,) = half.encode(frames), model.encode(frames)
    assert tokens.embeds.dtype == half.dtype == getattr(torch, dtype)
    cosine = torch.nn.functional.cosine_similarity(tokens.embeds.float(), expected.embeds, dim=-1)
    assert cosine.min() > 0.99
    assert half.rotary(torch.arange(4).expand(3, -1))[0].dtype == torch.float32


def test_importing_the_package_costs_no_torch():
    code = "import sys, cluster.models; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
