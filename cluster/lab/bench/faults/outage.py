"""Recovery of a memory after a restart during which its lowest tier was unreachable.

A real Redis is stopped (SIGSTOP) while a new bank opens the camera whose memory another bank has written. Frames keep
arriving. The duration of the outage does not matter, as long as it is noticed.
"""

import os
import signal
import time
from typing import Any

from cluster.lab.bench.faults.kill import held_tokens, readable_blocks
from cluster.lab.bench.harness import BenchResult
from cluster.lab.bench.memory.footage import add_written, made_chunks
from cluster.lab.bench.node import FINGERPRINT
from cluster.lab.bench.processes import RedisServer
from cluster.memory.bank import MemoryBank
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.redis import RedisTier
from cluster.memory.tiers.stack import TierStack
from cluster.types import MemorySpec

CAMERA = "cam"
SHAPE = {"layers": 4, "heads": 2, "rows": 4, "columns": 8, "width": 64}
FRAMES, MORE = 64, 24
ROUNDS = 3

_SPEC = MemorySpec(cap_bytes=8 * 2**20)
_OUTAGE_S = 2.0
_BACK_S = 30.0


def measure(seed: int) -> BenchResult:
    """Figure ``restored_after_outage``: smallest share over all rounds."""
    rows: list[dict[str, Any]] = []
    with RedisServer() as server:
        for number in range(ROUNDS):
            rows.append({"round": number, **_round(server.url, server.pid, seed + number)})
    note = f"share of the tokens clustered before the restart that can be read after it; outages of {_OUTAGE_S:g} s"
    return BenchResult({"restored_after_outage": min(row["share"] for row in rows)}, rows, [note])


def _round(url: str, pid: int, seed: int) -> dict[str, Any]:
    first = _bank(url)
    first.tiers.drop(CAMERA)
    first.open_stream(CAMERA, _SPEC)
    chunks = list(made_chunks(CAMERA, FRAMES + MORE, **SHAPE, seed=seed))
    for chunk in chunks[:FRAMES]:
        add_written(first, chunk)
    first.save_stream(CAMERA)
    held = held_tokens(first.get_memory(CAMERA)[0])
    os.kill(pid, signal.SIGSTOP)
    try:
        second = _bank(url)
        second.open_stream(CAMERA, _SPEC)
        until = time.monotonic() + _OUTAGE_S
        for chunk in chunks[FRAMES:]:
            second.accept_chunk(chunk)
            second.schedule_saves()
            second.run_maintenance()
            time.sleep(max(0.0, until - time.monotonic()) / MORE)
    finally:
        os.kill(pid, signal.SIGCONT)
    memory, _ = second.get_memory(CAMERA)
    until = time.monotonic() + _BACK_S
    while not memory.restored and time.monotonic() < until:
        second.run_maintenance()
        second.tiers.finish_deletions()
        second.wait_written()
        time.sleep(0.05)
    # Tokens of frames stored before the restart.
    restored = sum(int((block.frame < FRAMES).sum()) for block in readable_blocks(memory))
    for bank in (first, second):
        bank.tiers.close()
    return {
        "held": held,
        "restored": restored,
        "share": restored / held,
        "frames_dropped": memory.counts.frames_dropped,
    }


def _bank(url: str) -> MemoryBank:
    redis = RedisTier(url, fingerprint=FINGERPRINT, cap_bytes=_SPEC.cap_bytes, ttl_s=600, deadline_s=2.0)
    return MemoryBank(TierStack([Arena(2**25, slab_bytes=2**18), redis]))
