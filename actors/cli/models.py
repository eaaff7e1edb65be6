"""``sightline models``: supported families, what a model needs, and a check of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actors.cli.options import Device, Dtype, Json
from actors.cli.output import Progress, check_json_target, console, make_table, print_json, size

if TYPE_CHECKING:
    from rich.table import Table

    from cluster.lab.check.run import CheckReport
    from cluster.lab.planning.model_card import FamilyCard, ModelCard

app = typer.Typer(no_args_is_help=True, help="List model families; show what a model needs; check a checkpoint.")


@app.command("list")
def list_models(json: Json = None) -> None:
    """List model families: checkpoints by hub id, shapes, presets, and supported engines.

    $ sightline models list

    $ sightline models list --json - | jq '.[].family'
    """
    from cluster.lab.planning.model_card import family_cards

    cards = family_cards()
    if print_json(json, cards):
        console().print(_families_table(cards), markup=False)


@app.command("show")
def show(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A shape, preset or hub id of `models list`, or a checkpoint's folder."),
    ],
    json: Json = None,
) -> None:
    """Show a model's size, positions, tokens per frame, KV size, and how many windows fit on each GPU.

    $ sightline models show qwen3_vl-8b

    $ sightline models show /models/mine --json -
    """
    from cluster.lab.planning.model_card import model_card

    card = model_card(model)
    if print_json(json, card):
        console().print(_card_table(card), markup=False)


@app.command("check")
def check(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A checkpoint's folder, demo, a preset, or a hub id fetched before."),
    ],
    device: Device = "cpu",
    dtype: Dtype = "float32",
    clip: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Another clip; the ground truth of a `scenes make` clip is used too."),
    ] = None,
    json: Json = None,
) -> None:
    """Check that a model is computed correctly on this machine, and how fast.

    Compares full windows with transformers, windows with and without reuse, and pruned with full answers on a synthetic
    clip. Exit code 0: right, 1: wrong, 2: refused before anything is loaded.

    $ sightline models check /models/mine --device cuda --dtype bfloat16 --json check.json
    """
    from cluster.lab.check.run import STEPS, run_check

    check_json_target(json)
    with Progress(total=STEPS) as progress:
        report = run_check(
            model,
            device=device,
            dtype=dtype,
            clip=clip,
            on_step=lambda what, done: progress.show(what, done, key=what),
        )
    if print_json(json, report.as_json()):
        rows = [(each.name, each.verdict, each.sentence) for each in report.stages]
        console().print(make_table("stage|verdict|found", rows), markup=False)
        print(verdict(report))
    if report.wrong:
        raise typer.Exit(1)


def verdict(report: CheckReport) -> str:
    """The concluding line."""
    what = f"{report.model} ({report.family}, {report.parameters / 1e6:.1f}M) on {report.device} in {report.dtype}"
    if not report.wrong:
        return f"right: {what}"
    return f"wrong: {what}: {', '.join(stage.name for stage in report.wrong)}"


def _families_table(cards: Sequence[FamilyCard]) -> Table:
    rows = [
        (card.family, "\n".join((*card.published, *card.shapes, *card.presets)), ", ".join(card.engines))
        for card in cards
    ]
    return make_table("!family|!hub ids, shapes, presets|!engines", rows)


def _parameters(count: int) -> str:
    """8290000000 -> 8.29B, 3100000 -> 3.1M."""
    return f"{count / 1e9:.2f}B" if count >= 1e8 else f"{count / 1e6:.1f}M"


def _card_table(card: ModelCard) -> Table:
    from rich import box
    from rich.table import Table

    from cluster.config.memory import held_text

    width, height = card.picture
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    for name, value in (
        ("model", f"{card.model} ({card.family})"),
        ("size", f"{_parameters(card.parameters)} parameters, {size(card.weight_bytes)} in half precision"),
        ("layers", str(card.layers)),
        ("positions", card.positions),
        ("a 1080p frame", f"{width} x {height} pixels, {card.tokens_per_frame} tokens, every {card.frame_s:g} s"),
        ("KV", f"{size(card.kv_token_bytes)} a token, {size(card.kv_second_bytes)} a second of video, nothing pruned"),
        ("memory", held_text(card.memory_cap, card.memory_token_bytes) if card.memory_token_bytes else "unknown"),
        *((gpu, f"{count} windows of 40 s" if count else "too small") for gpu, count in card.windows.items()),
    ):
        table.add_row(name, value)
    return table
