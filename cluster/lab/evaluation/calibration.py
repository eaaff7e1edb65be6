"""Score calibration and threshold selection on validation videos."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cluster.errors import ConfigError
from cluster.lab.evaluation.memory.run import MemoryResults
from cluster.lab.evaluation.metrics import Bools, Counts, Floats, mean_over_kinds
from cluster.lab.evaluation.results import Results
from cluster.models.settings import ModelSettings, write_settings

_NEWTON_STEPS = 60
# Minimum number of positive videos for a per-kind threshold.
_MIN_POSITIVES = 8
# Outside these bounds the score is noise or inverted.
_TEMPERATURES = (0.05, 50.0)


@dataclass(frozen=True, slots=True)
class CalibrationFit:
    """Fitted values of ``ModelSettings``. ``f1``: of full computation on the fitted videos at the common threshold;
    ``thresholds``: of kinds with enough positive videos."""

    score_temperature: float
    score_bias: float
    threshold: float
    f1: float
    thresholds: Mapping[str, float] = field(default_factory=dict)


def fit_calibration(results: Results, settings: ModelSettings) -> CalibrationFit:
    """Fit temperature and bias by Platt scaling on all windows of full computation, then thresholds on videos.

    ``settings``: those of the model that computed the results; their scaling is undone first. Raises ``ConfigError``:
    windows of one class only, or scores that do not rise with the truth.
    """
    scores, truth = results.window_scores(results.full)
    if truth.all() or not truth.any():
        raise ConfigError("all windows have the same label; use more scenes")
    old_temperature, old_bias = settings.score_temperature or 1.0, settings.score_bias or 0.0
    margins = (logit(scores) - old_bias) * old_temperature
    slope, bias = _fit_platt(margins, truth)
    videos = results.scores(results.full)
    known = np.isfinite(videos)
    videos[known] = sigmoid((logit(videos[known]) - old_bias) * old_temperature * slope + bias)
    threshold, f1, kinds = fit_thresholds(results, videos)
    return CalibrationFit(1 / slope, bias, threshold, f1, kinds)


def fit_answers(found: MemoryResults, settings: ModelSettings) -> tuple[float, float]:
    """Fit temperature and bias of answers to free questions, by Platt scaling on those about past events.

    Args:
        found: answers of all settings are pooled: retrieval shifts scores, but one fit has to serve every memory.
        settings: those of the model that gave the answers; their scaling is undone first.

    Raises:
        ConfigError: answers of one class only, or scores that do not rise with the truth.
    """
    asked = [question for clip in found.footage for question in clip.questions]
    answered = [
        (each.yes[0], question.answers[0] == "yes")
        for result in found.results
        for each, question in zip(result.answered, asked, strict=True)
        if question.kind == "event" and each.yes
    ]
    truth = np.array([yes for _, yes in answered], dtype=np.bool_)
    if truth.all() or not truth.any():
        raise ConfigError("no question about an event, or all have the same answer; use more scenes")
    old_temperature, old_bias = settings.answer_temperature or 1.0, settings.answer_bias or 0.0
    slope, bias = _fit_platt((logit(np.array([yes for yes, _ in answered])) - old_bias) * old_temperature, truth)
    return 1 / slope, bias


def _fit_platt(margins: Floats, truth: Bools) -> tuple[float, float]:
    """:func:`platt`, but raises ``ConfigError`` if scores do not rise with the truth."""
    slope, bias = platt(margins, truth)
    if not _TEMPERATURES[0] <= 1 / max(slope, 1e-9) <= _TEMPERATURES[1]:
        raise ConfigError(f"the model's scores do not rise with the truth (slope {slope:.3g}); train it first")
    return slope, bias


def fit_thresholds(results: Results, scores: Floats) -> tuple[float, float, dict[str, float]]:
    """Common threshold, its mean F1 over kinds, and the thresholds of kinds with enough positive videos. ``scores``
    ``[v, k]``: of the videos under one setting."""
    threshold, f1 = choose_threshold(scores, results.truth, results.judged)
    often = (results.truth & results.judged).sum(0) >= _MIN_POSITIVES
    kinds: dict[str, float] = {}
    for column in np.flatnonzero(often):
        part = np.s_[:, column, None]
        own, _ = choose_threshold(scores[part], results.truth[part], results.judged[part])
        kinds[results.kinds[column]] = mean_in_logits(threshold, own)
    return threshold, f1, kinds


def mean_in_logits(common: float, own: float) -> float:
    """Mean of two thresholds in logit space: shrinks a kind's noisy threshold towards the common one."""
    return float(sigmoid(logit(np.array([common, own])).mean()))


def platt(margins: Floats, truth: Bools) -> tuple[float, float]:
    """``(a, b)`` of the maximum-likelihood ``sigmoid(a * margin + b)`` (Platt 1999, with smoothed targets)."""
    positive, negative = int(truth.sum()), int((~truth).sum())
    targets = np.where(truth, (positive + 1) / (positive + 2), 1 / (negative + 2))
    design = np.stack([margins, np.ones_like(margins)], axis=1)
    weights = np.array([1.0, math.log((positive + 1) / (negative + 1))])

    def loss(weights: Floats) -> float:
        raised = design @ weights
        return float((np.logaddexp(0.0, raised) - targets * raised).sum())

    for _ in range(_NEWTON_STEPS):
        predicted = sigmoid(design @ weights)
        gradient = design.T @ (predicted - targets)
        curvature = (design * (predicted * (1 - predicted))[:, None]).T @ design + 1e-9 * np.eye(2)
        step = np.linalg.solve(curvature, gradient)
        # Backtracking: full Newton steps overshoot where the likelihood is flat, and may oscillate forever.
        while float(np.abs(step).max()) >= 1e-9 and loss(weights - step) > loss(weights):
            step /= 2
        weights = weights - step
        if float(np.abs(step).max()) < 1e-9:
            break
    return float(weights[0]), float(weights[1])


def write_calibration(folder: Path, found: CalibrationFit) -> None:
    """Set the fitted entries of the checkpoint's ``sightline.json``, keeping the others. Raises ``ModelError``: the
    folder has no such file."""
    entries = {
        "score_temperature": round(found.score_temperature, 5),
        "score_bias": round(found.score_bias, 5),
        "threshold": round(found.threshold, 4),
        "thresholds": {kind: round(value, 4) for kind, value in found.thresholds.items()},
    }
    write_settings(folder, entries)


def choose_threshold(scores: Floats, truth: Bools, judged: Bools) -> tuple[float, float]:
    """Choose one threshold for all kinds: (threshold, its mean F1 over kinds).

    It is the middle, in logits, of the widest interval of thresholds with the best F1, the most robust to score shifts.
    All ``[v, k]``. ``scores``: of videos, ``-inf`` for one that can never be positive; ``judged``: where ``truth`` is
    known. Raises ``ValueError``: no judged video has an event.
    """
    if not (truth & judged).any():
        raise ValueError("no video has an event to choose a threshold on")
    logits = logit(scores)
    edges = np.unique(np.concatenate((logits[judged & np.isfinite(scores)], logit(np.array([0.0, 1.0])))))
    # All thresholds between neighbouring scores are equivalent.
    middles = (edges[1:] + edges[:-1]) / 2
    positive = logits[None] >= middles[:, None, None]
    hit, miss = truth & judged, ~truth & judged
    counts = Counts((positive & hit).sum(axis=1), (positive & miss).sum(axis=1), (~positive & hit).sum(axis=1))
    f1 = mean_over_kinds(counts.f1())
    best = f1 >= np.nanmax(f1) - 1e-12
    begin, end = _widest(best, edges)
    threshold = sigmoid((edges[begin] + edges[end]) / 2)
    return float(threshold), float(np.nanmax(f1))


def _widest(best: Bools, edges: Floats) -> tuple[int, int]:
    """Indices of the edges around the widest run of best intervals; interval ``i`` is ``edges[i : i + 2]``."""
    bounds = np.flatnonzero(np.diff(np.concatenate(([0], best.astype(np.int8), [0]))))
    runs = zip(bounds[::2].tolist(), bounds[1::2].tolist(), strict=True)
    return max(runs, key=lambda run: edges[run[1]] - edges[run[0]])


_EDGE = 1e-6


def logit(scores: Floats) -> Floats:
    """``log(p / (1 - p))``, clipped to be finite at 0 and 1; minus infinity is preserved."""
    clipped = np.clip(scores, _EDGE, 1 - _EDGE)
    logits: Floats = np.where(np.isneginf(scores), -np.inf, np.log(clipped) - np.log1p(-clipped))
    return logits


def sigmoid(values: Floats) -> Floats:
    """Inverse of :func:`logit`."""
    return 1 / (1 + np.exp(-values))


BINS = 10
FEWEST = 20
# 97.5 % quantile of the normal distribution.
_Z = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Bin:
    """Windows with ``low <= score < high`` (the last bin includes 1): mean ``score``, event ``rate`` with Wilson's 95 %
    interval, and ``expected`` rate from isotonic regression."""

    low: float
    high: float
    windows: int
    score: float
    rate: float
    expected: float
    ci_low: float
    ci_high: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Reliability diagram: event rate by score, and expected calibration error ``ece``.

    ``BINS`` bins of equal width, neighbours merged until each holds ``FEWEST`` windows. ``monotone``: 0 if the isotonic
    rate of any bin (weighted by windows) lies outside its binomial 95 % interval, else 1; ``nan`` with fewer than two
    bins. Windows overlap and are not independent, so intervals are too narrow and the test is stricter than nominal.
    """

    bins: tuple[Bin, ...]
    windows: int
    ece: float

    @property
    def monotone(self) -> float:
        if len(self.bins) < 2:
            return float("nan")
        return float(all(each.ci_low <= each.expected <= each.ci_high for each in self.bins))


def calibrate(scores: Floats, labels: Bools) -> Calibration:
    """Bin windows by ``scores`` ``[n]``; ``labels`` ``[n]``: whether the window shows the event.

    ``ece``: mean absolute difference of score and rate over bins, weighted by windows.
    """
    place = np.clip((scores * BINS).astype(np.int64), 0, BINS - 1)
    groups = _merged(np.bincount(place, minlength=BINS).tolist())
    if not groups:
        return Calibration((), len(scores), math.nan)
    within = [(place >= a) & (place < b) for a, b in groups]
    sizes = np.array([mask.sum() for mask in within], dtype=np.float64)
    rates = np.array([labels[mask].mean() for mask in within])
    means = np.array([scores[mask].mean() for mask in within])
    columns = (means, rates, isotonic(rates, sizes), *wilson(rates, sizes))
    bins = tuple(
        Bin(a / BINS, b / BINS, int(sizes[i]), *(float(column[i]) for column in columns))
        for i, (a, b) in enumerate(groups)
    )
    return Calibration(bins, len(scores), float((np.abs(rates - means) * sizes).sum() / sizes.sum()))


def isotonic(values: Floats, weights: Floats) -> Floats:
    """Weighted least-squares non-decreasing fit to ``values`` (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, wa, na), (b, wb, nb) = blocks[-2:]
            blocks[-2:] = [((a * wa + b * wb) / (wa + wb), wa + wb, na + nb)]
    return np.repeat([block[0] for block in blocks], [block[2] for block in blocks])


def wilson(rates: Floats, sizes: Floats) -> tuple[Floats, Floats]:
    """Wilson's 95 % interval of ``rates`` out of ``sizes``."""
    centre = (rates + _Z**2 / (2 * sizes)) / (1 + _Z**2 / sizes)
    half = _Z / (1 + _Z**2 / sizes) * np.sqrt(rates * (1 - rates) / sizes + _Z**2 / (4 * sizes**2))
    # Exact at rates of 0 and 1 despite rounding.
    return np.where(rates <= 0, 0.0, centre - half), np.where(rates >= 1, 1.0, centre + half)


def _merged(counts: list[int]) -> list[tuple[int, int]]:
    """Ranges ``[a, b)`` of adjacent bins with at least ``FEWEST`` windows each, from low scores up; a remainder joins
    the last range. Empty if there are too few windows in total."""
    groups: list[tuple[int, int]] = []
    begin = total = 0
    for index, count in enumerate(counts):
        total += count
        if total >= FEWEST:
            groups.append((begin, index + 1))
            begin, total = index + 1, 0
    if groups:
        groups[-1] = (groups[-1][0], len(counts))
    return groups
