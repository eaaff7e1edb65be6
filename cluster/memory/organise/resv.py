"""ReSV's clusters (V-Rex, section 4): keys whose hash bits are near each other."""

from __future__ import annotations

import torch
from torch import Tensor

from cluster.memory.organise.base import Organiser, organisers


@organisers.register("resv")
class ReSV(Organiser):
    """A token joins the nearest cluster within a Hamming distance, and else founds one; its bits are the founder's.

    Hashes are taken of raw keys, before rotary: the same thing at the same place hashes alike whenever it is seen. The
    paper hashes rotated keys, which drift apart with time.

    Args:
        width: of a key.
        bits: hyperplanes.
        threshold: largest distance at which a token still joins.
        seed: of the hyperplanes.
    """

    def __init__(self, width: int, *, bits: int = 32, threshold: int = 7, seed: int = 0) -> None:
        super().__init__(width)
        if bits < 1 or threshold < 0:
            raise ValueError(f"{bits} hyperplanes with a threshold of {threshold} hash nothing")
        self.threshold = threshold
        rng = torch.Generator().manual_seed(seed)
        self._planes = torch.randn(width, bits, generator=rng)
        # As +1 and -1: a Hamming distance is then half of what a product lacks to the number of bits.
        self._founders = torch.zeros(0, bits)

    def hash(self, key: Tensor) -> Tensor:
        """``key [t, D]`` -> ``[t, bits]`` of +1 and -1."""
        return torch.where(key.float() @ self._planes.to(key.device) >= 0, 1.0, -1.0)

    def add(self, key: Tensor, frame: Tensor) -> None:
        del frame
        signs = self.hash(key)
        self._founders = self._founders.to(signs.device)
        known = len(self._founders)
        near, nearest = self._nearest(signs)
        among = _hamming(signs, signs).tolist()
        founders: list[int] = []
        cluster: list[int] = []
        for token, (distance, joined) in enumerate(zip(near, nearest, strict=True)):
            # Of equal distances the older cluster's.
            for number, founder in enumerate(founders):
                if among[token][founder] < distance:
                    distance, joined = among[token][founder], known + number
            if distance > self.threshold:
                joined = known + len(founders)
                founders.append(token)
            cluster.append(joined)
        self._founders = torch.cat([self._founders, signs[founders]])
        self.table.add(key, torch.tensor(cluster, dtype=torch.int64, device=key.device))

    def _nearest(self, signs: Tensor) -> tuple[list[float], list[int]]:
        """Distance to the nearest cluster there is and its number; infinitely far where there is none."""
        if not len(self._founders):
            return [float("inf")] * len(signs), [-1] * len(signs)
        distance, number = _hamming(signs, self._founders).min(dim=1)
        return distance.tolist(), number.tolist()


def _hamming(a: Tensor, b: Tensor) -> Tensor:
    """``[n, bits]``, ``[m, bits]`` of +1 and -1 -> the number of bits that differ ``[n, m]``."""
    return (a.shape[1] - a @ b.mT) / 2
