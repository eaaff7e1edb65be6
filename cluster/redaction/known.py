"""The secrets that this process has met, so that texts of libraries that quote a piece of an address show none."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import quote, unquote, unquote_plus

from cluster.redaction.address import HIDDEN, Kind, Piece

LIMIT = 2**17
"""Forms of secrets that are remembered; the one that was met longest ago is forgotten first."""
SHORTEST = 4
"""Characters of a secret that is looked for in texts: shorter ones are found in every other word."""
SHORTEST_UNKNOWN = 8
"""The same for what may be a secret, or a word."""
WHOLE_WORD = 8
"""A secret that is shorter counts only as a word of its own."""

_MARKS = re.compile(r"[/?#@:=&;]")


class KnownSecrets:
    """May be used by several threads at once. ``hide`` takes a time that does not depend on how many there are."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._met: OrderedDict[str, None] = OrderedDict()
        self._by_start: dict[str, tuple[str, ...]] = {}

    def add(self, secrets: Iterable[str]) -> None:
        """Remember them, as they are."""
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
        """Forget them all."""
        with self._lock:
            self._met.clear()
            self._by_start.clear()

    def hide(self, text: str) -> str:
        """The text with ``***`` in place of every one of them."""
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


def forms(pieces: Sequence[Piece]) -> Iterator[str]:
    """The secrets of an address in every form that a text may have them in: as written, decoded, escaped, as header."""
    before = ""
    for piece in pieces:
        if piece.kind is not Kind.PLAIN:
            shortest = SHORTEST if piece.kind is Kind.SECRET else SHORTEST_UNKNOWN
            # A library that reads the address in another way names what lies between two marks.
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
        # A file may hold halves of characters.
        escaped, path = (quote(each, safe=safe, errors="surrogatepass") for safe in ("", "/"))
        yield from (each, escaped, re.sub("%..", lambda match: match.group().lower(), escaped), path)
        yield from (repr(each)[1:-1], json.dumps(each)[1:-1])


def _header(credentials: str) -> Iterator[str]:
    """As ``Authorization: Basic`` has them."""
    for each in {credentials, unquote(credentials)}:
        yield base64.b64encode(each.encode(errors="surrogatepass")).decode()


def _is_at(text: str, at: int, secret: str) -> bool:
    if not text.startswith(secret, at):
        return False
    end = at + len(secret)
    return len(secret) >= WHOLE_WORD or not (text[max(0, at - 1) : at].isalnum() or text[end : end + 1].isalnum())
