"""Converts free questions, their results and a memory's status to and from ``memory.proto``.

Input from the wire is validated here, once; errors say in one sentence what is wrong.
"""

import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sightline.v1 import memory_pb2

from cluster.errors import ConfigError
from cluster.files import jsonable
from cluster.types import MICROSECONDS, AskResult, AskSpec, DeletedMemory, MemoryStatus, Moment
from cluster.wire.mapping import from_message, to_message

MAX_QUESTION = 2_000
"""Maximum characters of a question."""
MAX_ANSWER = 8_000
"""Maximum characters of an answer in a conversation history sent by a client."""
MAX_TURNS = 16
"""Turns used of such a history, the last ones."""
MAX_PICTURES_BYTES = 768 * 2**10
"""Maximum bytes of all pictures of one answer: every Sightline server accepts messages of a megabyte."""

MAX_NAME = 256

# Control characters and surrogates, which terminals and files that are not UTF-8 leave behind.
_NOT_TEXT = ("Cc", "Cs")
_LAYOUT = "\t\n\r"


@dataclass(frozen=True, slots=True)
class AskOutcome:
    """Final event of an answer; ``pictures``: one JPEG per moment, empty where there is none."""

    result: AskResult
    conversation: str
    pictures: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class CameraOutcome:
    """One camera's answer to a question to all: ``outcome``, or None and an ``error``, unless the camera has no memory
    of that time (``empty``). ``incidents``: for each moment, the id of the one whose clip shows it, or empty."""

    camera: str
    outcome: AskOutcome | None = None
    error: str = ""
    incidents: tuple[str, ...] = ()
    empty: bool = False


@dataclass(frozen=True, slots=True)
class AskAllProgress:
    """Cameras asked in total, answered, failed, and without memory of that time (``empty``); ``tokens`` of text so far;
    ``finished``: this is the last event."""

    cameras: int
    answered: int
    failed: int
    empty: int
    tokens: int
    finished: bool


@dataclass(frozen=True, slots=True)
class RankedMoment:
    """A moment of one camera; ``rank`` is P(yes) of its answer times the moment's share of the attention."""

    camera: str
    rank: float
    yes: float
    ago_s: float
    moment: Moment
    text: str
    incident: str
    picture: bytes


def ranked(answers: Iterable[CameraOutcome]) -> list[RankedMoment]:
    """All moments, best first."""
    found = []
    for each in answers:
        if each.outcome is None:
            continue
        result = each.outcome.result
        pictures = each.outcome.pictures or (b"",) * len(result.moments)
        for moment, incident, picture in zip(result.moments, each.incidents, pictures, strict=True):
            rank = result.yes * moment.weight
            ago = ago_s(result, moment)
            found.append(RankedMoment(each.camera, rank, result.yes, ago, moment, result.text, incident, picture))
    return sorted(found, key=lambda each: -each.rank)


def all_from_proto(message: memory_pb2.AskAllEvent) -> CameraOutcome | AskAllProgress:
    """Convert an event of ``AskAll``."""
    if message.WhichOneof("event") == "progress":
        return from_message(AskAllProgress, message.progress)
    answer = message.answer
    outcome = outcome_from_proto(answer.result, answer.camera) if answer.HasField("result") else None
    return CameraOutcome(answer.camera, outcome, answer.error, tuple(answer.incidents), answer.empty)


def ago_s(result: AskResult, moment: Moment) -> float:
    """Seconds since a moment's start was seen."""
    return max(0.0, result.newest_age_s + (result.newest - moment.start) / MICROSECONDS)


def outcome_body(outcome: AskOutcome, pictures: Sequence[str | None] = ()) -> dict[str, Any]:
    """JSON form of a result; ``pictures``: none, or one per moment in any form, None to leave it out."""
    body = jsonable(outcome.result)
    body = {"camera": body.pop("stream"), **body, "conversation": outcome.conversation}
    for number, (moment, entry) in enumerate(zip(outcome.result.moments, body["moments"], strict=True)):
        entry["ago_s"] = ago_s(outcome.result, moment)
        if pictures and pictures[number] is not None:
            entry["picture"] = pictures[number]
    return body


def check_camera(camera: str) -> str:
    """Validate a camera's name. Raises ``ConfigError``: none, too long, or not text."""
    if not camera:
        raise ConfigError("no camera is named; say which one is meant")
    return check_name(camera, "the camera's name")


def check_name(name: str, what: str) -> str:
    """Validate the name of a camera or conversation. Raises ``ConfigError``: too long, or not text."""
    if len(name) > MAX_NAME or any(unicodedata.category(letter) in _NOT_TEXT for letter in name):
        raise ConfigError(f"{what} is longer than {MAX_NAME} characters, or not text")
    return name


def check_question(text: str) -> str:
    """Strip and validate a question. Raises ``ConfigError``: empty, longer than ``MAX_QUESTION`` characters, or not
    text."""
    text = text.strip()
    if not text:
        raise ConfigError("the question is empty; ask something, as in: what happened at the gate?")
    if len(text) > MAX_QUESTION:
        raise ConfigError(f"the question has {len(text):,} characters; at most {MAX_QUESTION:,} are taken")
    if strange := _not_text(text):
        raise ConfigError(
            f"the question is not text: character {text.index(strange) + 1} is U+{ord(strange):04X}; send UTF-8 "
            "without control characters"
        )
    return text


def turns_from_proto(request: memory_pb2.AskRequest) -> list[tuple[str, str]] | None:
    """The history that the client sends itself, ``None`` if it sends none. Raises ``ConfigError``: the request also
    names a conversation, or a turn is too long or not text."""
    if not request.HasField("history"):
        return None
    if request.conversation:
        raise ConfigError("a question has a conversation or a history, not both; omit one of them")
    turns = [(check_question(turn.question), turn.answer.strip()) for turn in request.history.turns[-MAX_TURNS:]]
    for _, answer in turns:
        if len(answer) > MAX_ANSWER or _not_text(answer):
            raise ConfigError(f"an answer of the history is longer than {MAX_ANSWER:,} characters, or not text")
    return turns


def _not_text(text: str) -> str:
    """The first control character (other than white space) or surrogate; empty if there is none."""
    return next((each for each in text if unicodedata.category(each) in _NOT_TEXT and each not in _LAYOUT), "")


def check_seconds(value: float, what: str) -> float | None:
    """Validate seconds from the wire; 0 becomes ``None``. Raises ``ConfigError``: negative, or not finite in
    microseconds, as which they are compared."""
    if not math.isfinite(value * MICROSECONDS) or value < 0:
        raise ConfigError(f"{what} is {value:g}; it is a number of seconds, and 0 means everything")
    return value or None


def ask_from_proto(request: memory_pb2.AskRequest, longest: int, turns: Sequence[tuple[str, str]] = ()) -> AskSpec:
    """Convert a question for the engine; ``longest``: limit and default of the answer's tokens. Raises ``ConfigError``:
    see :func:`check_question`, :func:`check_seconds`; or the answer may exceed ``longest``."""
    if request.max_new_tokens > longest:
        raise ConfigError(
            f"max_new_tokens is {request.max_new_tokens}; answers have at most {longest:,} tokens here "
            "(asking.max_new_tokens), which 0 stands for"
        )
    return AskSpec(
        stream=check_camera(request.camera),
        text=check_question(request.text),
        turns=tuple(turns),
        since_s=check_seconds(request.since_s, "since_s"),
        max_new_tokens=request.max_new_tokens or longest,
    )


def outcome_to_proto(outcome: AskOutcome) -> memory_pb2.AskResult:
    """Convert a result, omitting pictures that no longer fit ``MAX_PICTURES_BYTES``, those of the lightest moments.
    Raises ``ValueError``: there are pictures, but not one per moment."""
    result, room, moments = outcome.result, MAX_PICTURES_BYTES, []
    for moment, picture in zip(result.moments, outcome.pictures or [b""] * len(result.moments), strict=True):
        kept = picture if len(picture) <= room else b""
        room -= len(kept)
        moments.append(to_message(memory_pb2.Moment, moment, ago_s=ago_s(result, moment), picture=kept))
    return to_message(memory_pb2.AskResult, result, ("camera",), moments=moments, conversation=outcome.conversation)


def outcome_from_proto(message: memory_pb2.AskResult, camera: str) -> AskOutcome:
    """The inverse of :func:`outcome_to_proto`; the message does not name its camera."""
    pictures = tuple(moment.picture for moment in message.moments)
    return AskOutcome(from_message(AskResult, message, stream=camera), message.conversation, pictures)


@dataclass(frozen=True, slots=True)
class ForgottenCamera:
    """What was deleted of a camera.

    * ``frames``, ``bytes``: of its memory
    * ``files``, ``file_bytes``: snapshots and clips; their bytes include those of packets held for clips
    * ``incidents``, ``alerts``: incidents deleted or stripped of what they said about that time, and their alerts
    """

    frames: int
    bytes: int
    files: int = 0
    file_bytes: int = 0
    incidents: int = 0
    alerts: int = 0


def forgotten_to_proto(forgotten: DeletedMemory) -> memory_pb2.ForgetResponse:
    """Convert counts of a deletion; negative ones, of a memory that grew faster than it was deleted, become 0."""
    return memory_pb2.ForgetResponse(frames=max(0, forgotten.frames), bytes=max(0, forgotten.bytes))


def status_to_proto(status: MemoryStatus) -> memory_pb2.MemoryStatus:
    """Convert a memory's status."""
    names = {**status.tier_bytes, **status.tier_states}
    return to_message(
        memory_pb2.MemoryStatus,
        status,
        ("tier_bytes", "tier_states"),
        counts=[{"name": name, "count": count} for name, count in status.counts.items()],
        tiers=[
            memory_pb2.MemoryTier(name=name, bytes=status.tier_bytes.get(name), trouble=status.tier_states.get(name))
            for name in names
        ],
    )


def status_from_proto(message: memory_pb2.MemoryStatus) -> MemoryStatus:
    """The inverse of :func:`status_to_proto`."""
    return from_message(
        MemoryStatus,
        message,
        tier_bytes={tier.name: tier.bytes for tier in message.tiers if tier.HasField("bytes")},
        counts={each.name: each.count for each in message.counts},
        tier_states={tier.name: tier.trouble for tier in message.tiers if tier.HasField("trouble")},
    )
