"""``sightline plan city``: how many accelerators a city's cameras need, or what a pool carries, by simulation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actors.cli.options import Json
from actors.cli.output import Progress, check_writable, console, write_json
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from actors.cli.output import Progress
    from cluster.control.ladder import Ladder
    from loadtest.city.study import Trial

LONGEST_H = 24 * 7


def city(
    cameras: Annotated[
        int | None,
        typer.Option(
            "--cameras", "-n", min=1, metavar="N", help="How many. Without it: the most that the pool serves."
        ),
    ] = None,
    gpus: Annotated[
        list[str] | None,
        typer.Option(
            "--gpus",
            "-g",
            metavar="KIND[=N]",
            help="Accelerators, one replica each, as in h100=64; repeatable. KIND alone: the least number that serves "
            "the cameras. KIND may be a cost model's name or file.",
        ),
    ] = None,
    mix: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="What the cameras are: city, station, night, steady, or YAML.")
    ] = "city",
    hours: Annotated[float, typer.Option(metavar="H", help="Simulated hours.")] = 1.0,
    start: Annotated[float, typer.Option(metavar="H", help="Time of day at which it begins.")] = 8.0,
    event: Annotated[
        list[str] | None,
        typer.Option(
            "--event",
            metavar="S:WHAT:N",
            help="At second S: kill, join or drain N replicas, controller away for N seconds, wake a share N of the "
            "cameras; repeatable.",
        ),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(metavar="NAME=SHARE,…", help="Objectives: on_time, answered, quality. Default: 0.99, 0.99, 0.98."),
    ] = "",
    ladder: Annotated[
        str, typer.Option(metavar="PATH", help="Quality ladder: a model's folder or file, default, or none.")
    ] = "default",
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Whose shipped cost models --gpus names.")
    ] = "qwen2.5-vl-7b",
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, metavar="N", help="Most windows of a step.")] = 8,
    step_budget: Annotated[
        float, typer.Option("--step-budget", metavar="S", help="Most predicted seconds of a step of several windows.")
    ] = 1.0,
    heartbeat: Annotated[
        float, typer.Option(metavar="S", help="Seconds between a replica's reports, as cluster.heartbeat_s.")
    ] = 1.0,
    warmup: Annotated[float, typer.Option(metavar="S", help="Seconds at the beginning that do not count.")] = 120.0,
    price: Annotated[
        float | None, typer.Option(min=0.0, metavar="P", help="Price of an accelerator-hour, in any money.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of all random numbers.")] = 0,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="FILE", help="Simulate what this load test's JSON measured, and compare."),
    ] = None,
    json_to: Json = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write a page with charts.")] = None,
) -> None:
    """Simulate a city: production's placement, admission, queues and ladder in simulated time, with a cost model.

    $ sightline plan city --cameras 130000 --gpus h100=800 --price 2.5 --out city.html

    $ sightline plan city --cameras 130000 --gpus h100          # the least number of them

    $ sightline plan city --gpus h100=64 --json pool.json       # the most cameras, and how the pool scales

    $ sightline plan city -n 2000 -g h100=16 --event 600:kill:3 --event 900:join:3

    $ sightline plan city --against loadtest.json
    """
    from cluster.lab.report.page import write_files
    from loadtest.city import report
    from loadtest.city.mix import MIXES
    from loadtest.city.plan import CityPlan, Timing
    from loadtest.city.replica import EngineSettings
    from loadtest.city.study import Audience, parse_ladder, parse_objective, parse_pools, study
    from loadtest.city.timeline import parse_event

    screen = console(stderr=json_to == "-")
    if out is not None:
        check_writable(out.parent)
    rungs, ladder_name = parse_ladder(ladder)
    if against is not None:
        body = _compare(screen, against, rungs, seed)
        if json_to:
            write_json(json_to, body)
        return
    if not 0 < hours <= LONGEST_H:
        raise ConfigError(f"--hours must be above 0 and at most {LONGEST_H}, not {hours:g}")
    if not step_budget > 0 or not 0.1 <= heartbeat <= 60:
        raise ConfigError("--step-budget must be above 0, and --heartbeat from 0.1 to 60 seconds")
    pools, counted = parse_pools(gpus or ["h100"], model)
    wanted = parse_objective(objective)
    plan = CityPlan(
        cameras=cameras or 1,
        pools=pools,
        mix=MIXES.load(mix),
        mix_name=mix,
        ladder=rungs,
        ladder_name=ladder_name,
        timing=Timing(3600 * hours, tick_s=heartbeat, bin_s=max(10.0, 60 * hours)),
        warmup_s=warmup,
        hour=start,
        seed=seed,
        engine=EngineSettings(max_batch=max_batch, budget_s=step_budget),
        events=tuple(parse_event(text) for text in event or []),
        price_per_hour=price,
    )
    plan.check()
    with Progress(total=1.0) as progress:
        shown = _Listener(progress)
        told = Audience(shown.share, shown.begins, shown.tried)
        found = study(plan, wanted, cameras=cameras is not None, replicas=counted, told=told)
    screen.print(report.verdict(found.result, wanted), markup=False)
    for name, value in report.facts(found.result):
        screen.print(f"{name}: {value}", markup=False)
    for table in report.tables(found.result):
        table.show(screen)
    for name, number in found.figures.items():
        screen.print(f"{name} = {number:.4g}", markup=False)
    if out is not None:
        page = report.page(found.result, wanted, found.trials, fewer=found.fewer)
        write_files(out.parent, {out.name: page})
        screen.print(f"written: {out}", markup=False)
    if json_to:
        write_json(json_to, found.as_json())


def _compare(screen: Console, path: Path, ladder: Ladder | None, seed: int) -> dict[str, Any]:
    """Simulate a load test's runs and show both sides; returns the JSON."""
    from loadtest.city.against import compare, read_runs, sim_error
    from loadtest.city.report import comparison_table

    compared = [compare(run, ladder, seed=seed) for run in read_runs(path)]
    comparison_table(compared).show(screen)
    error = sim_error(compared)
    screen.print(f"sim_error = {error:.4g}: the median over runs of the worst of the three errors", markup=False)
    return {"bench": "city", "figures": {"sim_error": error}, "runs": [each.as_json() for each in compared]}


class _Listener:
    """Shows the running simulation, and a line for each count tried."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._what = ""

    def share(self, share: float) -> None:
        self._progress.show(self._what, share, key=self._what)

    def begins(self, what: str) -> None:
        self._what = what
        self.share(0.0)

    def tried(self, trial: Trial) -> None:
        word = "holds" if trial.met else "does not hold"
        self._progress.say(
            f"{trial.cameras:,} cameras on {trial.replicas:,}: {word} ({trial.on_time:.2%} on time, "
            f"{trial.answered:.2%} answered, quality {trial.quality:.3f})"
        )
