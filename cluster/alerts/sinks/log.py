"""``log``: alerts in the process's log, one line of JSON each; for trials and log collectors."""

import json
import logging
from dataclasses import dataclass

from cluster.alerts.incident import AlertEvent

logger = logging.getLogger("sightline.alerts")

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.ERROR}


@dataclass
class LogSink:
    """Writes to the logger ``sightline.alerts``, at a level that depends on the severity."""

    async def send(self, event: AlertEvent) -> None:
        logger.log(_LEVELS[event.incident.severity], "alert %s", json.dumps(event.body(), ensure_ascii=False))

    async def close(self) -> None:
        """Nothing to close."""
