"""Whether the score means anything: the event rate in bins of the score."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.lab.evaluation.metrics import Bools, Floats

BINS = 10
FEWEST = 20
# Of a normal distribution: 95 % lie within this many deviations.
_Z = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Bin:
    """Windows with ``low <= score < high`` (the last bin takes 1 too); ``expected``: the rate that isotonic regression
    gives the bin; ``ci_low, ci_high``: Wilson's 95 % interval of ``rate``."""

    low: float
    high: float
    windows: int
    score: float
    rate: float
    expected: float
    ci_low: float
    ci_high: float

    @property
    def violates(self) -> bool:
        return not self.ci_low <= self.expected <= self.ci_high


@dataclass(frozen=True, slots=True)
class Calibration:
    """The event rate over the score.

    ``monotone``: 1 or 0, or ``nan`` with fewer than two bins. Ten bins of equal width; neighbours are merged until each
    holds at least ``FEWEST`` windows. The rates' isotonic regression (weighted by windows) is what they would be if
    the score were monotone in the event rate; a bin whose isotonic rate lies outside its own binomial 95 % interval is
    a violation, and one violation makes it 0. Windows overlap and so are not independent, which makes the intervals
    too narrow and the test stricter than it says.
    """

    bins: tuple[Bin, ...]
    windows: int
    ece: float

    @property
    def monotone(self) -> float:
        if len(self.bins) < 2:
            return float("nan")
        return 0.0 if any(each.violates for each in self.bins) else 1.0


def calibrate(scores: Floats, labels: Bools, *, bins: int = BINS, fewest: int = FEWEST) -> Calibration:
    """Bin windows by score ``[n]`` against ``labels`` ``[n]``: whether the event was in the window.

    ``ece``: expected calibration error, the mean distance of score and rate over bins, weighted by windows.
    """
    place = np.clip((scores * bins).astype(np.int64), 0, bins - 1)
    counts = np.bincount(place, minlength=bins)
    groups = _merged(counts.tolist(), fewest)
    sizes = np.array([counts[a:b].sum() for a, b in groups], dtype=np.float64)
    within = [(place >= a) & (place < b) for a, b in groups]
    rates = np.array([labels[mask].mean() if mask.any() else 0.0 for mask in within])
    means = np.array([scores[mask].mean() if mask.any() else 0.0 for mask in within])
    expected = isotonic(rates, sizes) if len(groups) else rates
    low, high = wilson(rates, sizes) if len(groups) else (rates, rates)
    found = tuple(
        Bin(a / bins, b / bins, int(sizes[i]), *(float(each[i]) for each in (means, rates, expected, low, high)))
        for i, (a, b) in enumerate(groups)
    )
    ece = float((np.abs(rates - means) * sizes).sum() / sizes.sum()) if len(groups) else float("nan")
    return Calibration(found, len(scores), ece)


def isotonic(values: Floats, weights: Floats) -> Floats:
    """The non-decreasing sequence nearest to ``values`` in weighted squares (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, wa, na), (b, wb, nb) = blocks[-2:]
            blocks[-2:] = [((a * wa + b * wb) / (wa + wb), wa + wb, na + nb)]
    return np.repeat([block[0] for block in blocks], [block[2] for block in blocks])


def wilson(rates: Floats, sizes: Floats) -> tuple[Floats, Floats]:
    """Wilson's 95 % interval of shares ``rates`` out of ``sizes``."""
    centre = (rates + _Z**2 / (2 * sizes)) / (1 + _Z**2 / sizes)
    half = _Z / (1 + _Z**2 / sizes) * np.sqrt(rates * (1 - rates) / sizes + _Z**2 / (4 * sizes**2))
    # At 0 and 1 the exact bound is 0 and 1, which rounding misses by a hair.
    return np.where(rates <= 0, 0.0, centre - half), np.where(rates >= 1, 1.0, centre + half)


def _merged(counts: list[int], fewest: int) -> list[tuple[int, int]]:
    """Ranges ``[a, b)`` of neighbouring bins with at least ``fewest`` each, from low scores up; a rest too small joins
    the last range. Nothing when all together are too few."""
    groups: list[tuple[int, int]] = []
    begin = total = 0
    for index, count in enumerate(counts):
        total += count
        if total >= fewest:
            groups.append((begin, index + 1))
            begin, total = index + 1, 0
    if groups:
        groups[-1] = (groups[-1][0], len(counts))
    return groups
