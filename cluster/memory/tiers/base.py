"""Tier interface: storage for KV blocks under a byte cap, with bounded call times.

A block is one cluster of one layer and head, so a cluster takes one transfer. The lowest tier holds a stream's whole
memory; tiers above hold copies of recently used blocks.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

if TYPE_CHECKING:
    from torch import Tensor

    from cluster.wire.tls import PeerTls


class Outcome(Enum):
    """``HIT``: done. ``MISS``: absent, damaged or foreign. ``RETRY``: not now, perhaps later (the tier is down, slow or
    full)."""

    HIT = "hit"
    MISS = "miss"
    RETRY = "retry"


class BlockKey(NamedTuple):
    """Identifies a block. ``block``: its number in the stream. Blocks are immutable and numbers never reused: a changed
    cluster is written under a new number. A tuple for speed, as a question hashes thousands."""

    stream: str
    layer: int
    head: int
    block: int


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Members of one cluster in time order.

    * ``key``, ``value`` ``[n, D]``; keys before rotary
    * ``frame``, ``cell`` ``[n]`` int32: frame number, and row-major cell in its grid
    """

    key: Tensor
    value: Tensor
    frame: Tensor
    cell: Tensor

    def __len__(self) -> int:
        return int(self.key.shape[0])

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + self.value.nbytes + self.frame.nbytes + self.cell.nbytes

    def select(self, rows: Tensor | slice) -> Block:
        return Block(self.key[rows], self.value[rows], self.frame[rows], self.cell[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """Result of loading one block: ``block`` is complete if ``outcome`` is ``HIT``, else None."""

    outcome: Outcome
    block: Block | None = None


@dataclass(slots=True)
class TierState:
    """Whether a tier is up, ``reason`` if not, and its counters (``hits``, ``misses``, ``retries``, ``stored``,
    ``evicted``, ``damaged`` … in blocks; ``bytes_in``, ``bytes_out``)."""

    up: bool = True
    reason: str = ""
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def trouble(self) -> str:
        """Why the tier is down or refuses writes (full); empty if neither."""
        return self.reason or ("" if self.up else "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """Settings of a replica's tiers (configuration ``tiers:`` and ``security:``).

    Attributes:
        fingerprint: of the model and settings that blocks belong to.
        pinned: page-lock host memory.
        node_address: ``host:port`` of the node's tier process; None if unused.
        find_node: looks up that process's current address.
        camera_bytes: cap per camera in the tiers below the host; None for no cap.
        secret: key of the digests of stored blocks.
        options: by tier, for tiers without a configuration section (``tiers.options``).
    """

    fingerprint: str
    host_bytes: int
    node_bytes: int
    pinned: bool = False
    node_address: str | None = None
    find_node: Callable[[], str] | None = None
    camera_bytes: int | None = None
    redis_url: str | None = None
    redis_ttl_s: float = 24 * 3600.0
    deadline_s: float = 2.0
    secret: bytes = field(default=b"", repr=False)
    tls: PeerTls | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def storage(self) -> dict[str, Any]:
        """Arguments common to all tiers outside this process."""
        return {name: getattr(self, name) for name in ("fingerprint", "secret", "deadline_s")}


class Tier(ABC):
    """Storage for blocks and manifests; thread-safe. Calls end within the tier's deadline and never raise because the
    tier is down. Each stream has a byte cap: ``limit``, or a lower one set by :meth:`set_cap`."""

    # Whether it is in this process's memory, so that loads are copies and prefetching them gains nothing.
    at_hand: ClassVar[bool] = False

    def __init__(self, name: str, limit: int = sys.maxsize) -> None:
        self.name, self.limit = name, limit
        self._caps: dict[str, int] = {}
        self._shrinking: set[str] = set()

    @classmethod
    def from_settings(cls, settings: TierSettings) -> Self | None:
        """Create the tier as configured; None if it is not."""
        raise NotImplementedError(f"{cls.__name__} cannot be configured")

    def cap(self, stream: str) -> int:
        cap = self._caps.get(stream, self.limit)
        return cap if stream in self._shrinking else min(cap, self.limit)

    def set_cap(self, stream: str, nbytes: int | None, *, shrinking: bool = False) -> None:
        """Set a lower cap for a stream, or forget it (None). A tier that does not evict keeps the excess and refuses
        more. ``shrinking``: it may exceed ``limit``, as the stream was written under a higher cap and compressing it
        takes room."""
        (self._shrinking.add if shrinking else self._shrinking.discard)(stream)
        if nbytes is None:
            self._caps.pop(stream, None)
        else:
            self._caps[stream] = nbytes

    def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Whether each block could be loaded now, without moving KV; only for tiers ``at_hand``."""
        raise NotImplementedError

    @abstractmethod
    def store(self, items: Sequence[tuple[BlockKey, Block]]) -> list[Outcome]:
        """Store blocks, replacing those with the same keys. ``HIT``: stored. ``RETRY``: not now. ``MISS``: never
        possible (larger than the stream's cap). The cap is never exceeded, not even temporarily."""

    @abstractmethod
    def load(self, keys: Sequence[BlockKey]) -> list[Loaded]:
        """Load blocks in the order of ``keys``, each completely or not at all."""

    @abstractmethod
    def drop(self, stream: str, keys: Sequence[BlockKey] | None = None) -> int | None:
        """Delete a stream's blocks; without ``keys`` all of them and its manifest. Returns how many existed, None if
        the deletion is uncertain and must be repeated."""

    @abstractmethod
    def list_blocks(self, stream: str) -> tuple[Outcome, list[BlockKey]]:
        """All blocks of a stream, named by a manifest or not; ``RETRY``: unavailable now."""

    @abstractmethod
    def put_manifest(self, stream: str, manifest: bytes) -> Outcome:
        """Replace the stream's manifest."""

    @abstractmethod
    def manifest(self, stream: str) -> tuple[Outcome, bytes | None]:
        """Read the stream's manifest."""

    def renew(self, stream: str) -> None:  # noqa: B027
        """Renew the expiry of a stream in use, in tiers whose contents expire."""

    def leave(self, stream: str) -> None:  # noqa: B027
        """Free in-process state that only the stream's writer needs: the stream was closed here."""

    @abstractmethod
    def nbytes(self, stream: str | None = None) -> int:
        """Bytes stored for one stream, or for all."""

    @abstractmethod
    def state(self) -> TierState:
        """Current state, without calling a server."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent."""
