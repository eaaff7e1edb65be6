"""kill -9 of a process that writes a memory, at every point at which it writes: what of it comes back?

A process of its own (:mod:`cluster.lab.bench.faults.memory_process`) writes a memory into the node's process or a
Redis, and says before each write of blocks or a manifest and each deletion, and after it, that it is there. It is
killed at one of these points; then the memory is restored and every block that the last acknowledged manifest names is
read.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cluster.lab.bench.faults.memory_process import CAMERA, opened, readable, write
from cluster.lab.bench.harness import Part
from cluster.lab.bench.memory.node import far_tier
from cluster.lab.bench.processes import RedisServer

KILLS = 50
_NODE_BYTES = 2**28

# Real processes, forked from one that has imported everything: a start takes no seconds.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["cluster.lab.bench.faults.memory_process"])


def measure(seed: int) -> Part:
    """Figure ``restored_after_kill``: the least share of tokens over all kills."""
    draw = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for name, kills in (("node", KILLS // 2), ("redis", KILLS - KILLS // 2)):
        with _tier(name) as address:
            points = _run(address, None)[0]
            for kill in range(kills):
                # Spread over all points, so that each kind is met; which exactly is drawn.
                at = min(points - 1, int((kill + draw.random()) * points / kills))
                _, point, named = _run(address, at)
                restored, of = _restored(address)
                rows.append(
                    {
                        "tier": name,
                        "point": point,
                        "write": at,
                        "named": named,
                        "restored": restored,
                        "share": 0.0 if of < named else restored / named if named else 1.0,
                    }
                )
    note = (
        "every row is one kill -9; named: tokens that the last manifest the tier acknowledged names; restored: tokens "
        "whose blocks another process read whole; share is 0 where its manifest names fewer, and 1 where none was "
        "acknowledged yet"
    )
    return Part({"restored_after_kill": min(row["share"] for row in rows)}, _summary(rows), [note])


def _summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By tier and point."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["tier"], row["point"]), []).append(row)
    return [
        {
            "tier": tier,
            "point": point,
            "kills": len(these),
            "named": max(row["named"] for row in these),
            "share": min(row["share"] for row in these),
        }
        for (tier, point), these in sorted(found.items())
    ]


@contextmanager
def _tier(name: str) -> Iterator[str]:
    if name == "redis":
        with RedisServer() as server:
            yield server.url
    else:
        with far_tier(_NODE_BYTES) as node:
            yield node.address


def _run(address: str, at: int | None) -> tuple[int, str, int]:
    """Have the memory written, up to the write numbered ``at``; returns how many points were passed, the last one, and
    the tokens that the last acknowledged manifest names."""
    tier = opened(address)
    tier.drop(CAMERA)
    tier.close()
    mine, its = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=write, args=(address, its), daemon=True)
    process.start()
    its.close()
    passed, point, named = 0, "", 0
    try:
        while True:
            point, tokens = mine.recv()
            # After a manifest was acknowledged.
            named = tokens if point == "manifest+" else named
            if passed == at:
                break
            passed += 1
            mine.send(None)
    except EOFError:
        # It has written everything.
        pass
    finally:
        process.kill()
        process.join()
        mine.close()
    return passed, point, named


def _restored(address: str) -> tuple[int, int]:
    """Tokens that another process can read, and those that the manifest it finds names."""
    tier = opened(address)
    try:
        return readable(tier)
    finally:
        tier.close()
