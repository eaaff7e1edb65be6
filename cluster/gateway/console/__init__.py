"""The console: web pages that the gateway serves. Plain ES modules and style sheets, nothing to build."""

from __future__ import annotations

from pathlib import Path

STATIC = Path(__file__).parent / "static"
"""The files, for ``/console/``; ``index.html`` among them is the page at ``/``."""
