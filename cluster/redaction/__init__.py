"""Keeps secrets out of logs, displays and replies to clients.

A camera's source is a :class:`SourceAddress` from input until it is opened; other texts that may quote one pass
through :func:`redact`.
"""

from cluster.redaction.known_secrets import (
    KNOWN,
    REVEAL,
    KnownSecrets,
    SourceAddress,
    one_line,
    redact,
    redact_log,
    shortened,
)

__all__ = ["KNOWN", "REVEAL", "KnownSecrets", "SourceAddress", "one_line", "redact", "redact_log", "shortened"]
