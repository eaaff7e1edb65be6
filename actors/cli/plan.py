"""``sightline plan``: predicts from models what a machine reaches, and by simulation how many accelerators a city's
cameras need or how many cameras a pool carries."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actors.cli.options import Json
from actors.cli.output import Progress, check_json_target, console, print_json
from cluster.errors import ConfigError, SightlineError
from cluster.files import check_writable

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.control.ladder import Ladder
    from cluster.lab.city.study import Trial

LONGEST_H = 24 * 7
app = typer.Typer(no_args_is_help=True, help="Plan capacity: predict performance from models.")


@app.command("city")
def city(
    cameras: Annotated[
        int | None,
        typer.Option(
            "--cameras", "-n", min=1, metavar="N", help="Number of cameras. Default: the most that the pool serves."
        ),
    ] = None,
    gpus: Annotated[
        list[str] | None,
        typer.Option(
            "--gpus",
            "-g",
            metavar="KIND[=N]",
            help="Accelerators, one replica each, as in h100=64; repeatable. KIND alone: the smallest number that "
            "serves the cameras. KIND may be a cost model's name or file.",
        ),
    ] = None,
    mix: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Mix of cameras: city, station, night, steady, or a YAML file.")
    ] = "city",
    hours: Annotated[float, typer.Option(metavar="H", help="Hours to simulate for a given number of cameras.")] = 1.0,
    start: Annotated[float, typer.Option(metavar="H", help="Time of day at the start, in hours.")] = 8.0,
    event: Annotated[
        list[str] | None,
        typer.Option(
            metavar="S:WHAT:N",
            help="At second S: kill, join or drain N replicas, stop the controller for N seconds, or wake a share N of "
            "the cameras; repeatable.",
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
        str, typer.Option(metavar="NAME", help="Model whose built-in cost models --gpus names.")
    ] = "qwen2.5-vl-7b",
    max_batch: Annotated[int, typer.Option(min=1, metavar="N", help="Maximum windows per step.")] = 8,
    step_budget: Annotated[
        float, typer.Option(metavar="S", help="Maximum predicted seconds of a step with several windows.")
    ] = 1.0,
    heartbeat: Annotated[
        float, typer.Option(metavar="S", help="Seconds between a replica's reports, as cluster.heartbeat_s.")
    ] = 1.0,
    warmup: Annotated[float, typer.Option(metavar="S", help="Seconds at the start that do not count.")] = 120.0,
    price: Annotated[
        float | None, typer.Option(min=0.0, metavar="P", help="Price per accelerator-hour, in any currency.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Random seed.")] = 0,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Simulate the load test in this JSON, and compare.")
    ] = None,
    json_to: Json = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write a page with charts.")] = None,
) -> None:
    """Simulate a city: the production placement, admission, queues and ladder in simulated time, with a cost model.

    $ sightline plan city --cameras 130000 --gpus h100=800 --price 2.5 --out city.html

    $ sightline plan city --cameras 130000 --gpus h100          # the smallest number of them

    $ sightline plan city --gpus h100=64 --json pool.json       # the most cameras, and how the pool scales

    $ sightline plan city -n 2000 -g h100=16 --event 600:kill:3 --event 900:join:3

    $ sightline plan city --against loadtest.json
    """
    from cluster.lab.city import report
    from cluster.lab.city.mix import MIXES
    from cluster.lab.city.plan import CityPlan, Timing, parse_event
    from cluster.lab.city.replica import EngineSettings
    from cluster.lab.city.study import StudyProgress, parse_ladder, parse_objective, parse_pools, study
    from cluster.lab.report.number_format import figure_text
    from cluster.lab.report.page import write_files

    screen = console(stderr=json_to == "-")
    check_json_target(json_to)
    if out is not None:
        check_writable(out.parent)
    rungs = parse_ladder(ladder)
    if against is not None:
        if cameras or gpus or event or out:
            raise ConfigError(
                "--against simulates a load test as it ran, and prints a table; leave out -n, -g, --event, -o"
            )
        body = _compare(screen, against, rungs, seed)
        print_json(json_to, body)
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
        ladder_name=ladder,
        timing=Timing(3600 * hours, tick_s=heartbeat, bin_s=max(10.0, 60 * hours)),
        warmup_s=warmup,
        hour=start,
        seed=seed,
        engine=EngineSettings(max_batch=max_batch, budget_s=step_budget),
        events=tuple(parse_event(text) for text in event or []),
        price_per_hour=price,
    )
    plan.check()
    with Progress(total=1.0) as shown:
        progress = StudyProgress(
            lambda share: shown.show(shown.phase, share), shown.begin, lambda trial: shown.say(_trial_text(trial))
        )
        found = study(plan, wanted, cameras=cameras is not None, replicas=counted, progress=progress)
    screen.print(report.verdict(found.result, wanted), markup=False)
    screen.print("\n".join(f"{name}: {value}" for name, value in report.facts(found.result)), markup=False)
    for table in report.tables(found.result):
        table.show(screen)
    for name, number in found.figures.items():
        screen.print(f"{name} = {figure_text(number)}", markup=False)
    if out is not None:
        page = report.page(found.result, wanted, found.trials, fewer=found.fewer)
        write_files(out.parent, {out.name: page})
        screen.print(f"written: {out}", markup=False)
    print_json(json_to, found.as_json())


def _compare(screen: Console, path: Path, ladder: Ladder, seed: int) -> dict[str, Any]:
    """Simulate a load test's runs and show both sides; returns the JSON."""
    from cluster.lab.city.against import compare, read_runs, sim_error
    from cluster.lab.city.report import comparison_table

    compared = [compare(run, ladder, seed=seed) for run in read_runs(path)]
    comparison_table(compared).show(screen)
    error = sim_error(compared)
    screen.print(f"sim_error = {error:.4g}: the median over runs of the worst of the three errors", markup=False)
    return {"bench": "city", "figures": {"sim_error": error}, "runs": [each.as_json() for each in compared]}


def _trial_text(trial: Trial) -> str:
    word = "holds" if trial.met else "does not hold"
    return (
        f"{trial.cameras:,} cameras on {trial.replicas:,}: {word} ({trial.on_time:.2%} on time, "
        f"{trial.answered:.2%} answered, quality {trial.quality:.3f})"
    )


@app.command("accelerator")
def accelerator(
    platform: Annotated[
        list[str] | None,
        typer.Option("--platform", "-p", metavar="P", help="A machine, as in agx-orin; repeatable. Default: all."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-m",
            metavar="M",
            help="KV cache method, as in resv; repeatable. Default: software methods on GPUs, resv-dre on V-Rex.",
        ),
    ] = None,
    cache: Annotated[int, typer.Option(metavar="N", help="Tokens already in the cache.")] = 40_000,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences per batch.")] = 1,
    frame_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens per frame. Default: the model's.")
    ] = None,
    model: Annotated[str, typer.Option(metavar="NAME", help="Shape of the model.")] = "llama3-8b",
    json_to: Json = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Write plan.html, plan.md and charts over cache lengths."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with every number in the paper; exit code 1 if too far off.")
    ] = False,
) -> None:
    """Predict latency and energy of streaming video on an accelerator with V-Rex's performance model.

    $ sightline plan accelerator --platform agx-orin --platform vrex8 --cache 40000

    $ sightline plan accelerator --batch 8 --out out/plan

    $ sightline plan accelerator --check
    """
    from cluster.lab.planning import figures, report
    from cluster.lab.planning.accelerator import platforms
    from cluster.lab.planning.report import rows
    from cluster.lab.planning.workload import methods, models
    from cluster.lab.report.page import write_page

    machines = [platforms.get(name) for name in platform or platforms]
    if not platform:
        # Edge before server, the paper's machines before extrapolated ones.
        machines.sort(key=lambda each: (each.place, each.extrapolated, each.name))
    ways = [methods.get(name) for name in method or []]
    shape = models.get(model)
    found = rows(machines, ways, shape, [cache], batch, frame_tokens)
    comparisons = figures.compare() if check else []
    screen = console(stderr=json_to == "-")
    if check:
        report.comparison_table(comparisons).show(screen)
        screen.print(report.summary(comparisons), markup=False)
    else:
        report.prediction_table(found).show(screen)
        screen.print(f"{shape.title}, batch {batch}; predicted. {report.NOTE}", markup=False)
    if out is not None:
        check_writable(out)
        swept = rows(machines, ways, shape, sorted({*figures.SIZES, cache}), batch, frame_tokens)
        page = report.page(swept, shape, batch)
        written = write_page(page, out, "plan")
        screen.print(f"{written}, plan.md and {len(page.charts)} charts written", markup=False)
    body: dict[str, Any] = {"model": model, "rows": [row.as_json() for row in found]}
    if check:
        body |= {"check": [each.as_json() for each in comparisons], "mean_error": figures.mean_error(comparisons)}
    print_json(json_to, body)
    if check and (error := figures.mean_error(comparisons)) > figures.BOUND:
        raise SightlineError(
            f"the model is off by {100 * error:.0f} % on average; the documentation states at most "
            f"{100 * figures.BOUND:.0f} %"
        )
