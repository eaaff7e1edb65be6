"""Check one checkpoint on one machine: refusals first, then its logits, reuse, answers and speed."""

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
"""Of :attr:`LogitPair.relative`, for logits that were computed in another order."""
REUSE_LIMIT = 0.5
"""The same, of windows that keep KV computed under frames that have left: an approximation, 0.05 in the bundled model
and up to 0.3 in random ones (28 layers)."""
REUSE = "anchors"
SCORE_LIMIT = 0.2
"""Of the mean difference between a pruned window's score and the full one's."""
FLIP, LOST_SHARE = 0.2, 0.2
"""An answer is lost if it was right in full, is wrong pruned, and its score moved by more; and the share of right ones
that may be."""
PRUNER = "replenish"
GROWING, SLID = 2, 2
"""Windows whose logits are compared with transformers', and with windows computed at once."""
STEPS = 2 + GROWING + 2 * SLID + 1 + COMPARED

Progress = Callable[[str, int], None]
"""Called with what is done next, and the number of steps of ``STEPS`` that are done."""


Verdict = Literal["right", "wrong", "measured"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One comparison: ``sentence`` says what was found and the limit; ``error``: traceback where it failed."""

    name: str
    verdict: Verdict
    sentence: str
    figures: dict[str, float]
    error: str = ""


@dataclass(frozen=True, slots=True)
class AskedWindow:
    """One question about one window: score in full and pruned, what is said of either, and what is true (``None``:
    undecidable or unknown)."""

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
    """``config``: the checkpoint's ``config.json``, empty for a preset; ``machine`` as benches print it."""

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
        """All of it, the verdict first."""
        return {"verdict": "wrong" if self.wrong else "right", **asdict(self)}


@dataclass(frozen=True, slots=True)
class Frames:
    """The clip's frames: unpruned, and as our pruner leaves them."""

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
    """Check a model; every stage is measured, whatever the one before it found.

    Args:
        name: a checkpoint's folder, a bundled model, a preset, or a hub id that this machine has.
        dtype: as in ``model.dtype``.
        clip: a video instead of the bundled one.

    Raises:
        ConfigError: the model, device, dtype or clip is refused; no weights were loaded.
    """
    folder = checkpoint_folder(name)
    if folder is not None:
        check_files(folder)
    where = find_device(device)
    kind = loaded_dtype(dtype, where)
    place = str(folder or name)
    shape = load_shape(place)
    with tempfile.TemporaryDirectory() as directory:
        on_step("drawing the clip" if clip is None else "reading the clip", 0)
        frames = _frames(check_clip(clip or draw_clip(Path(directory)), shape.settings), shape)
    tokens = _window_tokens(shape, frames)
    check_memory(shape, where, kind, tokens)
    on_step("loading", 1)
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
        return _each(pairs, "windows that slid, against windows computed at once", step)

    def pruned() -> Stage:
        what = "pruned windows, against full ones"
        step(what)
        engine = NativeEngine(model, kv_bytes=kv_bytes)
        windows.extend(compare(engine, spec, frames.pruned, frames.whole, lambda: step(what)))
        return _pruned_stage(windows)

    full = _each(against_library(model, growing, frames.whole, kv_bytes), "windows, against transformers", step)
    logits = (
        ("logits", "full windows and transformers' own forward", full, limit),
        ("refresh", "windows that slid, refreshed, and windows computed at once", slid("all"), limit),
        ("reuse", "windows with reuse and windows without", slid(REUSE), max(limit, REUSE_LIMIT)),
    )
    stages = [_stage(compared[0], partial(_logit_stage, *compared)) for compared in logits]
    stages.append(_stage("pruned", pruned))
    asked = _asked(frames.clip, windows)
    if windows:
        stages += [_answers_stage(asked, model.random_weights), _speed_stage(windows)]
    return stages, asked


def _each(pairs: Iterator[LogitPair], what: str, step: Callable[[str], None]) -> Iterator[LogitPair]:
    """The pairs, each announced before it is computed."""
    step(what)
    for number, pair in enumerate(pairs):
        if number:
            step(what)
        yield pair


def _stage(name: str, measure: Callable[[], Stage]) -> Stage:
    """A stage's result; one that raises is wrong, and the next ones are measured all the same."""
    try:
        return measure()
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        return Stage(name, "wrong", f"failed: {type(error).__name__}: {reason}", {}, traceback.format_exc())


def _logit_stage(name: str, what: str, pairs: Iterator[LogitPair], limit: float) -> Stage:
    found = [(pair.relative, pair.largest) for pair in pairs]
    # Of a nan, neither max nor a comparison says anything.
    if not found:
        return Stage(name, "wrong", f"{what}: there is nothing to compare", {})
    if not all(math.isfinite(number) for pair in found for number in pair):
        return Stage(name, "wrong", f"{what}: logits are not finite", {})
    relative, largest = (max(numbers) for numbers in zip(*found, strict=True))
    right = relative <= limit
    sentence = f"{what} {'agree' if right else 'differ'}: {relative:.1e} of the logits' spread (at most {limit:g})"
    return Stage(name, "right" if right else "wrong", sentence, {"relative": relative, "largest": largest})


def _pruned_stage(windows: Sequence[ComparedWindow]) -> Stage:
    """Scores alone: what they mean is of no account, so that random weights can be judged too."""
    moved = [abs(full - each.our_scores[name]) for each in windows for name, full in each.full_scores.items()]
    mean, largest = statistics.fmean(moved), max(moved)
    right = mean <= SCORE_LIMIT
    sentence = (
        f"scores of pruned and full windows {'agree' if right else 'differ'}: {mean:.3f} on average, {largest:.3f} at "
        f"most (on average at most {SCORE_LIMIT:g})"
    )
    return Stage("pruned", "right" if right else "wrong", sentence, {"mean": mean, "largest": largest})


def _answers_stage(asked: Sequence[AskedWindow], random_weights: bool) -> Stage:
    """How many answers a person would give too; wrong only where pruning loses those that are right in full."""
    known = [each for each in asked if each.truth is not None]
    if not known or random_weights:
        why = "random weights: answers mean nothing" if random_weights else "nobody knows the answers of this clip"
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
    sentence = "{full_s:.2f} s a full window, {pruned_s:.2f} s a pruned one with reuse: {speedup:.1f} times as fast"
    return Stage("speed", "measured", sentence.format(**figures), figures)


def _asked(clip: CheckClip, windows: Sequence[ComparedWindow]) -> list[AskedWindow]:
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
