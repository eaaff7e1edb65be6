"""What ``models check`` refuses, each in a sentence, with exit code 2 and before weights are loaded."""

import json
import subprocess
import sys

import pytest
import torch

from actors.cli import main
from cluster.errors import ModelError
from cluster.lab.check import run
from cluster.lab.check.requirements import check_files, check_memory, checkpoint_folder
from cluster.models.loading import load_shape


@pytest.fixture
def refused(monkeypatch, capsys):
    """``refused(*arguments)``: the one line that the command says, having loaded nothing."""

    def loading(*_, **__):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(run, "load_model", loading)

    def say(*arguments):
        assert main(["models", "check", *map(str, arguments)]) == 2
        (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        return error

    return say


def change_config(folder, **entries):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_a_family_that_is_not_supported(saved, refused):
    folder = saved()
    change_config(folder, model_type="llava")
    assert "of family 'llava'; supported families: internvl" in refused(folder)


def test_a_name_that_is_none(refused):
    assert "there is no model 'qwen9'" in refused("qwen9")


@pytest.mark.parametrize("within", [None, "text_config"])
def test_a_quantised_checkpoint(saved, refused, within):
    folder = saved()
    quantised = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    config = json.loads((folder / "config.json").read_text())
    change_config(folder, **(quantised if within is None else {within: config[within] | quantised}))
    assert "is quantised (method awq), which is not supported" in refused(folder)


def test_a_missing_file_of_weights(saved, refused):
    folder = saved(max_shard_size="100KB")
    files = sorted(folder.glob("model-*.safetensors"))
    assert len(files) > 1
    files[1].unlink()
    assert f"lacks 1 of {len(files)} weight files, {files[1].name} the first" in refused(folder)


def test_no_weights_at_all(saved, refused):
    folder = saved()
    (folder / "model.safetensors").unlink()
    assert "has no weights" in refused(folder)


def test_weights_that_are_cut_off(saved, refused):
    folder = saved(max_shard_size="100KB")
    file = max(folder.glob("model-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    assert f"{file} is no complete safetensors file (" in refused(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 16060522904\n",
        b"",
        (2).to_bytes(8, "little") + b"[]",
    ],
)
def test_a_file_that_holds_no_weights(saved, refused, content):
    folder = saved()
    (folder / "model.safetensors").write_bytes(content)
    assert "model.safetensors is no complete safetensors file" in refused(folder)


def test_a_weight_that_its_file_lacks(saved, refused):
    folder = saved(max_shard_size="100KB")
    index = folder / "model.safetensors.index.json"
    body = json.loads(index.read_text())
    name, file = next((name, file) for name, file in body["weight_map"].items())
    body["weight_map"][f"{name}.more"] = file
    index.write_text(json.dumps(body))
    assert f"{file} lacks the weight {name}.more listed in" in refused(folder)


def test_an_index_that_is_none(saved, refused):
    folder = saved(max_shard_size="100KB")
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "lists no weight files" in refused(folder)


def test_weights_in_torchs_own_format_are_left_to_the_loader(saved):
    folder = saved()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    check_files(folder)


def test_a_model_too_large_for_the_machine(saved, refused, clip):
    """2**36 words of 64 numbers in 4 bytes, which input and output share: 16 TiB."""
    folder = saved()
    config = json.loads((folder / "config.json").read_text())
    change_config(folder, text_config=config["text_config"] | {"vocab_size": 2**36})
    said = refused(folder, "--clip", clip)
    assert "too large for this machine: 16384.0" in said
    assert "GiB of weights in float32" in said


def test_a_model_too_large_for_the_gpu(monkeypatch):
    """The host has room for it, the GPU has not."""
    shape = load_shape("tiny-qwen2_5_vl")
    weights = 2 * sum(parameter.numel() for parameter in shape.model.parameters())
    cuda = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (weights, weights))
    with pytest.raises(ModelError, match=r"too large for this machine: .* in bfloat16 .* cuda:0 must hold"):
        check_memory(shape, cuda, torch.bfloat16, window_tokens=100)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 30))
    check_memory(shape, cuda, torch.bfloat16, window_tokens=100)


def test_device_and_dtype(refused):
    assert "device 'toaster' is not available" in refused("tiny-qwen2_5_vl", "--device", "toaster")
    assert "unknown dtype 'float4'" in refused("tiny-qwen2_5_vl", "--dtype", "float4")


def test_a_tokenizer_of_another_family(saved, refused):
    folder, other = saved(), saved("tiny-internvl3")
    (folder / "tokenizer.json").write_bytes((other / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_bytes((other / "tokenizer_config.json").read_bytes())
    assert "no token '<|vision_start|>'" in refused(folder)


def test_a_clip_that_is_none(tmp_path, refused):
    assert "the clip cannot be read" in refused("tiny-qwen2_5_vl", "--clip", tmp_path / "gone.mp4")
    (tmp_path / "text.mp4").write_text("no video")
    assert "the clip cannot be read" in refused("tiny-qwen2_5_vl", "--clip", tmp_path / "text.mp4")


def test_a_report_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    (tmp_path / "file").write_text("")
    assert main(["models", "check", "tiny-qwen2_5_vl", "--json", str(tmp_path / "file" / "out.json")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_a_hub_id_is_looked_up_on_this_machine_alone(tmp_path, monkeypatch, refused):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "fetch it first (hf download some/model)" in refused("some/model")
    kept = tmp_path / "models--some--model"
    (kept / "snapshots" / "ab12").mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("ab12")
    (kept / "snapshots" / "ab12" / "config.json").write_text("{}")
    assert checkpoint_folder("some/model") == kept / "snapshots" / "ab12"


def test_files_are_checked_without_torch(saved):
    code = "import sys; from pathlib import Path; from cluster.lab.check.requirements import check_files"
    code += f"; check_files(Path({str(saved())!r})); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
