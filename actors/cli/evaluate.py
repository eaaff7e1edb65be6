"""``sightline eval``: accuracy of answers, and its cost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actors.cli.evaluate_memory import memory
from actors.cli.options import AnchorInterval, Device, Dtype, Fps, Jobs, Json, Model, OutFolder, Stride, Window
from actors.cli.output import Progress, check_json_target, console, print_json
from cluster.errors import ConfigError
from cluster.files import check_writable, json_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.lab.evaluation.datasets import Dataset
    from cluster.lab.evaluation.memory.report import MemoryReport
    from cluster.lab.evaluation.report import EvaluationReport
    from cluster.lab.evaluation.results import Results, Thresholds
    from cluster.lab.evaluation.settings import Setting, WindowShape
    from cluster.lab.evaluation.work import ModelSpec
    from cluster.lab.report.page import Page, Table
    from cluster.models.base import VisionLanguageModel
    from cluster.models.settings import ModelSettings


def ladder(
    results: Annotated[Path, typer.Argument(metavar="FILE", help="Results of `sightline eval accuracy --json`.")],
    model: Annotated[str, typer.Option(metavar="NAME", help="demo, or the folder of the checkpoint.")] = "demo",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: ladder.json in the model's folder.")
    ] = None,
) -> None:
    """Write the quality ladder of a model: its rungs, each with its measured cost in F1.

    $ sightline eval accuracy --settings ladder --json out/ladder.json

    $ sightline eval ladder out/ladder.json
    """
    from cluster.control.ladder import FILE
    from cluster.lab.evaluation.ladder import build_ladder, read_accuracy_results
    from cluster.lab.report.page import Table
    from cluster.models.catalog import locate

    place = out or Path(locate(model)) / FILE
    if not place.parent.is_dir():
        raise ConfigError(f"there is no folder {place.parent}; name the checkpoint's folder, or give --out FILE")
    found = build_ladder(read_accuracy_results(results))
    found.save(place)
    screen = console()
    heads, rows = ("rung", "prune", "refresh", "stride", "fps", "kept", "F1 kept", "source"), []
    for rung in found.rungs:
        refresh = "own" if rung.refresh_budget is None else f"{rung.refresh_budget:g}"
        factors = [f"x{value:g}" for value in (rung.prune, rung.stride, rung.fps, rung.kept)]
        numbers = [factors[0], refresh, *factors[1:], f"{rung.f1:.3f}"]
        rows.append([rung.name, *(["-"] * 5 + ["0"] if rung.shed else numbers), rung.source])
    Table("", heads, rows).show(screen)
    screen.print(f"written: {place}", markup=False)


app = typer.Typer(no_args_is_help=True, help="Measure accuracy on labelled footage.")

Checkpoint = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a checkpoint with a sightline.json.")]
ValidationScenes = Annotated[Path, typer.Option(metavar="DIR", help="Validation scenes, never the test scenes.")]
WorkFolder = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for resumable work.")]

# Scenes made by default: two per event kind and two without an event; in full runs five times as many.
QUICK_SCENES, SCENES = 14, 70
MOST_JOBS = 8


@app.command("accuracy")
def accuracy(
    scenes: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Output of `sightline scenes make`. Default: make test scenes.")
    ] = None,
    dataset: Annotated[Path | None, typer.Option(metavar="DIR", help="Your own footage, see --layout.")] = None,
    layout: Annotated[str, typer.Option(help="Directory layout of --dataset: ucf-crime or scenes.")] = "ucf-crime",
    validation: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Scenes on which to choose settings and missing thresholds.")
    ] = None,
    count: Annotated[int | None, typer.Option("--count", "-n", metavar="N", min=1, help="Scenes to make.")] = None,
    seed: Annotated[int, typer.Option(metavar="S", help="Seed of the scenes to make.")] = 0,
    model: Model = "demo",
    settings: Annotated[
        str | None, typer.Option(help="What to compare: basic, quick, systems, sweeps, standard, full or ladder.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few scenes, quick settings: under five minutes.")] = False,
    window: Window = None,
    stride: Stride = None,
    fps: Fps = None,
    anchor_interval: AnchorInterval = None,
    consecutive: Annotated[
        int, typer.Option(metavar="N", min=1, help="Consecutive positive windows that make a video positive.")
    ] = 2,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    jobs: Jobs = None,
    json: Json = None,
    out: OutFolder = Path("out/accuracy"),
) -> None:
    """Measure precision, recall, F1 and cost of every pruning and refresh policy against full computation.

    Every clip runs through the live code path: demuxer, decoder, pruner, engine. To resume an interrupted run, repeat
    it with the same --out.

    $ sightline eval accuracy --quick

    $ sightline eval accuracy --scenes out/test --validation out/val --settings standard --json out/accuracy.json

    $ sightline eval accuracy --dataset UCF_Crimes --layout ucf-crime --model Qwen/Qwen2.5-VL-7B-Instruct --device cuda
    """
    if scenes is not None and dataset is not None:
        raise ConfigError("give --scenes or --dataset, not both")
    _check_run(model, out, json)
    from cluster.lab.evaluation.datasets import check_validation
    from cluster.lab.evaluation.page import figure_table, make_page, setting_table
    from cluster.lab.evaluation.report import check_questions, make_report, select_thresholds
    from cluster.lab.evaluation.settings import make_grid
    from cluster.lab.evaluation.work import ModelSpec

    spec = ModelSpec(model, device, dtype)
    loaded = spec.load()
    layout = layout if dataset else "scenes"
    shape = window_shape(loaded.settings, layout, window, stride, fps, anchor_interval)
    compared = make_grid(settings or ("quick" if quick else "standard"), shape)
    if dataset is None:
        from cluster.lab.scenes.questions import standing_question
        from cluster.lab.scenes.vocabulary import EVENT_KINDS

        check_questions(loaded, model, {kind: standing_question(kind) for kind in EVENT_KINDS})
    workers = jobs or _default_jobs(device)
    if dataset is None and scenes is None:
        scenes = _made(out, count or (QUICK_SCENES if quick else SCENES), seed, workers)
    found = _dataset(dataset or scenes or out, layout, shape, consecutive)
    work = out / "work.jsonl"
    chosen_on: Results | None = None
    if validation is not None:
        held = _dataset(validation, layout, shape, consecutive)
        check_validation(held, found.videos)
        chosen_on = _evaluated("validation", held, spec, loaded, compared, workers, work, consecutive)
    results = _evaluated("evaluating", found, spec, loaded, compared, workers, work, consecutive)
    thresholds, origin = select_thresholds(loaded, results, chosen_on)
    facts = _facts(model, found, results, shape, thresholds, origin, workers, chosen_on)
    report = make_report("Accuracy", results, thresholds, validation=chosen_on, skipped=found.skipped, facts=facts)
    finish(report, make_page(report), [setting_table(report), figure_table(report)], out, "accuracy", json)


@app.command("calibrate")
def calibrate(
    model: Checkpoint,
    scenes: ValidationScenes,
    device: Device = "cpu",
    jobs: Jobs = None,
    out: WorkFolder = Path("out/calibrate"),
) -> None:
    """Calibrate a model's scores and threshold on validation scenes with full computation; written to its folder.

    $ sightline eval calibrate out/train/model --scenes out/validation
    """
    from cluster.lab.evaluation.calibration import fit_calibration, write_calibration
    from cluster.lab.evaluation.settings import full_computation

    spec, loaded, shape, found = _validation(model, scenes, device, out)
    workers = jobs or _default_jobs(device)
    work = out / "work.jsonl"
    results = _evaluated("calibrating", found, spec, loaded, [full_computation(shape)], workers, work, 2)
    fitted = fit_calibration(results, loaded.settings)
    write_calibration(model, fitted)
    console().print(
        f"temperature {fitted.score_temperature:.3f}, bias {fitted.score_bias:.3f}, threshold {fitted.threshold:.3f}: "
        f"F1 {fitted.f1:.3f} on {len(results.videos)} validation videos; written to {model}",
        markup=False,
    )


@app.command("profile")
def profile(
    model: Checkpoint,
    scenes: ValidationScenes,
    device: Device = "cpu",
    out: WorkFolder = Path("out/profile"),
) -> None:
    """Measure the share of reused tokens that each layer must recompute (VLCache's profile); written to the model's
    folder.

    $ sightline eval profile out/train/model --scenes out/validation
    """
    from cluster.lab.evaluation.layer_profile import layer_profile, measure_errors
    from cluster.models.settings import write_settings

    _, loaded, shape, found = _validation(model, scenes, device, out)
    with Progress(f"profiling {len(found.videos)} videos", 1) as bar:
        work = out / "work.jsonl"
        errors = measure_errors(loaded, found.videos, found.questions, shape, work=work, on_progress=bar.count)
    shares = [round(share, 4) for share in layer_profile(errors)]
    write_settings(model, {"layer_profile": shares})
    told = ", ".join(f"{error:.3f}" for error in errors)
    text = f"logit error, refreshed up to each depth: {told}; shares per layer {shares}, written to {model}"
    console().print(text, markup=False)


app.command("memory")(memory)
app.command("ladder")(ladder)


def _validation(
    model: Path, scenes: Path, device: str, out: Path
) -> tuple[ModelSpec, VisionLanguageModel, WindowShape, Dataset]:
    """A checkpoint, its window shape, and the validation scenes to fit it on."""
    from cluster.lab.evaluation.datasets import check_validation
    from cluster.lab.evaluation.report import check_questions
    from cluster.lab.evaluation.work import ModelSpec
    from cluster.models.catalog import check_model
    from cluster.models.settings import ModelSettings

    check_model(str(model))
    check_writable(out)
    shape = window_shape(ModelSettings.load(model))
    found = _dataset(scenes, "scenes", shape, 2)
    check_validation(found)
    spec = ModelSpec(str(model), device, "float32")
    loaded = spec.load()
    check_questions(loaded, str(model), found.questions)
    return spec, loaded, shape, found


def window_shape(
    known: ModelSettings,
    layout: str = "scenes",
    window: float | None = None,
    stride: float | None = None,
    fps: float | None = None,
    anchor_interval: float | None = None,
) -> WindowShape:
    """The requested window, else the model's training window, else CodecSight's for footage and the demo's for scenes.
    The default stride is a fifth of the window."""
    from cluster.lab.evaluation.settings import WindowShape

    if 0 in (window, stride, fps, anchor_interval):
        raise ConfigError("window, stride, samples per second and anchor interval must be above 0")
    default = WindowShape()
    length = window or known.window_s or (default.window_s if layout == "scenes" else 40.0)
    step = stride or (known.stride_s if window is None else None) or length / 5
    shape = WindowShape(
        length,
        step,
        fps or known.fps or default.fps,
        anchor_interval or known.anchor_interval_s or default.anchor_interval_s,
    )
    shape.check()
    return shape


def _check_run(model: str, out: Path, json: str | None) -> None:
    """Raises ``ConfigError`` for an unknown model or a place that cannot be written."""
    from cluster.models.catalog import check_model

    check_writable(out)
    check_json_target(json)
    check_model(model)
    if "/" not in model or Path(model).is_dir():
        # Nothing is downloaded, and Hugging Face's progress bars would interleave with ours.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _default_jobs(device: str) -> int:
    return min(len(os.sched_getaffinity(0)), MOST_JOBS) if device == "cpu" else 1


def _made(out: Path, count: int, seed: int, jobs: int) -> Path:
    """Make test scenes with each event kind in turn, or reuse them. One folder per seed and count: every scene in a
    folder is evaluated."""
    from cluster.lab.scenes.dataset import SceneSet, make_scenes
    from cluster.lab.scenes.vocabulary import EVENT_KINDS

    folder = out / f"scenes-{seed}-{count}"
    wanted = SceneSet("test", count, seed, events=(*EVENT_KINDS, "none"))
    with Progress("making scenes", count) as bar:
        make_scenes(folder, wanted, jobs=jobs, on_clip=bar.add_file)
    return folder


def _dataset(folder: Path, layout: str, shape: WindowShape, consecutive: int) -> Dataset:
    from cluster.lab.evaluation.datasets import load_dataset

    needed = shape.window_s + (consecutive - 1) * shape.stride_s
    # A container's duration may be a picture off.
    return load_dataset(folder, layout, min_seconds=needed - 0.5)


def _evaluated(
    what: str,
    found: Dataset,
    spec: ModelSpec,
    loaded: VisionLanguageModel,
    settings: list[Setting],
    jobs: int,
    work: Path,
    consecutive: int,
) -> Results:
    from cluster.lab.evaluation.run import evaluate

    videos = len(found.videos)
    with Progress(f"{what} {videos} videos with {len({each.key for each in settings})} settings", 1) as bar:
        return evaluate(
            found.videos,
            loaded if jobs == 1 else spec,
            settings,
            found.questions,
            consecutive=consecutive,
            jobs=jobs,
            work=work,
            on_progress=bar.count,
        )


def _facts(
    model: str,
    found: Dataset,
    results: Results,
    shape: WindowShape,
    thresholds: Thresholds,
    origin: str,
    jobs: int,
    validation: Results | None,
) -> dict[str, str]:
    full = thresholds.of(results.full)
    values = sorted(set(full.values()))
    told = f"{values[0]:.3f}" if len(values) == 1 else ", ".join(f"{k} {v:.3f}" for k, v in full.items())
    events = int((results.truth & results.judged).sum())
    return {
        "model": model,
        "videos": f"{len(results.videos)} of layout {found.layout}, {events} events of {len(results.kinds)} kinds",
        "window": _window_text(shape),
        "decision": f"a video is positive after {results.consecutive} positive windows in a row",
        "threshold": f"{told} for full computation ({origin})",
        "chosen on": "these videos" if validation is None else f"{len(validation.videos)} validation videos",
        "latency": _latency_text(jobs),
    }


def _window_text(shape: WindowShape) -> str:
    rate = f"{shape.fps:g} samples a second, anchors every {shape.anchor_interval_s:g} s"
    return f"{shape.window_s:g} s every {shape.stride_s:g} s, {rate}"


def _latency_text(jobs: int) -> str:
    processes = f"{jobs} process{'es' if jobs > 1 else ''}"
    return f"measured with {processes} in parallel on this machine; reused results keep those of their run"


def finish(
    report: EvaluationReport | MemoryReport, page: Page, tables: Iterable[Table], out: Path, stem: str, json: str | None
) -> None:
    """Write the report to ``out``, and its JSON also to ``--json``; then print the ``tables``, notes and paths, to
    standard error if the JSON goes to standard output."""
    from cluster.lab.report.page import write_page

    body = report.as_json()
    written = write_page(page, out, stem, json_text(body))
    print_json(json, body)
    screen = console(stderr=json == "-")
    for table in tables:
        table.show(screen)
    notes = [f"note: {note}" for note in report.notes]
    skipped = [f"skipped {each.path.name}: {each.reason}" for each in report.skipped]
    screen.print("\n".join([*notes, *skipped, f"written: {written}"]), markup=False)
