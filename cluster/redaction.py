"""Keeps secrets out of what is shown, logged or sent to clients."""

from __future__ import annotations

import re

_PASSWORD = re.compile(r"(?<=://)([^:/@\s]*):[^@/\s]*@")


def redact(text: str) -> str:
    """An address, or a sentence with addresses in it, without their passwords."""
    return _PASSWORD.sub(r"\1:***@", text)
