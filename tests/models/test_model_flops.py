"""Analytic FLOP counts against what torch counts while the model runs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cluster.errors import ModelError
from cluster.models.base import PatchBatch
from cluster.models.loading import load_shape


def eager_sdpa(q, k, v, *, scale=None, is_causal=False, enable_gqa=False, **_):
    """Attention as matrix products, which the counter sees on every device (it knows no CPU flash kernel)."""
    return torch.softmax(q @ k.transpose(-1, -2) * scale, dim=-1) @ v


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_tower(model, make_frame, random_keep, share, monkeypatch):
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", eager_sdpa)
    grid = model.geometry.grid(160, 120)
    frames: list[PatchBatch] = [make_frame(grid, None if share == 1.0 else random_keep(grid, share)) for _ in range(3)]
    with FlopCounterMode(display=False) as counter:
        model.encode(frames)
    assert model.tower_flops(frames) == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_tower_of_nothing(model, make_frame):
    grid = model.geometry.grid(112, 112)
    nothing = torch.zeros(grid.group_rows, grid.group_cols, dtype=torch.bool)
    assert model.tower_flops([]) == model.tower_flops([make_frame(grid, nothing)]) == 0


@torch.no_grad()
def test_language_model(model):
    n = 50
    text = model.model.model.language_model
    embeds = torch.randn(1, n, model.text_config.hidden_size)
    before = text.config._attn_implementation
    text.config._attn_implementation = "eager"
    try:
        with FlopCounterMode(display=False) as counter:
            text(inputs_embeds=embeds)
    finally:
        text.config._attn_implementation = before
    # Eager attention computes the whole square, so every token's span counts as n here. Rotary's frequencies are
    # a small matrix product in one family, hence the tolerance.
    assert model.llm_flops(n, n * n) == pytest.approx(counter.get_total_flops(), rel=0.02)
    assert model.llm_flops(0, 0) == 0


@torch.no_grad()
def test_rows_that_the_last_layer_omits(model):
    """The others are computed as before."""
    n, wanted = 50, torch.arange(3, 50, 5)
    last = len(model.layers) - 1
    start, embeds = torch.randn(n, model.text_config.hidden_size), model.embed(torch.zeros(n, dtype=torch.int64))

    def run(index, hidden, rows):
        def attend(_, query, key, value, scale):
            group = query.shape[1] // key.shape[1]
            query = query if rows is None else query[rows]
            q, k, v = (x.transpose(0, 1) for x in (query, *(x.repeat_interleave(group, 1) for x in (key, value))))
            return eager_sdpa(q, k, v, scale=scale).transpose(0, 1)

        return model.run_layer(index, hidden, embeds if rows is None else embeds[rows], None, attend, None, rows)

    with FlopCounterMode(display=False) as counter:
        hidden = start
        for index in range(last):
            hidden = run(index, hidden, None)
        got = run(last, hidden, wanted)
    gone = n - len(wanted)
    assert model.llm_flops(n, n * n, (gone, gone * n)) == counter.get_total_flops()
    torch.testing.assert_close(got, run(last, hidden, None)[wanted])
    assert run(last, hidden, wanted[:0]).shape == (0, hidden.shape[1])


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen2_5_vl-7b", 8.29),
        ("qwen2_5_vl-3b", 3.75),
        ("qwen2_vl-7b", 8.29),
        ("qwen3_vl-4b", 4.44),
        ("qwen3_vl-8b", 8.77),
        ("llava_next_video-7b", 7.06),
        ("llava_onevision-7b", 8.03),
        ("internvl3-8b", 7.94),
        ("internvl3-14b", 15.12),
    ],
)
def test_published_shapes_have_published_sizes(name, billions):
    """Shapes take no memory."""
    model = load_shape(name)
    size = sum(parameter.numel() for parameter in model.model.parameters()) / 1e9
    assert size == pytest.approx(billions, rel=0.02)
    grid = model.geometry.grid(1920, 1080)
    tokens = 40 * grid.tokens
    cells = torch.cartesian_prod(torch.arange(grid.group_rows), torch.arange(grid.group_cols))
    frame = PatchBatch(torch.zeros(grid.rows * grid.cols, 0), cells, grid)
    dense = model.llm_flops(tokens, tokens * (tokens + 1) // 2) + model.tower_flops([frame] * 40)
    # At least two FLOPs per weight and token, embeddings and tower aside.
    assert dense > 2 * tokens * 0.8 * billions * 1e9


def test_an_unknown_shape():
    with pytest.raises(ModelError, match="internvl3-8b"):
        load_shape("qwen9-900b")
