"""What one stream holds in one tier: frames come in, and the cap is never exceeded."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.errors import ConfigError
from cluster.memory.compress import Compressor
from cluster.memory.head_memory import LayerKV


class HeldKV:
    """KV of all layers under a cap of tokens per layer and head.

    Frames are held as they came until their KV is wanted in one piece: joining them at every frame would move
    everything that is held each time.

    Args:
        compressor: chooses what stays once the cap would be exceeded.
        cap: most tokens of a layer and head that are held between two calls.
        target: share of the cap that a compression leaves (|C| / |M| of InfiniPot-V).

    Raises:
        ConfigError: a cap or a target that can hold nothing.
    """

    def __init__(self, compressor: Compressor, *, cap: int, target: float = 0.75) -> None:
        if cap < 1 or not 0 < target <= 1 or int(cap * target) < 1:
            raise ConfigError(f"a memory of {cap} tokens, compressed to {target:g} of that, can hold nothing")
        self.compressor, self.cap, self.budget = compressor, cap, int(cap * target)
        self.tokens = 0
        self.compressions = 0
        self.dropped = 0
        # In time order, one entry per layer in each; what a compression left is the first.
        self._parts: list[tuple[LayerKV, ...]] = []

    @property
    def layers(self) -> tuple[LayerKV, ...]:
        """All that is held, in one piece per layer."""
        if len(self._parts) > 1:
            self._parts = [tuple(LayerKV.concatenate(parts) for parts in zip(*self._parts, strict=True))]
        return self._parts[0] if self._parts else ()

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for part in self._parts for layer in part)

    def add(self, frame: Sequence[LayerKV]) -> None:
        """Take in one frame's KV, one entry per layer. While it is taken in there are at most the cap and the frame.

        Raises:
            ValueError: another number of layers or heads than before, or a frame older than what is held.
        """
        if self._parts:
            self._check(self._parts[-1], frame)
        if not self._parts or frame[0].tokens:
            self._parts.append(tuple(frame))
            self.tokens += frame[0].tokens
        if self.tokens > self.cap:
            self._compress()

    def _check(self, last: Sequence[LayerKV], frame: Sequence[LayerKV]) -> None:
        if len(frame) != len(last):
            raise ValueError(f"a frame of {len(frame)} layers for a memory of {len(last)}")
        for held, new in zip(last, frame, strict=True):
            if held.heads != new.heads:
                raise ValueError(f"a frame of {new.heads} heads for a memory of {held.heads}")
            if held.tokens and new.tokens and bool((new.frame[:, 0] < held.frame[:, -1]).any()):
                raise ValueError("frames must come in time order")

    def _compress(self) -> None:
        layers = self.layers
        chosen = self.compressor.select(layers, self.budget)
        kept = tuple(layer.select(stays) for layer, stays in zip(layers, chosen, strict=True))
        self._parts = [kept]
        self.compressions += 1
        self.tokens = kept[0].tokens
        self.dropped += layers[0].tokens - self.tokens
