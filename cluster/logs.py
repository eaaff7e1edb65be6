"""Log formatting as text or JSON lines, with secrets redacted."""

import json
import logging
import re
from datetime import UTC, datetime

from cluster import metrics
from cluster.redaction import one_line, redact_log, shortened
from cluster.redaction.known_secrets import RedactingFormatter

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

ALERTS = "sightline.alerts"
"""Logger of the alert sink ``log``: its records are camera alerts, logged at the level of their severity."""

_PLACEHOLDER = re.compile(r"%%|(?:\b(?P<what>camera|window) )?(?P<value>%[-#0 +]*\d*(?:\.\d+)?[srdgfex])")


class TextFormatter(RedactingFormatter):
    """``time level logger: message``."""

    def __init__(self) -> None:
        super().__init__(TEXT)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Redact each value before encoding: JSON escapes could hide a secret from the redaction."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": redact_log(shortened(record.getMessage())),
        }
        line |= {name: redact_log(shortened(value)) for name, value in _context(record).items()}
        if record.exc_info:
            line["error"] = redact_log(self.formatException(record.exc_info))
        return one_line(json.dumps(line, ensure_ascii=False))


class CountingHandler(logging.Handler):
    """Counts messages by level, for alerts on logged errors."""

    def emit(self, record: logging.LogRecord) -> None:
        """Count the record, except camera alerts: they are not errors of Sightline."""
        if record.name != ALERTS:
            level = "error" if record.levelno >= logging.ERROR else record.levelname.lower()
            metrics.log_records.labels(level).inc()


def _context(record: logging.LogRecord) -> dict[str, str]:
    """``camera``, ``window`` and ``trace`` of a record: from ``extra``, else the values after the words ``camera`` and
    ``window`` in the message template (``"camera %s: ..."``)."""
    found: dict[str, str] = {}
    arguments = record.args if isinstance(record.args, tuple) else ()
    template = record.msg if isinstance(record.msg, str) else ""
    placeholders = (each for each in _PLACEHOLDER.finditer(template) if each["value"])
    for placeholder, value in zip(placeholders, arguments, strict=False):
        what = placeholder["what"]
        if what is not None:
            found.setdefault(what, str(value))
    for name in ("camera", "window", "trace"):
        if (value := getattr(record, name, None)) not in (None, ""):
            found[name] = str(value)
    return found
