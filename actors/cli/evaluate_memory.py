"""``sightline eval memory``: accuracy of questions about the past under each memory policy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actors.cli.options import AnchorInterval, Device, Dtype, Fps, Jobs, Json, Model, OutFolder, Stride, Window
from actors.cli.output import Progress
from cluster.errors import ConfigError
from cluster.models.settings import FILE

if TYPE_CHECKING:
    from cluster.lab.evaluation.datasets import SkippedVideo
    from cluster.lab.evaluation.memory.questions import Footage
    from cluster.lab.evaluation.memory.run import MemoryResults
    from cluster.lab.scenes.vocabulary import Split
    from cluster.models.base import VisionLanguageModel

# Scenes made by default: number, length, and questions of each kind per scene.
QUICK_SCENES, QUICK_SECONDS, QUICK_PER_KIND = 3, 180.0, 8
SCENES, SECONDS, PER_KIND = 4, 3600.0, 24
# Mean pause between periods of activity, shorter in short scenes so that each has some.
QUIET_S, QUIET_SHARE, LEAST_QUIET_S = 30.0, 1 / 8, 8.0
# Share of the periods of activity that are an event.
EVENT_SHARE = 1 / 3


def memory(
    scenes: Annotated[int | None, typer.Option("--scenes", "-n", metavar="N", min=1, help="Scenes to make.")] = None,
    seconds: Annotated[
        float | None, typer.Option(metavar="S", min=1.0, help="Length of each scene. Default: 3600.")
    ] = None,
    per_kind: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Maximum questions per kind and scene. Default: 24.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="Seed of the scenes to make.")] = 0,
    dataset: Annotated[Path | None, typer.Option(metavar="DIR", help="Videos with questions, see --layout.")] = None,
    layout: Annotated[str, typer.Option(help="Directory layout of --dataset: mlvu, videomme or rvs.")] = "mlvu",
    model: Model = "demo",
    settings: Annotated[str, typer.Option(help="What to compare: basic, quick or standard.")] = "quick",
    quick: Annotated[bool, typer.Option("--quick", help="Few, short scenes: under five minutes.")] = False,
    window: Window = None,
    stride: Stride = None,
    fps: Fps = None,
    anchor_interval: AnchorInterval = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    jobs: Jobs = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Only calibrate the model's yes/no answers about past events, on validation scenes with the basic "
            "settings, and write the result to its folder.",
        ),
    ] = False,
    json: Json = None,
    out: OutFolder = Path("out/memory"),
) -> None:
    """Measure accuracy about the past with every compressor, organiser and retriever, against a memory of everything.

    Each clip's windows are computed once, and every setting gets the same KV. To resume an interrupted run, repeat it
    with the same --out.

    $ sightline eval memory --quick

    $ sightline eval memory --scenes 4 --seconds 3600 --settings standard --json out/memory.json

    $ sightline eval memory --scenes 14 --seconds 300 --model out/train/model --calibrate

    $ sightline eval memory --dataset MLVU --layout mlvu --model Qwen/Qwen2.5-VL-7B-Instruct --device cuda
    """
    from actors.cli.evaluate import _check_run, _default_jobs, _latency_text, _window_text, finish, window_shape

    made = {"--scenes": scenes, "--seconds": seconds, "--per-kind": per_kind, "--calibrate": calibrate or None}
    given = [name for name, value in made.items() if value is not None]
    if dataset is not None and given:
        raise ConfigError(f"{given[0]} is for generated scenes; give it or --dataset, not both")
    if calibrate and not Path(model, FILE).is_file():
        raise ConfigError(f"--calibrate writes to a model's folder, but there is no {Path(model, FILE)}")
    _check_run(model, out, json)
    from cluster.lab.evaluation.memory.report import make_page, make_report, tables
    from cluster.lab.evaluation.memory.run import evaluate_memory
    from cluster.lab.evaluation.memory.settings import memory_grid
    from cluster.lab.evaluation.work import ModelSpec
    from cluster.lab.report.page import Table

    compared = memory_grid("basic" if calibrate else settings)
    spec = ModelSpec(model, device, dtype)
    loaded = spec.load()
    shape = window_shape(loaded.settings, "scenes", window, stride, fps, anchor_interval)
    workers = jobs or _default_jobs(device)
    skipped: tuple[SkippedVideo, ...] = ()
    if dataset is None:
        count, length = scenes or (QUICK_SCENES if quick else SCENES), seconds or (QUICK_SECONDS if quick else SECONDS)
        asked = per_kind or (QUICK_PER_KIND if quick else PER_KIND)
        split: Split = "validation" if calibrate else "test"
        footage = _made(out / "footage", split, count, length, seed, asked, workers)
        origin = f"{count} scenes of {length:g} s"
    else:
        from cluster.lab.evaluation.memory.datasets import load_question_dataset

        read = load_question_dataset(dataset, layout)
        footage, skipped = list(read.videos), read.skipped
        origin = f"{len(footage)} of layout {layout}"
    with Progress(f"evaluating {len(footage)} clips with {len(compared)} settings", 1) as bar:
        used = loaded if workers == 1 else spec
        found = evaluate_memory(footage, used, compared, shape, out, jobs=workers, on_progress=bar.count)
    if calibrate:
        _calibrate(found, Path(model), loaded)
        return
    facts = {
        "model": model,
        "footage": f"{origin}, {sum(len(clip.questions) for clip in found.footage)} questions",
        "window": _window_text(shape),
        "latency": _latency_text(workers),
    }
    report = make_report("Memory", found, loaded, facts=facts, skipped=skipped)
    headline = Table("", ("figure", "value"), [(name, f"{value:.3f}") for name, value in report.headline.items()])
    finish(report, make_page(report), [*tables(report), headline], out, "memory", json)


def _made(folder: Path, split: Split, count: int, seconds: float, seed: int, per_kind: int, jobs: int) -> list[Footage]:
    """Make long scenes, or reuse them."""
    from cluster.lab.evaluation.memory.long_scene import LongScene
    from cluster.lab.evaluation.memory.questions import Footage, generate_questions
    from cluster.lab.scenes.encode import encode_missing_clips

    quiet_s = min(QUIET_S, max(LEAST_QUIET_S, seconds * QUIET_SHARE))
    long = [LongScene(seconds, seed + number, quiet_s, EVENT_SHARE, split=split) for number in range(count)]
    questions = [tuple(generate_questions(scene, per_kind=per_kind)) for scene in long]
    clips = [scene.clip(folder) for scene in long]
    with Progress("making scenes", count) as bar:
        encode_missing_clips(clips, folder, jobs=jobs, on_clip=bar.add_file)
    return [Footage(clip.path.stem, clip.path, asked) for clip, asked in zip(clips, questions, strict=True)]


def _calibrate(found: MemoryResults, model: Path, loaded: VisionLanguageModel) -> None:
    from actors.cli.output import console
    from cluster.lab.evaluation.calibration import fit_answers
    from cluster.models.settings import write_settings

    temperature, bias = fit_answers(found, loaded.settings)
    write_settings(model, {"answer_temperature": round(temperature, 5), "answer_bias": round(bias, 5)})
    console().print(f"answers: temperature {temperature:.3f}, bias {bias:.3f}; written to {model}", markup=False)
