"""Check a checkpoint on this machine: requirements first, then logits, reuse, answers and speed."""

import json
import math
import statistics
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from cluster.codec.processor import CodecOptions
from cluster.engine.native.engine import NativeEngine
from cluster.errors import ConfigError, SourceError
from cluster.lab.bench.frames import prune_clip, read_clip
from cluster.lab.bench.harness import machine
from cluster.lab.check.clip import COMPARED, CheckClip, check_clip, draw_clip
from cluster.lab.check.logits import LogitPair, against_fresh, against_library
from cluster.lab.check.requirements import check_files, check_memory, checkpoint_folder, pool_bytes
from cluster.lab.report.compare import compare
from cluster.lab.report.records import ComparedWindow, Cost
from cluster.models.base import VisionLanguageModel
from cluster.models.loading import find_device, load_model, load_shape, loaded_dtype
from cluster.types import MICROSECONDS, FrameSample

LIMITS = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1, "float8": 3e-1}
"""Limits of :attr:`LogitPair.relative` for logits computed in a different order of operations."""
REUSE_LIMIT = 0.5
"""The same for windows that reuse KV computed with frames that have left, an approximation: 0.05 for the bundled model
and up to 0.3 for random ones (28 layers)."""
REUSE = "anchors"
SCORE_LIMIT = 0.2
"""Limit of the mean score difference between pruned and full windows."""
FLIP, LOST_SHARE = 0.2, 0.2
"""An answer is lost if right in full and wrong pruned, with its score moved by more than ``FLIP``; at most
``LOST_SHARE`` of those right in full may be lost."""
PRUNER = "replenish"
GROWING, SLID = 2, 2
"""Windows compared with transformers, and with windows computed from scratch."""
STEPS = 2 + GROWING + 2 * SLID + 1 + COMPARED

Progress = Callable[[str, int], None]
"""Called with the next step's title and the number of finished steps, out of ``STEPS``."""


Verdict = Literal["right", "wrong", "measured"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One comparison. ``sentence``: result and limit; ``error``: traceback if it failed."""

    name: str
    verdict: Verdict
    sentence: str
    figures: dict[str, float]
    error: str = ""


@dataclass(frozen=True, slots=True)
class AskedWindow:
    """One question about one window: scores and answers in full and pruned, and the true answer (``None``: undecidable
    or unknown)."""

    start_s: float
    end_s: float
    question: str
    truth: bool | None
    full_score: float
    pruned_score: float
    full: bool
    pruned: bool


@dataclass(frozen=True, slots=True)
class CheckReport:
    """``config``: the checkpoint's ``config.json``, empty for a preset; ``machine``: as in benchmark results."""

    model: str
    family: str
    parameters: int
    random_weights: bool
    device: str
    dtype: str
    clip: str
    window_s: float
    stride_s: float
    stages: tuple[Stage, ...]
    answers: tuple[AskedWindow, ...]
    config: dict[str, Any]
    machine: dict[str, Any]

    @property
    def wrong(self) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if stage.verdict == "wrong")

    def as_json(self) -> dict[str, Any]:
        """The report as JSON, verdict first."""
        return {"verdict": "wrong" if self.wrong else "right", **asdict(self)}


@dataclass(frozen=True, slots=True)
class Frames:
    """The clip's frames, unpruned and pruned."""

    clip: CheckClip
    whole: Sequence[FrameSample]
    pruned: Sequence[FrameSample]


def run_check(
    name: str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    clip: Path | None = None,
    on_step: Progress = lambda *_: None,
) -> CheckReport:
    """Check a model; every stage runs even if an earlier one fails.

    Args:
        name: a checkpoint's folder, a bundled model, a preset, or a locally cached hub id.
        dtype: as in ``model.dtype``.
        clip: a video instead of the bundled one.

    Raises:
        ConfigError: invalid model, device, dtype or clip, raised before weights are loaded.
    """
    folder = checkpoint_folder(name)
    if folder is not None:
        check_files(folder)
    where = find_device(device)
    kind = loaded_dtype(dtype, where)
    place = str(folder or name)
    shape = load_shape(place)
    with tempfile.TemporaryDirectory() as directory:
        on_step("rendering the clip" if clip is None else "reading the clip", 0)
        frames = _frames(check_clip(clip or draw_clip(Path(directory)), shape.settings), shape)
    tokens = _window_tokens(shape, frames)
    check_memory(shape, where, kind, tokens)
    on_step("loading the model", 1)
    model = load_model(place, device=device, dtype=dtype)
    stages, answers = _measure(model, frames, dtype, pool_bytes(shape, kind, tokens), on_step)
    return CheckReport(
        model=name,
        family=model.family,
        parameters=sum(parameter.numel() for parameter in shape.model.parameters()),
        random_weights=model.random_weights,
        device=device,
        dtype=dtype,
        clip="bundled" if clip is None else clip.name,
        window_s=frames.clip.spec.window_s,
        stride_s=frames.clip.spec.stride_s,
        stages=tuple(stages),
        answers=tuple(answers),
        config={} if folder is None else json.loads((folder / "config.json").read_text(encoding="utf-8")),
        machine=machine(),
    )


def _frames(clip: CheckClip, shape: VisionLanguageModel) -> Frames:
    options, seconds = CodecOptions(fps=clip.fps, anchor_interval_s=clip.anchor_interval_s), clip.seconds
    try:
        sampled = read_clip(clip.path, shape.geometry, options=options, at_least=seconds, at_most=seconds)
    except SourceError as error:
        raise ConfigError(f"the clip cannot be read: {error}") from None
    whole, pruned = (prune_clip(sampled, clip.spec.stream, policy).samples for policy in ("none", PRUNER))
    return Frames(clip, whole, pruned)


def _window_tokens(shape: VisionLanguageModel, frames: Frames) -> int:
    """Tokens of a window with nothing pruned."""
    grid = frames.whole[0].grid
    count = math.ceil(frames.clip.spec.window_s * frames.clip.fps / shape.geometry.temporal)
    return count * (grid.tokens + shape.frame_text_tokens(grid))


def _measure(
    model: VisionLanguageModel, frames: Frames, dtype: str, kv_bytes: int, on_step: Progress
) -> tuple[list[Stage], list[AskedWindow]]:
    spec, limit, done = frames.clip.spec, LIMITS[dtype], 2
    growing = replace(spec, stride_s=spec.window_s / GROWING)
    end = frames.pruned[0].pts + round((spec.window_s + SLID * spec.stride_s) * MICROSECONDS)
    start = [sample for sample in frames.pruned if sample.pts < end]
    windows: list[ComparedWindow] = []

    def step(what: str) -> None:
        nonlocal done
        on_step(what, done)
        done += 1

    def slid(refresh: str) -> Iterator[LogitPair]:
        pairs = against_fresh(model, replace(spec, refresh=refresh), start, kv_bytes)
        return _tracked(pairs, "sliding windows, against windows computed from scratch", step)

    def pruned() -> Stage:
        what = "pruned windows, against full ones"
        step(what)
        engine = NativeEngine(model, kv_bytes=kv_bytes)
        windows.extend(compare(engine, spec, frames.pruned, frames.whole, lambda: step(what)))
        return _pruned_stage(windows)

    full = _tracked(against_library(model, growing, frames.whole, kv_bytes), "windows, against transformers", step)
    logits = (
        ("logits", "full windows and transformers' own forward pass", full, limit),
        ("refresh", "refreshed sliding windows and windows computed from scratch", slid("all"), limit),
        ("reuse", "windows with reuse and windows without", slid(REUSE), max(limit, REUSE_LIMIT)),
    )
    stages = [_run_stage(compared[0], partial(_logit_stage, *compared)) for compared in logits]
    stages.append(_run_stage("pruned", pruned))
    asked = _asked_windows(frames.clip, windows)
    if windows:
        stages += [_answers_stage(asked, model.random_weights), _speed_stage(windows)]
    return stages, asked


def _tracked(pairs: Iterator[LogitPair], what: str, step: Callable[[str], None]) -> Iterator[LogitPair]:
    """Yield the pairs, reporting a step before each is computed."""
    step(what)
    for number, pair in enumerate(pairs):
        if number:
            step(what)
        yield pair


def _run_stage(name: str, measure: Callable[[], Stage]) -> Stage:
    """Run a stage; an exception makes it wrong without stopping the others."""
    try:
        return measure()
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        return Stage(name, "wrong", f"failed: {type(error).__name__}: {reason}", {}, traceback.format_exc())


def _logit_stage(name: str, what: str, pairs: Iterator[LogitPair], limit: float) -> Stage:
    found = [(pair.relative, pair.largest) for pair in pairs]
    # NaN would pass through max and comparisons unnoticed.
    if not found:
        return Stage(name, "wrong", f"{what}: nothing to compare", {})
    if not all(math.isfinite(number) for pair in found for number in pair):
        return Stage(name, "wrong", f"{what}: logits are not finite", {})
    relative, largest = (max(numbers) for numbers in zip(*found, strict=True))
    right = relative <= limit
    sentence = f"{what} {'agree' if right else 'differ'}: {relative:.1e} of the logits' spread (at most {limit:g})"
    return Stage(name, "right" if right else "wrong", sentence, {"relative": relative, "largest": largest})


def _pruned_stage(windows: Sequence[ComparedWindow]) -> Stage:
    """Compares scores regardless of their meaning, so that random weights can be judged, too."""
    moved = [abs(full - each.our_scores[name]) for each in windows for name, full in each.full_scores.items()]
    mean, largest = statistics.fmean(moved), max(moved)
    right = mean <= SCORE_LIMIT
    sentence = (
        f"scores of pruned and full windows {'agree' if right else 'differ'}: mean difference {mean:.3f} "
        f"(at most {SCORE_LIMIT:g}), largest {largest:.3f}"
    )
    return Stage("pruned", "right" if right else "wrong", sentence, {"mean": mean, "largest": largest})


def _answers_stage(asked: Sequence[AskedWindow], random_weights: bool) -> Stage:
    """Counts correct answers; wrong only if pruning loses too many of those right in full."""
    known = [each for each in asked if each.truth is not None]
    if not known or random_weights:
        why = "answers of random weights are meaningless" if random_weights else "no known answers for this clip"
        return Stage("answers", "measured", why, {})
    full = [each for each in known if each.full == each.truth]
    pruned = sum(each.pruned == each.truth for each in known)
    lost = sum(each.pruned != each.truth and abs(each.full_score - each.pruned_score) > FLIP for each in full)
    wrong = lost > LOST_SHARE * len(full)
    sentence = f"{len(full)} of {len(known)} right in full, {pruned} pruned"
    if lost:
        sentence += f"; {lost} lost by pruning (at most {int(LOST_SHARE * len(full))})"
    figures: dict[str, float] = {"known": len(known), "right_full": len(full), "right_pruned": pruned, "lost": lost}
    return Stage("answers", "wrong" if wrong else "right", sentence, figures)


def _speed_stage(windows: Sequence[ComparedWindow]) -> Stage:
    full, ours = (sum(costs, Cost()) for costs in zip(*((w.full, w.ours) for w in windows), strict=True))
    count = len(windows)
    figures = {
        "full_s": full.seconds / count,
        "pruned_s": ours.seconds / count,
        "speedup": full.seconds / ours.seconds,
        "tokens_full": full.tokens / count,
        "tokens_computed": ours.tokens / count,
    }
    sentence = "{full_s:.2f} s per full window, {pruned_s:.2f} s per pruned one with reuse: {speedup:.1f} times as fast"
    return Stage("speed", "measured", sentence.format(**figures), figures)


def _asked_windows(clip: CheckClip, windows: Sequence[ComparedWindow]) -> list[AskedWindow]:
    return [
        AskedWindow(
            start_s=window.start_s,
            end_s=window.end_s,
            question=question.text,
            truth=clip.answer(question.id, window.start_s, window.end_s),
            full_score=window.full_scores[question.id],
            pruned_score=window.our_scores[question.id],
            full=window.full_scores[question.id] >= question.threshold,
            pruned=window.our_scores[question.id] >= question.threshold,
        )
        for window in windows
        for question in clip.spec.questions
    ]
