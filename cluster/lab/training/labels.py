"""Dense labels of visual tokens, which train the tower and the language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.lab.scenes.actors import COLORS
from cluster.lab.scenes.render import SceneObject
from cluster.lab.scenes.vocabulary import EVENT_KINDS, OBJECT_KINDS, STATES, SceneEvent
from cluster.types import PatchGrid

LABELS = (
    *(f"kind:{kind}" for kind in OBJECT_KINDS),
    *(f"state:{state}" for state in STATES),
    *(f"color:{color}" for color in COLORS),
    *(f"event:{kind}" for kind in EVENT_KINDS),
)
"""Columns of :attr:`TokenLabels.hot`."""

MIN_COVERAGE = 0.2
"""Minimum overlap, as a share of the token or of a smaller object, to label the token."""

_COLUMN = {label: column for column, label in enumerate(LABELS)}


LabelledInstant = tuple[float, Sequence[SceneObject]]
"""Time, and the objects visible then."""


@dataclass(frozen=True, slots=True)
class TokenLabels:
    """Labels of some tokens of one frame.

    * ``hot`` ``[t, len(LABELS)]`` uint8, multi-hot
    * ``velocity`` ``[t, 2]`` float32, shares of the picture per second, of the object that covers most of the token
    * ``covered`` ``[t]`` bool: some object is there (``velocity`` is valid)
    """

    hot: npt.NDArray[np.uint8]
    velocity: npt.NDArray[np.float32]
    covered: npt.NDArray[np.bool_]

    def take(self, tokens: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> TokenLabels:
        """Labels of some of the tokens."""
        return TokenLabels(self.hot[tokens], self.velocity[tokens], self.covered[tokens])


def coverage(box: tuple[float, float, float, float], rows: int, cols: int) -> npt.NDArray[np.float64]:
    """``[rows, cols]``: overlap of a box (shares of the picture) with each cell, as a share of the smaller of both."""
    x0, y0, x1, y1 = box
    wide = _overlap(x0, x1, cols)
    high = _overlap(y0, y1, rows)
    area = max((x1 - x0) * cols * (y1 - y0) * rows, 1e-9)
    share: npt.NDArray[np.float64] = np.outer(high, wide) / min(1.0, area)
    return share


def _overlap(low: float, high: float, cells: int) -> npt.NDArray[np.float64]:
    edges = np.arange(cells, dtype=np.float64)
    overlap: npt.NDArray[np.float64] = np.clip(
        np.minimum(high * cells, edges + 1) - np.maximum(low * cells, edges), 0, 1
    )
    return overlap


def token_labels(instants: Sequence[LabelledInstant], events: Sequence[SceneEvent], grid: PatchGrid) -> TokenLabels:
    """Labels of all tokens of one frame, row-major; ``instants``: time and objects of each sample.

    Labels are the union over samples; an event labels its actors' tokens while it lasts.
    """
    rows, cols = grid.group_rows, grid.group_cols
    hot = np.zeros((rows * cols, len(LABELS)), np.uint8)
    velocity = np.zeros((rows * cols, 2), np.float32)
    most = np.zeros(rows * cols)
    for second, objects in instants:
        for seen in objects:
            share = coverage(seen.box, rows, cols).ravel()
            here = share >= MIN_COVERAGE
            # As a share of the token: a small object covers little of it.
            share = share * min(1.0, (seen.box[2] - seen.box[0]) * cols * (seen.box[3] - seen.box[1]) * rows)
            if not here.any():
                continue
            names = [f"kind:{seen.kind}", f"state:{seen.state}", f"color:{seen.colour}"]
            names += [f"event:{e.kind}" for e in events if seen.id in e.actors and e.start_s <= second < e.end_s]
            for column in (_COLUMN[name] for name in names if name in _COLUMN):
                hot[here, column] = 1
            nearer = here & (share > most)
            velocity[nearer] = seen.velocity
            most = np.where(nearer, share, most)
    return TokenLabels(hot, velocity, most > 0)
