"""Questions about long footage whose answers are certain, in the wordings that the demo model was taught."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product, zip_longest

import numpy as np

from cluster.errors import ConfigError
from cluster.lab.evaluation.memory.long_scene import LongScene, visible_span
from cluster.lab.scenes.actors import COLORS, Actor
from cluster.lab.scenes.questions import NUMBERS, memory_questions

LETTERS = "ABCDEFGHIJ"

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """A conversation of one or more ``turns`` and what is right for each.

    ``kind``: what it is reported under. ``at_s``: when it is asked, seconds from the first picture. ``since_s``: what
    was seen before does not count; None for all of it. ``evidence``: spans of time that the answers rest on; empty
    where they are not known, or where the answer is that something never happened.

    Raises:
        ConfigError: no turn, or not one answer for each.
    """

    kind: str
    turns: tuple[str, ...]
    answers: tuple[str, ...]
    at_s: float
    since_s: float | None = None
    evidence: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        if not self.turns or len(self.turns) != len(self.answers):
            raise ConfigError(f"{len(self.turns)} turns with {len(self.answers)} answers: each turn needs one answer")


@dataclass(frozen=True, slots=True)
class MultipleChoice:
    """One question with options; ``answer`` is the index of the right one. The rest as in ``OpenQuestion``.

    Raises:
        ConfigError: fewer than two options, more than there are letters for, or an answer that is none of them.
    """

    kind: str
    text: str
    options: tuple[str, ...]
    answer: int
    at_s: float
    since_s: float | None = None
    evidence: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        if not 2 <= len(self.options) <= len(LETTERS):
            raise ConfigError(f"a choice is between 2 and {len(LETTERS)} options, not {len(self.options)}")
        if not 0 <= self.answer < len(self.options):
            raise ConfigError(f"option {self.answer} cannot be right: there are {len(self.options)}")

    @property
    def turns(self) -> tuple[str, ...]:
        """The one prompt: question, lettered options, and what form the answer is to have."""
        listed = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, self.options, strict=False))
        return (f"{self.text}\n{listed}\nAnswer with the option's letter from the given choices directly.",)

    @property
    def answers(self) -> tuple[str, ...]:
        """The letter of the right option."""
        return (LETTERS[self.answer],)


Question = OpenQuestion | MultipleChoice


_SEED = 405
_MOST = len(NUMBERS) - 1
# The wordings about a vehicle's colour are learnt from those about this one, which is always asked for.
_COLOR = "black"

Asked = tuple[str, OpenQuestion]
"""What a question has in common with those it is balanced against, and the question."""


def generate_questions(
    footage: LongScene, *, per_kind: int = 8, instants: int = 4, seed: int = 0
) -> list[OpenQuestion]:
    """Questions of four kinds, in the order in which they are asked.

    * ``needle``: whether a vehicle of a colour was there, or stopped: one event somewhere in the past, or none
    * ``counting``: how many people or vehicles since a moment, at most six of either
    * ``order``: whether a person or a vehicle came first since a moment
    * ``multi-turn``: whether there was a vehicle of one colour, then whether one of a colour stopped

    Of every wording of needle and order there are at every moment as many questions with the one answer as with the
    other, of multi-turn as many with each pair of answers, so nobody gains by always saying the same or by knowing when
    it is; counts are spread over the numbers that occur. All moments are quiet ones: nobody is half in the picture.

    Args:
        footage: what is asked about.
        per_kind: at most so many of each kind; fewer where the footage does not hold enough to balance them.
        instants: at how many moments they are asked, spread over the footage, its end included.
        seed: which of all the possible ones.

    Raises:
        ConfigError: a number below 1, or footage in which nothing happens.
    """
    if per_kind < 1 or instants < 1:
        raise ConfigError(f"{per_kind} questions of a kind at {instants} moments are none; both must be at least 1")
    if not footage.episodes:
        raise ConfigError(
            f"footage of {footage.seconds:g} s with {footage.quiet_s:g} s of "
            "quiet between episodes of life holds none of them to ask about; make it longer or less quiet"
        )
    rng = np.random.default_rng([_SEED, footage.seed, seed])
    moments = footage.moments
    chosen = np.unique(np.linspace(len(moments) - 1, min(1, len(moments) - 1), instants).round().astype(int))
    found: list[OpenQuestion] = []
    for write, answers in _KINDS:
        asked = [question for place in chosen for question in write(footage, moments[: int(place) + 1])]
        found += _balanced(asked, per_kind, answers, rng)
    return sorted(found, key=lambda question: question.at_s)


# -- kinds: footage and the moments up to that of asking -> every question there is -------------------
def _needles(footage: LongScene, moments: Sequence[float]) -> Iterator[Asked]:
    at = moments[-1]
    for form, color, answer, evidence in _colored(footage, at):
        yield form, OpenQuestion("needle", (form.format(color),), (answer,), at, None, evidence)


def _conversations(footage: LongScene, moments: Sequence[float]) -> Iterator[Asked]:
    at = moments[-1]
    colored = list(_colored(footage, at))
    opening = [each for each in colored if "stop" not in each[0]]
    follow_up = [each for each in colored if "stop" in each[0]]
    for (first, one, said, seen), (second, other, then, stood) in product(opening, follow_up):
        turns = (first.format(one), second.format(other))
        question = OpenQuestion("multi-turn", turns, (said, then), at, None, tuple(sorted({*seen, *stood})))
        yield f"{first} {second}", question


def _counts(footage: LongScene, moments: Sequence[float]) -> Iterator[Asked]:
    for text, answer, since, there in _since(footage, moments):
        if not text.startswith("How many"):
            continue
        kind = "vehicle" if "vehicle" in text else "person"
        evidence = _spans([actor for actor in there if actor.kind == kind])
        # More than six are "six" to who was taught these words.
        if len(evidence) <= _MOST:
            yield text, OpenQuestion("counting", (text,), (answer,), moments[-1], since, evidence)


def _orders(footage: LongScene, moments: Sequence[float]) -> Iterator[Asked]:
    for text, answer, since, there in _since(footage, moments):
        if "first" in text:
            evidence = [_spans([actor for actor in there if actor.kind == kind])[0] for kind in ("person", "vehicle")]
            yield text, OpenQuestion("order", (text,), (answer,), moments[-1], since, tuple(sorted(evidence)))


_KINDS: tuple[tuple[Callable[[LongScene, Sequence[float]], Iterator[Asked]], int | None], ...] = (
    (_needles, 2),
    (_counts, None),
    (_orders, 2),
    (_conversations, 4),
)


# -- truth ----------------------------------------------------------------------------------------
def _colored(footage: LongScene, at: float) -> Iterator[tuple[str, str, str, tuple[Span, ...]]]:
    """Wording with a gap for the colour, colour, answer and evidence, where one event or none answers it."""
    vehicles = [actor for actor in _between(footage, 0.0, at) if actor.kind == "vehicle"]
    forms = [text.replace(f" {_COLOR} ", " {} ") for text, _, _ in _taught(footage, [], at) if f" {_COLOR} " in text]
    for form, color in product(forms, COLORS):
        matching = [actor for actor in vehicles if actor.color == color]
        if "stop" in form:
            matching = [actor for actor in matching if any(key.state == "stopped" for key in actor.keys)]
        if len(matching) < 2:
            yield form, color, "yes" if matching else "no", _spans(matching)


def _since(footage: LongScene, moments: Sequence[float]) -> Iterator[tuple[str, str, float | None, list[Actor]]]:
    """Every taught wording without a colour, answered for what was between a moment and the last of ``moments``; with
    that moment (None for the beginning) and who was there."""
    at = moments[-1]
    for since in reversed(moments[:-1]):
        there = _between(footage, since, at)
        kinds = [actor.kind for actor in there]
        # Further back there are only more of both.
        if kinds.count("person") > _MOST and kinds.count("vehicle") > _MOST:
            return
        for text, answer, _ in _taught(footage, there, at):
            if f" {_COLOR} " not in text:
                yield text, answer, since or None, there


def _between(footage: LongScene, since: float, at: float) -> list[Actor]:
    """Who was there between two quiet moments."""
    return [
        actor
        for episode in footage.episodes
        if since <= episode.start_s and episode.end_s <= at
        for actor in episode.actors
    ]


def _taught(footage: LongScene, there: Sequence[Actor], at: float) -> Iterator[tuple[str, str, float]]:
    for question in memory_questions(replace(footage.scene, actors=tuple(there)), at):
        yield question.text, question.answer, question.at_s


def _spans(actors: Sequence[Actor]) -> tuple[Span, ...]:
    """When each was in the picture, in order."""
    return tuple(sorted(span for actor in actors if (span := visible_span(actor)) is not None))


# -- choice ---------------------------------------------------------------------------------------
def _balanced(asked: Sequence[Asked], count: int, answers: int | None, rng: np.random.Generator) -> list[OpenQuestion]:
    """At most ``count`` of them, in rounds of one question of each answer to one wording. ``answers``: how many
    different ones there must be in a round, whole rounds only, each of one moment; None for as many as there are, the
    fullest first."""
    forms: dict[tuple[str, float], dict[tuple[str, ...], list[OpenQuestion]]] = defaultdict(lambda: defaultdict(list))
    for form, question in asked:
        moment = 0.0 if answers is None else question.at_s
        forms[form, moment][question.answers].append(question)
    rounds: list[list[OpenQuestion]] = []
    for by_answer in forms.values():
        if answers is not None and len(by_answer) < answers:
            continue
        piles = [[pile[int(i)] for i in rng.permutation(len(pile))] for pile in by_answer.values()]
        if answers is None:
            rounds += [[each for each in layer if each is not None] for layer in zip_longest(*piles)]
        else:
            rounds += [list(layer) for layer in zip(*piles, strict=False)]
    mixed = [rounds[int(i)] for i in rng.permutation(len(rounds))]
    if answers is not None:
        return [question for each in mixed[: count // answers] for question in each]
    return [question for each in sorted(mixed, key=len, reverse=True) for question in each][:count]
