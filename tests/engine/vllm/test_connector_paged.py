"""Tokens in and out of vLLM's paged cache, as its own CPU operator packs it and as devices keep it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm.version", reason="vLLM is not installed here (make setup-vllm)")

from cluster.engine.vllm.connector.paged import PackedPaged, PagedKV, RowPaged, _reader, block_slots, paged_kv
from cluster.errors import ModelError

BLOCKS, HEADS, BLOCK, SIZE = 5, 2, 32, 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isa", ["vec", "vec16", *(["amx"] if torch.cpu._is_amx_tile_supported() else []), None])
def test_what_is_written_is_read_and_nothing_else_changes(isa: str | None, dtype: torch.dtype) -> None:
    paged: PagedKV = RowPaged() if isa is None else PackedPaged(isa, BLOCK, HEADS, SIZE, dtype)
    cache = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * SIZE, dtype=dtype)
    everything = torch.arange(BLOCKS * BLOCK)
    keys, values = torch.randn(2, len(everything), HEADS, SIZE).to(dtype)
    paged.write(cache, everything, keys, values)
    some = torch.tensor([33, 34, 70, 159, 0, 2])
    keys[some], values[some] = torch.randn(2, len(some), HEADS, SIZE).to(dtype)
    paged.write(cache, some, keys[some], values[some])
    found = paged.read(cache, everything)
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)
    assert torch.equal(paged.read(cache, some)[0], keys[some])


def test_any_order_within_a_block_is_read() -> None:
    order = torch.randperm(BLOCK * SIZE).view(BLOCK, SIZE)
    tokens = torch.randn(BLOCKS, HEADS, BLOCK, SIZE)
    half = torch.zeros(BLOCKS, HEADS, BLOCK * SIZE)
    half[:, :, order.flatten()] = tokens.flatten(2)
    blocks, places = torch.tensor([3, 0, 3]), torch.tensor([31, 4, 0])
    found = _reader(order)(half.view(BLOCKS, HEADS, BLOCK, SIZE), blocks, places)
    assert torch.equal(found, tokens[blocks, :, places])


def test_slots_follow_the_block_table() -> None:
    assert block_slots(torch.tensor([7, 2, 9]), 3, 9, 4).tolist() == [31, 8, 9, 10, 11, 36]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_a_quantised_cache_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ModelError, match="kv_cache_dtype"):
        paged_kv(None, torch.zeros(1, HEADS, BLOCK, 2 * SIZE, dtype=dtype))
