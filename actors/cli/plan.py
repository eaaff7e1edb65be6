"""``sightline plan``: predicts a machine's performance from models instead of measurements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actors.cli.options import Json
from actors.cli.output import check_writable, console, write_json
from actors.cli.plan_city import city
from cluster.errors import SightlineError

if TYPE_CHECKING:
    from cluster.lab.planning.accelerator import Platform

HELP = "Predict what machines would reach, to plan capacity."
app = typer.Typer(no_args_is_help=True, help=HELP)


app.command("city")(city)


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
            help="How the cache is held, as in resv; repeatable. Default: software methods on GPUs, resv-dre on V-Rex.",
        ),
    ] = None,
    cache: Annotated[int, typer.Option(metavar="N", help="Tokens already in the cache.")] = 40_000,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences that are computed together.")] = 1,
    frame_tokens: Annotated[
        int | None, typer.Option("--frame-tokens", metavar="N", help="Tokens of a frame. Default: the model's.")
    ] = None,
    model: Annotated[str, typer.Option(metavar="NAME", help="Shape of the model.")] = "llama3-8b",
    json_to: Json = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Write plan.html, plan.md and charts over cache lengths."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with every number that the paper states; 1 if too far off.")
    ] = False,
) -> None:
    """Predict latency and energy of streaming video on an accelerator by V-Rex's performance model.

    $ sightline plan accelerator --platform agx-orin --platform vrex8 --cache 40000

    $ sightline plan accelerator --batch 8 --out out/plan

    $ sightline plan accelerator --check
    """
    from cluster.lab.planning import figures, report
    from cluster.lab.planning.accelerator import platforms
    from cluster.lab.planning.report import rows
    from cluster.lab.planning.workload import methods, models
    from cluster.lab.report.page import write_page

    machines = [platforms.get(name) for name in platform or []] or _every_platform()
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
    if json_to:
        body: dict[str, Any] = {"model": model, "rows": [row.as_json() for row in found]}
        if check:
            body["check"] = [each.as_json() for each in comparisons]
            body["mean_error"] = figures.mean_error(comparisons)
        write_json(json_to, body)
    if check and (error := figures.mean_error(comparisons)) > figures.BOUND:
        raise SightlineError(
            f"the model is off by {100 * error:.0f} % on average; the documentation states at most "
            f"{100 * figures.BOUND:.0f} %"
        )


def _every_platform() -> list[Platform]:
    """Edge before server, the paper's machines before extrapolated ones."""
    from cluster.lab.planning.accelerator import platforms

    known = [platforms.get(name) for name in platforms]
    return sorted(known, key=lambda each: (each.place, each.extrapolated, each.name))
