"""A plan as tables: predictions, the ablation of the paper's Fig. 16, and the comparison with the paper's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.errors import SightlineError
from cluster.lab.planning.charts import ABLATION_STEPS, charts
from cluster.lab.planning.figures import Comparison, compare, mean_error, run
from cluster.lab.planning.rows import Row
from cluster.lab.planning.workload import ModelShape


def comparison_json(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """The paper's numbers, ours and the relative error."""
    return [
        {
            "where": each.reference.where,
            "what": each.reference.what,
            "unit": each.reference.unit,
            "paper": each.reference.paper,
            "model": each.model,
            "error": each.error,
            "calibrated": each.reference.calibrated,
        }
        for each in comparisons
    ]


def cells(row: Row) -> list[str]:
    """One table line: what, then frame, token."""
    name = row.platform.title + (" *" if row.extrapolated else "")
    if not (row.frame.fits and row.token.fits):
        return [name, row.method.title, f"{row.cache}", "does not fit its memory", *[""] * 6]
    return [
        name,
        row.method.title,
        f"{row.cache}",
        f"{1000 * row.frame.latency:.0f} ms",
        f"{row.frame.per_second:.1f}",
        f"{100 * row.frame.selection / row.frame.latency:.0f} %",
        f"{100 * row.frame.exposed_fetch / row.frame.latency:.0f} %",
        f"{row.frame.energy:.2f} J",
        f"{1000 * row.token.latency:.0f} ms",
        f"{row.token.energy:.2f} J",
    ]


HEADS = (
    "platform",
    "method",
    "cache",
    "frame",
    "frames/s",
    "selection",
    "exposed fetch",
    "energy/frame",
    "TPOT",
    "energy/token step",
)

COMPARISON_HEADS = ("where", "what", "paper", "model", "error", "calibrated")

NOTE = (
    "Frames/s are of each stream, energy is of the whole batch. "
    "* marks what the paper did not measure: the machine, the method on it, or the model."
)


def markdown(found: Sequence[Row], model: ModelShape, batch: int) -> str:
    """The table, the ablation, the paper's numbers and the charts in one page."""
    comparisons = compare()
    lines = [
        f"# {model.title}, batch {batch}",
        "",
        f"Predicted, not measured. {NOTE}",
        "",
        *_table(HEADS, [cells(row) for row in found]),
        "",
        *[f"![{name}]({name}.svg)" for name in charts(found)],
        "",
        "## Ablation of Fig. 16: Llama-3 8B, 40K tokens, batch 1, one frame",
        "",
        *_table(("", "vision", "linear", "attention", "host", "selection", "fetch", "latency"), _ablation_cells()),
        "",
        "Milliseconds; what runs beside something else counts in its own column and once in the latency.",
        "",
        "## Against the paper",
        "",
        *_table(COMPARISON_HEADS, [comparison_cells(each) for each in comparisons]),
        "",
        summary(comparisons),
    ]
    return "\n".join(lines) + "\n"


def summary(comparisons: list[Comparison]) -> str:
    """The mean errors in one sentence."""
    seen, unseen = (sum(c.reference.calibrated is kind for c in comparisons) for kind in (True, False))
    return (
        f"Mean absolute relative error {100 * mean_error(comparisons):.0f} %: "
        f"{100 * mean_error(comparisons, True):.0f} % of the {seen} numbers that parameters were set on, "
        f"{100 * mean_error(comparisons, False):.0f} % of the {unseen} others."
    )


def comparison_cells(each: Comparison) -> list[str]:
    """One line of the comparison."""
    reference = each.reference
    unit = "" if reference.unit == "×" else " "
    return [
        reference.where,
        reference.what,
        f"{reference.paper:.3g}{unit}{reference.unit}",
        f"{each.model:.3g}{unit}{reference.unit}",
        f"{100 * each.error:+.0f} %",
        "yes" if reference.calibrated else "",
    ]


def _ablation_cells() -> list[list[str]]:
    found = []
    for platform, method in ABLATION_STEPS:
        each = run(platform, method, "frame", 40_000)
        parts = (each.vision, each.linear, each.attention, each.host, each.selection, each.fetch, each.latency)
        found.append([f"{platform} + {method}", *(f"{1000 * part:.1f}" for part in parts)])
    return found


def _table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    lines = [list(heads), ["---"] * len(heads), *(list(line) for line in body)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def write(out: Path, found: Sequence[Row], model: ModelShape, batch: int) -> int:
    """``plan.md`` and its charts into an existing folder; returns how many charts.

    Raises:
        SightlineError: a file cannot be written.
    """
    drawn = charts(found)
    pages = {"plan.md": markdown(found, model, batch)} | {f"{name}.svg": text for name, text in drawn.items()}
    for name, text in pages.items():
        try:
            (out / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise SightlineError(f"cannot write {out / name}: {error.strerror or error}") from None
    return len(drawn)
