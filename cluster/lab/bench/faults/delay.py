"""Delay of a camera's loads while another camera's write to a tier takes 1.5 s.

Tiers are host memory, a node tier and Redis. While one camera's slow write to the node tier runs, another camera's
blocks are loaded from each tier, after being dropped from those above.
"""

import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from cluster.lab.bench.harness import BenchResult
from cluster.lab.bench.node import FINGERPRINT
from cluster.lab.bench.processes import RedisServer
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.base import Block, BlockKey, Outcome
from cluster.memory.tiers.redis import RedisTier
from cluster.memory.tiers.stack import TierStack

SLOW_S = 1.5
BLOCKS, TOKENS, WIDTH = 32, 32, 128
ROUNDS = 20

_TIER_BYTES = 2**26


class SlowArena(Arena):
    """A tier that is slow to store one camera's blocks."""

    camera = ""

    def store(self, items: Sequence[tuple[BlockKey, Block]]) -> list[Outcome]:
        if any(key.stream == self.camera for key, _ in items):
            time.sleep(SLOW_S)
        return super().store(items)


def measure(seed: int) -> BenchResult:
    """Figure ``other_camera_delay_ms``: largest excess, over the tiers, of the median load over the same load alone."""
    rng = torch.Generator().manual_seed(seed)
    rows: list[dict[str, Any]] = []
    with RedisServer() as server:
        host, node = Arena(_TIER_BYTES), SlowArena(_TIER_BYTES, name="node")
        redis = RedisTier(server.url, fingerprint=FINGERPRINT, cap_bytes=_TIER_BYTES, ttl_s=600, deadline_s=5.0)
        tiers = TierStack([host, node, redis])
        keys = [BlockKey("other", 0, 0, number) for number in range(BLOCKS)]
        tiers.store([(key, _block(rng)) for key in keys])
        for source, empty in (("host", ()), ("node", (host,)), ("redis", (host, node))):
            alone = [_load(tiers, keys, empty) for _ in range(ROUNDS)]
            node.camera = "slow"
            writing = threading.Thread(target=tiers.store, args=([(BlockKey("slow", 0, 0, len(rows)), _block(rng))],))
            writing.start()
            time.sleep(0.05)
            concurrent: list[float] = []
            while writing.is_alive() and len(concurrent) < ROUNDS:
                concurrent.append(_load(tiers, keys, empty))
            writing.join()
            node.camera = ""
            excess = max(concurrent) - statistics.median(alone)
            rows.append(
                {
                    "from": source,
                    "alone_ms": statistics.median(alone) * 1000,
                    "beside_ms": statistics.median(concurrent) * 1000,
                    "beside_worst_ms": max(concurrent) * 1000,
                    "excess_ms": (statistics.median(concurrent) - statistics.median(alone)) * 1000,
                    "worst_excess_ms": excess * 1000,
                    "loads": len(concurrent),
                }
            )
        tiers.close()
    note = f"{BLOCKS} blocks of {TOKENS} tokens; medians of {ROUNDS}; the write takes {SLOW_S:g} s in the node's tier"
    return BenchResult({"other_camera_delay_ms": max(row["excess_ms"] for row in rows)}, rows, [note])


def _load(tiers: TierStack, keys: Sequence[BlockKey], empty: Sequence[Arena]) -> float:
    for tier in empty:
        tier.drop("other", keys)
    began = time.perf_counter()
    loaded = tiers.load(keys)
    seconds = time.perf_counter() - began
    assert all(one.block is not None for one in loaded)
    return seconds


def _block(rng: torch.Generator) -> Block:
    key, value = (torch.randn(TOKENS, WIDTH, generator=rng) for _ in range(2))
    number = torch.arange(TOKENS, dtype=torch.int32)
    return Block(key, value, number, number)
