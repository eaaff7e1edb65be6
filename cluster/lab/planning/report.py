"""Tables and charts of a plan: predictions, the ablation of Fig. 16, and the comparison with the paper's numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cluster.lab.planning.accelerator import Platform, Prediction, predict
from cluster.lab.planning.figures import ABLATION, GAINS, MEASURED, PAPER_MODEL, Comparison, compare, mean_error, run
from cluster.lab.planning.workload import Method, ModelShape, frame, methods, token
from cluster.lab.report.charts import Axis, Point, Series, chart
from cluster.lab.report.page import Page, Section, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABLATION_STEPS = (("agx-orin", "flexgen"), ("agx-orin", "resv"), ("vrex8", "resv-kvpu"), ("vrex8", "resv-dre"))
"""Fig. 16, left to right: 40K tokens, one sequence."""


def charts(found: Sequence[Row]) -> dict[str, Figure]:
    """Charts by file stem: latency and energy over cache length per GPU, with the V-Rex of the same class; and the
    ablation."""
    figures: dict[str, Figure] = {}
    machines = list(dict.fromkeys(row.platform for row in found))
    heads = [machine for machine in machines if not machine.cores] or machines
    for machine in heads:
        vrex = [each for each in machines if each.cores and not machine.cores and each.place == machine.place]
        group = [row for row in found if row.platform in (machine, *vrex)]
        for name, title, value in _MEASURES:
            lines: dict[str, list[Point]] = {}
            for row in group:
                if row.fits:
                    key = f"{row.platform.title} + {row.method.title}"
                    lines.setdefault(key, []).append(Point(row.cache / 1000, value(row), text=f"{value(row):.3g}"))
            series = [Series(key, points) for key, points in lines.items()]
            axes = Axis("cache, thousand tokens"), Axis(title, log=True)
            figures[f"{name}-{machine.name}"] = chart(f"{title}, {machine.place}", series, *axes)
    figures["ablation"] = _ablation_chart()
    return figures


_MEASURES: tuple[tuple[str, str, Callable[[Row], float]], ...] = (
    ("frame-latency", "per-frame latency, ms", lambda row: 1000 * row.frame.latency),
    ("tpot", "time per output token, ms", lambda row: 1000 * row.token.latency),
    ("frame-energy", "energy per frame, J", lambda row: row.frame.energy),
    ("token-energy", "energy per token step, J", lambda row: row.token.energy),
)


def _ablation_chart() -> Figure:
    base = run(*ABLATION_STEPS[0], "frame", 40_000)
    steps = [run(*pair, "frame", 40_000) for pair in ABLATION_STEPS[1:]]
    series = []
    for of, name in GAINS.items():
        gains = [Point(i, getattr(base, of) / getattr(each, of)) for i, each in enumerate(steps, 1)]
        paper = [Point(ABLATION_STEPS.index((row[0], row[1])), row[2]) for row in ABLATION if row[3] == of]
        series += [Series(f"{name}, model", gains), Series(f"{name}, paper", paper, joined=False)]
    steps_axis = Axis("1: AGX Orin + ReSV, 2: V-Rex8 + KVPU, 3: V-Rex8 + DRE", low=0.8, high=3.2)
    return chart("Gain over AGX Orin + FlexGen, 40K", series, steps_axis, Axis("times", low=0.0))


@dataclass(frozen=True, slots=True)
class Row:
    """Predictions of a frame and a generated token for one machine, method and cache length."""

    platform: Platform
    method: Method
    cache: int
    frame: Prediction
    token: Prediction
    model: ModelShape

    @property
    def fits(self) -> bool:
        return self.frame.fits and self.token.fits

    @property
    def extrapolated(self) -> bool:
        """Whether the paper has no measurement of this method on this machine, or of this model."""
        return (self.platform.name, self.method.name) not in MEASURED or self.model.name != PAPER_MODEL

    def as_json(self) -> dict[str, Any]:
        """The row in seconds, joules and bytes, with the field names of ``Prediction``."""
        return {
            "platform": self.platform.name,
            "method": self.method.name,
            "cache": self.cache,
            "batch": self.frame.batch,
            "extrapolated": self.extrapolated,
            "source": self.platform.source,
            "frame": asdict(self.frame),
            "token": asdict(self.token),
        }


def usual_methods(platform: Platform) -> list[Method]:
    """Methods that the paper runs on such a machine: software on GPUs, ReSV with its engine on V-Rex."""
    names = ["resv-dre"] if platform.cores else ["flexgen", "infinigen", "infinigenp", "rekv", "resv"]
    return [methods.get(name) for name in names]


def rows(
    platforms: Sequence[Platform],
    chosen: Sequence[Method],
    model: ModelShape,
    caches: Sequence[int],
    batch: int,
    frame_tokens: int | None,
) -> list[Row]:
    """Predictions for every machine, method and cache length. ``chosen``: empty for each machine's usual methods.
    Raises ``ConfigError`` if a length or the batch is below one."""
    return [
        Row(
            platform,
            method,
            cache,
            predict(platform, method, frame(model, cache, batch, frame_tokens)),
            predict(platform, method, token(model, cache, batch)),
            model,
        )
        for cache in caches
        for platform in platforms
        for method in chosen or usual_methods(platform)
    ]


def prediction_table(found: Sequence[Row]) -> Table:
    """One line per row: machine, method and cache, then frame and token figures."""
    return Table("", HEADS, [_cells(row) for row in found])


def _cells(row: Row) -> list[str]:
    name = row.platform.title + (" *" if row.extrapolated else "")
    if not row.fits:
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
    *("platform", "method", "cache", "frame", "frames/s", "selection", "exposed fetch", "energy/frame"),
    *("TPOT", "energy/token step"),
)

NOTE = (
    "Frames/s are per stream, energy is for the whole batch. "
    "* marks rows not measured in the paper, because of the machine, the method on it, or the model."
)


def page(found: Sequence[Row], model: ModelShape, batch: int) -> Page:
    """A page with predictions, charts, the ablation and the paper's numbers."""
    comparisons = compare()
    ablation = []
    for platform, method in ABLATION_STEPS:
        each = run(platform, method, "frame", 40_000)
        parts = (each.vision, each.linear, each.attention, each.host, each.selection, each.fetch, each.latency)
        ablation.append([f"{platform} + {method}", *(f"{1000 * part:.1f}" for part in parts)])
    heads = ("", "vision", "linear", "attention", "host", "selection", "fetch", "latency")
    note = "Milliseconds; overlapping parts count fully in their own columns, but only once in the latency."
    return Page(
        f"{model.title}, batch {batch}",
        f"Predicted, not measured. {NOTE}",
        sections=[
            Section(charts=charts(found), tables=[prediction_table(found)]),
            Section(
                "Ablation of Fig. 16: Llama-3 8B, 40K tokens, batch 1, one frame",
                tables=[Table("", heads, ablation)],
                text=[note],
            ),
            Section("Against the paper", tables=[comparison_table(comparisons)], text=[summary(comparisons)]),
        ],
    )


def summary(comparisons: list[Comparison]) -> str:
    """Mean errors in one sentence."""
    seen, unseen = (sum(each.calibrated is kind for each in comparisons) for kind in (True, False))
    return (
        f"Mean absolute relative error {100 * mean_error(comparisons):.0f} %: "
        f"{100 * mean_error(comparisons, True):.0f} % for the {seen} numbers that parameters were calibrated on, "
        f"{100 * mean_error(comparisons, False):.0f} % for the {unseen} others."
    )


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """Table of the paper's numbers and the model's."""
    rows = []
    for each in comparisons:
        unit = each.unit if each.unit == "×" else f" {each.unit}"
        numbers = f"{each.paper:.3g}{unit}", f"{each.model:.3g}{unit}", f"{100 * each.error:+.0f} %"
        rows.append((each.where, each.what, *numbers, "yes" if each.calibrated else ""))
    return Table("", ("where", "what", "paper", "model", "error", "calibrated"), rows)
