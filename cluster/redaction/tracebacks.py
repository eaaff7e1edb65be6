"""What a process says that nobody formats for it: exceptions that nobody caught, and logs that nobody configured."""

from __future__ import annotations

import logging
import sys
import threading
from types import TracebackType

from cluster.redaction.text import redact_log

log = logging.getLogger(__name__)


class RedactingFormatter(logging.Formatter):
    """The whole of a record redacted, traceback included."""

    def format(self, record: logging.LogRecord) -> str:
        return redact_log(super().format(record))


def redact_tracebacks() -> None:
    """Exceptions that nobody caught, in any thread of this process, are logged, and so redacted: Python itself prints
    their messages as they are."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(RedactingFormatter())
    # Or a message that cannot be formatted is printed with its arguments.
    logging.raiseExceptions = False
    sys.excepthook = _ended
    threading.excepthook = _thread_ended


def _ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.critical("ended by an exception", exc_info=(kind, error, trace))


def _thread_ended(failure: threading.ExceptHookArgs) -> None:
    if failure.exc_type is SystemExit:
        return
    name = failure.thread.name if failure.thread is not None else "?"
    log.critical("thread %s ended by an exception", name, exc_info=failure.exc_value)
