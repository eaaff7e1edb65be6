"""Figures, rows and breakdowns of an evaluation, the source of its JSON, Markdown and HTML."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cluster.errors import ModelError
from cluster.lab.bench.harness import BenchResult
from cluster.lab.evaluation.calibration import Calibration, calibrate, fit_thresholds, isotonic
from cluster.lab.evaluation.datasets import SkippedVideo
from cluster.lab.evaluation.metrics import Accuracy, Bools, Estimate, accuracy, f1_drop, recall_drop
from cluster.lab.evaluation.results import Results, Thresholds
from cluster.lab.evaluation.settings import Setting
from cluster.models.base import VisionLanguageModel

DEFAULT_THRESHOLD = 0.5


def check_questions(model: VisionLanguageModel, name: str, questions: Mapping[str, str]) -> None:
    """Refuse a checkpoint that was trained on other questions than ``questions``. Raises ``ModelError``: its
    ``sightline.json`` lacks a kind of event or words it differently, or its tokenizer cannot encode a question."""
    known = model.settings.questions
    if not known:
        raise ModelError(
            f"model {name!r} does not say which questions it was trained on (its folder has no sightline.json with "
            "'questions'), so its answers on these scenes would be meaningless; use a model trained on them, or your "
            "own footage with --dataset"
        )
    for kind, text in questions.items():
        if kind not in known:
            raise ModelError(f"model {name!r} was not trained on {kind!r}; it knows: {', '.join(sorted(known))}")
        if known[kind] != text:
            raise ModelError(f"model {name!r} was trained on {known[kind]!r} for {kind!r}, the evaluator asks {text!r}")
        written = model.tokenizer.decode(model.tokenizer(text, add_special_tokens=False)["input_ids"])
        if written.split() != text.split():
            raise ModelError(
                f"the tokenizer of model {name!r} turns {text!r} into {written!r}: it is not the one of its training"
            )


def select_thresholds(
    model: VisionLanguageModel, results: Results, validation: Results | None = None
) -> tuple[Thresholds, str]:
    """Thresholds of every setting, and a description of their origin.

    With validation results each setting has its own, fitted on them in the same way; otherwise all use the model's, or
    ``DEFAULT_THRESHOLD``.
    """
    kinds = results.kinds
    known = {kind: value for kind in kinds if (value := model.settings.threshold_of(kind)) is not None}
    common = {kind: known.get(kind, DEFAULT_THRESHOLD) for kind in kinds}
    if validation is None or not (validation.truth & validation.judged).any():
        return Thresholds(common), "the model's own" if len(known) == len(kinds) else "the default"
    own: dict[str, dict[str, float]] = {}
    for setting in validation.settings:
        if setting.key not in own:
            threshold, _, kinds_own = fit_thresholds(validation, validation.scores(setting))
            own[setting.key] = {kind: kinds_own.get(kind, threshold) for kind in kinds}
    return Thresholds(common, own), "each setting's own, chosen on the validation videos"


# Suffix of figure names -> FLOPs limit, as a share of full computation's prefill FLOPs.
LIMITS = {"15": 0.15, "8": 0.08}
_STRATA = (
    ("f1_drop_noisy", ("noisy",), f1_drop),
    ("f1_drop_night", ("night",), f1_drop),
    ("recall_drop_low_contrast", ("low_contrast", "slow"), recall_drop),
)
# Tolerance when comparing F1.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Figures:
    """``values``: figure -> number. ``measured``: figures with an interval. ``chosen``: FLOPs limit or "codecsight" ->
    chosen setting of ours. ``notes``: how figures were obtained, or why one is missing."""

    values: dict[str, float]
    measured: dict[str, Estimate]
    chosen: dict[str, Setting]
    calibration: Calibration
    notes: list[str] = field(default_factory=list)


def compute_figures(test: Results, thresholds: Thresholds, validation: Results | None = None) -> Figures:
    """Compute all figures.

    For each FLOPs limit one setting of ours is chosen for all scenes (:func:`choose_setting`); without validation
    results on the test results (and a note says so). ``flops_vs_codecsight`` is interpolated on our Pareto frontier.
    """
    found = Figures({"videos": float(len(test.videos))}, {}, {}, calibrate(*test.window_scores(test.full)))
    whole = test.decisions(test.full, thresholds)
    exact = accuracy(whole)
    _set_figure(found, "f1_full", exact.f1)
    _set_figure(found, "f1_full_min", exact.worst)
    for name, limit in LIMITS.items():
        setting = choose_setting(test, thresholds, limit, validation)
        if setting is None:
            found.notes.append(f"f1_drop_at_{name}: no setting of ours stays within {limit:.0%} of full FLOPs")
            continue
        found.chosen[name] = setting
        lost = f1_drop(whole, test.decisions(setting, thresholds))
        _set_figure(found, f"f1_drop_at_{name}", lost)
        _set_figure(found, f"f1_drop_at_{name}_high", lost.high)
        _set_figure(found, f"flops_share_at_{name}", test.flops_share(setting))
    _add_codecsight_figures(found, test, thresholds, validation)
    if "15" in found.chosen:
        ours = test.decisions(found.chosen["15"], thresholds)
        for name, strata, drop in _STRATA:
            some = test.stratum(*strata)
            if (test.truth[some] & test.judged[some]).any():
                _set_figure(found, name, drop(whole.subset(some), ours.subset(some)))
            else:
                found.notes.append(f"{name}: no video of {' or '.join(strata)} has an event")
    _set_figure(found, "calibration_monotone", found.calibration.monotone)
    if validation is None and found.chosen:
        found.notes.append("settings were chosen on the test scenes themselves; --validation DIR avoids that")
    return found


def choose_setting(
    test: Results, thresholds: Thresholds, limit: float, validation: Results | None = None
) -> Setting | None:
    """Choose the setting of ours within a share ``limit`` of full computation's FLOPs on ``test`` (which needs no
    labels): of those that ``validation`` cannot tell from the best one there, the one that computes most."""
    judge = validation or test
    affordable = [setting for setting in comparable_settings(test) if test.flops_share(setting) <= limit]
    best = max(affordable, key=lambda setting: _rank(judge, setting, thresholds), default=None)
    if best is None:
        return None
    # A few hundred videos determine F1 to 0.03, so the best is best by luck; a setting that computes more is closer to
    # full computation (one-standard-error rule of Breiman et al. 1984, with the paired interval).
    decided = judge.decisions(best, thresholds)
    alike = [each for each in affordable if f1_drop(decided, judge.decisions(each, thresholds)).low <= 0]
    return max(alike or [best], key=lambda each: (test.flops_share(each), _rank(judge, each, thresholds)))


def comparable_settings(results: Results) -> list[Setting]:
    """Settings of ours that answer the same windows of the same source as full computation, one per key."""
    whole = replace(results.full.shape, anchor_interval_s=1)
    found: dict[str, Setting] = {}
    for setting in results.settings:
        alike = replace(setting.shape, anchor_interval_s=1) == whole and setting.source == results.full.source
        if setting.role == "ours" and alike:
            # A sweep point may duplicate a setting of the table, which comes first.
            found.setdefault(setting.key, setting)
    return list(found.values())


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Pareto frontier of ``(price, F1)`` points, by rising price."""
    best: list[tuple[float, float]] = []
    for price, f1 in sorted(points, key=lambda point: (point[0], -point[1])):
        if not math.isnan(f1) and (not best or f1 > best[-1][1]):
            best.append((price, f1))
    return best


def flops_at_f1(points: Sequence[tuple[float, float]], wanted: float) -> float:
    """FLOPs at which ``(flops, F1)`` points, in order of intended cost, first reach F1 ``wanted``; ``nan`` if never.

    Linear interpolation: a budget or margin between two settings gives a point in between. If the first point reaches
    it already, its FLOPs are returned.
    """
    for index, (flops, f1) in enumerate(points):
        if f1 >= wanted - _ROUNDING:
            if index == 0:
                return flops
            below, lower = points[index - 1]
            return below + (flops - below) * min(1.0, max(0.0, (wanted - lower) / (f1 - lower)))
    return float("nan")


def _frontier_on_test(test: Results, thresholds: Thresholds, validation: Results | None) -> list[tuple[float, float]]:
    """``(FLOPs share, F1)`` on the test videos of the settings that form our frontier on the validation videos, in its
    order: picking the best of many settings on the test videos would be optimistic. So would taking the first that is
    good enough there, so that a setting that dearer ones fall behind is averaged with them."""
    judge = validation or test
    places = {(judge.flops_share(each), _f1(judge, each, thresholds)): each for each in comparable_settings(test)}
    chosen = [places[point] for point in frontier(places)]
    rising = isotonic(np.array([_f1(test, each, thresholds) for each in chosen]), np.ones(len(chosen)))
    return [(test.flops_share(each), float(f1)) for each, f1 in zip(chosen, rising, strict=True)]


def _f1(results: Results, setting: Setting, thresholds: Thresholds) -> float:
    return accuracy(results.decisions(setting, thresholds), resamples=0).f1.value


def _rank(results: Results, setting: Setting, thresholds: Thresholds) -> tuple[float, float]:
    f1 = _f1(results, setting, thresholds)
    return (-1.0 if math.isnan(f1) else round(f1, 9), -results.disagreement(setting))


def _add_codecsight_figures(found: Figures, test: Results, thresholds: Thresholds, validation: Results | None) -> None:
    # On the camera's stream or re-encoded as in its paper: whichever is better on validation.
    known = [each for each in test.settings if each.role == "codecsight" and each.sweep is None]
    published = max(known, key=lambda each: _rank(validation or test, each, thresholds), default=None)
    if published is None or not comparable_settings(test):
        found.notes.append("flops_vs_codecsight: the settings lack CodecSight's rule or ours")
        return
    wanted = _f1(test, published, thresholds)
    _set_figure(found, "f1_codecsight", wanted)
    _set_figure(found, "flops_share_codecsight", test.flops_share(published))
    equal = choose_setting(test, thresholds, test.flops_share(published), validation)
    if equal is None:
        found.notes.append("f1_gain_over_codecsight: no setting of ours is as cheap as CodecSight's rule")
    else:
        gain = f1_drop(test.decisions(equal, thresholds), test.decisions(published, thresholds))
        found.chosen["codecsight"] = equal
        _set_figure(found, "f1_gain_over_codecsight", gain)
        _set_figure(found, "f1_gain_over_codecsight_low", gain.low)
    needed = flops_at_f1(_frontier_on_test(test, thresholds, validation), wanted)
    if math.isnan(needed):
        found.notes.append(f"flops_vs_codecsight: no setting of ours reaches CodecSight's F1 of {wanted:.3f}")
    else:
        _set_figure(found, "flops_vs_codecsight", needed / test.flops_share(published))


def _set_figure(found: Figures, name: str, value: Estimate | float) -> None:
    number = value.value if isinstance(value, Estimate) else value
    if math.isnan(number):
        found.notes.append(f"{name}: too few videos")
        return
    found.values[name] = float(number)
    if isinstance(value, Estimate):
        found.measured[name] = value


# Targets of the project.
BOUNDS: dict[str, tuple[str, float]] = {
    "videos": ("≥", 400),
    "f1_full": ("≥", 0.90),
    "f1_full_min": ("≥", 0.80),
    "f1_drop_at_15": ("≤", 0.01),
    "f1_drop_at_15_high": ("≤", 0.03),
    "f1_drop_at_8": ("≤", 0.03),
    "f1_drop_at_8_high": ("≤", 0.05),
    "f1_gain_over_codecsight_low": ("≥", 0),
    "flops_vs_codecsight": ("≤", 0.7),
    "f1_drop_noisy": ("≤", 0.02),
    "f1_drop_night": ("≤", 0.02),
    "recall_drop_low_contrast": ("≤", 0.02),
    "calibration_monotone": ("≥", 1.0),
}

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SettingRow:
    """Cost and accuracy of one setting."""

    setting: Setting
    accuracy: Accuracy
    flops_share: float
    computed_share: float
    row: Row


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """``lines``: settings, then every point of the sweeps. ``groups``: group of videos -> setting name -> accuracy, for
    the ``compared`` settings."""

    title: str
    figures: Figures
    lines: tuple[SettingRow, ...]
    groups: dict[str, dict[str, Accuracy]]
    thresholds: Thresholds
    skipped: tuple[SkippedVideo, ...]
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        return self.figures.notes

    @property
    def table(self) -> list[SettingRow]:
        """Lines that are not points of a sweep."""
        return [line for line in self.lines if line.setting.sweep is None]

    @property
    def compared(self) -> list[SettingRow]:
        """Full computation, CodecSight, and the chosen setting of ours for each limit."""
        lines = {line.setting.key: line for line in self.table if line.setting.role in ("full", "codecsight")}
        for setting in self.figures.chosen.values():
            lines.setdefault(setting.key, next(line for line in self.lines if line.setting.key == setting.key))
        return list(lines.values())

    def as_json(self) -> dict[str, Any]:
        """The JSON object of every benchmark, plus intervals, breakdowns, calibration and skipped videos."""
        figures, calibration = self.figures, self.figures.calibration
        more = {
            "intervals": {name: [each.low, each.high] for name, each in figures.measured.items()},
            "chosen": {limit: setting.name for limit, setting in figures.chosen.items()},
            "thresholds": {line.setting.name: dict(self.thresholds.of(line.setting)) for line in self.lines},
            "by_kind": {line.setting.name: _kinds(line.accuracy) for line in self.lines},
            "groups": {
                group: {name: _short(each) for name, each in settings.items()}
                for group, settings in self.groups.items()
            },
            "calibration": {
                "windows": calibration.windows,
                "expected_error": calibration.ece,
                "bins": [
                    {"low": b.low, "high": b.high, "windows": b.windows, "score": b.score, "rate": b.rate}
                    | {"interval": [b.ci_low, b.ci_high]}
                    for b in calibration.bins
                ],
            },
        }
        result = BenchResult(figures.values, [line.row for line in self.lines], figures.notes)
        return report_json("accuracy", result, self.facts, self.skipped) | more


def report_json(
    bench: str, result: BenchResult, facts: Mapping[str, str], skipped: Sequence[SkippedVideo]
) -> dict[str, Any]:
    """The JSON object of every benchmark, with ``facts`` among its notes, plus skipped videos."""
    return result.as_json(bench) | {
        "notes": [*(f"{name}: {value}" for name, value in facts.items()), *result.notes],
        "skipped": [{"path": str(each.path), "reason": each.reason} for each in skipped],
    }


def make_report(
    title: str,
    results: Results,
    thresholds: Thresholds,
    *,
    validation: Results | None = None,
    skipped: Sequence[SkippedVideo] = (),
    facts: dict[str, str] | None = None,
) -> EvaluationReport:
    """Compute the report. ``skipped``: videos that the dataset reader skipped."""
    found = compute_figures(results, thresholds, validation)
    lines = tuple(_setting_row(results, setting, thresholds) for setting in results.settings)
    report = EvaluationReport(title, found, lines, {}, thresholds, (*skipped, *results.skipped), dict(facts or {}))
    groups: list[tuple[str, Bools]] = [
        *zip(("low motion", "medium motion", "high motion"), results.motion_levels, strict=True),
        *((name, results.stratum(name)) for name in results.strata),
    ]
    for name, videos in groups:
        if videos.any():
            report.groups[name] = {
                line.setting.name: accuracy(results.decisions(line.setting, thresholds).subset(videos))
                for line in report.compared
            }
    return report


def _setting_row(results: Results, setting: Setting, thresholds: Thresholds) -> SettingRow:
    decisions = results.decisions(setting, thresholds)
    found = accuracy(decisions)
    share = results.flops_share(setting)
    whole, computed = results.mean(results.full, "computed"), results.mean(setting, "computed")
    row: Row = {
        "setting": setting.name,
        **found.f1.row("f1"),
        **f1_drop(results.decisions(results.full, thresholds), decisions).row("drop"),
        "precision": found.precision.value,
        "recall": found.recall.value,
        "f1_worst": found.worst,
        "f1_model_thresholds": accuracy(
            results.decisions(setting, Thresholds(thresholds.common)), resamples=0
        ).f1.value,
        "tokens_full": round(results.mean(setting, "full")),
        "kept": round(results.mean(setting, "kept")),
        "computed": round(computed),
        "questions": round(results.mean(setting, "query")),
        "gflops": results.mean(setting, "flops") / 1e9,
        "tower_gflops": results.mean(setting, "tower_flops") / 1e9,
        "flops_share": share,
        "latency_s": results.mean(setting, "latency_s"),
        "disagreement": results.disagreement(setting),
    }
    rounded = {key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}
    return SettingRow(setting, found, share, computed / whole if whole else math.nan, rounded)


def within_bound(name: str, value: float) -> bool | None:
    """Whether a figure meets its bound; ``None`` if it has none."""
    if name not in BOUNDS:
        return None
    sign, bound = BOUNDS[name]
    return value >= bound - 1e-9 if sign == "≥" else value <= bound + 1e-9


def format_number(value: float) -> str:
    """Three decimals; a dash for NaN."""
    return "–" if math.isnan(value) else f"{value:.3f}"


def format_estimate(measured: Estimate) -> str:
    """``0.913 [0.88, 0.94]``."""
    value, low, high = measured
    return format_number(value) + ("" if math.isnan(low) else f" [{low:.2f}, {high:.2f}]")


def _kinds(found: Accuracy) -> dict[str, dict[str, float]]:
    return {
        kind: each.row("f1") | {"precision": found.precision_by_kind[kind], "recall": found.recall_by_kind[kind]}
        for kind, each in found.by_kind.items()
    }


def _short(found: Accuracy) -> dict[str, float]:
    return {
        "videos": found.videos,
        "events": found.events,
        **found.f1.row("f1"),
        "pooled_f1": found.pooled_f1.value,
        "recall": found.pooled_recall.value,
    }
