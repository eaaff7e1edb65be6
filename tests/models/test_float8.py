"""Linear layers in float8: rounding by hand, what stays as it was, and what a window then says."""

import math

import pytest
import torch
from torch import nn

from cluster.engine.native import NativeEngine
from cluster.errors import ConfigError
from cluster.lab.bench.soak import SyntheticCamera
from cluster.models.float8 import Float8Linear, check_float8
from cluster.models.fused import to_float8
from cluster.models.fused_triton import launch_float8
from cluster.models.loading import load_model
from cluster.types import Question, StreamSpec


def rounded(value: float) -> float:
    """e4m3 by hand: 3 bits of mantissa, exponents from -6 (below: steps of 2**-9) to 8, at most 448."""
    if value == 0:
        return 0.0
    exponent = max(math.frexp(abs(value))[1] - 1, -6)
    step = 2.0 ** (exponent - 3)
    # Ties to even.
    return math.copysign(min(round(abs(value) / step) * step, 448.0), value)


def test_rows_are_rounded_by_their_own_scale() -> None:
    torch.manual_seed(0)
    rows = torch.randn(5, 32) * torch.tensor([1e-6, 0.1, 1.0, 30.0, 1e4])[:, None]
    rows[2] = 0
    got, scale = to_float8(rows)
    for row, values, by in zip(rows.tolist(), got.float().tolist(), scale[:, 0].tolist(), strict=True):
        largest = max(map(abs, row))
        assert by == pytest.approx(largest / 448, rel=1e-6, abs=1e-37)
        assert values == [rounded(torch.tensor(value / by).item()) if largest else 0.0 for value in row]


def test_a_layer_multiplies_what_was_rounded() -> None:
    torch.manual_seed(1)
    linear = nn.Linear(64, 48)
    rows = torch.randn(2, 7, 64)
    layer = Float8Linear.of(linear)
    (a, by), (b, of) = to_float8(rows.flatten(0, 1)), to_float8(linear.weight.detach())
    expected = (a.double() * by.double()) @ (b.double() * of.double()).T + linear.bias.double()
    got = layer(rows)
    assert got.shape == (2, 7, 48)
    torch.testing.assert_close(got.double().flatten(0, 1), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("bias", [False, True])
def test_joined_layers_are_the_same(bias: bool) -> None:
    torch.manual_seed(2)
    apart = [Float8Linear.of(nn.Linear(64, size, bias=bias)) for size in (48, 16, 16)]
    rows = torch.randn(7, 64)
    wanted = torch.cat([each(rows) for each in apart], 1)
    joined = Float8Linear.joined(apart)
    assert torch.equal(joined(rows), wanted)
    # Held once.
    assert torch.equal(torch.cat([each(rows) for each in apart], 1), wanted)
    storages = {each.weight.untyped_storage().data_ptr() for each in (*apart, joined)}
    assert len(storages) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 1500])
def test_the_gpu_s_kernel_rounds_as_torch_does(dtype: torch.dtype, width: int) -> None:
    """Scales are equal. Triton's interpreter, which stands for a GPU, rounds ties up and forgets the carry to the next
    power of two; all other values are equal."""
    rows = torch.randn(5, width, generator=torch.Generator().manual_seed(width)).to(dtype) * 3
    rows[2] = 0
    limits = torch.finfo(torch.float32).tiny * 448, 448.0
    (got, scale), (wanted, of_row) = launch_float8(rows, torch.float8_e4m3fn, *limits), to_float8(rows)
    assert torch.equal(scale, of_row)
    got, wanted, exact = got.float(), wanted.float(), rows.float() / scale
    carried, tie = wanted.abs().log2().frac() == 0, (got - exact).abs() == (wanted - exact).abs()
    assert torch.equal(got[~carried & ~tie], wanted[~carried & ~tie])
    assert int((carried & (got != wanted)).sum()) < got.numel() / 8
    assert torch.equal(got[2], torch.zeros(width))


def test_what_is_no_number_stays_none() -> None:
    """On a GPU by its instruction (see test_fused.py): the interpreter has no such number in float8."""
    rows = torch.ones(2, 16)
    rows[0, 3] = float("nan")
    got, scale = to_float8(rows)
    assert bool((got.float() * scale)[0, 3].isnan())
    assert bool((got.float() * scale)[1].isfinite().all())


@pytest.mark.parametrize("name", ["demo-qwen2_5_vl", "tiny-internvl3", "tiny-qwen3_vl"])
def test_towers_and_decoder_layers_alone_change(name: str) -> None:
    wide, model = load_model(name), load_model(name, dtype="float8")
    assert model.dtype == torch.float32
    kinds = {path: type(part) for path, part in model.model.named_modules() if isinstance(part, nn.Linear)}
    float8 = {path for path, kind in kinds.items() if kind is Float8Linear}
    assert any("language_model.layers" in path for path in float8)
    assert any("language_model" not in path for path in float8)
    assert not any("lm_head" in path for path in float8)
    held = dict(wide.model.named_modules())
    for path in kinds.keys() - float8:
        part = held[path]
        assert "lm_head" in path or part.in_features % 16 or part.out_features % 16
    # Counted as before, and another model to whoever would continue its windows.
    assert model.llm_flops(10, 100) == wide.llm_flops(10, 100)
    assert NativeEngine(model).fingerprint != NativeEngine(wide).fingerprint


def test_a_window_says_nearly_the_same() -> None:
    scores = {}
    for dtype in ("float32", "float8"):
        engine = NativeEngine(load_model("demo-qwen2_5_vl", dtype=dtype))
        engine.admit(StreamSpec("cam", (Question("q", "Is it?"),), 8.0, 2.0, static_gate=False))
        camera = SyntheticCamera("cam", engine.geometry, width=84, height=56, anchor_every=4)
        samples = [camera.sample(index) for index in range(16)]
        scores[dtype] = [a.score for s in samples for r in engine.push(s) for a in engine.step([r])]
    assert scores["float8"] != scores["float32"]
    differences = [abs(a - b) for a, b in zip(*scores.values(), strict=True)]
    assert sum(differences) / len(differences) < 0.1


def test_a_gpu_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    with pytest.raises(ConfigError, match="needs an Ada, Hopper or newer GPU, not A100; use bfloat16"):
        check_float8(torch.device("cuda:0"))
    check_float8(torch.device("cpu"))
