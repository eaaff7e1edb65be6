"""``sightline scenes``: make synthetic CCTV clips with ground truth, and show the truth."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from actors.cli.options import Jobs
from actors.cli.output import Progress, console, plural
from cluster.errors import ConfigError
from cluster.files import writing

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.lab.scenes.truth import SceneTruth

app = typer.Typer(no_args_is_help=True, help="Make synthetic CCTV clips with ground truth, to train and evaluate on.")


@app.command("make")
def make(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for clips and ground truth.")],
    count: Annotated[int, typer.Option("--count", "-n", metavar="N", help="Number of scenes.")] = 24,
    seed: Annotated[int, typer.Option(metavar="S", help="Random seed; the same seed makes the same clips.")] = 0,
    split: Annotated[
        str, typer.Option(help="train, validation or test; test has layouts and cameras that training never sees.")
    ] = "test",
    seconds: Annotated[float, typer.Option(metavar="S", help="Length of each scene, seconds.")] = 40.0,
    event: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="Event to show, or none; if repeated, each in turn. Default: any."),
    ] = None,
    jobs: Jobs = None,
    sheet: Annotated[bool, typer.Option("--sheet", help="Also draw sheet.png: pictures with events marked.")] = False,
) -> None:
    """Write scenes as MP4, the ground truth of each as JSON beside it, and an index, scenes.json.

    Repeat the command to resume after an interruption, or with a larger --count to add scenes.

    $ sightline scenes make --out out/scenes --count 60 --seed 1 --sheet

    $ sightline scenes make --out out/falls --count 8 --event fall --event none
    """
    from cluster.lab.scenes.dataset import INDEX, SceneSet, make_scenes
    from cluster.lab.scenes.vocabulary import Split

    wanted = SceneSet(cast(Split, split), count, seed, seconds, tuple(event or ["any"]))
    workers = len(os.sched_getaffinity(0)) if jobs is None else jobs
    with Progress("making scenes", count) as progress:
        made = make_scenes(out, wanted, jobs=workers, on_clip=progress.add_file)
    screen = console()
    kept = len(made.clips) - made.made
    already = f", {kept} already existed" if kept else ""
    screen.print(f"{plural(made.made, 'scene')} made{already}: {out / INDEX}", markup=False)
    if sheet:
        from cluster.lab.scenes.dataset import contact_sheet

        with writing(out / "sheet.png"):
            shown = contact_sheet(made.clips, out / "sheet.png")
        screen.print(f"{shown} of them on {out / 'sheet.png'}", markup=False)


@app.command("show")
def show(
    clip: Annotated[Path, typer.Argument(metavar="CLIP", help="A clip made by `scenes make`, or its JSON file.")],
) -> None:
    """Print the ground truth of a scene: its camera, events, questions and their answers.

    $ sightline scenes show out/scenes/test-100000.mp4
    """
    from cluster.lab.scenes.truth import SceneTruth, truth_path

    if clip.is_dir():
        raise ConfigError(f"{clip} is a directory; name one clip in it")
    _print_truth(console(), SceneTruth.load(truth_path(clip)))


def _print_truth(screen: Console, truth: SceneTruth) -> None:
    from rich.table import Table as Grid

    from cluster.lab.report.page import Table

    facts = Grid(box=None, show_header=False, pad_edge=False)
    camera = truth.camera
    b_frames = f"{camera.bframes} B-frames" if camera.bframes else "no B-frames"
    for name, value in (
        ("scene", f"{truth.name}, {truth.seconds:g} s, {truth.layout}, {truth.light}"),
        ("hard", ", ".join(truth.strata) or "nothing"),
        ("camera", f"{truth.width}×{truth.height}, {truth.fps:g} fps, {camera.codec}, crf {camera.crf}"),
        ("", f"an I-frame every {camera.gop_s:g} s, {b_frames}"),
        ("motion", f"{truth.mean_motion:.4f}"),
    ):
        facts.add_row(f"[bold]{name}[/]", value)
    screen.print(facts)

    events = []
    for event in truth.events:
        middle = event.boxes[len(event.boxes) // 2][1] if event.boxes else "never in the picture"
        actors = ", ".join(map(str, event.actors))
        events.append((event.kind, f"{event.start_s:.1f} s", f"{event.end_s:.1f} s", actors, str(middle)))
    if events:
        Table("Events", ("event", "from", "to", "objects", "box in its middle"), events).show(screen)
    else:
        screen.print("\nno event\n")
    questions = [("any time", each.text, each.answer) for each in truth.questions]
    questions += [(f"{each.at_s:.0f} s", each.text, each.answer) for each in truth.memory]
    Table("Questions", ("asked at", "question", "answer"), questions).show(screen)
