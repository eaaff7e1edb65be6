"""Scores to answer with where no model runs: drawn from a histogram that was recorded from one that did."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cluster.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ScoreStatistics:
    """``windows[i]`` scores lay in ``[edges[i], edges[i + 1])``; ``source``: one sentence, where they come from."""

    edges: tuple[float, ...]
    windows: tuple[int, ...]
    source: str

    def __post_init__(self) -> None:
        ascending = all(low < high for low, high in zip(self.edges, self.edges[1:], strict=False))
        if len(self.edges) != len(self.windows) + 1 or not ascending or sum(self.windows) <= 0:
            raise ConfigError("a histogram of scores needs ascending edges, one more than bins, and at least one score")
        if min(self.edges) < 0 or max(self.edges) > 1 or min(self.windows) < 0:
            raise ConfigError("scores lie between 0 and 1, and a bin of them holds no fewer than 0")

    @classmethod
    def load(cls, path: str | Path) -> ScoreStatistics:
        """The calibration histogram in the JSON of `sightline eval accuracy`.

        Raises:
            ConfigError: no such file, or it holds no histogram.
        """
        how = "write one with `sightline eval accuracy --json FILE`"
        try:
            bins = json.loads(Path(path).read_text(encoding="utf-8"))["calibration"]["bins"]
            edges = (*(float(each["low"]) for each in bins), float(bins[-1]["high"]))
            windows = tuple(int(each["windows"]) for each in bins)
        except OSError as error:
            raise ConfigError(f"cannot read the scores in {path}: {error.strerror or error}; {how}") from None
        except (ValueError, KeyError, TypeError, IndexError):
            raise ConfigError(f"{path} holds no calibration histogram of scores; {how}") from None
        return cls(edges, windows, f"the calibration histogram in {path}")

    def draw(self, random: np.random.Generator) -> float:
        """One score: a bin by how many windows it had, evenly within it."""
        ends = np.cumsum(self.windows)
        number = int(np.searchsorted(ends, random.random() * ends[-1], side="right"))
        low, high = self.edges[number], self.edges[number + 1]
        return low + (high - low) * random.random()


DEMO_SCORES = ScoreStatistics(
    edges=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.8, 0.9, 1.0),
    windows=(2021, 92, 31, 27, 26, 40, 29, 88, 180),
    source="2534 windows of 72 made scenes, full computation by the bundled demo model (`sightline eval accuracy`)",
)
