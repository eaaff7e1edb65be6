"""When in its stride each camera's windows end, so that those of one replica do not all end at once."""

from __future__ import annotations

SLOTS = 64
"""Stretches that a stride is divided into."""

_GOLDEN = 0.6180339887498949


class Phases:
    """Cameras of one replica over their stride: each takes the emptiest of ``SLOTS`` stretches by the load in it.

    Cameras of one stride meet their own kind only: those of different strides drift past each other anyhow.
    """

    def __init__(self) -> None:
        self._slots: dict[float, list[float]] = {}
        self._placed: dict[str, tuple[float, int, float, float]] = {}
        self._count = 0

    def add(self, camera: str, stride_s: float, load: float, *, phase: float | None = None) -> float:
        """A camera's phase, 0 to below 1: the share of its stride by which its windows end later than those of phase 0.

        ``phase``: the one it has already and keeps. A known camera is taken out first.
        """
        self.remove(camera)
        slots = self._slots.setdefault(stride_s, [0.0] * SLOTS)
        self._count += 1
        if phase is None:
            least = min(slots)
            # Of equally empty ones the one that is farthest from those taken last.
            start = int(self._count * _GOLDEN % 1 * SLOTS)
            place = next(p % SLOTS for p in range(start, start + SLOTS) if slots[p % SLOTS] == least)
            phase = (place + self._count * _GOLDEN % 1) / SLOTS
        else:
            place = int(phase * SLOTS)
        slots[place] += load
        self._placed[camera] = (stride_s, place, load, phase)
        return phase

    def remove(self, camera: str) -> float | None:
        """Forget a camera; its phase if it was known."""
        known = self._placed.pop(camera, None)
        if known is None:
            return None
        stride_s, place, load, phase = known
        self._slots[stride_s][place] = max(0.0, self._slots[stride_s][place] - load)
        return phase

    def of(self, camera: str) -> float:
        """A known camera's phase."""
        return self._placed[camera][3]
