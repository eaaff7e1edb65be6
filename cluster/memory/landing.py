"""Where loaded blocks come to lie before attention reads them: as they are, or copied to a GPU beside its work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from cluster.memory.tiers.base import Block, Loaded

_ALIGN = 64

Arrive = Callable[[], None]
"""Called in the thread that computes, before it uses what landed: orders its stream after the copies."""


class Landing(Protocol):
    """Takes what a load brought to where it is used."""

    def land(self, loaded: Sequence[Loaded]) -> tuple[list[Loaded], Arrive]:
        """Called in the thread that loaded. The blocks in their place, and what to call before they are used."""
        ...


class StayingLanding:
    """Leaves blocks where the load put them: host memory that the CPU computes on."""

    def land(self, loaded: Sequence[Loaded]) -> tuple[list[Loaded], Arrive]:
        """The same, and nothing to wait for."""
        return list(loaded), _nothing


class CudaLanding:
    """Copies blocks to a GPU on a stream of its own, while the stream that computes goes on.

    What one load brought crosses in one copy, since clusters are small and every copy costs a launch, and from pinned
    memory, since a copy from pageable memory holds up its thread. An event stands behind it, and only the stream that
    uses the blocks waits for it; the device as a whole is never synchronised.

    Args:
        device: the GPU attention runs on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def land(self, loaded: Sequence[Loaded]) -> tuple[list[Loaded], Arrive]:
        """Starts the copy; the thread does not wait for it."""
        blocks = [one.block for one in loaded if one.block is not None]
        if not blocks:
            return list(loaded), _nothing
        packed = pack(blocks, pinned=True)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # The allocator of pinned memory keeps `packed` until the copy that reads it is over.
            there = packed.to(self._device, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        moved = iter(unpack(there, blocks))

        def arrive() -> None:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(done)
            # Once freed, this memory must not go to the next copy before the computing stream has read it.
            there.record_stream(computing)

        return [one if one.block is None else Loaded(one.outcome, next(moved)) for one in loaded], arrive


def pack(blocks: Sequence[Block], *, pinned: bool = False) -> Tensor:
    """All tensors of ``blocks`` in one uint8 tensor, each beginning where every type may."""
    size = sum(_room(part) for block in blocks for part in _parts(block))
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    at = 0
    for block in blocks:
        for part in _parts(block):
            packed[at : at + part.nbytes] = part.flatten().view(torch.uint8)
            at += _room(part)
    return packed


def unpack(packed: Tensor, like: Sequence[Block]) -> list[Block]:
    """The blocks that :func:`pack` packed, as views of ``packed``, wherever it is by now; ``like``: those blocks."""
    blocks, at = [], 0
    for block in like:
        views = []
        for part in _parts(block):
            views.append(packed[at : at + part.nbytes].view(part.dtype).view(part.shape))
            at += _room(part)
        blocks.append(Block(*views))
    return blocks


def _parts(block: Block) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return block.key, block.value, block.frame, block.cell


def _room(part: Tensor) -> int:
    return -(-part.nbytes // _ALIGN) * _ALIGN


def _nothing() -> None:
    pass
