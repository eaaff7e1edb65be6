"""Texts that may quote an address, a token or a header, without the secrets of it."""

from __future__ import annotations

import re

from cluster.redaction.address import parse
from cluster.redaction.known import KnownSecrets

KNOWN = KnownSecrets()
"""Of this process."""

# Where an address begins in a sentence (bounded, or it takes quadratic time), and where it may end.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,31}://[^\s\"'<>]+")
_TOKEN = re.compile(r"\bsl_[A-Za-z0-9_-]{8,}")
_HEADER = re.compile(r"\b(bearer|basic|digest)\s+(?!realm)[\w.~+/=-]{8,}", re.IGNORECASE)
_NAMED = re.compile(
    r"((?:password|passwd|pwd|passphrase|secret|token|api[_-]?key|access[_-]?key|sightline_session)[\"']?\s*[=:]\s*)"
    r"(\"[^\"]*\"|'[^']*'|[^\s,;&\"'}]+)",
    re.IGNORECASE,
)


def redact(text: str, known: KnownSecrets = KNOWN) -> str:
    """An address, or a sentence with addresses or API tokens in it, without the secrets of them and without those that
    are ``known``."""
    return _TOKEN.sub("sl_***", _ADDRESS.sub(_shown, known.hide(text)))


def redact_log(text: str, known: KnownSecrets = KNOWN) -> str:
    """A line of a log, which may quote anything: also without headers that authenticate, and values whose names say
    that they are secret. Hides too much rather than too little."""
    return _NAMED.sub(r"\1***", _HEADER.sub(r"\1 ***", redact(text, known)))


def _shown(match: re.Match[str]) -> str:
    return "".join(piece.shown for piece in parse(match.group()))
