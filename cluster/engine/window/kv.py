"""Position-free KV of one stream: keys before rotary, in slots that are given up from the front.

Layout ``K, V [L, Hkv, capacity, d]``: a layer's keys of one head lie together, which is how attention reads them, and
a rotation writes them without a transpose. Frames enter at the end and leave at the start, so what a stream holds is
always one stretch. The system prompt's KV is copied directly in front of the window, over slots whose frames have left
(or that were never used): the window is then one contiguous stretch for every kernel. When the end of the slab is
reached, the stretch moves to its front.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cluster.models.base import VisionLanguageModel

# Slots beyond what is needed now, as a share: the more, the rarer the move to the front (one window's KV each time).
SLACK = 1.5
ROUNDING = 64


class KVSlab:
    """Slots of one stream; ``[start, start + length)`` hold the KV of its frames."""

    def __init__(self, layers: int, heads: int, head_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.start = 0
        self.length = 0
        # Zeros, not empty: a masked slot's score is -inf only if the score itself is finite.
        self.k = torch.zeros(layers, heads, 0, head_size, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)

    @classmethod
    def of(cls, model: VisionLanguageModel) -> KVSlab:
        """An empty one for a stream of this model."""
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
        """Forget everything; the memory stays."""
        self.start = self.length = 0

    def drop_slots(self, count: int) -> None:
        """The oldest ``count`` slots are given up.

        Raises:
            ValueError: there are not that many.
        """
        if not 0 <= count <= self.length:
            raise ValueError(f"{count} slots cannot be dropped of {self.length}")
        self.start += count
        self.length -= count

    def reserve(self, front: int, count: int) -> None:
        """Make room for ``front`` slots before the stretch and for the stretch to be ``count`` slots long."""
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
        """Copy ``k, v [L, Hkv, s, d]`` into the ``s`` slots before the stretch."""
        front = self.start - k.shape[2]
        self.k[:, :, front : self.start] = k
        self.v[:, :, front : self.start] = v

    def live_kv(self) -> tuple[Tensor, Tensor]:
        """``K, V [L, Hkv, length, d]`` of the frames held, as views."""
        held = slice(self.start, self.start + self.length)
        return self.k[:, :, held], self.v[:, :, held]
