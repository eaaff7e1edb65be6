"""``sightline watch``: stream answers."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from actors.cli.options import DEFAULT_GATEWAY, Gateway, JsonStream, connect
from actors.cli.output import JsonLines, console, reconnecting, trouble_lines, warn_of_missed
from cluster.errors import SightlineError

if TYPE_CHECKING:
    from cluster.client import GatewayClient
    from cluster.types import Answer, CameraStatus


LOOK_S = 3.0
"""Seconds between checks of the cameras' states, to report why one is silent."""


def watch(
    cameras: Annotated[list[str] | None, typer.Argument(metavar="CAMERA", help="Only these cameras.")] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="Stop after this many answers; 0: never.")] = 0,
    positive: Annotated[bool, typer.Option("--positive", help="Only answers at or above their threshold.")] = False,
    gateway: Gateway = DEFAULT_GATEWAY,
    json: JsonStream = None,
) -> None:
    """Print answers as they arrive, one per line, until Ctrl-C.

    A line shows camera, question, score and verdict, the window (seconds of the camera's clock), tokens (full →
    computed), the time from the window's last frame to the answer, and, for questions with `explain`, the model's text
    in quotes. Reasons for silent cameras go to standard error. Reconnects when the gateway restarts.

    $ sightline watch gate depot

    $ sightline watch --json - --positive | jq .camera
    """
    screen = console()
    shown = 0
    with JsonLines(json) as lines, connect(gateway) as client:
        # An unknown camera or unreachable gateway is reported now instead of waiting for answers that never come.
        for camera in cameras or ():
            client.camera_get(camera)
        _start_explaining(client, cameras or ())
        for answer, missed in reconnecting(client, lambda: client.watch(cameras or ())):
            warn_of_missed(missed, "answers")
            if positive and not answer.positive:
                continue
            body = asdict(answer)
            lines.write({"camera": body.pop("stream"), **body, "missed": missed})
            if json != "-":
                screen.print(line(answer))
            shown += 1
            if shown == count:
                return


def _start_explaining(client: GatewayClient, cameras: Collection[str]) -> None:
    """Print to standard error why cameras are silent: now, and from a thread whenever that changes."""
    screen = console(stderr=True)
    said: set[str] = set()

    def explain() -> None:
        nonlocal said
        lines = silence_lines(client.cameras_list(), cameras)
        for each in lines:
            if each not in said:
                screen.print(each, style="yellow", markup=False)
        said = set(lines)

    def keep_explaining() -> None:
        # The stream of answers itself reports a lost gateway; ValueError: the client was closed.
        while not threading.Event().wait(LOOK_S):
            try:
                explain()
            except ValueError:
                return
            except SightlineError:
                continue

    explain()
    threading.Thread(target=keep_explaining, name="silent cameras", daemon=True).start()


def silence_lines(statuses: Collection[CameraStatus], cameras: Collection[str]) -> list[str]:
    """Why the watched ``cameras`` (empty: all) send no answers: those without pictures or questions."""
    watched = [status for status in statuses if not cameras or status.name in cameras]
    if not watched:
        return ["there is no camera; add one with `sightline cameras add NAME SOURCE`"]
    waiting = [f"{each.name}: {each.reason or each.state}" for each in watched if each.state == "waiting"]
    ended = [f"{each.name}: its video has ended" for each in watched if each.state == "ended"]
    return trouble_lines(watched) + waiting + ended


def line(answer: Answer) -> str:
    """One answer as a line with colours."""
    from rich.markup import escape

    verdict = "[bold green]yes[/]" if answer.positive else "[dim]no [/]"
    window = f"{answer.start / 1e6:.1f}–{answer.end / 1e6:.1f} s"
    if answer.gated:
        cost = "[dim]nothing moved[/]"
    else:
        cost = f"{answer.tokens.full} → {answer.tokens.computed} tokens  {answer.lag_s:.2f} s"
    text = "" if answer.text in ("", "yes", "no") else f'  "{escape(answer.text)}"'
    return (
        f"{escape(answer.stream):16} {escape(answer.question):12} {answer.score:.2f} {verdict}  {window}  {cost}{text}"
    )
