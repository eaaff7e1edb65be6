"""Packed attention equals attending one sequence at a time."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from cluster.models.packed_attention import Packing, packed_attention


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_equals_one_by_one(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, 2, sum(lengths), 8, generator=generator) for _ in range(3))
    packing = Packing.of(lengths, torch.device("cpu"), torch.float32)
    packed, _ = packed_attention(torch.nn.Identity(), query, key, value, None, packing=packing, scaling=0.3)
    alone = [
        scaled_dot_product_attention(q, k, v, scale=0.3)
        for q, k, v in zip(*(torch.split(x, lengths, dim=2) for x in (query, key, value)), strict=True)
    ]
    torch.testing.assert_close(packed, torch.cat(alone, dim=2).transpose(1, 2), rtol=1e-4, atol=1e-5)
    assert packing.cu_seqlens.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert sorted(torch.cat([batch.flatten() for batch in packing.batches]).tolist()) == list(range(sum(lengths)))
