"""Choosing the score at which an answer is positive, on validation videos."""

from __future__ import annotations

import numpy as np

from cluster.lab.evaluation.logistic import logit, sigmoid
from cluster.lab.evaluation.metrics import Bools, Counts, Floats, mean_over_kinds


def choose_threshold(scores: Floats, truth: Bools, judged: Bools) -> tuple[float, float]:
    """One threshold for all kinds: (threshold, the mean F1 over kinds it gives).

    The middle, in logits, of the widest stretch of thresholds with the best F1: the choice that a small change of the
    scores upsets least.

    Args:
        scores: video scores ``[v, k]``, ``-inf`` for a video that can never be positive.
        truth: ``[v, k]``; judged: where it is known, ``[v, k]``.

    Raises:
        ValueError: no judged video has an event.
    """
    if not (truth & judged).any():
        raise ValueError("a threshold cannot be chosen on videos without any event")
    logits = logit(scores)
    edges = np.unique(np.concatenate((logits[judged & np.isfinite(scores)], logit(np.array([0.0, 1.0])))))
    # Between two neighbouring scores every threshold decides alike.
    middles = (edges[1:] + edges[:-1]) / 2
    if not len(middles):
        middles = edges
    positive = logits[None] >= middles[:, None, None]
    hit, miss = truth & judged, ~truth & judged
    counts = Counts((positive & hit).sum(axis=1), (positive & miss).sum(axis=1), (~positive & hit).sum(axis=1))
    f1 = mean_over_kinds(counts.f1())
    best = f1 >= np.nanmax(f1) - 1e-12
    begin, end = _widest(best, edges)
    threshold = sigmoid((edges[begin] + edges[end]) / 2)
    return float(threshold), float(np.nanmax(f1))


def choose_thresholds(
    kinds: tuple[str, ...], scores: Floats, truth: Bools, judged: Bools
) -> dict[str, tuple[float, float]]:
    """A threshold for each kind by itself: kind -> (threshold, F1); kinds without an event are left out."""
    chosen: dict[str, tuple[float, float]] = {}
    for column, kind in enumerate(kinds):
        part = slice(column, column + 1)
        if (truth[:, part] & judged[:, part]).any():
            chosen[kind] = choose_threshold(scores[:, part], truth[:, part], judged[:, part])
    return chosen


def _widest(best: Bools, edges: Floats) -> tuple[int, int]:
    """First and last edge of the widest run of neighbouring best stretches; stretch ``i`` is ``edges[i : i + 2]``."""
    bounds = np.flatnonzero(np.diff(np.concatenate(([0], best.astype(np.int8), [0]))))
    runs = [(int(a), min(int(b), len(edges) - 1)) for a, b in zip(bounds[::2], bounds[1::2], strict=True)]
    return max(runs, key=lambda run: edges[run[1]] - edges[run[0]])
