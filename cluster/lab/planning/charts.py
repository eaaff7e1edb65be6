"""Charts of a plan: over the cache length like the paper's Fig. 13, and its ablation like Fig. 16."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cluster.lab.evaluation.plots import Axis, Point, Series, chart
from cluster.lab.planning.figures import ABLATION, run
from cluster.lab.planning.platforms import Platform
from cluster.lab.planning.rows import Row

ABLATION_STEPS = (("agx-orin", "flexgen"), ("agx-orin", "resv"), ("vrex8", "resv-kvpu"), ("vrex8", "resv-dre"))
"""Fig. 16, left to right; 40K tokens, one sequence."""


def charts(found: Sequence[Row]) -> dict[str, str]:
    """SVG documents by file name without its end: per GPU, with V-Rex of the same place, latency and energy over the
    cache length; and the ablation."""
    drawn: dict[str, str] = {}
    machines = list(dict.fromkeys(row.platform for row in found))
    heads = [machine for machine in machines if not machine.cores] or machines
    for machine in heads:
        group = [row for row in found if row.platform is machine or _beside(row.platform, machine)]
        for name, title, value in _MEASURES:
            lines: dict[tuple[str, str], list[Point]] = {}
            for row in group:
                if row.frame.fits and row.token.fits:
                    key = (row.platform.title, row.method.title)
                    lines.setdefault(key, []).append(Point(row.cache / 1000, value(row), text=f"{value(row):.3g}"))
            series = [Series(" + ".join(key), tuple(points)) for key, points in lines.items()]
            axis = Axis(title, log=True)
            drawn[f"{name}-{machine.name}"] = chart(
                f"{title}, {machine.place}", series, Axis("cache, thousand tokens"), axis
            )
    drawn["ablation"] = _ablation_chart()
    return drawn


_MEASURES: tuple[tuple[str, str, Callable[[Row], float]], ...] = (
    ("frame-latency", "per-frame latency, ms", lambda row: 1000 * row.frame.latency),
    ("tpot", "time per output token, ms", lambda row: 1000 * row.token.latency),
    ("frame-energy", "energy per frame, J", lambda row: row.frame.energy),
    ("token-energy", "energy per token step, J", lambda row: row.token.energy),
)


def _beside(platform: Platform, machine: Platform) -> bool:
    return bool(platform.cores) and not machine.cores and platform.place == machine.place


def _ablation_chart() -> str:
    base = run(*ABLATION_STEPS[0], "frame", 40_000)
    steps = [run(*pair, "frame", 40_000) for pair in ABLATION_STEPS[1:]]
    speed = tuple(Point(i, base.latency / each.latency) for i, each in enumerate(steps, 1))
    energy = tuple(Point(i, base.energy / each.energy) for i, each in enumerate(steps, 1))
    paper: dict[bool, list[Point]] = {False: [], True: []}
    for platform, method, gain, of_energy, _ in ABLATION:
        paper[of_energy].append(Point(ABLATION_STEPS.index((platform, method)), gain))
    series = [
        Series("speed-up, model", speed),
        Series("speed-up, paper", tuple(paper[False]), joined=False),
        Series("energy gain, model", energy),
        Series("energy gain, paper", tuple(paper[True]), joined=False),
    ]
    steps_axis = Axis("1: AGX Orin + ReSV, 2: V-Rex8 + KVPU, 3: V-Rex8 + DRE", low=0.8, high=3.2)
    return chart("Gain over AGX Orin + FlexGen, 40K", series, steps_axis, Axis("times", low=0.0))
