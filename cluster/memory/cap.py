"""Byte cap of one stream's memory, and how it is divided."""

import logging
import threading

from cluster.memory.head_memory import HeadMemory, KVChunk
from cluster.memory.memory_counts import MemoryCounts
from cluster.memory.tiers.stack import TierStack
from cluster.memory.writer import StoredBlocks
from cluster.types import MemorySpec
from cluster.types.cameras import WAITING

log = logging.getLogger(__name__)

# Divisor of the cap: maximum size of a saved window.
WINDOW = 8
# Usable share of the lowest tier, which rounds allocations up.
_ROUNDING = 0.95


class CappedMemory:
    """Caps of one memory: the configured one, and ``cap_bytes``, the one in force.

    After the configured cap is lowered, the one in force stays above it until the contents fit: compressing them takes
    room.
    """

    heads: list[list[HeadMemory]]
    stored: StoredBlocks
    # Frames waiting to be clustered.
    recent: list[KVChunk]

    def __init__(self, stream: str, spec: MemorySpec, tiers: TierStack) -> None:
        self.stream, self.spec, self.tiers = stream, spec, tiers
        self.cap_bytes = self.settings_cap_bytes
        self.counts = MemoryCounts()
        self._lock = threading.Lock()

    @property
    def waiting_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.recent)

    @property
    def device_bytes(self) -> int:
        """Bytes of waiting frames in device memory."""
        return sum(chunk.nbytes for chunk in self.recent if chunk.key.device.type != "cpu")

    @property
    def held_bytes(self) -> int:
        """Bytes of blocks and index in the lowest tier, plus waiting frames."""
        return self.stored.nbytes + self.waiting_bytes

    @property
    def settings_cap_bytes(self) -> int:
        """The configured cap, limited by the lowest tier's per-camera cap."""
        return min(self.spec.cap_bytes, self.tiers.lowest.limit)

    @property
    def max_window_bytes(self) -> int:
        return self.spec.cap_bytes // WINDOW

    @property
    def max_bytes(self) -> int:
        """Maximum bytes of blocks, index and window, counting both versions during a rewrite: the cap in force less
        the share of waiting frames."""
        return self.cap_bytes - self.cap_bytes // WAITING

    @property
    def max_settled_bytes(self) -> float:
        """Maximum of the same between rewrites, under the configured cap: leaves room for a second version of one
        head's blocks."""
        heads = max(1, sum(map(len, self.heads)))
        cap = self.settings_cap_bytes
        return (cap - cap // WAITING) * _ROUNDING * heads / (heads + 1)

    def apply_cap(self) -> None:
        """Enforce the configured cap, here and in the tiers; a lower one only once the contents fit it."""
        with self._lock:
            fits = self.stored.nbytes <= self.max_settled_bytes
            self.cap_bytes = self.settings_cap_bytes if fits else max(self.cap_bytes, self.settings_cap_bytes)
            self.tiers.set_cap(self.stream, self.cap_bytes, shrinking=not fits)

    def has_room_for_window(self, nbytes: int) -> bool:
        """Whether a window of ``nbytes`` can be saved with the memory; counted, and logged once, if not."""
        if nbytes <= self.max_window_bytes:
            return True
        if not self.counts.windows_not_saved:
            window, cap, enough = (-(-each // 2**10) for each in (nbytes, self.spec.cap_bytes, WINDOW * nbytes))
            why = f"more than an eighth of memory.cap = {cap} KiB and is not saved; {enough} KiB would suffice"
            log.warning("camera %r: its window of %d KiB is %s", self.stream, window, why)
        self.counts.windows_not_saved += 1
        return False
