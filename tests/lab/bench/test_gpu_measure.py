"""``bench gpu`` without a GPU: the same code on a CPU, the search for cameras, and what is refused."""

from __future__ import annotations

import pytest
import torch

from cluster.errors import ConfigError
from cluster.lab.bench import harness
from cluster.lab.bench.fake_cuda import DEVICE, FakeCuda
from cluster.lab.bench.gpu_measure import search_streams
from cluster.models.loading import load_random_shape


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


def test_everything_is_measured_on_a_cpu_too(capsys, tmp_path, clip) -> None:
    file = tmp_path / "gpu.json"
    options = [
        "--device",
        "cpu",
        "--model",
        "tiny-qwen2_5_vl",
        "--streams",
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
    assert "no NVIDIA driver" in shown or torch.cuda.is_available()
    assert '"figure": "window_speedup"' in file.read_text()


def test_what_cannot_be_measured_is_refused() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no GPU here that torch can use"):
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
