"""Keeps secrets out of what is shown, logged or sent to clients."""

from __future__ import annotations

import re

# Up to the last @ of the word: people put an @ or a / into passwords without escaping it. Digits before a slash are a
# port.
_PASSWORD = re.compile(r"(?<=://)([^:/@\s]*):(?!\d+[/?#])[^\s\"'<>]*@")
_TOKEN = re.compile(r"\bsl_[A-Za-z0-9_-]{8,}")
_HEADER = re.compile(r"\b(bearer|basic|digest)\s+(?!realm)[\w.~+/=-]{8,}", re.IGNORECASE)
_NAMED = re.compile(
    r"((?:password|passwd|pwd|passphrase|secret|token|api[_-]?key|access[_-]?key|sightline_session)[\"']?\s*[=:]\s*)"
    r"(\"[^\"]*\"|'[^']*'|[^\s,;&\"'}]+)",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """An address, or a sentence with addresses or API tokens in it, without the secrets of them."""
    return _TOKEN.sub("sl_***", _PASSWORD.sub(r"\1:***@", text))


def redact_log(text: str) -> str:
    """A line of a log, which may quote anything: also without headers that authenticate, and values whose names say
    that they are secret. Hides too much rather than too little."""
    return _NAMED.sub(r"\1***", _HEADER.sub(r"\1 ***", redact(text)))
