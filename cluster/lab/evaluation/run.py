"""Runs an evaluation (videos × settings) in one or several processes, resumable."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from cluster.engine.native.engine import NativeEngine
from cluster.errors import ConfigError, SourceError
from cluster.lab.evaluation.datasets import LabelledVideo, SkippedVideo
from cluster.lab.evaluation.metrics import CONSECUTIVE
from cluster.lab.evaluation.replay import replay
from cluster.lab.evaluation.results import Results, VideoRun
from cluster.lab.evaluation.settings import Setting, full_computation
from cluster.lab.evaluation.work import (
    ModelSpec,
    OnProgress,
    ResultCache,
    WorkerPool,
    all_skipped_error,
    model_digest,
    video_digest,
)
from cluster.models.base import VisionLanguageModel

_SAVED = TypeAdapter(VideoRun)


@dataclass(frozen=True, slots=True)
class _Pass:
    video: LabelledVideo
    digest: str
    settings: tuple[Setting, ...]


def evaluate(
    videos: Sequence[LabelledVideo],
    model: VisionLanguageModel | ModelSpec,
    settings: Sequence[Setting],
    questions: Mapping[str, str],
    *,
    consecutive: int = CONSECUTIVE,
    jobs: int = 1,
    work: Path | None = None,
    on_progress: OnProgress = lambda *_: None,
) -> Results:
    """Run every video under every setting through the live code path.

    Args:
        model: a loaded model, or a spec to load; several processes need a spec.
        settings: full computation is added if missing, in the window shape of the first.
        questions: kind of event -> text, for every kind that is labelled in a video.
        consecutive: positive windows in a row that make a video positive.
        work: JSON Lines file of finished runs, read at the start and appended to.

    Raises:
        ConfigError: no videos, no settings, a kind without a question, or a setting the engine refuses.
        SightlineError: all videos were skipped, or the work file cannot be written.
    """
    settings = _with_full(settings)
    lacking = sorted({kind for video in videos for kind in video.kinds} - set(questions))
    if lacking:
        raise ConfigError(f"there is no question for {', '.join(lacking)}; add one for each kind of event")
    if not videos:
        raise ConfigError("there are no videos to evaluate")
    if len({video.name for video in videos}) < len(videos):
        raise ConfigError("video names must be unique")
    runs: dict[tuple[str, str], VideoRun] = {}
    failed: dict[str, SkippedVideo] = {}
    with ResultCache(work) as file, WorkerPool(model, jobs) as workers:
        code = model_digest(workers.engine, questions)
        passes = _passes(videos, settings, code, file, runs, failed)
        total = sum(len(each.settings) for each in passes) + len(runs)
        done = len(runs)
        on_progress(done, total, "")
        for each, found in workers.do(functools.partial(_run_pass, dict(questions)), passes):
            done += len(each.settings)
            if isinstance(found, str):
                failed.setdefault(each.video.name, SkippedVideo(each.video.path, found))
            else:
                for key, run in found.items():
                    file.add((each.digest, code, key), run)
                    runs[each.video.name, key] = run
            on_progress(done, total, each.video.name)
    return _results(videos, settings, runs, failed, consecutive)


def _with_full(settings: Sequence[Setting]) -> tuple[Setting, ...]:
    if not settings:
        raise ConfigError("there are no settings to evaluate")
    if not any(setting.role == "full" and setting.sweep is None for setting in settings):
        settings = [full_computation(settings[0].shape), *settings]
    return tuple(settings)


def _passes(
    videos: Sequence[LabelledVideo],
    settings: Sequence[Setting],
    model: str,
    file: ResultCache,
    runs: dict[tuple[str, str], VideoRun],
    failed: dict[str, SkippedVideo],
) -> list[_Pass]:
    """Passes that remain to be run, one per video and input; cached results are added to ``runs``."""
    found: list[_Pass] = []
    for video in videos:
        try:
            content = video_digest(video.path)
        except OSError as error:
            failed[video.name] = SkippedVideo(video.path, f"cannot be read: {error.strerror or error}")
            continue
        passes: dict[tuple[float, float, str], dict[str, Setting]] = {}
        for setting in settings:
            run = file.get((content, model, setting.key), _SAVED.validate_python)
            if run is not None and run.kinds == video.kinds:
                runs[video.name, setting.key] = run
            else:
                passes.setdefault(setting.input, {}).setdefault(setting.key, setting)
        found += [_Pass(video, content, tuple(each.values())) for each in passes.values()]
    return found


def _run_pass(questions: Mapping[str, str], engine: NativeEngine, each: _Pass) -> dict[str, VideoRun] | str:
    """Runs of a pass by setting key, or the reason why the video cannot be read."""
    try:
        return replay(engine, each.video, each.settings, questions)
    except SourceError as error:
        return str(error)


def _results(
    videos: Sequence[LabelledVideo],
    settings: tuple[Setting, ...],
    runs: dict[tuple[str, str], VideoRun],
    failed: dict[str, SkippedVideo],
    consecutive: int,
) -> Results:
    kept: list[LabelledVideo] = []
    whole = Results((), settings, runs).full
    for video in videos:
        if video.name in failed:
            continue
        count = len(runs[video.name, whole.key].windows)
        if count < consecutive:
            reason = f"too short: {count} whole windows of {whole.shape.window_s:g} s, {consecutive} are needed"
            failed[video.name] = SkippedVideo(video.path, reason)
        else:
            kept.append(video)
    if not kept:
        raise all_skipped_error("videos", len(videos), failed)
    return Results(tuple(kept), settings, runs, tuple(failed.values()), consecutive)
