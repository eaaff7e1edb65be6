"""Keeps secrets out of what is shown, logged or sent to clients.

A camera's source is a :class:`SourceAddress` from where it enters to where it is opened; texts of others that may quote
one go through :func:`redact`.
"""

from cluster.redaction.known_secrets import REVEAL, KnownSecrets, SourceAddress, redact, redact_log

__all__ = ["REVEAL", "KnownSecrets", "SourceAddress", "redact", "redact_log"]
