"""A tier that is far away: another tier, with a latency on every load."""

from __future__ import annotations

import time
from collections.abc import Sequence

from cluster.memory.tiers.base import Block, BlockKey, Loaded, Outcome, Tier, TierState


class Delayed(Tier):
    """``tier``, with every load ``seconds`` longer; loads at once wait side by side."""

    def __init__(self, tier: Tier, seconds: float) -> None:
        self.name, self._tier, self.seconds = f"delayed {tier.name}", tier, seconds

    def load(self, keys: Sequence[BlockKey]) -> list[Loaded]:
        """See ``Tier``."""
        time.sleep(self.seconds)
        return self._tier.load(keys)

    def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """See ``Tier``."""
        return self._tier.lookup(keys)

    def store(self, items: Sequence[tuple[BlockKey, Block]]) -> list[Outcome]:
        """See ``Tier``."""
        return self._tier.store(items)

    def list_blocks(self, stream: str) -> tuple[Outcome, list[BlockKey]]:
        """See ``Tier``."""
        return self._tier.list_blocks(stream)

    def drop(self, stream: str, keys: Sequence[BlockKey] | None = None) -> int | None:
        """See ``Tier``."""
        return self._tier.drop(stream, keys)

    def put_manifest(self, stream: str, manifest: bytes) -> Outcome:
        """See ``Tier``."""
        return self._tier.put_manifest(stream, manifest)

    def manifest(self, stream: str) -> tuple[Outcome, bytes | None]:
        """See ``Tier``."""
        return self._tier.manifest(stream)

    def nbytes(self, stream: str | None = None) -> int:
        """See ``Tier``."""
        return self._tier.nbytes(stream)

    def state(self) -> TierState:
        """See ``Tier``."""
        return self._tier.state()

    def close(self) -> None:
        """See ``Tier``."""
        self._tier.close()
