"""Grades of answers: by kind, with confidence intervals, and as drop between two settings."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.lab.evaluation.memory.questions import LETTERS, MultipleChoice, Question
from cluster.lab.evaluation.metrics import RESAMPLES, Estimate, Floats, bootstrap_weights, estimate
from cluster.lab.scenes.questions import NUMBERS
from cluster.memory.head_memory import LayerKV

Space = Literal["key", "value", "joint"]


def nearest_distances(full: LayerKV, kept: LayerKV, space: Space) -> Tensor:
    """Distance ``[H, n]`` of every token of ``full`` to the nearest ``kept`` one of its head.

    ``joint``: root of the mean of both squared distances, each normalised by its space's mean squared norm.
    """
    parts = {
        "key": [(full.key, kept.key)],
        "value": [(full.value, kept.value)],
        "joint": [(full.key, kept.key), (full.value, kept.value)],
    }[space]
    squared = full.key.new_zeros((), dtype=torch.float32)
    for all_tokens, held in parts:
        wide, there = all_tokens.float(), held.float()
        apart = torch.cdist(wide, there).square() / wide.square().sum(-1).mean().clamp(min=1e-12)
        squared = squared + apart
    return (squared / len(parts)).amin(-1).sqrt()


def nearest_cosine_distances(full: LayerKV, kept: LayerKV, space: Space) -> Tensor:
    """Cosine distance ``[H, n]`` of every token of ``full`` to the nearest ``kept`` one of its head (CoRDS, 4.6).

    ``joint``: of keys beside values, each of unit length.
    """
    parts = {"key": ("key",), "value": ("value",), "joint": ("key", "value")}[space]
    ours, held = (
        torch.cat([F.normalize(getattr(kv, part).float(), dim=-1) for part in parts], dim=-1) for kv in (full, kept)
    )
    # Rounding may bring a token's distance to itself below 0.
    return (1 - (ours @ held.transpose(1, 2)).amax(-1) / len(parts)).clamp(min=0)


def largest_gap(ours: Tensor, theirs: Tensor, furthest: float) -> float:
    """Largest lead of the distribution function of the distances ``ours`` over that of ``theirs`` at any of 256
    distances from 0 to ``furthest``; 0 where ``ours`` covers less everywhere."""
    at = torch.linspace(0, furthest, 257)[1:]
    below = [torch.searchsorted(each.flatten().sort().values, at, right=True) / each.numel() for each in (ours, theirs)]
    return float((below[0] - below[1]).max())


def coverage_area(distances: Tensor, furthest: float) -> float:
    """Area under the distribution function of ``distances`` from 0 to ``furthest``, as a share: 1 if all are 0."""
    if furthest <= 0:
        return 1.0
    return float((1 - distances.clamp(max=furthest) / furthest).mean())


_WORD = re.compile(r"\w+(?:'\w+)?")
_ARTICLES = frozenset({"a", "an", "the"})
# "B", "(B)", "B.", "B: text"; "A" and "I" are words too ("A man …") and must stand alone.
_LEADING = re.compile(r"^\W*(?:([B-HJ])(?=[\s.):,]|$)|([AI])(?=\s*$|[.):,]))", re.IGNORECASE)
_STATED = re.compile(r"\b(?:answer|option)(?:\s+is)?\s*:?\s*\(?(?:([B-HJ])\b|([AI])\b(?!\s+\w))", re.IGNORECASE)
# From this number of videos on, videos are resampled, as questions about one video are not independent.
_ENOUGH_VIDEOS = 10


@dataclass(frozen=True, slots=True)
class GradedAnswer:
    """Grade of one answer: ``video``, ``number`` of the question within it, its kind, and ``credit`` in 0..1."""

    video: str
    number: int
    kind: str
    credit: float


def words(text: str) -> list[str]:
    """Lower-case words without articles and punctuation; digits up to six spelled out."""
    found = (word.casefold() for word in _WORD.findall(text))
    return [
        NUMBERS[int(word)] if word.isascii() and word.isdigit() and int(word) < len(NUMBERS) else word
        for word in found
        if word not in _ARTICLES
    ]


def first_word_matches(said: str, truth: str) -> bool:
    """Whether the first words are equal: the grade of one-word answers."""
    ours, right = words(said)[:1], words(truth)[:1]
    return bool(right) and ours == right


def chosen_option(said: str, options: Sequence[str]) -> int | None:
    """Option that an answer names: a letter at its start or after "answer is", or the text of exactly one option; None
    for none or several."""
    for pattern in (_LEADING, _STATED):
        match = pattern.search(said)
        if match:
            index = LETTERS.index(next(group for group in match.groups() if group).upper())
            return index if index < len(options) else None
    ours = words(said)
    named = [index for index, option in enumerate(options) if _holds(ours, words(option))]
    # "red car" does not name "car".
    longest = [i for i in named if not any(i != j and _holds(words(options[j]), words(options[i])) for j in named)]
    return longest[0] if len(longest) == 1 else None


def word_overlap(said: str, truth: str) -> float:
    """Word F1 of a free answer, as SQuAD's (Rajpurkar et al. 2016), in 0..1.

    Replaces grading by another model, with which RVS is published: not comparable with those numbers.
    """
    ours, right = words(said), words(truth)
    shared = sum(min(ours.count(word), right.count(word)) for word in set(ours))
    return 2 * shared / (len(ours) + len(right)) if shared else 0.0


def credit(question: Question, said: Sequence[str]) -> float:
    """Grade of a conversation in 0..1: share of turns answered rightly; word overlap for answers of several words.

    Raises:
        ValueError: not one answer per turn.
    """
    if len(said) != len(question.turns):
        raise ValueError(f"{len(said)} answers to {len(question.turns)} turns")
    if isinstance(question, MultipleChoice):
        return float(chosen_option(said[0], question.options) == question.answer)
    return sum(_right(ours, truth) for ours, truth in zip(said, question.answers, strict=True)) / len(said)


def accuracy_by_kind(judged: Sequence[GradedAnswer], *, resamples: int = RESAMPLES) -> dict[str, Estimate]:
    """Mean credit over all questions (``all``) and by kind, with bootstrap intervals.

    Resamples videos if there are at least ten, else questions, which ignores their dependence: the interval is then too
    narrow.
    """
    weights = _draws(judged, resamples)
    credits = np.array([each.credit for each in judged], dtype=np.float64)
    return {kind: estimate(_mean(credits, rows), *weights) for kind, rows in _kinds(judged).items()}


def accuracy_drop(full: Sequence[GradedAnswer], other: Sequence[GradedAnswer]) -> dict[str, Estimate]:
    """Mean credit of ``full`` minus that of ``other`` on the same questions, over all and by kind, with paired
    intervals.

    Raises:
        ValueError: not the same questions in the same order.
    """
    if [(each.video, each.number, each.kind) for each in full] != [(e.video, e.number, e.kind) for e in other]:
        raise ValueError("a drop is between two settings on the same questions in the same order")
    weights = _draws(full, RESAMPLES)
    lost = np.array([ours.credit - theirs.credit for ours, theirs in zip(full, other, strict=True)], dtype=np.float64)
    return {kind: estimate(_mean(lost, rows), *weights) for kind, rows in _kinds(full).items()}


def _right(said: str, truth: str) -> float:
    return float(first_word_matches(said, truth)) if len(words(truth)) == 1 else word_overlap(said, truth)


def _holds(text: Sequence[str], part: Sequence[str]) -> bool:
    size = len(part)
    return size > 0 and any(list(text[i : i + size]) == list(part) for i in range(len(text) - size + 1))


def _kinds(judged: Sequence[GradedAnswer]) -> dict[str, Floats]:
    """Kind -> indicator ``[n]`` of its questions; ``all`` first."""
    kinds = {"all": np.ones(len(judged))}
    for kind in sorted({each.kind for each in judged}):
        kinds[kind] = np.array([each.kind == kind for each in judged], dtype=np.float64)
    return kinds


def _mean(values: Floats, rows: Floats) -> Callable[[Floats], Floats]:
    """``weights [b, n]`` -> weighted mean over some rows ``[b]``; ``nan`` if none was drawn."""

    def mean(weights: Floats) -> Floats:
        counted = weights @ rows
        return np.where(counted > 0, (weights @ (rows * values)) / np.maximum(counted, 1e-12), np.nan)

    return mean


def _draws(judged: Sequence[GradedAnswer], resamples: int) -> tuple[Floats, Floats | None]:
    """Weights of the questions: ``[1, n]`` ones, and ``[b, n]`` resampled, None with too few to resample."""
    videos = sorted({each.video for each in judged})
    by_video = len(videos) >= _ENOUGH_VIDEOS
    unit = np.array([videos.index(each.video) if by_video else row for row, each in enumerate(judged)], dtype=np.int64)
    units = len(videos) if by_video else len(judged)
    once = np.ones((1, len(judged)))
    drawn = bootstrap_weights(units, resamples)
    return once, None if drawn is None else drawn[:, unit]
