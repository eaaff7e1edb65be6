"""Decoding one token of several explanations, as a replayed CUDA graph where there is a GPU.

A pass of a few rows takes the device less time than its launches take the host. All that changes between two of them is
data, which is written to buffers of fixed addresses before a replay; the KV pool never moves.
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

# Rows of the largest graph: its logits of a vocabulary of 150,000 take 80 MB.
LARGEST = 128

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Turns a function without arguments and results into one that launches the same work again."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeStep:
    """The newest token of each explanation, on the host.

    * ``ids`` ``[n]`` and ``slots`` ``[n]``, of the pool; ``positions`` ``[3, n]``; all int64
    * ``tables``, ``runs``: of each stream, see :meth:`~cluster.engine.native.kernels.Kernel.prepare`
    """

    ids: Tensor
    positions: Tensor
    slots: IntArray
    tables: Sequence[IntArray]
    runs: Sequence[Sequence[Run]]

    def padded(self, rows: int) -> DecodeStep:
        """The last row again and again until there are ``rows``: what it writes to its slot is the same."""
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
    """A captured pass of so many rows as ``step`` has; ``chosen`` is what it writes, the others what it reads."""

    def __init__(self, decode: GraphedDecode, capture: Capture, inputs: Any, step: DecodeStep) -> None:
        rows, device = len(step.ids), decode.pool.device
        self._kernel, self._inputs = decode.kernel, inputs
        self._chosen = torch.zeros(rows, dtype=torch.int64, device=device)
        # Token ids, slots and positions, which are written together.
        self._rows = torch.zeros(5, rows, dtype=torch.int64, device=device)
        ids, slots, positions = self._rows[0], self._rows[1], self._rows[2:]

        def compute() -> None:
            self._chosen.copy_(decode.compute(ids, positions, slots, inputs))

        # Warm-up computes this step, so that nothing else is written to the pool.
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
    """Next tokens of explanations; one graph for each power of two of rows, captured when it is first needed.

    * ``capture``: ``None`` where there is no GPU, or once a capture has failed
    * ``replayed``, ``eager``: steps that were replayed, and that were launched operation by operation
    """

    def __init__(self, model: VisionLanguageModel, pool: KVPool, kernel: Kernel[Any]) -> None:
        self.model, self.pool, self.kernel = model, pool, kernel
        gpu = model.device.type == "cuda" and torch.cuda.is_available()
        self.capture: Capture | None = CudaCapture() if gpu else None
        self.replayed = self.eager = 0
        self._graphs: dict[int, _Graph] = {}

    def __call__(self, step: DecodeStep) -> Tensor:
        """Compute the rows' KV and the tokens after them ``[n]``, on the device; valid until the next call."""
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
        """The pass from token ids ``[n]`` to the tokens after them ``[n]``. Nothing in it waits for the device."""
        attention = RaggedAttention(self.pool, slots, self.kernel, prepared)
        embeds = self.model.embed(ids)
        hidden = embeds[:, : self.model.text_config.hidden_size]
        rotary = layer_rotary(*(part.to(hidden.dtype) for part in self.model.rotary(positions)))
        for index in range(len(self.model.layers)):
            hidden = self.model.run_layer(index, hidden, embeds, rotary, attention)
        return self.model.logits(hidden).argmax(dim=1)

    def _graph(self, step: DecodeStep) -> _Graph | None:
        """The graph for this many rows; ``None``: there is none here."""
        rows = len(step.ids)
        if self.capture is None or rows in self._graphs or rows > LARGEST:
            return self._graphs.get(rows)
        try:
            inputs = self.kernel.static_inputs(rows, self.pool.capacity, self.pool.device)
            if inputs is not None:
                self._graphs[rows] = _Graph(self, self.capture, inputs, step)
        except Exception:
            log.exception("explanations decode without CUDA graphs from here on: capturing %d rows failed", rows)
            self.capture = None
            self._graphs.clear()
        return self._graphs.get(rows)


class CudaCapture:
    """:data:`Capture` of this thread's work on the current GPU; graphs are replayed one at a time and share memory."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        # For all of them: what cuBLAS takes for each queue, 32 MiB on a Hopper GPU, stays taken.
        self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        # Libraries allocate and Triton compiles at first calls, which a capture does not allow.
        current, aside = torch.cuda.current_stream(), self._aside
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(2):
                function()
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads copy memories meanwhile. Where the end of a capture fails, torch leaves its queue current.
            with (
                torch.cuda.stream(current),
                torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"),
            ):
                function()
        except BaseException:
            # And its allocator as if the capture went on, in which memory of several queues is never free again.
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._memory)
            raise
        return graph.replay
