"""Kernels of layers in Triton's interpreter, against the published formulas and torch's operations."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cluster
from cluster.models import fused
from cluster.models.base import PatchBatch
from cluster.models.float8 import ALIGNED
from cluster.models.fused_triton import launch_gated, launch_rotated
from cluster.models.layers import GatedMLP, layer_rotary
from cluster.models.loading import load_model
from cluster.models.presets import PRESETS

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


def assert_near(got: Tensor, wanted: Tensor) -> None:
    assert (got.double() - wanted).norm() <= TOLERANCE[got.dtype] * wanted.norm()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [3, 40, 1500])
def test_gates(dtype: torch.dtype, width: int) -> None:
    """``x sigmoid(x)`` of the gates times the values, of more columns than a program takes and of fewer."""
    x = torch.randn(5, 2 * width, generator=torch.Generator().manual_seed(width)).to(dtype)
    gate, value = x.double().chunk(2, 1)
    assert_near(launch_gated(x), gate * gate.sigmoid() * value)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "size"), [(6, 80), (3, 128), (5, 16)])
def test_rotary_embedding(dtype: torch.dtype, heads: int, size: int) -> None:
    """Pairs ``(x_i, x_{i + d/2})`` are turned by their angles; rows are views of wider ones."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(37, heads + 2, size, generator=generator).to(dtype)[:, :heads]
    angle = torch.randn(37, 1, size // 2, generator=generator)
    cos, sin = (torch.cat((each, each), 2)[:, 0] for each in (angle.cos(), angle.sin()))
    turn = torch.polar(torch.ones_like(angle).double(), angle.double())
    pairs = torch.complex(*x.double().chunk(2, 2)) * turn
    wanted = torch.cat((pairs.real, pairs.imag), 2)
    signed = layer_rotary(cos, sin)
    assert_near(launch_rotated(x, *(part[:, 0] for part in signed)), wanted)
    assert_near(fused.rotated(x, *signed), wanted)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("tiny-")])
def test_models_compute_the_same_with_them(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Tower and layers of every family; whose MLPs are gated, and which embed positions so, take the kernels."""
    model = load_model(name)
    rng = np.random.default_rng(0)
    grid = model.geometry.grid(96, 64)
    cells = torch.from_numpy(np.argwhere(rng.random((grid.group_rows, grid.group_cols)) < 0.7))
    shape = len(cells) * grid.merge**2, model.geometry.temporal, 3, model.geometry.patch, model.geometry.patch
    frame = PatchBatch(torch.from_numpy(rng.integers(0, 256, shape, np.uint8)), cells, grid)
    launched: list[str] = []

    def run() -> tuple[Tensor, Tensor]:
        [seen] = model.encode([frame])
        count = len(seen)
        rotary = layer_rotary(*model.rotary(torch.arange(count).expand(3, -1)))
        hidden = seen.embeds[:, : model.text_config.hidden_size]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            del layer, scale
            return query * key.mean(1, keepdim=True) + value.mean(1, keepdim=True)

        for index in range(len(model.layers)):
            hidden = model.run_layer(index, hidden, seen.embeds, rotary, attend)
        return seen.embeds, hidden

    plain = run()
    for each, op in (("gated", fused._gated), ("rotated", fused._rotated)):
        monkeypatch.setattr(fused, f"_{each}", lambda *given, op=op, each=each: (launched.append(each), op(*given))[1])
    monkeypatch.setattr(fused, "_fused", lambda _: True)
    for got, wanted in zip(run(), plain, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    tower = {"tiny-qwen2_5_vl": (1, 1), "tiny-qwen2_vl": (0, 1), "tiny-qwen3_vl": (0, 1)}.get(name, (0, 0))
    layers = len(model.layers)
    blocks = len(model._visual.blocks) if any(tower) else 0
    assert launched.count("gated") == layers + tower[0] * blocks
    assert launched.count("rotated") == layers + tower[1] * blocks


@pytest.mark.parametrize("bias", [False, True])
def test_an_odd_width_is_filled_up(bias: bool) -> None:
    """As the library computes it, before and after its weights have become views of wider ones."""
    torch.manual_seed(0)
    mlp = nn.Module()
    mlp.gate_proj, mlp.up_proj = (nn.Linear(8, 21, bias=bias) for _ in range(2))
    mlp.down_proj, mlp.act_fn = nn.Linear(21, 8, bias=bias), nn.SiLU()
    x, hidden = torch.randn(2, 5, 8)

    def library() -> Tensor:
        return hidden + mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))

    with torch.no_grad():
        wanted = library()
        ours = GatedMLP(mlp)
        assert ours._expand(x).shape == (5, 2 * 2 * ALIGNED)
        torch.testing.assert_close(ours(hidden, x), wanted)
        torch.testing.assert_close(library(), wanted)
    assert mlp.down_proj.weight.shape == (8, 21)


def test_kernels_compile_for_gpus_that_are_not_here() -> None:
    """Triton's compiler and NVIDIA's assembler need no GPU. An L4 has 99 KiB of shared memory for a block."""
    script = Path(__file__).parents[1] / "support" / "compile_kernels.py"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(cluster.__file__).parents[1])
    # By a GPU's capability; all of them where none is named.
    wanted: dict[str, list[str]] = {"90": [], "80": ["slots"], "89": ["float8"]}
    run = subprocess.run(
        [sys.executable, script, json.dumps(wanted)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    compiled = json.loads(run.stdout)
    assert compiled.keys() == wanted.keys()
    assert all(shared <= 99 * 1024 for kernels in compiled.values() for shared, _ in kernels.values())
    hopper = compiled["90"]
    assert {"slots", "slots, short", "slots, decoding", "gated", "rotated", "float8"} == set(hopper)
    # To the nearest, ties to even.
    assert "cvt.rn.satfinite.e4m3x2.f32" in hopper["float8"][1]
    assert "max.NaN.f32" in hopper["float8"][1]
    assert "wgmma" in hopper["slots"][1]
