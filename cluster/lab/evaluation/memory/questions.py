"""Questions about long footage with unambiguous answers, in the wordings of the demo model's training."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product, zip_longest
from pathlib import Path

import numpy as np

from cluster.errors import ConfigError
from cluster.lab.evaluation.memory.long_scene import Episode, LongScene, visible_span
from cluster.lab.scenes.actors import COLORS, Actor
from cluster.lab.scenes.questions import NUMBERS, memory_questions, phrasings
from cluster.lab.scenes.vocabulary import EVENT_KINDS

LETTERS = "ABCDEFGHIJ"

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation of one or more ``turns`` and the right answer to each.

    ``kind``: category in the report. ``at_s``: when it is asked, in seconds from the first frame. ``since_s``: only
    footage after this time counts; None for all. ``evidence``: time spans that support the answers; empty if unknown or
    if nothing happened. ``options``: of a multiple-choice question, which is answered with a letter. Raises
    ``ConfigError``: no turn, or not exactly one answer per turn.
    """

    kind: str
    turns: tuple[str, ...]
    answers: tuple[str, ...]
    at_s: float
    since_s: float | None = None
    evidence: tuple[Span, ...] = ()
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.turns or len(self.turns) != len(self.answers):
            raise ConfigError(f"{len(self.turns)} turns with {len(self.answers)} answers: each turn needs one answer")


def multiple_choice(kind: str, text: str, options: Sequence[str], answer: int, at_s: float = 0.0) -> Question:
    """A question whose prompt lists lettered options; ``answer``: index of the right one. Raises ``ConfigError``: fewer
    than two options, more than ``LETTERS``, or ``answer`` out of range."""
    if not 2 <= len(options) <= len(LETTERS):
        raise ConfigError(f"a choice needs 2 to {len(LETTERS)} options, not {len(options)}")
    if not 0 <= answer < len(options):
        raise ConfigError(f"option {answer} cannot be right: there are {len(options)}")
    listed = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))
    prompt = f"{text}\n{listed}\nAnswer with the option's letter from the given choices directly."
    return Question(kind, (prompt,), (LETTERS[answer],), at_s, options=tuple(options))


@dataclass(frozen=True, slots=True)
class Footage:
    """A video with a unique name, and questions about it."""

    name: str
    path: Path
    questions: tuple[Question, ...]


_SEED = 405
_MAX_COUNT = len(NUMBERS) - 1
# Number of instants at which questions are asked, spread over the footage, including its end.
_INSTANTS = 4
# Wordings with a colour are derived from those with this one, which always occurs.
_COLOR = "black"

Asked = tuple[str, Question]
"""Wording (the unit of balancing) and question."""


def generate_questions(footage: LongScene, *, per_kind: int = 8, seed: int = 0) -> list[Question]:
    """Generate questions of five kinds, in the order in which they are asked.

    * ``event``: whether one of the six events happened since an instant, worded like standing questions
    * ``needle``: whether a vehicle of a colour passed, or stopped: a single occurrence in the past, or none
    * ``counting``: how many people or vehicles since an instant, at most six of either
    * ``order``: whether a person or a vehicle came first since an instant
    * ``multi-turn``: whether there was a vehicle of one colour, then whether one of some colour stopped

    Balanced: at every instant each wording of event, needle and order has equally many questions per answer, and
    multi-turn per pair of answers, so that constant answers or knowing the time do not help; counts are spread over the
    numbers that occur. Instants are quiet: nobody is partly visible.

    Args:
        per_kind: maximum per kind; fewer if the footage does not allow balancing them.
        seed: selects among all possible questions.

    Raises:
        ConfigError: ``per_kind`` below 1, or footage without episodes.
    """
    if per_kind < 1:
        raise ConfigError(f"the number of questions of a kind must be at least 1, not {per_kind}")
    if not footage.episodes:
        raise ConfigError(
            f"footage of {footage.seconds:g} s with {footage.quiet_s:g} s of quiet between episodes holds no episode; "
            "make it longer or less quiet"
        )
    rng = np.random.default_rng([_SEED, footage.seed, seed])
    moments = footage.quiet_instants
    chosen = np.unique(np.linspace(len(moments) - 1, min(1, len(moments) - 1), _INSTANTS).round().astype(int))
    found: list[Question] = []
    for write, answers in _KINDS:
        asked = [question for place in chosen for question in write(footage, moments[: int(place) + 1])]
        found += _balanced(asked, per_kind, answers, rng)
    return sorted(found, key=lambda question: question.at_s)


# -- kinds: footage and quiet instants, the last of which is that of asking -> all possible questions ----
def _events(footage: LongScene, moments: Sequence[float]) -> Iterator[Asked]:
    at = moments[-1]
    for since in moments[:-1]:
        happened = [event for episode in _episodes_between(footage, since, at) for event in episode.events]
        for kind in EVENT_KINDS:
            evidence = tuple(sorted((event.start_s, event.end_s) for event in happened if event.kind == kind))
            for text in phrasings(kind):
                answer = "yes" if evidence else "no"
                yield text, Question("event", (text,), (answer,), at, since or None, evidence)


def _needles(footage: LongScene, moments: Sequence[float]) -> Iterator[Asked]:
    at = moments[-1]
    for form, color, answer, evidence in _colored(footage, at):
        yield form, Question("needle", (form.format(color),), (answer,), at, None, evidence)


def _conversations(footage: LongScene, moments: Sequence[float]) -> Iterator[Asked]:
    at = moments[-1]
    colored = list(_colored(footage, at))
    opening = [each for each in colored if "stop" not in each[0]]
    follow_up = [each for each in colored if "stop" in each[0]]
    for (first, one, said, seen), (second, other, then, stood) in product(opening, follow_up):
        turns = (first.format(one), second.format(other))
        question = Question("multi-turn", turns, (said, then), at, None, tuple(sorted({*seen, *stood})))
        yield f"{first} {second}", question


def _counts(footage: LongScene, moments: Sequence[float]) -> Iterator[Asked]:
    for text, answer, since, there in _since(footage, moments):
        if not text.startswith("How many"):
            continue
        kind = "vehicle" if "vehicle" in text else "person"
        evidence = _spans([actor for actor in there if actor.kind == kind])
        # The model's largest number is six.
        if len(evidence) <= _MAX_COUNT:
            yield text, Question("counting", (text,), (answer,), moments[-1], since, evidence)


def _orders(footage: LongScene, moments: Sequence[float]) -> Iterator[Asked]:
    for text, answer, since, there in _since(footage, moments):
        if "first" in text:
            evidence = [_spans([actor for actor in there if actor.kind == kind])[0] for kind in ("person", "vehicle")]
            yield text, Question("order", (text,), (answer,), moments[-1], since, tuple(sorted(evidence)))


_KINDS: tuple[tuple[Callable[[LongScene, Sequence[float]], Iterator[Asked]], int | None], ...] = (
    (_events, 2),
    (_needles, 2),
    (_counts, None),
    (_orders, 2),
    (_conversations, 4),
)


def _colored(footage: LongScene, at: float) -> Iterator[tuple[str, str, str, tuple[Span, ...]]]:
    """Wording with a colour placeholder, colour, answer and evidence, where at most one vehicle matches."""
    vehicles = [actor for actor in _between(footage, 0.0, at) if actor.kind == "vehicle"]
    forms = [
        text.replace(f" {_COLOR} ", " {} ") for text, _ in _trained_questions(footage, [], at) if f" {_COLOR} " in text
    ]
    for form, color in product(forms, COLORS):
        matching = [actor for actor in vehicles if actor.color == color]
        if "stop" in form:
            matching = [actor for actor in matching if any(key.state == "stopped" for key in actor.keys)]
        if len(matching) < 2:
            yield form, color, "yes" if matching else "no", _spans(matching)


def _since(footage: LongScene, moments: Sequence[float]) -> Iterator[tuple[str, str, float | None, list[Actor]]]:
    """Every wording without a colour and its answer for the time since an instant, the instant (None: start), and the
    actors since then."""
    at = moments[-1]
    for since in reversed(moments[:-1]):
        there = _between(footage, since, at)
        kinds = [actor.kind for actor in there]
        # Earlier instants only add actors.
        if kinds.count("person") > _MAX_COUNT and kinds.count("vehicle") > _MAX_COUNT:
            return
        for text, answer in _trained_questions(footage, there, at):
            if f" {_COLOR} " not in text:
                yield text, answer, since or None, there


def _between(footage: LongScene, since: float, at: float) -> list[Actor]:
    """Actors between two quiet instants."""
    return [actor for episode in _episodes_between(footage, since, at) for actor in episode.actors]


def _episodes_between(footage: LongScene, since: float, at: float) -> list[Episode]:
    return [episode for episode in footage.episodes if since <= episode.start_s and episode.end_s <= at]


def _trained_questions(footage: LongScene, there: Sequence[Actor], at: float) -> Iterator[tuple[str, str]]:
    """(text, answer) of the memory questions of the training, for these actors."""
    for question in memory_questions(replace(footage.scene, actors=tuple(there)), at):
        yield question.text, question.answer


def _spans(actors: Sequence[Actor]) -> tuple[Span, ...]:
    """Spans in which the actors were visible, sorted."""
    return tuple(sorted(span for actor in actors if (span := visible_span(actor)) is not None))


def _balanced(asked: Sequence[Asked], count: int, answers: int | None, rng: np.random.Generator) -> list[Question]:
    """At most ``count`` questions, in rounds with one question per answer to a wording. ``answers``: distinct answers
    per round, all at one instant, incomplete rounds unused; None allows any number, largest rounds first."""
    forms: dict[tuple[str, float], dict[tuple[str, ...], list[Question]]] = defaultdict(lambda: defaultdict(list))
    for form, question in asked:
        moment = 0.0 if answers is None else question.at_s
        forms[form, moment][question.answers].append(question)
    rounds: list[list[Question]] = []
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
