"""Scores and margins: the logistic scale they lie on."""

from __future__ import annotations

import numpy as np

from cluster.lab.evaluation.metrics import Floats

_EDGE = 1e-6


def logit(scores: Floats) -> Floats:
    """``log(p / (1 - p))``, finite for scores of 0 and 1; what is minus infinity (never positive) stays so."""
    clipped = np.clip(scores, _EDGE, 1 - _EDGE)
    logits: Floats = np.where(np.isneginf(scores), -np.inf, np.log(clipped) - np.log1p(-clipped))
    return logits


def sigmoid(values: Floats) -> Floats:
    """The inverse of :func:`logit`."""
    return 1 / (1 + np.exp(-values))
