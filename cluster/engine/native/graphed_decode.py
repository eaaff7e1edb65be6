"""Decodes one token of several explanations per step; on a GPU, by replaying a CUDA graph.

A pass of a few rows takes the device less time than its launches take the host. Only data changes between two passes:
it is written to buffers at fixed addresses before each replay, and the KV pool never moves.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster.engine.native.forward import RaggedAttention
from cluster.engine.native.kernels import Kernel
from cluster.engine.window.kv import KVPool
from cluster.engine.window.planner import IntArray, Run
from cluster.models.base import VisionLanguageModel
from cluster.models.layers import layer_rotary
from cluster.models.upload import fill, to_device

log = logging.getLogger(__name__)

# Rows of the largest graph: its logits take 80 MB for a vocabulary of 150,000.
LARGEST = 128

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Turns a function without arguments or result into one that launches the same work again."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeStep:
    """The newest token of each explanation, on the host.

    * ``ids`` ``[n]``; ``positions`` ``[3, n]``; ``slots`` ``[n]`` in the pool; all int64
    * ``tables``, ``runs``: per stream, see :meth:`~cluster.engine.native.kernels.Kernel.prepare`
    """

    ids: Tensor
    positions: Tensor
    slots: IntArray
    tables: Sequence[IntArray]
    runs: Sequence[Sequence[Run]]

    def padded(self, rows: int) -> DecodeStep:
        """Repeat the last row until there are ``rows``; every repetition writes the same KV to the same slot."""
        more = rows - len(self.ids)
        last = self.runs[-1][-1]
        return DecodeStep(
            torch.cat((self.ids, self.ids[-1:].expand(more))),
            torch.cat((self.positions, self.positions[:, -1:].expand(-1, more)), 1),
            np.concatenate((self.slots, self.slots[-1:].repeat(more))),
            self.tables,
            [*self.runs[:-1], [*self.runs[-1], *(last.moved(i + 1) for i in range(more))]],
        )


class _Graph:
    """A captured pass with as many rows as ``step``; writes ``_chosen`` and reads the other buffers."""

    def __init__(self, decode: GraphedDecode, capture: Capture, inputs: Any, step: DecodeStep) -> None:
        rows, device = len(step.ids), decode.pool.device
        self._kernel, self._inputs = decode.kernel, inputs
        self._chosen = torch.zeros(rows, dtype=torch.int64, device=device)
        # Token ids, slots and positions, written in one copy.
        self._rows = torch.zeros(5, rows, dtype=torch.int64, device=device)
        ids, slots, positions = self._rows[0], self._rows[1], self._rows[2:]

        def compute() -> None:
            self._chosen.copy_(decode.compute(ids, positions, slots, inputs))

        # Capture's warm-up runs this step, so that it writes nothing else to the pool.
        self._fill(step)
        self._replay = capture(compute)

    def __call__(self, step: DecodeStep) -> Tensor:
        self._fill(step)
        self._replay()
        return self._chosen

    def _fill(self, step: DecodeStep) -> None:
        fill(self._rows, torch.cat((step.ids[None], torch.from_numpy(step.slots)[None], step.positions)))
        self._kernel.fill(self._inputs, step.tables, step.runs)


class GraphedDecode:
    """Next tokens of explanations; one graph per power of two of rows, captured on first use.

    * ``capture``: ``None`` without a GPU, or once a capture has failed
    * ``replayed``, ``eager``: number of steps replayed from a graph, and launched operation by operation
    """

    def __init__(self, model: VisionLanguageModel, pool: KVPool, kernel: Kernel[Any]) -> None:
        self.model, self.pool, self.kernel = model, pool, kernel
        gpu = model.device.type == "cuda" and torch.cuda.is_available()
        self.capture: Capture | None = CudaCapture() if gpu else None
        self.replayed = self.eager = 0
        self._graphs: dict[int, _Graph] = {}

    def __call__(self, step: DecodeStep) -> Tensor:
        """Compute the rows' KV and the next tokens ``[n]``, on the device; valid until the next call."""
        count = len(step.ids)
        padded = step.padded(1 << (count - 1).bit_length())
        graph = self._graph(padded)
        if graph is not None:
            self.replayed += 1
            return graph(padded)[:count]
        self.eager += 1
        positions, slots = to_device(step.positions, self.pool.device), self.pool.index(step.slots)
        like = torch.empty(0, dtype=self.model.dtype, device=self.pool.device)
        prepared = self.kernel.prepare(step.tables, step.runs, like)
        return self.compute(to_device(step.ids, self.pool.device), positions, slots, prepared)

    def compute(self, ids: Tensor, positions: Tensor, slots: Tensor, prepared: Any) -> Tensor:
        """The pass from token ids ``[n]`` to the next tokens ``[n]``, without synchronisation."""
        attention = RaggedAttention(self.pool, slots, self.kernel, prepared)
        embeds = self.model.embed(ids)
        hidden = embeds[:, : self.model.text_config.hidden_size]
        rotary = layer_rotary(*(part.to(hidden.dtype) for part in self.model.rotary(positions)))
        for index in range(len(self.model.layers)):
            hidden = self.model.run_layer(index, hidden, embeds, rotary, attention)
        return self.model.logits(hidden).argmax(dim=1)

    def _graph(self, step: DecodeStep) -> _Graph | None:
        """The graph for this number of rows, captured if necessary; ``None`` if there is none."""
        rows = len(step.ids)
        if self.capture is None or rows in self._graphs or rows > LARGEST:
            return self._graphs.get(rows)
        try:
            inputs = self.kernel.static_inputs(rows, self.pool.capacity, self.pool.device)
            if inputs is not None:
                self._graphs[rows] = _Graph(self, self.capture, inputs, step)
        except Exception:
            log.exception("capturing %d rows failed; explanations decode without CUDA graphs from now on", rows)
            self.capture = None
            self._graphs.clear()
        return self._graphs.get(rows)


class CudaCapture:
    """:data:`Capture` of this thread's work on the current GPU. Graphs share memory, so only one may run at a time."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        # One for all captures: cuBLAS never frees its workspace per stream, 32 MiB on a Hopper GPU.
        self._side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        # On first calls, libraries allocate and Triton compiles, neither of which a capture allows.
        current, side = torch.cuda.current_stream(), self._side_stream
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(2):
                function()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            # Thread-local, as other threads copy memories meanwhile. If ending a capture fails, torch leaves the
            # capture stream current; the outer context restores it.
            with (
                torch.cuda.stream(current),
                torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"),
            ):
                function()
        except BaseException:
            # Torch's allocator would stay in capture mode, in which memory used by several streams is never freed.
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._memory)
            raise
        return graph.replay
