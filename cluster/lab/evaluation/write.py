"""Writing an evaluation: JSON, Markdown, one SVG per curve, and a page with all of it that needs no other file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from cluster.errors import SightlineError
from cluster.lab.evaluation.curves import charts
from cluster.lab.evaluation.report import (
    EvaluationReport,
    bound_text,
    measured_text,
    number,
    reached,
)

Table = tuple[list[str], list[list[str]]]
"""Heads and rows of cells."""


def figure_table(report: EvaluationReport) -> Table:
    """Every figure, its interval, what it must reach and whether it does."""
    rows = []
    for name, value in report.figures.values.items():
        told = reached(name, value)
        measured = report.figures.measured.get(name)
        rows.append(
            [
                name,
                number(value) if measured is None else measured_text(measured),
                "" if told is None else bound_text(name),
                {True: "yes", False: "no", None: ""}[told],
            ]
        )
    return ["figure", "value [95 %]", "must reach", "reached"], rows


def setting_table(report: EvaluationReport) -> Table:
    """Every setting but the sweeps' points."""
    heads = ["setting", "F1 [95 %]", "precision", "recall", "worst kind", "kept", "computed", "FLOPs", "latency"]
    rows = [
        [
            line.setting.name,
            measured_text(line.accuracy.f1),
            number(line.accuracy.precision.value),
            number(line.accuracy.recall.value),
            number(line.accuracy.worst),
            str(line.row["kept"]),
            str(line.row["computed"]),
            f"{100 * line.flops_share:.1f} %",
            f"{1000 * float(line.row['latency_s']):.0f} ms",
        ]
        for line in report.table
    ]
    return heads, rows


def kind_table(report: EvaluationReport) -> Table:
    """F1 of each kind of event under the settings that are compared."""
    lines = report.compared
    kinds = list(lines[0].accuracy.by_kind)
    rows = [[kind, *(measured_text(line.accuracy.by_kind[kind]) for line in lines)] for kind in kinds]
    return ["kind", *(line.setting.name for line in lines)], rows


def group_table(report: EvaluationReport) -> Table:
    """F1 in each third by motion and each stratum."""
    names = [line.setting.name for line in report.compared]
    rows = [
        [group, str(found[names[0]].videos), str(found[names[0]].events)]
        + [measured_text(found[name].f1) for name in names]
        for group, found in report.groups.items()
    ]
    return ["videos", "n", "events", *names], rows


def calibration_table(report: EvaluationReport) -> Table:
    """The bins."""
    rows = [
        [
            f"{each.low:.1f}–{each.high:.1f}",
            str(each.windows),
            number(each.score),
            f"{each.rate:.3f} [{each.ci_low:.2f}, {each.ci_high:.2f}]",
        ]
        for each in report.figures.calibration.bins
    ]
    return ["score", "windows", "mean score", "event rate [95 %]"], rows


def sections(report: EvaluationReport) -> list[tuple[str, Table]]:
    """Titles and tables, in order."""
    return [
        ("Figures", figure_table(report)),
        ("Settings", setting_table(report)),
        ("F1 by kind of event", kind_table(report)),
        ("F1 by motion and stratum", group_table(report)),
        ("Calibration", calibration_table(report)),
    ]


def markdown(report: EvaluationReport) -> str:
    """The report as text."""
    parts = [f"# {report.title}", _facts(report)]
    for title, (heads, rows) in sections(report):
        parts.append(f"## {title}\n\n{markdown_table(heads, rows)}")
    if report.figures.notes:
        parts.append("## Notes\n\n" + "\n".join(f"* {note}" for note in report.figures.notes))
    if report.skipped:
        parts.append("## Skipped\n\n" + "\n".join(f"* `{each.path.name}`: {each.reason}" for each in report.skipped))
    return "\n\n".join(parts) + "\n"


def page(report: EvaluationReport) -> str:
    """The report as one HTML page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("cluster.lab.evaluation", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        report=report,
        sections=sections(report),
        # Made here, their texts escaped.
        charts=[Markup(svg) for svg in charts(report).values()],
    )


def write_report(report: EvaluationReport, folder: Path) -> Path:
    """Write ``accuracy.json``, ``accuracy.md``, ``accuracy.html`` and ``*.svg``; returns the page's path.

    Raises:
        SightlineError: the folder cannot be written.
    """
    files = {
        "accuracy.json": report.to_json() + "\n",
        "accuracy.md": markdown(report),
        "accuracy.html": page(report),
        **{f"{name}.svg": svg + "\n" for name, svg in charts(report).items()},
    }
    write_files(folder, files)
    return folder / "accuracy.html"


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write a report's files by name.

    Raises:
        SightlineError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SightlineError(f"cannot write the report to {folder}: {error.strerror or error}") from None


def _facts(report: EvaluationReport) -> str:
    return "\n".join(f"* {name}: {value}" for name, value in report.facts.items())


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as Markdown has it."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
