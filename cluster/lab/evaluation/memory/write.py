"""Writing an evaluation of memory: JSON, Markdown tables, and one SVG for each curve."""

from __future__ import annotations

import math
from pathlib import Path

from cluster.lab.evaluation.memory.plots import memory_charts
from cluster.lab.evaluation.memory.report import MemoryReport
from cluster.lab.evaluation.memory.results import SettingResult
from cluster.lab.evaluation.report import measured_text, number
from cluster.lab.evaluation.write import Table, markdown_table, write_files


def accuracy_table(report: MemoryReport) -> Table:
    """Accuracy of every setting, all questions and by kind, and the drop from the baseline."""
    heads = ["setting", "questions", *report.kinds, *(["drop"] if report.baseline is not None else [])]
    rows = []
    for result in report.results:
        row = [result.setting.name, str(len(result.answered))]
        row += [measured_text(result.accuracy[kind]) if kind in result.accuracy else "–" for kind in report.kinds]
        if report.baseline is not None:
            drop = report.drops.get(result.setting)
            row.append("" if drop is None else measured_text(drop["all"]))
        rows.append(row)
    return heads, rows


def retrieval_table(report: MemoryReport) -> Table:
    """What was retrieved, and whether it was what the answers rest on."""
    heads = ["setting", "retrieved", "evidence in it", "spans found", "any found"]
    rows = [
        [
            result.setting.name,
            _percent(result.retrieval_ratio),
            *(_percent(result.recall(name)) for name in ("inside", "spans", "found")),
        ]
        for result in report.results
    ]
    return heads, rows


def coverage_table(report: MemoryReport) -> Table:
    """Area under the distribution of distances in each space, where it was measured."""
    rows = [
        [result.setting.name, *(_area(result, space) for space in ("joint", "key", "value"))]
        for result in report.results
        if result.coverage
    ]
    return ["setting", "joint", "keys", "values"], rows


def cost_table(report: MemoryReport) -> Table:
    """Time to the first word, and bytes."""
    rows = [
        [
            result.setting.name,
            _or_dash(1000 * result.mean("ttft_s"), "{:.0f} ms"),
            _or_dash(result.mean("bytes_moved") / 2**20, "{:.1f} MiB"),
            _or_dash(result.mean("bytes_held") / 2**20, "{:.1f} MiB"),
        ]
        for result in report.results
    ]
    return ["setting", "first word", "moved for a question", "held"], rows


def markdown(report: MemoryReport) -> str:
    """The report as text; tables without a row are left out."""
    parts = [f"# {report.title}"]
    if report.facts:
        parts.append("\n".join(f"* {name}: {value}" for name, value in report.facts.items()))
    tables = [
        ("Accuracy [95 %]", accuracy_table(report)),
        ("Retrieval", retrieval_table(report)),
        ("Coverage, area under the curve", coverage_table(report)),
        ("Cost", cost_table(report)),
    ]
    parts += [f"## {title}\n\n{markdown_table(heads, rows)}" for title, (heads, rows) in tables if rows]
    if report.notes:
        parts.append("## Notes\n\n" + "\n".join(f"* {note}" for note in report.notes))
    if report.skipped:
        parts.append("## Skipped\n\n" + "\n".join(f"* `{each.path.name}`: {each.reason}" for each in report.skipped))
    return "\n\n".join(parts) + "\n"


def write_memory_report(report: MemoryReport, folder: Path) -> Path:
    """Write ``memory.json``, ``memory.md`` and ``*.svg``; returns the path of the Markdown.

    Raises:
        SightlineError: the folder cannot be written.
    """
    files = {
        "memory.json": report.to_json() + "\n",
        "memory.md": markdown(report),
        **{f"{name}.svg": svg + "\n" for name, svg in memory_charts(report).items()},
    }
    write_files(folder, files)
    return folder / "memory.md"


def _area(result: SettingResult, space: str) -> str:
    return next((number(found.area) for name, found in result.coverage.items() if name == space), "–")


def _percent(share: float) -> str:
    return _or_dash(100 * share, "{:.1f} %")


def _or_dash(value: float, form: str) -> str:
    return "–" if math.isnan(value) else form.format(value)
