"""Counters of one memory, and what this process lost of all of them."""

from dataclasses import dataclass

from cluster.metrics.families import memory_lost


@dataclass(slots=True)
class MemoryCounts:
    """Counters: ``frames`` accepted, batches ``settled``, tokens of all layers and heads ``lost``."""

    frames: int = 0
    settled: int = 0
    compressions: int = 0
    compressed_away: int = 0
    lost: int = 0
    frames_dropped: int = 0
    windows_not_saved: int = 0
    unreadable: int = 0

    def drop_frames(self, frames: int = 1) -> None:
        """Count frames that were dropped before they were stored."""
        self.frames_dropped += frames
        memory_lost.labels("frames").inc(frames)

    def lose_tokens(self, tokens: int) -> None:
        """Count stored tokens whose blocks are lost."""
        self.lost += tokens
        memory_lost.labels("tokens").inc(tokens)
