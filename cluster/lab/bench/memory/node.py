"""A tier whose blocks lie in another process, for what has to travel."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.memory.tiers.remote import RemoteTier

FINGERPRINT = "bench"


_DEADLINE_S = 30.0


_END_S = 10.0


@contextmanager
def far_tier(total_bytes: int) -> Iterator[RemoteTier]:
    """A tier whose blocks lie in another process on this machine."""
    started = subprocess.Popen(
        [sys.executable, "-m", "cluster.lab.bench.memory.node_process", str(total_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert started.stdout is not None
        port = started.stdout.readline().strip()
        tier = RemoteTier(f"127.0.0.1:{port}", fingerprint=FINGERPRINT, deadline_s=_DEADLINE_S, name="node")
        try:
            yield tier
        finally:
            tier.close()
    finally:
        started.terminate()
        started.wait(_END_S)
        for pipe in (started.stdin, started.stdout):
            if pipe is not None:
                pipe.close()
