"""``bench gpu`` without a GPU: the same code on a CPU, the search for cameras, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.codec.nvdec import Nvdec
from cluster.engine.native import NativeEngine
from cluster.errors import ConfigError
from cluster.lab.bench import gpu, gpu_host, gpu_measure, harness
from cluster.lab.bench.fake_cuda import DEVICE, FakeCuda
from cluster.lab.bench.gpu_frontend import DecodeLoad, HostNvdecDecoder, decode_rates, host_nvdec
from cluster.lab.bench.gpu_measure import PARTS, Rig, search_streams
from cluster.models.loading import load_random_shape
from cluster.models.presets import SHAPES


@pytest.fixture
def quick(monkeypatch) -> None:
    """Windows of 16 s of two cameras a step, each measured once, and decoders that run for a blink; the scenarios of
    the dry run have shorter strides too."""
    monkeypatch.setattr(gpu, "WINDOW_S", 16.0)
    monkeypatch.setattr(gpu, "STRIDE_S", 4.0)
    monkeypatch.setattr(gpu, "camera_samples", lambda *given: gpu_host.camera_samples(*given)[:32])
    monkeypatch.setattr(gpu_measure, "WINDOW_S", 16.0)
    monkeypatch.setattr(gpu_measure, "SPEC", replace(gpu_measure.SPEC, window_s=16.0))
    monkeypatch.setattr(gpu_measure, "REPEATS", 1)
    monkeypatch.setattr(gpu_measure, "STEP", 2)
    monkeypatch.setattr(gpu_measure, "SUSTAINED_S", 0.05)
    load: Any = DecodeLoad
    monkeypatch.setattr(gpu_measure, "DecodeLoad", lambda *size, **given: load(*size, **{**given, "run_s": 0.2}))


@pytest.mark.parametrize(
    ("a_camera_s", "fixed_s", "most", "expected"),
    [(0.05, 0.0, 512, 155), (0.05, 0.0, 100, 100), (9.0, 0.0, 512, 0), (8.0, 0.0, 512, 1), (0.5, 2.0, 512, 11)],
)
def test_the_cameras_that_fit_a_stride_are_found(a_camera_s, fixed_s, most, expected) -> None:
    """8 s hold 160 cameras of 0.05 s, and 12 of 0.5 s beside 2 s; tries end within a few percent of that."""
    tried = []

    def strides(count: int) -> tuple[float, float]:
        tried.append(count)
        return fixed_s + 0.9 * a_camera_s * count, fixed_s + a_camera_s * count

    found = search_streams(strides, most)
    assert len(tried) <= 5
    assert found == 0 or fixed_s + a_camera_s * found <= 8.0
    assert found >= expected


def test_full_windows_have_all_their_frames_at_any_rate_of_pictures(clip, quick, monkeypatch) -> None:
    """Of cameras with few pictures a second every other frame is late, so that windows begin between two."""
    rig = Rig("tiny-qwen2_5_vl", torch.device("cpu"), clip, streams=1)
    late = [replace(sample, pts=sample.pts + 200_000 * (number % 2 == 0)) for number, sample in enumerate(rig.full)]
    step, full = NativeEngine.step, []

    def counted(engine, requests, following=()):
        answers = step(engine, requests, following)
        full.extend(window.tokens.full for window in engine.stats.windows)
        return answers

    monkeypatch.setattr(NativeEngine, "step", counted)
    rig.measure(late[1:], from_scratch=True, cameras=1)
    assert len(full) == 3
    assert set(full) == {16 * rig.full[0].grid.tokens}


def test_everything_is_measured_on_a_cpu_too(capsys, tmp_path, clip, quick) -> None:
    file = tmp_path / "gpu.json"
    options = [
        "--device",
        "cpu",
        "--model",
        "tiny-qwen2_5_vl",
        "--streams",
        "2",
        "--layers",
        "2",
        "--clip",
        str(clip),
        "--json",
        str(file),
    ]
    assert harness.main(["gpu", *options]) == 0
    shown = capsys.readouterr().out
    for figure in ("window_speedup", "prefill_mfu", "tower_mfu", "library_speedup", "host_loads_hidden"):
        assert f"{figure} = " in shown
    assert "streams_per_gpu = 2" in shown
    assert "pictures of 320 x 180, decoded on the CPU" in shown
    assert "vLLM, full" in shown, "or why there is none"
    assert "nvdec_1080p_fps" not in shown, "a CPU's figure is none of NVDEC's"
    assert "device_faults = 0" in shown, "every scenario of the dry run ran on this device"
    assert "parts_failed = 0" in shown
    assert '"figure": "window_speedup"' in file.read_text()


def test_what_fails_in_one_part_costs_no_other(capsys, monkeypatch, clip, quick) -> None:
    def fail(_rig) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setitem(PARTS, "ceilings", fail)
    options = ["--device", "cpu", "--model", "tiny-qwen2_5_vl", "--clip", str(clip)]
    options += ["--part", "windows", "explanations"]
    assert harness.main(["gpu", *options]) == 1, "a script sees it too"
    shown = capsys.readouterr().out
    assert "RuntimeError: no kernel image is available" in shown
    assert "parts_failed = 1" in shown
    assert "one by one" in shown, "the last part after it"
    assert "window_speedup = " in shown
    assert "prefill_mfu" not in shown, "there is no ceiling that it would be a share of"


def test_transformers_and_ours_take_one_window_at_a_time(clip, quick, monkeypatch) -> None:
    taken: list[int] = []
    step = NativeEngine.step

    def counted(engine: NativeEngine, requests, *following):
        taken.append(len(requests))
        return step(engine, requests, *following)

    monkeypatch.setattr(NativeEngine, "step", counted)
    part = PARTS["library"](Rig("tiny-qwen2_5_vl", torch.device("cpu"), clip, streams=1))
    assert set(taken) == {1}
    assert [(row["full window"], row["windows a step"]) for row in part.rows] == [("transformers", 1), ("ours", 1)]
    theirs, ours = (row["seconds"] for row in part.rows)
    assert part.figures["library_speedup"] == theirs / ours


SMALL = DecodeLoad((320, 180), clip_s=6.0, run_s=0.3, most=2)


def test_every_session_decodes_and_prunes() -> None:
    # Long enough for more than the first frame, which is whole, on a busy machine too.
    part = decode_rates(host_nvdec(), replace(SMALL, run_s=1.0))
    assert {(row["codec"], row["refused"]) for row in part.rows} == {("h264", ""), ("hevc", "")}
    assert all(row["sessions"] in (1, 2) and 0 < row["kept"] < 0.5 for row in part.rows)
    best = max(row["pictures_s"] for row in part.rows if row["codec"] == "h264")
    assert part.figures["nvdec_1080p_fps"] == best > 0


def test_sessions_that_the_gpu_refuses_end_the_search() -> None:
    """A card of one session: the second camera is told so, and no more are tried."""
    nvdec = Nvdec(lambda: None, HostNvdecDecoder, clock=lambda: 0.0)
    nvdec.limit = 1
    rows = decode_rates(nvdec, replace(SMALL, most=8)).rows
    last = {row["codec"]: row for row in rows}
    for row in last.values():
        assert (row["sessions"], row["refused"]) == (1, "all 1 NVDEC sessions of this process are taken")
    assert len(rows) == 4
    assert nvdec.sessions == 0, "every session is given back"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_nvdec_says_why() -> None:
    rig = SimpleNamespace(device=torch.device("cuda"))
    [row] = PARTS["nvdec"](rig).rows
    assert row == {"nvdec": "none", "why": "this machine has no NVIDIA driver (libcuda.so.1)"}


def test_what_cannot_be_measured_is_refused() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch finds no GPU on this machine"):
            harness.main(["gpu"])
    with pytest.raises(ConfigError, match="there is no part speed; there are: ceilings, windows"):
        harness.main(["gpu", "--device", "cpu", "--model", "tiny-qwen2_5_vl", "--part", "speed"])


def test_a_shape_is_made_on_the_device_with_weights() -> None:
    with FakeCuda():
        model = load_random_shape("qwen2_5_vl-7b", DEVICE)
        weights = list(model.model.parameters())
        assert {weight.device for weight in weights} == {DEVICE}
        assert {weight.dtype for weight in weights} == {torch.bfloat16}
        assert len(model.layers) == 28


@pytest.fixture
def narrow(monkeypatch) -> None:
    """Published shapes with few words and narrow MLPs: all their weights take gigabytes."""
    for name in ("qwen2_5_vl-7b", "llava_onevision-7b"):
        text = {**SHAPES[name].text, "vocab_size": 512, "intermediate_size": 64}
        monkeypatch.setitem(SHAPES, name, replace(SHAPES[name], text=text))


def test_a_random_model_turns_by_the_published_frequencies(narrow) -> None:
    """``theta^(-2 i / d)``: 1e6 and 128 of Qwen2.5-VL's language model, 1e4 and half of 80 of its tower."""
    model = load_random_shape("qwen2_5_vl-7b", torch.device("cpu"), 1)
    assert len(model.layers) == 1
    found = dict(model.model.named_buffers())
    for name, theta, size in (("language_model.rotary_emb", 1e6, 128), ("visual.rotary_pos_emb", 1e4, 40)):
        wanted = torch.tensor([theta ** (-2 * i / size) for i in range(size // 2)])
        torch.testing.assert_close(found[f"model.{name}.inv_freq"], wanted)
        torch.testing.assert_close(found[f"model.{name}.original_inv_freq"], wanted)


def test_a_random_llava_has_its_places(narrow) -> None:
    model = load_random_shape("llava_onevision-7b", torch.device("cpu"), 1)
    places = dict(model.model.named_buffers())["model.vision_tower.embeddings.position_ids"]
    assert places.tolist() == [list(range(27**2))]
