"""Results of an evaluation: every window of every video under every setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from cluster.errors import ConfigError
from cluster.lab.evaluation.datasets import LabelledVideo, SkippedVideo
from cluster.lab.evaluation.metrics import CONSECUTIVE, Bools, Decisions, Floats, terciles, video_score
from cluster.lab.evaluation.settings import Setting
from cluster.lab.scenes.vocabulary import SceneEvent, window_label


@dataclass(frozen=True, slots=True)
class WindowResult:
    """One window. Times in seconds from the video's first frame; ``scores`` in the order of the run's kinds; tokens as
    in ``TokenCount``; prefill FLOPs including questions; ``latency_s`` from the last frame to the answer, ``nan`` if
    not measured."""

    start_s: float
    end_s: float
    scores: tuple[float, ...]
    full: int
    kept: int
    refreshed: int
    new: int
    query: int
    tower_flops: int
    llm_flops: int
    latency_s: float

    @property
    def computed(self) -> int:
        """Tokens through the language model."""
        return self.refreshed + self.new + self.query

    @property
    def flops(self) -> int:
        return self.tower_flops + self.llm_flops


@dataclass(frozen=True, slots=True)
class VideoRun:
    """One video under one setting: its full-length windows, and its motion.

    ``motion``: mean motion over cells and samples, in picture heights per second, ``None`` if the codec exports no
    motion vectors; ``change``: mean luma change in grey levels.
    """

    kinds: tuple[str, ...]
    windows: tuple[WindowResult, ...]
    motion: float | None
    change: float

    def scores(self, kind: str) -> list[float]:
        column = self.kinds.index(kind)
        return [window.scores[column] for window in self.windows]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Thresholds by kind. ``common``: of all settings but those in ``own``, which maps setting keys to their own."""

    common: Mapping[str, float]
    own: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def of(self, setting: Setting) -> Mapping[str, float]:
        return self.own.get(setting.key, self.common)


@dataclass(frozen=True, eq=False)
class Results:
    """``runs``: (video name, setting key) -> run. Arrays ``[v, k]`` are in the order of ``videos`` and ``kinds``."""

    videos: tuple[LabelledVideo, ...]
    settings: tuple[Setting, ...]
    runs: Mapping[tuple[str, str], VideoRun] = field(repr=False)
    skipped: tuple[SkippedVideo, ...] = ()
    consecutive: int = CONSECUTIVE

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kinds that are labelled in any video, in order of appearance."""
        return tuple(dict.fromkeys(kind for video in self.videos for kind in video.kinds))

    @cached_property
    def truth(self) -> Bools:
        """``[v, k]``: whether the video shows an event of the kind."""
        return np.array(
            [[any(name == kind for name, *_ in video.events) for kind in self.kinds] for video in self.videos],
            dtype=np.bool_,
        )

    @cached_property
    def judged(self) -> Bools:
        """``[v, k]``: whether the truth is known."""
        return np.array([[kind in video.kinds for kind in self.kinds] for video in self.videos], dtype=np.bool_)

    @property
    def full(self) -> Setting:
        """Full computation, the reference setting. Raises ``ConfigError``: it is missing."""
        for setting in self.settings:
            if setting.role == "full" and setting.sweep is None:
                return setting
        raise ConfigError("the settings lack full computation, the reference")

    def run(self, video: LabelledVideo, setting: Setting) -> VideoRun:
        return self.runs[video.name, setting.key]

    def scores(self, setting: Setting) -> Floats:
        """Video scores ``[v, k]``; ``-inf`` for kinds a video is not judged on."""
        found = np.full((len(self.videos), len(self.kinds)), -np.inf)
        for row, video in enumerate(self.videos):
            run = self.run(video, setting)
            for column, kind in enumerate(self.kinds):
                if kind in run.kinds:
                    found[row, column] = video_score(run.scores(kind), self.consecutive)
        return found

    def decisions(self, setting: Setting, thresholds: Thresholds) -> Decisions:
        chosen = thresholds.of(setting)
        limits = np.array([chosen[kind] for kind in self.kinds])
        return Decisions(self.kinds, self.truth, self.scores(setting) >= limits, self.judged)

    def window_scores(self, setting: Setting) -> tuple[Floats, Bools]:
        """Scores and truth of all windows and kinds with known truth, each ``[n]``."""
        scores: list[float] = []
        labels: list[bool] = []
        for video in self.videos:
            run = self.run(video, setting)
            events = [SceneEvent(*event, ()) for event in video.events]
            for window in run.windows:
                for kind, score in zip(run.kinds, window.scores, strict=True):
                    label = window_label(events, kind, window.start_s, window.end_s)
                    if label is not None:
                        scores.append(score)
                        labels.append(label)
        return np.array(scores, dtype=np.float64), np.array(labels, dtype=np.bool_)

    def disagreement(self, setting: Setting) -> float:
        """Mean absolute score difference from full computation on the same windows; ``nan`` without any."""
        shapes = setting.shape, self.full.shape
        if len({(each.window_s, each.stride_s) for each in shapes}) > 1:
            return float("nan")
        differences: list[float] = []
        for video in self.videos:
            # If a video's timestamps jump, a re-encoded copy has windows that the original stream lacks.
            runs = self.run(video, setting), self.run(video, self.full)
            ours, whole = ({round(window.start_s): window for window in run.windows} for run in runs)
            for at in ours.keys() & whole.keys():
                differences += (abs(a - b) for a, b in zip(ours[at].scores, whole[at].scores, strict=True))
        return float(np.mean(differences)) if differences else float("nan")

    def flops_share(self, setting: Setting) -> float:
        """Prefill FLOPs relative to the video's mean under full computation, averaged over all windows."""
        shares: list[float] = []
        for video in self.videos:
            whole = [window.flops for window in self.run(video, self.full).windows]
            mean = sum(whole) / len(whole) if whole else float("nan")
            shares += [window.flops / mean for window in self.run(video, setting).windows]
        return float(np.mean(shares)) if shares else float("nan")

    def mean(self, setting: Setting, name: str) -> float:
        """Mean of a ``WindowResult`` field over all windows, ignoring ``nan`` (not measured)."""
        values = np.array(
            [getattr(window, name) for video in self.videos for window in self.run(video, setting).windows], float
        )
        known = values[~np.isnan(values)]
        return float(known.mean()) if len(known) else float("nan")

    def stratum(self, *names: str) -> Bools:
        """Mask ``[v]`` of videos in any of these strata."""
        return np.array([not video.strata.isdisjoint(names) for video in self.videos], dtype=np.bool_)

    @cached_property
    def strata(self) -> tuple[str, ...]:
        return tuple(sorted({name for video in self.videos for name in video.strata}))

    @cached_property
    def motion_levels(self) -> tuple[Bools, Bools, Bools]:
        """Low, medium and high third by motion: the dataset's own measure, else motion vectors, else luma change."""
        runs = [self.run(video, self.full) for video in self.videos]
        own = [video.motion for video in self.videos]
        vectors = [run.motion for run in runs]
        for measure in (own, vectors):
            known = [value for value in measure if value is not None]
            if len(known) == len(measure):
                return terciles(known)
        return terciles([run.change for run in runs])
