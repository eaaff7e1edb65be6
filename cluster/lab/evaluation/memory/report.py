"""Report of a memory evaluation: figures, tables, charts, JSON."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cluster.lab.bench.harness import BenchResult
from cluster.lab.evaluation.datasets import SkippedVideo
from cluster.lab.evaluation.memory.questions import Question
from cluster.lab.evaluation.memory.results import ENOUGH_VIDEOS, SettingResult, credit
from cluster.lab.evaluation.memory.run import MemoryResults
from cluster.lab.evaluation.memory.settings import FULL, ShareSetting, ours
from cluster.lab.evaluation.metrics import Estimate
from cluster.lab.evaluation.page import report_page
from cluster.lab.evaluation.report import format_estimate, report_json
from cluster.lab.report.charts import Axis, Point, Series, chart
from cluster.lab.report.page import Page, Section, Table
from cluster.models.base import VisionLanguageModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def accuracy_table(report: MemoryReport) -> Table:
    """Accuracy of every setting, overall and by kind, and its drop from the baseline."""
    heads = ["setting", "questions", *report.kinds, *(["drop"] if report.baseline is not None else [])]
    rows = []
    for result in report.results:
        row = [result.setting.name, str(len(result.answered))]
        row += [format_estimate(result.accuracy[kind]) if kind in result.accuracy else "–" for kind in report.kinds]
        if report.baseline is not None:
            drop = report.drops.get(result.setting)
            row.append("" if drop is None else format_estimate(drop["all"]))
        rows.append(row)
    return Table("Accuracy [95 %]", heads, rows)


def tables(report: MemoryReport) -> list[Table]:
    """Accuracy; retrieval and evidence; cost."""
    retrieval, cost = [], []
    for result in report.results:
        name = result.setting.name
        found = (result.retrieval_ratio, *(result.recall(what) for what in ("inside", "spans", "found")))
        retrieval.append((name, *(_or_dash(100 * share, "{:.1f} %") for share in found)))
        moved, held = (_or_dash(result.mean(what) / 2**20, "{:.1f} MiB") for what in ("bytes_moved", "bytes_held"))
        cost.append((name, _or_dash(1000 * result.mean("ttft_s"), "{:.0f} ms"), moved, held))
    return [
        accuracy_table(report),
        Table("Retrieval", ("setting", "retrieved", "evidence in it", "spans found", "any found"), retrieval),
        Table("Cost", ("setting", "first word", "moved for a question", "held"), cost),
    ]


def make_page(report: MemoryReport) -> Page:
    """Page of the report."""
    shown = Section(charts=memory_charts(report), tables=tables(report))
    return report_page(report.title, report.facts, shown, report.notes, report.skipped)


def _or_dash(value: float, form: str) -> str:
    return "–" if math.isnan(value) else form.format(value)


def memory_charts(report: MemoryReport) -> dict[str, Figure]:
    """File name (without suffix) -> figure: ``accuracy-budget`` and, if anything was answered, ``ttft-history``."""
    found = {
        "accuracy-budget": chart(
            "Accuracy against budget",
            _by_budget(report.results),
            Axis("tokens held per layer and head", log=True),
            Axis("accuracy, all questions", percent=True, high=1.0),
        )
    }
    if any(result.answered for result in report.results):
        found["ttft-history"] = chart(
            "Time to the first word against length of history",
            _by_history(report.results),
            Axis("footage seen before the question, s"),
            Axis("time to the first word, s", low=0.0),
        )
    return found


def _by_budget(results: Sequence[SettingResult]) -> list[Series]:
    """One series per combination of policies, by tokens held."""
    points: dict[str, list[Point]] = defaultdict(list)
    for result in results:
        setting, measured, held = result.setting, result.accuracy["all"], result.mean("held")
        # Zero has no place on a logarithmic axis.
        if held > 0:
            text = f"{setting.name}: {format_estimate(measured)}"
            name = f"{setting.compressor}/{setting.organiser}/{setting.retriever}"
            points[name].append(Point(held, *measured, text))
    return [Series(name, found) for name, found in points.items()]


def _by_history(results: Sequence[SettingResult]) -> list[Series]:
    found = []
    for result in results:
        times: dict[float, list[float]] = defaultdict(list)
        for each in result.answered:
            times[round(each.history_s)].append(each.ttft_s)
        points = [Point(history, sum(some) / len(some)) for history, some in sorted(times.items())]
        found.append(Series(result.setting.name, points))
    return found


# A drop is only meaningful for kinds of questions whose accuracy exceeds chance by this much.
_MARGIN = 0.15
_ASKED_ALONE = (
    "questions are answered from the memory alone, which includes the window's KV; shares are relative to the bytes "
    "of all KV at the time of the question"
)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """``results``: one per setting. ``baseline``: reference of the drops, or None. ``facts``: model and data.
    ``skipped``: videos without results. ``headline``: the main figures."""

    title: str
    results: tuple[SettingResult, ...]
    baseline: SettingResult | None
    drops: dict[ShareSetting, dict[str, Estimate]]
    facts: dict[str, str]
    notes: tuple[str, ...]
    skipped: tuple[SkippedVideo, ...]
    headline: dict[str, float]

    @property
    def kinds(self) -> tuple[str, ...]:
        """``all``, then every kind of question."""
        return tuple(dict.fromkeys(kind for result in self.results for kind in result.accuracy))

    @property
    def figures(self) -> dict[str, float]:
        """The headline; accuracy and drop of each setting, where defined."""
        found = {f"accuracy {each.setting.name}": each.accuracy["all"].value for each in self.results}
        found |= {f"drop {setting.name}": drop["all"].value for setting, drop in self.drops.items()}
        return self.headline | {name: value for name, value in found.items() if math.isfinite(value)}

    def as_json(self) -> dict[str, Any]:
        """The JSON object of every benchmark, plus answers and skipped videos."""
        more = {
            "baseline": None if self.baseline is None else self.baseline.setting.name,
            "questions": {each.setting.name: [asdict(question) for question in each.answered] for each in self.results},
        }
        rows = []
        for result in self.results:
            rows.append(result.row())
            for kind, drop in self.drops.get(result.setting, {}).items():
                rows[-1] |= drop.row(f"drop_{kind}")
        return report_json("memory", BenchResult(self.figures, rows, list(self.notes)), self.facts, self.skipped) | more


def chance(questions: Sequence[Question]) -> float:
    """Mean credit of always giving the most common answer for the question's kind and turn."""
    said: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    for question in questions:
        for turn, answer in enumerate(question.answers):
            said[question.kind, turn][answer] += 1
    usual = {place: counts.most_common(1)[0][0] for place, counts in said.items()}
    credits = [
        credit(question, [usual[question.kind, turn] for turn in range(len(question.turns))]) for question in questions
    ]
    return sum(credits) / len(credits)


def kinds_above_chance(full: SettingResult, questions: Sequence[Question]) -> tuple[str, ...]:
    """Kinds of questions that full KV answers clearly better than :func:`chance`; the others have nothing to lose."""
    return tuple(
        kind
        for kind in sorted({question.kind for question in questions})
        if full.accuracy[kind].value >= chance([each for each in questions if each.kind == kind]) + _MARGIN
    )


def make_report(
    title: str,
    found: MemoryResults,
    model: VisionLanguageModel,
    *,
    facts: dict[str, str] | None = None,
    skipped: Sequence[SkippedVideo] = (),
) -> MemoryReport:
    """Compute the report, relative to full KV if it is among the settings. ``skipped``: videos skipped beforehand.

    Headline figures: ``chance``; with full KV ``accuracy_full``; with ours at 1/8 also ``accuracy_drop_at_eighth``,
    their paired difference, and ``…_high``, the upper end of its interval, if it has one. If full KV answers any kind
    of question clearly above chance, ``…_answered`` figures and the drop are restricted to those kinds.
    """
    settings = {result.setting: result for result in found.results}
    full, eighth = settings.get(FULL), settings.get(ours(1 / 8))
    questions = [question for clip in found.footage for question in clip.questions]
    headline = {"chance": chance(questions)}
    notes = [_ASKED_ALONE]
    if len(found.footage) < ENOUGH_VIDEOS:
        notes.append(
            f"intervals are over videos and need at least {ENOUGH_VIDEOS}: none is given for {len(found.footage)}"
        )
    if model.settings.open_instruction is None:
        notes.append("the model's sightline.json has no open_instruction: it was not trained to answer free questions")
    drops = {}
    if full is not None:
        drops = {each.setting: each.drop_from(full) for each in found.results if each is not full}
        headline["accuracy_full"] = full.accuracy["all"].value
        kinds = kinds_above_chance(full, questions)
        if kinds:
            answered = [question for question in questions if question.kind in kinds]
            notes.insert(0, f"full KV is clearly above chance on {', '.join(kinds)}; the drop is over these kinds")
            headline["chance_answered"] = chance(answered)
            headline["accuracy_full_answered"] = full.of_kinds(kinds).accuracy["all"].value
        else:
            notes.insert(
                0,
                f"accuracy of full KV is {format_estimate(full.accuracy['all'])}, of always giving the most common "
                f"answer {headline['chance']:.3f}: the model is not clearly above chance on any kind of question, so "
                "a small drop means nothing",
            )
        if eighth is not None:
            drop = drops[eighth.setting]["all"]
            if kinds:
                drop = eighth.of_kinds(kinds).drop_from(full.of_kinds(kinds))["all"]
            headline["accuracy_drop_at_eighth"] = drop.value
            if not math.isnan(drop.high):
                headline["accuracy_drop_at_eighth_high"] = drop.high
    if found.incomplete:
        notes.append(f"{found.incomplete} answers are incomplete: some memory blocks were late or lost")
    return MemoryReport(
        title=title,
        results=found.results,
        baseline=full,
        drops=drops,
        facts=facts or {},
        notes=tuple(notes),
        skipped=(*skipped, *found.skipped),
        headline=headline,
    )
