"""Worker side of the connector: loads blocks into the paged cache before a layer's attention, saves new KV after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from cluster.engine.vllm.connector.paged import PagedKV, Rotary, RowPaged, block_slots
from cluster.engine.vllm.connector.scheduling import LoadJob, SaveJob, StepJobs, StepReport
from cluster.engine.vllm.connector.store import BlockStore, Fault
from cluster.engine.vllm.connector.transfer import Load
from cluster.engine.window.kv import rotate_wide, unrotate
from cluster.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class _Loading:
    """``pieces``: rows of blocks that fill ``slots [n]`` in turn; a piece's ``rows`` are None for all of them."""

    pieces: list[tuple[Tensor, Tensor | None]]
    slots: Tensor
    cos: Tensor
    sin: Tensor

    def layer(self, part: int, layer: int) -> Tensor:
        """Raw keys (``part`` 0) or values (1) ``[n, heads, size]``."""
        return torch.cat(
            [block[part, layer] if rows is None else block[part, layer, rows] for block, rows in self.pieces]
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Saving:
    """``kv [2, layers, n, heads, size]``: what the job's ``slots`` held; ``layers``: those that are in it already."""

    job: SaveJob
    slots: Tensor
    cos: Tensor
    sin: Tensor
    kv: Tensor
    layers: set[int] = field(default_factory=set)


class WorkerSide:
    """One worker's side. ``layers``: names of the attention layers, in order; ``block``: tokens of a paged block.

    Keys are rotated to this window's positions when loaded, and unrotated when saved. Everything a load needs is
    verified before the first layer: if anything is missing, all the request's blocks are reported as failed, which ends
    it, and nothing of it is loaded or saved.
    """

    def __init__(self, store: BlockStore, layers: Sequence[str], *, block: int, rotary: Callable[[], Rotary]) -> None:
        self.store, self.block = store, block
        self._number = {name: number for number, name in enumerate(layers)}
        self._make_rotary = rotary
        self._rotary: Rotary | None = None
        self._caches: Mapping[str, Tensor] = {}
        self._paged: PagedKV = RowPaged()
        self._loading: list[_Loading] = []
        self._saving: list[_Saving] = []
        self._errors: set[int] = set()
        self._report = StepReport()

    def register_caches(self, caches: Mapping[str, Tensor], paged: PagedKV) -> None:
        """Register the layers' paged caches, by name, and their layout."""
        self._caches, self._paged = caches, paged

    # -- one step ---------------------------------------------------------------------------------
    def begin_step(self, jobs: StepJobs) -> None:
        """Find the blocks of all loads and allocate buffers for saves."""
        self._loading, self._saving, self._errors, self._report = [], [], set(), StepReport()
        for job in jobs.loads:
            try:
                self._loading.append(self._prepare(job))
            except ConfigError as error:
                self._report.failed[job.request] = str(error)
                self._errors.update(job.blocks[job.start // self.block : -(-job.stop // self.block)])
        for save in jobs.saves:
            if save.request in self._report.failed:
                self._report.lost[save.request] = len(save.saves)
                continue
            try:
                self._saving.append(self._stage(save))
            except ConfigError:
                self._report.lost[save.request] = len(save.saves)

    def load_layer(self, name: str) -> None:
        """Load blocks into one layer's cache."""
        number = self._number[name]
        for loading in self._loading:
            keys = rotate_wide(loading.layer(0, number).to(loading.cos.device), loading.cos, loading.sin)
            values = loading.layer(1, number).to(loading.cos.device)
            self._paged.write(self._caches[name], loading.slots, keys, values)

    def save_layer(self, name: str) -> None:
        """Copy saved tokens out of one layer's cache."""
        number = self._number[name]
        for saving in self._saving:
            keys, values = self._paged.read(self._caches[name], saving.slots)
            saving.kv[0, number] = unrotate(keys, saving.cos, saving.sin).cpu()
            saving.kv[1, number] = values.cpu()
            saving.layers.add(number)

    def end_step(self) -> None:
        """Store the saved blocks, each whole or not at all."""
        blocks: list[tuple[str, Tensor]] = []
        owners: list[str] = []
        for saving in self._saving:
            # A forward pass that ended before its last layer leaves parts of the KV unset.
            mine = self._blocks(saving) if len(saving.layers) == len(self._number) else []
            blocks += mine
            owners += [saving.job.request] * len(mine)
        held = self.store.put(blocks) if blocks else []
        for saving in self._saving:
            request = saving.job.request
            kept = sum(ok for ok, owner in zip(held, owners, strict=True) if owner == request)
            self._report.saved[request] = kept
            if kept < len(saving.job.saves):
                self._report.lost[request] = len(saving.job.saves) - kept
        self._loading, self._saving = [], []

    def pop_errors(self) -> set[int]:
        """Ids of paged blocks that this step failed to load."""
        errors, self._errors = self._errors, set()
        return errors

    def pop_report(self) -> StepReport | None:
        report, self._report = self._report, StepReport()
        return report if report.failed or report.saved or report.lost else None

    # -- loads ------------------------------------------------------------------------------------
    def _prepare(self, job: LoadJob) -> _Loading:
        """Find the blocks that fill ``[start, stop)``.

        Raises:
            ConfigError: they do not, or stand where the model has no positions.
        """
        pieces: list[tuple[Tensor, Tensor | None]] = []
        first = 0
        for load in job.loads:
            begin, end = max(first, job.start), min(first + len(load), job.stop)
            if begin < end:
                pieces.append((self._find(load), _taken(load, begin - first, end - first)))
            first += len(load)
        if first < job.stop:
            raise ConfigError(job.refused or f"its blocks stand for {first} tokens and not for {job.stop}")
        blocks = torch.tensor(job.blocks, device=self._device)
        cos, sin = self._at(job.axes, job.positions, np.arange(job.start, job.stop))
        return _Loading(pieces, block_slots(blocks, job.start, job.stop, self.block), cos, sin)

    def _find(self, load: Load) -> Tensor:
        found = self.store.get(load.key)
        if isinstance(found, Fault):
            raise ConfigError(f"block {load.key} is {found.value}")
        if found.shape[2] != load.tokens:
            raise ConfigError(f"block {load.key} has {found.shape[2]} tokens and not {load.tokens}")
        return found

    # -- saves ------------------------------------------------------------------------------------
    def _stage(self, job: SaveJob) -> _Saving:
        tokens = np.concatenate([np.arange(save.start, save.start + len(save)) for save in job.saves])
        blocks = torch.tensor(job.blocks, device=self._device)
        at = torch.from_numpy(tokens).to(self._device)
        cos, sin = self._at(job.axes, job.positions, tokens)
        kv = torch.empty(self.store.shape.block(len(tokens)), dtype=self.store.shape.dtype)
        slots = blocks[at // self.block] * self.block + at % self.block
        return _Saving(job, slots, cos, sin, kv)

    def _blocks(self, saving: _Saving) -> list[tuple[str, Tensor]]:
        """Saved KV cut into blocks; rows that were not computed come from the base block."""
        blocks: list[tuple[str, Tensor]] = []
        at = 0
        for save in saving.job.saves:
            part = saving.kv[:, :, at : at + len(save)]
            at += len(save)
            if save.rows is not None and save.base is not None:
                base = self.store.get(save.base)
                if isinstance(base, Fault) or base.shape[2] != save.tokens:
                    continue
                whole = base.clone()
                whole[:, :, torch.tensor(save.rows)] = part
                part = whole
            blocks.append((save.key, part))
        return blocks

    # -- positions --------------------------------------------------------------------------------
    @property
    def _device(self) -> torch.device:
        return next(iter(self._caches.values())).device

    def _at(self, axes: int, positions: bytes, tokens: np.ndarray) -> tuple[Tensor, Tensor]:
        if self._rotary is None:
            self._rotary = self._make_rotary()
        whole = np.frombuffer(positions, dtype=np.int32).reshape(axes, -1)
        return self._rotary.at(torch.from_numpy(whole[:, tokens].astype(np.int64)))


def _taken(load: Load, begin: int, end: int) -> Tensor | None:
    """Rows of the block behind its part ``[begin, end)`` of the prompt; None for all of them."""
    if load.rows is not None:
        return torch.tensor(load.rows[begin:end])
    return None if (begin, end) == (0, load.tokens) else torch.arange(begin, end)
