"""``sightline eval ladder``: a model's quality ladder from what an evaluation measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def ladder(
    results: Annotated[Path, typer.Argument(metavar="FILE", help="Written by `sightline eval accuracy --json`.")],
    model: Annotated[str, typer.Option(metavar="NAME", help="demo, or the folder of the checkpoint.")] = "demo",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: ladder.json in the model's folder.")
    ] = None,
) -> None:
    """Write which rungs a camera may step down under load, and what each was measured to cost in F1.

    $ sightline eval accuracy --settings ladder --json out/ladder.json

    $ sightline eval ladder out/ladder.json
    """
    from rich import box
    from rich.table import Table

    from actors.cli.output import console
    from cluster.control.ladder import FILE
    from cluster.errors import ConfigError
    from cluster.lab.evaluation.ladder import ladder_of, read_results
    from cluster.models.catalog import locate

    place = out or Path(locate(model)) / FILE
    if not place.parent.is_dir():
        raise ConfigError(f"there is no folder {place.parent}; name the folder of the checkpoint, or --out FILE")
    found = ladder_of(read_results(results))
    found.save(place)
    screen = console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, head in enumerate(("rung", "prune", "refresh", "stride", "fps", "kept", "F1 kept", "source")):
        table.add_column(head, justify="right" if 0 < index < 7 else "left")
    for rung in found.rungs:
        refresh = "own" if rung.refresh_budget is None else f"{rung.refresh_budget:g}"
        factors = [f"x{value:g}" for value in (rung.prune, rung.stride, rung.fps, rung.kept)]
        numbers = [factors[0], refresh, *factors[1:], f"{rung.f1:.3f}"]
        table.add_row(rung.name, *(["-"] * 5 + ["0"] if rung.shed else numbers), rung.source)
    screen.print(table)
    screen.print(f"written: {place}", markup=False)
