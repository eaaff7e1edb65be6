"""What the gateway remembers of each camera's scores and rungs: rings, so that it is bounded whatever comes."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from cluster.types import Answer, CameraStatus

KEPT = 120
"""Scores per question, and changes of rung per camera."""
MOST_QUESTIONS = 64
MOST_CAMERAS = 20_000

_WIDTH = 3


class Ring:
    """The last ``kept`` scores: (Unix time of the window's end, score, flags), 24 bytes each."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._data = array("d")
        self._next = 0

    def add(self, at_s: float, score: float, positive: bool, gated: bool) -> None:
        row = (at_s, score, positive + 2.0 * gated)
        if len(self._data) < _WIDTH * self._kept:
            self._data.extend(row)
            return
        self._data[_WIDTH * self._next : _WIDTH * (self._next + 1)] = array("d", row)
        self._next = (self._next + 1) % self._kept

    def since(self, at_s: float) -> Ring:
        """Only windows that ended at this Unix time or later."""
        kept = Ring(self._kept)
        for row in self.rows():
            if row[0] >= at_s:
                kept.add(*row)
        return kept

    def rows(self) -> list[list[Any]]:
        """Oldest first: ``[end_unix_s, score, positive, gated]``."""
        data, count = self._data, len(self._data) // _WIDTH
        order = [(self._next + number) % count for number in range(count)]
        return [
            [
                round(data[_WIDTH * k], 3),
                round(data[_WIDTH * k + 1], 4),
                data[_WIDTH * k + 2] % 2 == 1,
                data[_WIDTH * k + 2] >= 2,
            ]
            for k in order
        ]


@dataclass(slots=True)
class _Camera:
    scores: dict[str, Ring] = field(default_factory=dict)
    rungs: deque[tuple[float, str, str]] = field(default_factory=lambda: deque(maxlen=KEPT))


class History:
    """Of every camera that there is; those that are removed are forgotten with :meth:`keep`."""

    def __init__(self) -> None:
        self._cameras: dict[str, _Camera] = {}

    def __len__(self) -> int:
        return len(self._cameras)

    def answer(self, answer: Answer, now_s: float | None = None) -> float:
        """Note its score; returns the Unix time of the window's end.

        That is when its last frame came: the camera's own clock may have begun anywhere.
        """
        at_s = round((time.time() if now_s is None else now_s) - answer.timing.latency_s, 3)
        camera = self._camera(answer.stream)
        if camera is None:
            return at_s
        ring = camera.scores.get(answer.question)
        if ring is None:
            if len(camera.scores) >= MOST_QUESTIONS:
                del camera.scores[next(iter(camera.scores))]
            ring = camera.scores[answer.question] = Ring()
        ring.add(at_s, answer.score, answer.positive, answer.gated)
        return at_s

    def status(self, status: CameraStatus, now_s: float | None = None) -> None:
        """Note the camera's rung, where it is another one than before."""
        camera = self._camera(status.name)
        if camera is not None and (not camera.rungs or camera.rungs[-1][1] != status.rung):
            at_s = time.time() if now_s is None else now_s
            camera.rungs.append((round(at_s, 3), status.rung, status.rung_reason))

    def keep(self, names: Collection[str]) -> None:
        """Forget all cameras but these."""
        for gone in self._cameras.keys() - set(names):
            del self._cameras[gone]

    def forget(self, name: str, before_s: float) -> None:
        """Scores of windows that ended before this Unix time."""
        camera = self._cameras.get(name, _Camera())
        camera.scores = {question: ring.since(before_s) for question, ring in camera.scores.items()}

    def body(self, name: str) -> dict[str, Any]:
        """``{"scores": {question: rows}, "rungs": [[unix_s, rung, reason], …]}``; empty for a camera not known yet."""
        camera = self._cameras.get(name, _Camera())
        return {
            "scores": {question: ring.rows() for question, ring in camera.scores.items()},
            "rungs": [list(row) for row in camera.rungs],
        }

    def _camera(self, name: str) -> _Camera | None:
        camera = self._cameras.get(name)
        if camera is None and len(self._cameras) < MOST_CAMERAS:
            camera = self._cameras[name] = _Camera()
        return camera
