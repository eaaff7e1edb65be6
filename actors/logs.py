"""Where a process of the cluster logs: standard error, which Ray keeps in its session folder, and ``log_dir``."""

from __future__ import annotations

import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(process: str, log_dir: str | None) -> None:
    """Send everything from INFO on to this process's place."""
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if log_dir is not None:
        folder = Path(log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        handlers.append(RotatingFileHandler(folder / f"{process}.log", maxBytes=10 * 2**20, backupCount=2, delay=True))
    logging.basicConfig(level=logging.INFO, format=FORMAT, handlers=handlers, force=True)
