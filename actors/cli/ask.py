"""``sightline ask``: a free question about what a camera, or every camera, has seen."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actors.cli.options import DEFAULT_GATEWAY, Gateway, Json, connect, parse_duration, spoken
from actors.cli.output import console, make_table, print_json, reasons, size
from cluster.errors import CapacityError, ConfigError, NotReadyError, UnavailableError
from cluster.files import check_writable, writing
from cluster.lab.report.number_format import compact

if TYPE_CHECKING:
    from cluster.client import GatewayClient
    from cluster.wire.memory_wire import AskAllProgress, AskOutcome, CameraOutcome

PROMPT = "? "

MOST = 20
"""Maximum number of moments listed for a question to all cameras."""


def ask(
    camera: Annotated[
        str, typer.Argument(metavar="CAMERA", help="Name of the camera; with --all, the question.", show_default=False)
    ] = "",
    question: Annotated[
        str,
        typer.Argument(metavar="QUESTION", help="The question. Default: interactive, on a terminal."),
    ] = "",
    since: Annotated[
        str, typer.Option(metavar="DURATION", help="Only what was seen in the last 10m, 2h, 1d. Default: all of it.")
    ] = "",
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the moments that support the answer, and its cost.")
    ] = False,
    pictures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a picture of each such moment to this folder.")
    ] = None,
    conversation: Annotated[
        str, typer.Option(metavar="ID", help="Continue this conversation; answers show the id.")
    ] = "",
    max_tokens: Annotated[
        int, typer.Option(min=0, max=1024, help="Maximum answer length in tokens; 0: the cluster's limit.")
    ] = 0,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="Timeout for the answer.")] = "2m",
    every: Annotated[bool, typer.Option("--all", help="Ask all cameras and rank their moments.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--camera", metavar="PATTERN", help="With --all: only these, as in gate-*; may be repeated."),
    ] = None,
    at_once: Annotated[int, typer.Option(min=0, max=32, help="With --all: cameras asked concurrently; 0: 8.")] = 0,
    gateway: Gateway = DEFAULT_GATEWAY,
    json: Json = None,
) -> None:
    """Ask about anything a camera has seen; the answer is streamed.

    $ sightline ask gate "Did a truck come in?" --since 2h --explain

    $ sightline ask gate "Who opened the door?" --pictures out/door --json -

    $ sightline ask gate

    $ sightline ask --all "Was there a red van?" --since 6h --pictures out/van
    """
    wanted: dict[str, Any] = {
        "since_s": parse_duration(since, "--since") if since else 0.0,
        "timeout_s": parse_duration(timeout, "--timeout"),
        "max_new_tokens": max_tokens,
        "with_pictures": pictures is not None,
    }
    interactive = not (every or question)
    refused = {
        'no question; add one, as in: sightline ask --all "Was there a red van?"': every and not camera,
        'no camera; name one, as in: sightline ask gate "Who came in?"': not camera,
        f"--all asks every camera; leave out {camera!r}, or select with --camera {camera}": every and question,
        "--all supports no conversations; leave out --conversation": every and conversation,
        'no question; write one after the camera, as in: sightline ask gate "Who came in?"': interactive
        and not sys.stdin.isatty(),
        "--json needs a question on the command line": interactive and json is not None,
    }
    for sentence, holds in refused.items():
        if holds:
            raise ConfigError(sentence)
    if pictures is not None:
        check_writable(pictures)
    if every:
        deadline_s = min(wanted.pop("timeout_s"), 300.0)
        with connect(gateway) as client:
            events = client.ask_all(camera, only or (), at_once=at_once, deadline_s=deadline_s, **wanted)
            if not _show_all(events, pictures=pictures, json=json):
                raise KeyboardInterrupt
        return
    with connect(gateway) as client:
        # Report an unknown camera or an unreachable gateway before the first question is typed.
        for line in reasons([client.camera_get(camera)]):
            print(line, file=sys.stderr)
        shown = Shown(explain=explain, pictures=pictures, json=json)
        if interactive:
            _talk(client, camera, conversation, wanted, shown)
        else:
            shown.answer(question, client.ask(camera, question, conversation=conversation, **wanted))


def _talk(client: GatewayClient, camera: str, conversation: str, wanted: dict[str, Any], shown: Shown) -> None:
    """Read questions until the end of input. Ctrl-C cancels an answer; at the prompt it ends the command."""
    # Gives input() line editing and history.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            question = input(PROMPT).strip()
        except EOFError:
            print()
            return
        if not question:
            continue
        try:
            outcome = shown.answer(question, client.ask(camera, question, conversation=conversation, **wanted))
            conversation = outcome.conversation
        except KeyboardInterrupt:
            print("\nstopped")
        except (CapacityError, ConfigError, NotReadyError, UnavailableError) as error:
            # The next question may succeed. A conversation is lost with its replica: continue without it.
            print(f"error: {error}", file=sys.stderr)
            if isinstance(error, NotReadyError):
                conversation = ""


@dataclass(slots=True, kw_only=True)
class Shown:
    """Prints answers and their evidence."""

    explain: bool
    pictures: Path | None
    json: str | None
    _conversation: str = ""

    def answer(self, question: str, events: Generator[str | AskOutcome, None, None]) -> AskOutcome:
        """Print the pieces as they arrive, then the evidence; the call is closed when this returns or raises. Raises
        ``SightlineError``: the answer failed, or a file cannot be written."""
        from cluster.wire.memory_wire import AskOutcome, outcome_body

        quiet = self.json == "-"
        try:
            for event in events:
                if isinstance(event, AskOutcome):
                    break
                if not quiet:
                    print(printable(event), end="", flush=True)
        finally:
            events.close()
        assert isinstance(event, AskOutcome)
        if not quiet:
            print()
        files = write_pictures(event, self.pictures) if self.pictures is not None else []
        print_json(self.json, outcome_body(event, files))
        self._remarks(question, event)
        if self.explain and not quiet:
            _print_explanation(event)
        return event

    def _remarks(self, question: str, outcome: AskOutcome) -> None:
        from cluster.types.cameras import answer_remark

        screen = console(stderr=True)
        if outcome.result.degraded:
            screen.print("[yellow]part of the memory was unreachable; the answer may be incomplete[/]")
        if remark := answer_remark(question, outcome.result.text):
            screen.print(f"[yellow]{remark}[/]")
        if (screen.is_terminal or self.explain) and outcome.conversation != self._conversation:
            screen.print(f"[dim]conversation {outcome.conversation}[/]")
            self._conversation = outcome.conversation


def printable(text: str) -> str:
    """A model's text without terminal control characters."""
    return "".join(letter for letter in text if letter.isprintable() or letter in "\n\t")


def moment_lines(outcome: AskOutcome) -> list[tuple[str, str, str]]:
    """For each moment: time, duration and share of attention."""
    from cluster.types import MICROSECONDS
    from cluster.wire.memory_wire import ago_s

    return [
        (
            f"{spoken(ago_s(outcome.result, moment))} ago",
            f"{spoken((moment.end - moment.start) / MICROSECONDS)} long",
            f"{100 * moment.weight:.0f} % of attention",
        )
        for moment in outcome.result.moments
    ]


def cost_lines(outcome: AskOutcome) -> list[str]:
    """Time span that the answer covers, and its cost."""
    from cluster.types import MICROSECONDS

    result = outcome.result
    share = f" ({100 * result.tokens_read / result.tokens_held:.0f} %)" if result.tokens_held else ""
    return [
        f"looks back over {spoken((result.newest - result.oldest) / MICROSECONDS)}",
        f"read {compact(result.tokens_read)} of {compact(result.tokens_held)} tokens{share}, {size(result.bytes_read)}",
        f"first token after {result.first_token_s:.2f} s, {result.total_s:.2f} s in total",
    ]


def _print_explanation(outcome: AskOutcome) -> None:
    from rich.table import Column, Table

    screen = console()
    table = Table.grid(*(Column(justify="right", no_wrap=True) for _ in range(3)), padding=(0, 3))
    for line in moment_lines(outcome):
        table.add_row(*line)
    if outcome.result.moments:
        screen.print(table)
    screen.print("\n".join(cost_lines(outcome)), markup=False)


def write_pictures(outcome: AskOutcome, folder: Path) -> list[str]:
    """Write the available pictures; returns a path or ``""`` per moment, in the order of the moments. Raises
    ``SightlineError``: a file cannot be written."""
    from cluster.types import MICROSECONDS

    paths = []
    for moment, picture in zip(outcome.result.moments, outcome.pictures, strict=True):
        path = folder / f"{outcome.result.stream}-{moment.start / MICROSECONDS:.3f}s.jpg"
        if picture:
            with writing(path):
                path.write_bytes(picture)
        paths.append(str(path) if picture else "")
    return paths


def _show_all(
    events: Generator[CameraOutcome | AskAllProgress, None, None], *, pictures: Path | None, json: str | None
) -> bool:
    """Print answers as they arrive, then their moments by rank. Ctrl-C cancels the question, shows what has arrived and
    makes this return false. Raises ``SightlineError``: the question failed, or a file cannot be written."""
    from cluster.wire.memory_wire import CameraOutcome, outcome_body, ranked

    answers: list[CameraOutcome] = []
    files: dict[str, list[str]] = {}
    progress: AskAllProgress | None = None
    quiet, whole = json == "-", True
    screen, errors = console(), console(stderr=True)
    clear = "\r\x1b[K" if errors.is_terminal and not errors.is_dumb_terminal else ""
    try:
        for event in events:
            print(clear, end="", file=sys.stderr, flush=True)
            if isinstance(event, CameraOutcome):
                if event.outcome is not None and pictures is not None:
                    # At once: thousands of cameras' pictures would fill the memory, and be lost with this process.
                    files[event.camera] = write_pictures(event.outcome, pictures)
                    event = replace(event, outcome=replace(event.outcome, pictures=()))
                answers.append(event)
                if event.outcome is not None and event.outcome.result.says_yes and not quiet:
                    print(
                        f"{event.camera}: {printable(event.outcome.result.text)} ({event.outcome.result.yes:.2f})",
                        flush=True,
                    )
            else:
                progress = event
                if clear:
                    print(
                        f"{event.answered + event.failed + event.empty} of {event.cameras} cameras",
                        end="",
                        file=sys.stderr,
                    )
    except KeyboardInterrupt:
        whole = False
        print("\nstopped", file=sys.stderr)
    finally:
        print(clear, end="", file=sys.stderr, flush=True)
        events.close()
    if progress is None:
        if not whole:
            return False
        raise UnavailableError("the gateway ended the answer without a result")
    body = [
        outcome_body(each.outcome, files.get(each.camera, [])) | {"incidents": list(each.incidents)}
        if each.outcome is not None
        else {"camera": each.camera, "error": each.error, "empty": each.empty}
        for each in answers
    ]
    shown = print_json(json, {"cameras": progress.cameras, "answers": body})
    if not progress.cameras:
        raise NotReadyError("no camera was asked: there is none, or none matches --camera")
    if not shown:
        return whole
    rows = [
        (each.camera, f"{spoken(each.ago_s)} ago", f"{each.rank:.2f}", f"{each.yes:.2f}", each.incident)
        for each in ranked(answers)[:MOST]
    ]
    if rows:
        screen.print(make_table("!camera|>when|>rank|>yes|clip of incident", rows), markup=False)
    missing = progress.cameras - progress.answered - progress.empty
    print(f"{progress.answered} of {progress.cameras} cameras answered")
    if progress.empty:
        print(f"{progress.empty} with no memory of that time: {_reason(answers, empty=True)}", file=sys.stderr)
    if missing:
        print(f"{missing} did not: {_reason(answers, empty=False) or 'not reached in time'}", file=sys.stderr)
    return whole


def _reason(answers: Sequence[CameraOutcome], *, empty: bool) -> str:
    """Reason of one of the cameras without an answer."""
    return min((each.error for each in answers if each.error and each.empty is empty), default="")
