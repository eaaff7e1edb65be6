"""Output of ``sightline ask --all``: cameras that say yes as they answer, then the best moments."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

from actors.cli.options import spoken
from actors.cli.output import console, make_table, write_json
from cluster.errors import UnavailableError

if TYPE_CHECKING:
    from cluster.wire.memory_wire import AskAllProgress, CameraTold

MOST = 20
SAYS_YES = 0.5


def show_all(
    events: Generator[CameraTold | AskAllProgress, None, None], *, pictures: Path | None, json: str | None
) -> None:
    """Print answers as they come, and all moments by rank at the end; Ctrl-C stops the question and shows what came.

    Raises:
        SightlineError: the question failed, or a file cannot be written.
    """
    from actors.cli.ask import as_json, printable, write_pictures
    from cluster.wire.memory_wire import CameraTold, ranked

    answers: list[CameraTold] = []
    progress: AskAllProgress | None = None
    quiet = json == "-"
    screen, errors = console(), console(stderr=True)
    try:
        for event in events:
            if isinstance(event, CameraTold):
                answers.append(event)
                if event.told is not None and event.told.result.yes >= SAYS_YES and not quiet:
                    print(
                        f"{event.camera}: {printable(event.told.result.text)} ({event.told.result.yes:.2f})", flush=True
                    )
            else:
                progress = event
                if errors.is_terminal:
                    print(f"\r{event.answered + event.failed} of {event.cameras} cameras", end="", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
    finally:
        events.close()
    if progress is None:
        raise UnavailableError("the gateway ended the answer without a result")
    files = {
        each.camera: write_pictures(each.told, pictures)
        for each in answers
        if each.told is not None and pictures is not None
    }
    if json is not None:
        body = [
            as_json(each.told, files.get(each.camera, [])) | {"incidents": list(each.incidents)}
            if each.told is not None
            else {"camera": each.camera, "error": each.error}
            for each in answers
        ]
        write_json(json, {"cameras": progress.cameras, "answers": body})
    if quiet:
        return
    rows = [
        (each.camera, f"{spoken(each.ago_s)} ago", f"{each.rank:.2f}", f"{each.yes:.2f}", each.incident)
        for each in ranked(answers)[:MOST]
    ]
    if rows:
        screen.print(make_table("!camera|>when|>rank|>yes|clip of incident", rows), markup=False)
    missing = progress.cameras - progress.answered
    print(f"{progress.answered} of {progress.cameras} cameras answered")
    if missing:
        reasons = sorted({each.error for each in answers if each.error})
        print(f"{missing} did not: {reasons[0] if reasons else 'not reached in time'}", file=sys.stderr)
