"""Position-free KV of one stream: keys before rotary, in a ring of slots.

Layout ``K, V [L, Hkv, capacity, d]``: the keys of a layer and head are contiguous, as attention reads them. Frames
enter at the end and leave at the start, so a stream's KV is one contiguous range. The system prompt's KV is copied
directly before it, over free slots, so that the window is one contiguous range for every kernel. At the end of the slab
the range moves to its front.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cluster.models.base import VisionLanguageModel

# Slots beyond what is needed now, as a share: the more, the rarer the move to the front (one window's KV each time).
SLACK = 1.5
ROUNDING = 64


class KVSlab:
    """KV slots of one stream; ``[start, start + length)`` are in use."""

    def __init__(self, layers: int, heads: int, head_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.start = 0
        self.length = 0
        # Zeros, not empty: a masked slot's score is -inf only if the score itself is finite.
        self.k = torch.zeros(layers, heads, 0, head_size, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)

    @classmethod
    def of(cls, model: VisionLanguageModel) -> KVSlab:
        """Create an empty slab for a stream of this model."""
        config = model.text_config
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return cls(len(model.layers), kv_heads, size, model.dtype, model.device)

    @property
    def capacity(self) -> int:
        return int(self.k.shape[2])

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def clear(self) -> None:
        """Drop all slots; the memory stays allocated."""
        self.start = self.length = 0

    def drop_slots(self, count: int) -> None:
        """Drop the oldest ``count`` slots.

        Raises:
            ValueError: there are fewer.
        """
        if not 0 <= count <= self.length:
            raise ValueError(f"{count} slots cannot be dropped of {self.length}")
        self.start += count
        self.length -= count

    def reserve(self, front: int, count: int) -> None:
        """Make room for ``front`` slots before the range and for the range to grow to ``count`` slots."""
        if self.start >= front and self.start + count <= self.capacity:
            return
        if front + count > self.capacity:
            wanted = front + int(count * SLACK)
            capacity = -(-wanted // ROUNDING) * ROUNDING
            self.k, self.v = (self._grown(tensor, capacity, front) for tensor in (self.k, self.v))
        else:
            for tensor in (self.k, self.v):
                for layer in tensor:
                    # The two stretches may overlap: through a copy, a layer at a time.
                    layer[:, front : front + self.length] = layer[:, self.start : self.start + self.length].clone()
        self.start = front

    def _grown(self, tensor: Tensor, capacity: int, front: int) -> Tensor:
        layers, heads, _, head_size = tensor.shape
        grown = tensor.new_zeros(layers, heads, capacity, head_size)
        grown[:, :, front : front + self.length] = tensor[:, :, self.start : self.start + self.length]
        return grown

    def prepend(self, k: Tensor, v: Tensor) -> None:
        """Copy ``k, v [L, Hkv, s, d]`` into the ``s`` slots before the range."""
        front = self.start - k.shape[2]
        self.k[:, :, front : self.start] = k
        self.v[:, :, front : self.start] = v

    def live_kv(self) -> tuple[Tensor, Tensor]:
        """``K, V [L, Hkv, length, d]`` of the slots in use, as views."""
        held = slice(self.start, self.start + self.length)
        return self.k[:, :, held], self.v[:, :, held]
