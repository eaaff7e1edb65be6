"""``sightline models``: families that are supported, and what a model needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from actors.cli.options import Json

if TYPE_CHECKING:
    from rich.table import Table

    from cluster.lab.planning.model_card import FamilyCard, ModelCard

app = typer.Typer(no_args_is_help=True, help="List model families; show what a model needs.")


@app.command("list")
def list_models(json: Json = None) -> None:
    """Show every family: its presets and shapes, what it can do, and on which engines.

    $ sightline models list

    $ sightline models list --json - | jq '.[].family'
    """
    from dataclasses import asdict

    from actors.cli.output import console, write_json
    from cluster.lab.planning.model_card import family_cards

    cards = family_cards()
    if json is not None:
        write_json(json, [asdict(card) for card in cards])
    if json != "-":
        console().print(families_table(cards), markup=False)


@app.command("show")
def show(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A shape, preset or hub id of `models list`, or a checkpoint's folder."),
    ],
    json: Json = None,
) -> None:
    """Show a model's size, positions, tokens per frame, KV, and how many windows fit on which GPU.

    $ sightline models show qwen3_vl-8b

    $ sightline models show /models/mine --json -
    """
    from dataclasses import asdict

    from actors.cli.output import console, write_json
    from cluster.lab.planning.model_card import model_card

    card = model_card(model)
    if json is not None:
        write_json(json, asdict(card))
    if json != "-":
        console().print(card_table(card), markup=False)


def families_table(cards: Sequence[FamilyCard]) -> Table:
    """One row per family."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("family", "presets", "shapes", "can", "engines"):
        table.add_column(column)
    for card in cards:
        can = [name for name in ("window", "reuse", "memory", "ask") if getattr(card, name)]
        table.add_row(
            card.family, ", ".join(card.presets), ", ".join(card.shapes), ", ".join(can), ", ".join(card.engines)
        )
    return table


def card_table(card: ModelCard) -> Table:
    """One row per property."""
    from rich import box
    from rich.table import Table

    from actors.cli.output import size

    width, height = card.picture
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    for name, value in (
        ("model", f"{card.model} ({card.family})"),
        ("size", f"{card.parameters / 1e9:.2f}B parameters, {size(card.weight_bytes)} in half precision"),
        ("layers", str(card.layers)),
        ("positions", card.positions),
        ("a 1080p frame", f"{width} x {height} pixels, {card.tokens_per_frame} tokens, every {card.frame_s:g} s"),
        ("KV", f"{size(card.kv_token_bytes)} a token, {size(card.kv_second_bytes)} a second of video, nothing pruned"),
        *((gpu, f"{count} windows of 40 s" if count else "too small") for gpu, count in card.windows.items()),
    ):
        table.add_row(name, value)
    return table
