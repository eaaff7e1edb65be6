"""What stands for a layer that computes while blocks travel, and what came of a question that waited for them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from cluster.memory.prefetch import FetchEvent, PrefetchStats


@dataclass(frozen=True, slots=True)
class Compute:
    """One layer's work. Times are ``time.perf_counter``'s."""

    layer: int
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class PrefetchRun:
    """``waited_s`` with blocks loaded ahead, ``transfer_s`` without; ``hidden``: the share of the latter that is gone.
    ``events``, ``computes`` and ``stats`` are those of the run with blocks loaded ahead."""

    hidden: float
    waited_s: float
    transfer_s: float
    events: tuple[FetchEvent, ...]
    computes: tuple[Compute, ...]
    stats: PrefetchStats


class Work:
    """What stands for a layer: products of matrices for at least ``seconds``, each of them about a quarter of that or
    less, as a layer is a handful of them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        for size in (64, 128, 256, 512, 1024):
            matrix = torch.randn(size, size) / size**0.5
            took = []
            for _ in range(3):
                began = time.perf_counter()
                torch.mm(matrix, matrix)
                took.append(time.perf_counter() - began)
            if size == 64 or min(took) <= seconds / 4:
                self._matrix = matrix

    def __call__(self) -> None:
        until = time.perf_counter() + self._seconds
        product = self._matrix
        while time.perf_counter() < until:
            product = product @ self._matrix
