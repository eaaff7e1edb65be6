"""Registry of secrets seen by this process; redaction of texts, logs and tracebacks."""

from __future__ import annotations

import base64
import json
import logging
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, unquote_plus

from cluster.redaction.address import HIDDEN, Kind, Piece, openable, parse

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema
    from pydantic_core.core_schema import SerializationInfo

LIMIT = 2**17
"""Maximum number of secret forms remembered; the oldest is evicted first."""
SHORTEST = 4
"""Minimum length of a secret searched for in texts: shorter ones occur in ordinary words."""
SHORTEST_UNKNOWN = 8
"""Minimum length of pieces that may be a secret or a word."""
WHOLE_WORD = 8
"""Secrets shorter than this match only as whole words."""
MOST_SAID, MOST_ADDRESS = 2000, 4096
"""Maximum characters of a message that may quote untrusted input, and of a source address."""

_MARKS = re.compile(r"[/?#@:=&;]")


class KnownSecrets:
    """Thread-safe set of secrets. The run time of ``hide`` does not depend on their number."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._met: OrderedDict[str, None] = OrderedDict()
        self._by_start: dict[str, tuple[str, ...]] = {}

    def add(self, secrets: Iterable[str]) -> None:
        with self._lock:
            for secret in secrets:
                if len(secret) < SHORTEST:
                    continue
                if secret not in self._met:
                    alike = (*self._by_start.get(secret[:SHORTEST], ()), secret)
                    self._by_start[secret[:SHORTEST]] = tuple(sorted(alike, key=len, reverse=True))
                self._met[secret] = None
                self._met.move_to_end(secret)
            while len(self._met) > self._limit:
                oldest, _ = self._met.popitem(last=False)
                alike = tuple(each for each in self._by_start.pop(oldest[:SHORTEST]) if each != oldest)
                if alike:
                    self._by_start[oldest[:SHORTEST]] = alike

    def clear(self) -> None:
        with self._lock:
            self._met.clear()
            self._by_start.clear()

    def hide(self, text: str) -> str:
        """Replace every known secret by ``***``."""
        if not self._met:
            return text
        found, end = [], 0
        for at in range(len(text) - SHORTEST + 1):
            alike = self._by_start.get(text[at : at + SHORTEST])
            if alike is None or at < end:
                continue
            secret = next((each for each in alike if _is_at(text, at, each)), None)
            if secret is not None:
                found += [text[end:at], HIDDEN]
                end = at + len(secret)
        return "".join([*found, text[end:]])


def secret_forms(pieces: Sequence[Piece]) -> Iterator[str]:
    """Every form in which an address's secrets may occur: as written, decoded, escaped, in a header."""
    before = ""
    for piece in pieces:
        if piece.kind is not Kind.PLAIN:
            shortest = SHORTEST if piece.kind is Kind.SECRET else SHORTEST_UNKNOWN
            # Libraries that parse the address differently may quote the text between two separators.
            parts = {part for each in (piece.text, unquote(piece.text)) for part in _MARKS.split(each)}
            for part in (piece.text, *(each for each in parts if len(each) >= SHORTEST_UNKNOWN)):
                if len(part) >= shortest:
                    yield from _spellings(part)
            if before.endswith(":"):
                yield from _header(before + piece.text)
            elif ":" in piece.text:
                yield from _header(piece.text)
        before = piece.text


def _spellings(secret: str) -> Iterator[str]:
    for each in {secret, unquote(secret), unquote_plus(secret)}:
        # File names may hold lone surrogates.
        escaped, path = (quote(each, safe=safe, errors="surrogatepass") for safe in ("", "/"))
        yield from (each, escaped, re.sub("%..", lambda match: match.group().lower(), escaped), path)
        yield from (repr(each)[1:-1], json.dumps(each)[1:-1])


def _header(credentials: str) -> Iterator[str]:
    """Value of ``Authorization: Basic``."""
    for each in {credentials, unquote(credentials)}:
        yield base64.b64encode(each.encode(errors="surrogatepass")).decode()


def _is_at(text: str, at: int, secret: str) -> bool:
    if not text.startswith(secret, at):
        return False
    end = at + len(secret)
    return len(secret) >= WHOLE_WORD or not (text[max(0, at - 1) : at].isalnum() or text[end : end + 1].isalnum())


REVEAL: Mapping[str, Any] = {"reveal": True}
"""Context for ``model_dump_json`` that writes sources in full."""


KNOWN = KnownSecrets()
"""The registry of this process."""

# An address in a sentence; the scheme's length is bounded, because matching would take quadratic time otherwise.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,31}://[^\s\"'<>]+")
_TOKEN = re.compile(r"\bsl_[A-Za-z0-9_-]{8,}")
_HEADER = re.compile(r"\b(bearer|basic|digest)\s+(?!realm)[\w.~+/=-]{8,}", re.IGNORECASE)
_NAMED = re.compile(
    r"((?:password|passwd|pwd|passphrase|secret|token|api[_-]?key|access[_-]?key|sightline_session)[\"']?\s*[=:]\s*)"
    r"(\"[^\"]*\"|'[^']*'|[^\s,;&\"'}]+)",
    re.IGNORECASE,
)


def redact(text: str, known: KnownSecrets = KNOWN) -> str:
    """Remove secrets from an address, or from a sentence with addresses, API tokens or ``known`` secrets."""
    return _TOKEN.sub("sl_***", _ADDRESS.sub(_shown, known.hide(text)))


def redact_log(text: str, known: KnownSecrets = KNOWN) -> str:
    """Redact a log line: like :func:`redact`, plus authentication headers and values whose names mark them as secret.
    Hides too much rather than too little."""
    return _NAMED.sub(r"\1***", _HEADER.sub(r"\1 ***", redact(text, known)))


def _shown(match: re.Match[str]) -> str:
    return "".join(piece.shown for piece in parse(match.group()))


class SourceAddress:
    """An address or path whose ``str``, ``repr``, formatting and JSON show only its public part; :meth:`reveal` returns
    all of it. Creating one registers its secrets with this process (:func:`redact`)."""

    __slots__ = ("_shown", "_text", "holds_password")

    def __init__(self, text: str | SourceAddress = "") -> None:
        self._text: str = text.reveal() if isinstance(text, SourceAddress) else text
        self._shown, self.holds_password = _read(self._text)

    def reveal(self) -> str:
        """The text as written, with secrets; never for display, logs or files."""
        return self._text

    def openable(self) -> str:
        """The text in a form that libraries parse correctly, with secrets."""
        return openable(self._text)

    @property
    def scheme(self) -> str:
        """Lower-case scheme; empty for a path."""
        scheme, separator, _ = self._text.partition("://")
        return scheme.lower() if separator else ""

    def __bool__(self) -> bool:
        return bool(self._text)

    def __str__(self) -> str:
        return self._shown

    def __repr__(self) -> str:
        return repr(self._shown)

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, SourceAddress) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> tuple[Any, ...]:
        return SourceAddress, (self._text,)

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(
            _validated,
            json_schema_input_schema=core_schema.str_schema(),
            serialization=core_schema.plain_serializer_function_ser_schema(
                _serialised, info_arg=True, when_used="json", return_schema=core_schema.str_schema()
            ),
        )


@lru_cache(maxsize=2**14)
def _read(text: str) -> tuple[str, bool]:
    """Public form of an address, and whether it certainly holds a secret. Cached, because cameras are passed between
    processes often."""
    pieces = parse(text)
    KNOWN.add(secret_forms(pieces))
    certain = any(piece.kind is Kind.SECRET and piece.shown != piece.text for piece in pieces)
    return "".join(piece.shown for piece in pieces), certain


def _validated(value: object) -> SourceAddress:
    from pydantic_core import PydanticKnownError

    if not isinstance(value, str | SourceAddress):
        raise PydanticKnownError("string_type")
    if isinstance(value, str) and len(value) > MOST_ADDRESS:
        raise ValueError(f"an address has at most {MOST_ADDRESS} characters")
    return SourceAddress(value)


def _serialised(source: SourceAddress, info: SerializationInfo) -> str:
    return source.reveal() if info.context == REVEAL else str(source)


log = logging.getLogger(__name__)


def shortened(text: str) -> str:
    """The beginning of a text, cut at a word: searching secrets in unbounded input would stall the process."""
    if len(text) <= MOST_SAID:
        return text
    before, _, last = text[:MOST_SAID].rpartition(" ")
    return (before or last) + " …"


def one_line(text: str) -> str:
    """Escape line breaks and terminal control characters as in JSON; printable text in any language stays."""
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)


class RedactingFormatter(logging.Formatter):
    """Formats log records and redacts the result, tracebacks included. Each message, which may quote untrusted input,
    becomes one line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(shortened(super().formatMessage(record)))

    def format(self, record: logging.LogRecord) -> str:
        return redact_log(super().format(record))


def redact_tracebacks() -> None:
    """Log uncaught exceptions of all threads, redacted; Python itself would print them unchanged."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(RedactingFormatter())
    # Otherwise logging prints a record that cannot be formatted together with its arguments.
    logging.raiseExceptions = False
    sys.excepthook = _log_exception
    threading.excepthook = _log_thread_exception


def _log_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.critical("ended by an exception", exc_info=(kind, error, trace))


def _log_thread_exception(failure: threading.ExceptHookArgs) -> None:
    if failure.exc_type is SystemExit:
        return
    name = failure.thread.name if failure.thread is not None else "?"
    log.critical("thread %s ended by an exception", name, exc_info=failure.exc_value)
