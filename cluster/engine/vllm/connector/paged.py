"""Reading and writing tokens of vLLM's paged KV cache, one layer at a time.

vLLM shows a layer's cache as ``[blocks, heads, block size, 2 * size]``. On devices a token's row is its key and its
value. The CPU backend packs the same memory for its kernels instead, keys of a block before its values, keys transposed
or in tiles; that is written with the backend's own operator, and read by an order found by writing numbers with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from cluster.errors import ConfigError, ModelError


class Rotary:
    """Rotary of half-split heads, one axis of positions or three (M-RoPE in sections, as Qwen2.5-VL has it).

    Cosines and sines are read from the engine's own table, rounded as it rounds them, and everything else is float32:
    a key that the engine rotated comes back to what it was but for the rounding of the rotated key itself.

    Args:
        table: ``[positions, size]``, cosines in the first half of a row and sines in the second.
        sections: how many of the ``size / 2`` frequencies follow each of the three axes; None for one axis.

    Raises:
        ModelError: sections that do not fit the table.
    """

    def __init__(self, table: Tensor, sections: Sequence[int] | None = None) -> None:
        self.table = table
        self._axis: Tensor | None = None
        half = table.shape[1] // 2
        if sections is not None:
            if len(sections) != 3 or sum(sections) != half:
                raise ModelError(f"rotary sections {list(sections)} do not add up to the {half} frequencies of a head")
            counts = torch.tensor(sections, device=table.device)
            self._axis = torch.repeat_interleave(torch.arange(3, device=table.device), counts)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``cos, sin [n, 1, size]`` float32 at positions ``[1 or 3, n]``.

        Raises:
            ConfigError: a position outside the table.
        """
        if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < len(self.table):
            raise ConfigError(f"positions must lie in 0 to {len(self.table) - 1}, where the model has rotary for them")
        positions = positions.to(self.table.device)
        if self._axis is None:
            rows = self.table[positions[0]].float()
            cos, sin = rows.chunk(2, dim=-1)
        else:
            # One axis stands for all three where a model's text has no other.
            rows = self.table[positions.expand(3, -1)].float()
            cosines, sines = rows.chunk(2, dim=-1)
            pick = self._axis.expand(1, cosines.shape[1], -1)
            cos, sin = cosines.gather(0, pick)[0], sines.gather(0, pick)[0]
        return cos.repeat(1, 2).unsqueeze(1), sin.repeat(1, 2).unsqueeze(1)


_Reader = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``half [blocks, heads, block size, size]``, blocks ``[n]`` and places in them ``[n]`` -> ``[n, heads, size]``."""


class PagedKV(Protocol):
    """KV layout of one attention backend. ``slots [n]`` int64: block number times block size plus offset."""

    def write(self, cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put ``keys, values [n, heads, size]`` into a layer's cache."""
        ...

    def read(self, cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """``keys, values [n, heads, size]`` out of it."""
        ...


class RowPaged:
    """Per token a row of key and value (FlashAttention, FlashInfer, Triton)."""

    def write(self, cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        size = cache.shape[2]
        cache[slots // size, :, slots % size] = torch.cat((keys, values), dim=-1).to(cache.dtype)

    def read(self, cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        size = cache.shape[2]
        keys, values = cache[slots // size, :, slots % size].chunk(2, dim=-1)
        return keys, values


class PackedPaged:
    """CPU backend. ``isa``: its layers' name of the layout.

    Raises:
        ModelError: a layout that cannot be read back token by token.
    """

    def __init__(self, isa: str, block: int, heads: int, size: int, dtype: torch.dtype) -> None:
        self._isa = isa
        self._keys, self._values = self._readers(block, heads, size, dtype)

    def write(self, cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        from vllm import _custom_ops

        key_half, value_half = _halves(cache)
        _custom_ops.cpu_attn_reshape_and_cache(
            keys.contiguous(), values.contiguous(), key_half, value_half, slots, self._isa
        )

    def read(self, cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = _halves(cache)
        blocks, places = slots // cache.shape[2], slots % cache.shape[2]
        return self._keys(keys, blocks, places), self._values(values, blocks, places)

    def _readers(self, block: int, heads: int, size: int, dtype: torch.dtype) -> tuple[_Reader, _Reader]:
        """Readers for keys and values, from where each element of ``[block, size]`` was found in a block's half."""
        numbers = torch.arange(block * size).view(block, 1, size).expand(block, heads, size)
        digits: list[tuple[Tensor, Tensor]] = []
        # Every type of KV holds the integers below 128 exactly.
        for power in range(3):
            scratch = torch.zeros(1, heads, block, 2 * size, dtype=dtype)
            digit = (numbers // 128**power % 128).to(dtype)
            self.write(scratch, torch.arange(block), digit, digit)
            key_half, value_half = _halves(scratch)
            digits.append((key_half[0, 0].flatten().long(), value_half[0, 0].flatten().long()))
        readers = []
        for half in range(2):
            lies = sum(128**power * digits[power][half] for power in range(3))
            assert isinstance(lies, Tensor)
            if not torch.equal(lies.sort().values, torch.arange(block * size)):
                raise ModelError(
                    f"vLLM packs its KV cache as {self._isa!r} here, which cannot be read token by token; "
                    "reuse needs another processor or dtype, mode: pruned works"
                )
            readers.append(_reader(lies.argsort().view(block, size)))
        return readers[0], readers[1]


def paged_kv(layer: Any, cache: Tensor) -> PagedKV:
    """Layout of the cache of an attention layer.

    Raises:
        ModelError: a cache that cannot be read back (quantised, or of another shape).
    """
    if cache.ndim != 4 or not cache.dtype.is_floating_point or cache.dtype.itemsize < 2:
        raise ModelError(
            f"reuse needs a KV cache in the model's own type, not {cache.dtype} {list(cache.shape)}; "
            "leave kv_cache_dtype at auto"
        )
    if cache.device.type != "cpu":
        return RowPaged()
    return PackedPaged(layer.isa, cache.shape[2], cache.shape[1], cache.shape[3] // 2, cache.dtype)


def block_slots(blocks: Tensor, start: int, stop: int, size: int) -> Tensor:
    """Slots of a request's tokens ``[start, stop)`` in ``blocks`` of ``size`` tokens."""
    tokens = torch.arange(start, stop, device=blocks.device)
    return blocks[tokens // size] * size + tokens % size


def _reader(order: Tensor) -> _Reader:
    """Reads elements that lie at ``order [block, size]`` in their block's half; the usual orders without a detour."""
    block, size = order.shape
    numbers = torch.arange(block * size)
    if torch.equal(order, numbers.view(block, size)):
        return lambda half, blocks, places: half[blocks, :, places]
    if torch.equal(order, numbers.view(size, block).T):
        return lambda half, blocks, places: half.view(*half.shape[:2], size, block)[blocks, :, :, places]

    def scattered(half: Tensor, blocks: Tensor, places: Tensor) -> Tensor:
        heads = torch.arange(half.shape[1])[None, :, None]
        return half.flatten(2)[blocks[:, None, None], heads, order[places][:, None]]

    return scattered


def _halves(cache: Tensor) -> tuple[Tensor, Tensor]:
    """The keys' and the values' part of the packed cache, ``[blocks, heads, block size, size]`` each."""
    blocks, heads, block, double = cache.shape
    keys, values = cache.view(blocks, heads, block * 2, double // 2).chunk(2, dim=2)
    return keys, values
