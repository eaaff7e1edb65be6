"""VLCache's profile: how much of a window's overlap each layer has to compute again, measured on validation videos.

For every depth ``d`` whole frames are refreshed in the layers below ``d`` and reused above. ``e_d`` is how far answers
are from those of full computation, and ``e_d − e_{d+1}`` what refreshing layer ``d`` brings. Layers get shares in
proportion to that, but no layer more than one before it: what a layer does not compute, none above it can.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from cluster.engine.native.engine import NativeEngine
from cluster.errors import ModelError, SourceError
from cluster.lab.evaluation.calibration import isotonic, logit
from cluster.lab.evaluation.datasets import LabelledVideo, SkippedVideo
from cluster.lab.evaluation.metrics import Floats
from cluster.lab.evaluation.replay import replay
from cluster.lab.evaluation.results import VideoRun
from cluster.lab.evaluation.run import CODE
from cluster.lab.evaluation.settings import Setting, WindowShape
from cluster.lab.evaluation.work import (
    Progress,
    ResultCache,
    all_skipped_error,
    code_digest,
    digest,
    model_digest,
    video_digest,
)


def measure_errors(
    engine: NativeEngine,
    videos: Sequence[LabelledVideo],
    questions: Mapping[str, str],
    shape: WindowShape,
    *,
    work: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Floats:
    """``e_d`` for depths ``0..L``: root mean square of the answers' difference in logits.

    Videos that cannot be read are passed over. ``questions``: kind of event -> text; ``work``: JSON Lines file of
    finished passes, read at the start and appended to.

    Raises:
        SightlineError: no video can be read, or the work file cannot be written.
    """
    settings, layers = engine.model.settings, len(engine.model.layers)
    steps = [Setting("refreshed", "none", "first_percent", depth / layers, shape=shape) for depth in range(layers)]
    whole = Setting("whole", "none", "all", shape=shape)
    squares: list[Floats] = []
    skipped: dict[str, SkippedVideo] = {}
    total = len(videos) * (layers + 1)
    with ResultCache(work) as file:
        code = digest(model_digest(engine, questions), code_digest(CODE), "layer profile")
        try:
            for number, video in enumerate(videos):
                scores: list[Floats] = []
                for depth, setting in enumerate((*steps, whole)):
                    shares = tuple(float(layer < depth) for layer in range(layers))
                    engine.model.settings = replace(settings, layer_profile=shares if 0 < depth < layers else ())
                    try:
                        key = video_digest(video.path), code, f"{depth} {setting.key}"
                        run = file.get(key, VideoRun.from_json)
                        if run is None:
                            run = replay(engine, video, [setting], questions)[setting.key]
                            file.add(key, run.to_json())
                    except (SourceError, OSError) as error:
                        skipped[video.name] = SkippedVideo(video.path, str(error))
                        break
                    scores.append(np.array([window.scores for window in run.windows]))
                    on_progress(Progress(number * (layers + 1) + depth + 1, total, video.name))
                else:
                    exact = logit(scores[-1])
                    squares.append(np.array([((logit(each) - exact) ** 2).ravel() for each in scores]))
        finally:
            engine.model.settings = settings
    if not any(each.size for each in squares):
        raise all_skipped_error("videos", len(videos), skipped)
    errors: Floats = np.sqrt(np.concatenate(squares, axis=1).mean(axis=1))
    return errors


def layer_profile(errors: Floats) -> tuple[float, ...]:
    """Shares per layer over their mean: what each layer brings, as the nearest sequence that never rises.

    Raises:
        ModelError: refreshing brings nothing.
    """
    brought = np.maximum(errors[:-1] - errors[1:], 0.0)
    if not brought.any():
        raise ModelError("answers with everything reused are those of full computation: there is nothing to measure")
    shares = -isotonic(-brought, np.ones(len(brought)))
    return tuple(float(share) for share in shares / shares.mean())
