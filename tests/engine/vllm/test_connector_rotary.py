"""Rotary on and off: as transformers rotates, and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from cluster.engine.vllm.connector.paged import Rotary
from cluster.engine.window.kv import rotate_wide, unrotate
from cluster.errors import ConfigError, ModelError
from cluster.models import load_model

SIZE = 16


def table(positions: int = 512, dtype: torch.dtype = torch.float32) -> Tensor:
    frequencies = 10_000.0 ** -(torch.arange(0, SIZE, 2) / SIZE)
    angles = torch.arange(positions)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype)


def test_three_axes_agree_with_the_model() -> None:
    model = load_model("tiny-qwen2_5_vl")
    size = model.text_config.hidden_size // model.text_config.num_attention_heads
    rope = model.text_config.rope_parameters
    frequencies = rope["rope_theta"] ** -(torch.arange(0, size, 2) / size)
    angles = torch.arange(300)[:, None] * frequencies
    rotary = Rotary(torch.cat((angles.cos(), angles.sin()), dim=1), rope["mrope_section"])
    positions, keys = torch.randint(0, 300, (3, 40)), torch.randn(40, 2, size)
    cos, sin = model.rotary(positions)
    expected = apply_rotary_pos_emb(keys, keys, cos, sin, unsqueeze_dim=1)[1]
    torch.testing.assert_close(rotate_wide(keys, *rotary.at(positions)), expected)


def test_one_axis_is_three_equal_ones() -> None:
    positions = torch.randint(0, 512, (1, 20))
    keys = torch.randn(20, 2, SIZE)
    one = rotate_wide(keys, *Rotary(table()).at(positions))
    torch.testing.assert_close(rotate_wide(keys, *Rotary(table(), [2, 3, 3]).at(positions)), one)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 0.004)])
def test_off_undoes_on(dtype: torch.dtype, limit: float) -> None:
    """In bfloat16 the error is that of rounding the rotated key and the raw one, half a unit in the last place each."""
    rotary = Rotary(table(dtype=dtype), [2, 3, 3])
    keys = torch.randn(2000, 2, SIZE).to(dtype)
    at = rotary.at(torch.randint(0, 512, (3, 2000)))
    back = unrotate(rotate_wide(keys, *at), *at)
    assert back.dtype == dtype
    assert float((back.float() - keys.float()).norm() / keys.float().norm()) < limit


def test_positions_and_sections_outside_the_table_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 to 511"):
        Rotary(table()).at(torch.tensor([[0, 512]]))
    with pytest.raises(ConfigError, match="0 to 511"):
        Rotary(table()).at(torch.tensor([[-1]]))
    with pytest.raises(ModelError, match="do not add up"):
        Rotary(table(), [2, 2, 2])
