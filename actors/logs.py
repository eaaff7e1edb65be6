"""Where a process of the cluster logs: standard error, which Ray keeps in its session folder, and ``log_dir``."""

from __future__ import annotations

import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path

from cluster.config.cluster import ClusterConfig
from cluster.logs import CountingHandler, JsonFormatter, TextFormatter
from cluster.redaction.tracebacks import redact_tracebacks


def configure_logging(process: str, cluster: ClusterConfig) -> None:
    """Send everything from INFO on to this process's place, as ``cluster.log_format`` says."""
    redact_tracebacks()
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if cluster.log_dir is not None:
        folder = Path(cluster.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        handlers.append(RotatingFileHandler(folder / f"{process}.log", maxBytes=10 * 2**20, backupCount=2, delay=True))
    for handler in handlers:
        handler.setFormatter(JsonFormatter(process) if cluster.log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[*handlers, CountingHandler()], force=True)
