"""``sightline demo``: the command."""

from __future__ import annotations

import os
import shlex
import sys
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actors.cli.demo.plan import CAMERAS
from actors.cli.options import Json
from actors.cli.output import console, print_json
from cluster.files import check_writable

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.lab.report.records import Report

ROOM_BYTES = 32 * 2**20
# Seconds on two cores for making clips, starting, loading and measuring: everything but the live part.
ABOUT_S = 60


def demo(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for clips, configuration and report.")
    ] = Path("out/demo"),
    seconds: Annotated[float, typer.Option(min=8.0, metavar="S", help="Seconds that the cameras run live.")] = 40.0,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Preset, checkpoint folder or hub id of the model.")
    ] = "demo",
    engine: Annotated[
        str,
        typer.Option(metavar="NAME", help="Inference engine of the live part: native, or vllm if installed."),
    ] = "native",
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open the report in a browser.")] = False,
    json: Json = None,
) -> None:
    """Run the whole system on this machine, in about two minutes.

    Renders four short CCTV scenes with events, starts a cluster (gateway, controller, two decoders, one model replica),
    feeds two cameras from files and two by gRPC push, asks three questions of each, and shows the answers beside the
    ground truth as they arrive. Then computes the same clips in full and incrementally, and writes report.html and
    report.json.

    The model is small and was trained on similar scenes, not on these. A preset named with --model has random weights:
    its cost is meaningful, its answers are not.

    $ sightline demo

    $ sightline demo --model /models/Qwen3-VL-4B-Instruct --seconds 120
    """
    from actors.preflight import check_settings
    from cluster.config import load_config
    from cluster.lab.report.render import UNTRAINED, cost_table, write_report

    # Checked before the clips are made, which takes a while.
    check_settings(load_config(None, {"model": {"name": model}, "engine": engine}))
    check_writable(out, ROOM_BYTES)
    screen = console(stderr=json == "-")
    report = _run(screen, out, seconds, model, engine)
    page, data = write_report(report, out)
    print_json(json, report.as_json())
    cost_table(report, "Full and incremental computation of the same windows").show(screen)
    if report.random_weights:
        screen.print(f"[yellow]{UNTRAINED.format(report.model)}[/]")
    if engine != "native":
        screen.print(
            f"The live answers came from engine {engine}; the comparison above is within the native engine. "
            "`sightline bench engines` compares engines."
        )
    screen.print(f"\nreport  {page}\n        {data}\nagain   sightline serve -c {out / 'config.yaml'}", markup=False)
    if not no_open and screen.is_terminal:
        _open(page)


def _run(console: Console, out: Path, seconds: float, model: str, engine: str) -> Report:
    from rich.markup import escape

    from actors.cli.demo.plan import make_clips, write_config
    from actors.cli.demo.record import LoopedTruth
    from actors.cli.demo.screen import Screen
    from cluster.config import load_config
    from cluster.models.catalog import locate
    from cluster.models.presets import PRESETS
    from cluster.models.settings import ModelSettings

    with Screen(console) as screen:
        weights = " (random weights: only its cost is meaningful)" if model in PRESETS else ""
        console.print(
            f"[bold]Four cameras[/], two fed from files and two by gRPC push, three questions each.\n"
            f"Model {escape(model)}{weights}. This takes about {seconds + ABOUT_S:.0f} seconds.\n"
        )
        made, measured_windows = count(1), count(1)
        screen.begin("making four clips", len(CAMERAS))
        clips = make_clips(out / "clips", lambda: screen.show(screen.phase, next(made)))
        config_file = write_config(out, clips, model, engine, ModelSettings.load(Path(locate(model)).expanduser()))
        # Any free ports: the demo must not collide with a running cluster.
        config = load_config(config_file, {"gateway": {"port": 0, "http_port": 0}})
        truths = {name: LoopedTruth.of_clip(clip, config.window.length_s) for name, clip in clips.items()}

        screen.begin("loading the libraries")
        from actors.cli.demo.live import LiveRun, run_live

        def look(run: LiveRun, now: float) -> None:
            screen.show(f"watching four cameras, {now:.0f} of {seconds:.0f} s", now, seconds)
            screen.cameras(run, truths)

        pushed = {camera.name: clips[camera.name] for camera in CAMERAS if camera.pushed}
        run = run_live(config, pushed, seconds, screen.begin, look)
        screen.end_live()

        screen.begin("loading the model")
        from actors.cli.demo.record import make_report, measure, windows_to_measure

        measuring, total = "measuring: full and incremental, window by window", windows_to_measure(config, clips)
        measured = measure(
            config, clips, truths, lambda: screen.show(measuring, next(measured_windows), total, key=measuring)
        )
        command = f"sightline demo --model {shlex.quote(model)} --seconds {seconds:g} --out {shlex.quote(str(out))}"
        return make_report(config, run, measured, truths, command)


def _open(page: Path) -> None:
    import webbrowser

    if sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(page.resolve().as_uri())
