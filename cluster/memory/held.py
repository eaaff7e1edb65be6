"""What one stream holds in one tier: frames come in, and the cap is never exceeded."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.errors import ConfigError
from cluster.memory.compress.base import Compressor
from cluster.memory.layer import LayerKV


class HeldKV:
    """KV of all layers under a cap of tokens per layer and head.

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
        self.layers: tuple[LayerKV, ...] = ()
        self.compressions = 0
        self.dropped = 0

    @property
    def tokens(self) -> int:
        """Tokens of each head of a layer."""
        return self.layers[0].tokens if self.layers else 0

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def add(self, frame: Sequence[LayerKV]) -> None:
        """Take in one frame's KV, one entry per layer. While it is taken in there are at most the cap and the frame.

        Raises:
            ValueError: another number of layers or heads than before, or a frame older than what is held.
        """
        if not self.layers:
            self._keep(tuple(frame))
            return
        if len(frame) != len(self.layers):
            raise ValueError(f"a frame of {len(frame)} layers for a memory of {len(self.layers)}")
        self._keep(tuple(held.then(new) for held, new in zip(self.layers, frame, strict=True)))

    def _keep(self, layers: tuple[LayerKV, ...]) -> None:
        if layers[0].tokens > self.cap:
            chosen = self.compressor.select(layers, self.budget)
            kept = tuple(layer.take(stays) for layer, stays in zip(layers, chosen, strict=True))
            self.compressions += 1
            self.dropped += layers[0].tokens - kept[0].tokens
            layers = kept
        self.layers = layers
