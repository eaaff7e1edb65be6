"""Slab allocator: cells of a few sizes in memory that never moves and never exceeds its cap."""

from bisect import bisect_left
from dataclasses import dataclass, field

import torch
from torch import Tensor

_ALIGN = 64
_SMALLEST = 256
_STEP = 1.25
_PER_SLAB = 8
_PAGE = 4096


@dataclass(slots=True, eq=False)
class _Slab:
    """``free``: offsets of the free cells of ``size`` bytes; None for a slab of a single cell."""

    memory: Tensor
    size: int
    free: list[int] | None


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """``memory`` ``[nbytes]`` uint8: exclusive, the requested size rounded up. Its view is created on access: keeping
    views of thousands of small blocks would take considerable memory."""

    _slab: _Slab = field(repr=False)
    _at: int

    @property
    def memory(self) -> Tensor:
        return self._slab.memory[self._at : self._at + self._slab.size]

    @property
    def nbytes(self) -> int:
        return self._slab.size

    @property
    def slab(self) -> tuple[int, int]:
        """Identity and size in bytes of its slab."""
        return id(self._slab), self._slab.memory.nbytes


class Slabs:
    """Cells in size classes a factor of 1.25 apart; each slab is cut into cells of one class. Cells above ``largest``,
    or on request, are allocated separately. Empty slabs can be reused for any class. Not thread-safe.

    Args:
        total_bytes: maximum memory reserved, at least one slab.
        slab_bytes: size of a slab, at least 8 of the smallest cells.
        pinned: page-locked memory, with CUDA only.
    """

    def __init__(self, total_bytes: int, *, slab_bytes: int, pinned: bool) -> None:
        self.total_bytes, self.slab_bytes = total_bytes, slab_bytes
        self.pinned = pinned and torch.cuda.is_available()
        self.reserved = 0
        self._sizes = _ladder(slab_bytes // _PER_SLAB)
        self.largest = self._sizes[-1]
        self._partial: dict[int, dict[int, _Slab]] = {size: {} for size in self._sizes}
        self._empty: list[Tensor] = []

    def cell_bytes(self, nbytes: int, *, alone: bool = False) -> int:
        if nbytes <= self.largest and not alone:
            return self._sizes[bisect_left(self._sizes, nbytes)]
        if self.pinned:
            # The pinned memory allocator rounds up to powers of two.
            return 1 << (nbytes - 1).bit_length()
        return _up(max(1, nbytes), _SMALLEST if alone else _PAGE)

    def allocate(self, nbytes: int, *, alone: bool = False) -> Cell | None:
        """Allocate a cell for ``nbytes``; None if full. ``alone``: outside the slabs, for rare sizes."""
        size = self.cell_bytes(nbytes, alone=alone)
        if alone or size > self.largest:
            memory = self._reserve(size)
            return None if memory is None else Cell(_Slab(memory, size, None), 0)
        partial = self._partial[size]
        if not partial:
            whole = self._empty.pop() if self._empty else self._reserve(self.slab_bytes)
            if whole is None:
                return None
            starts = range(0, self.slab_bytes - size + 1, size)
            slab = _Slab(whole, size, list(reversed(starts)))
            partial[id(slab)] = slab
        # The oldest slab first, so that newer ones empty sooner.
        slab = next(iter(partial.values()))
        assert slab.free is not None
        at = slab.free.pop()
        if not slab.free:
            del partial[id(slab)]
        return Cell(slab, at)

    @property
    def spare(self) -> int:
        """Bytes available for allocations outside the slabs."""
        return self.total_bytes - self.reserved + self.slab_bytes * len(self._empty)

    def free(self, cell: Cell) -> None:
        slab = cell._slab
        if slab.free is None:
            self.reserved -= slab.size
            return
        slab.free.append(cell._at)
        partial = self._partial[slab.size]
        partial[id(slab)] = slab
        if len(slab.free) == self.slab_bytes // slab.size:
            del partial[id(slab)]
            self._empty.append(slab.memory)

    def release(self) -> None:
        self.reserved -= self.slab_bytes * len(self._empty)
        self._empty.clear()

    def _reserve(self, size: int) -> Tensor | None:
        while self.reserved + size > self.total_bytes and self._empty:
            self._empty.pop()
            self.reserved -= self.slab_bytes
        if self.reserved + size > self.total_bytes:
            return None
        try:
            # Written inside and outside inference mode, so it must not be an inference tensor.
            with torch.inference_mode(mode=False):
                memory = torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)
        except RuntimeError:
            # The machine has less memory than configured; treat as full.
            return None
        self.reserved += size
        return memory


def _up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


def _ladder(largest: int) -> list[int]:
    """Size classes up to ``largest``, each at most a quarter above the last, or the next multiple of 64."""
    sizes = [_SMALLEST]
    while (following := _up(int(sizes[-1] * _STEP), _ALIGN)) <= largest:
        sizes.append(following)
    return sizes


_DEFAULT_SLAB = 4 * 1024 * 1024
_DEFAULT_SIZES = _ladder(_DEFAULT_SLAB // _PER_SLAB)


def cell_size(nbytes: int) -> int:
    """Bytes that ``nbytes`` take in slabs of the default size."""
    at = bisect_left(_DEFAULT_SIZES, nbytes)
    return _DEFAULT_SIZES[at] if at < len(_DEFAULT_SIZES) else _up(nbytes, _PAGE)
