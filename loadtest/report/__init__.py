"""The report of a load test: one self-contained page, JSON, and a summary of one screen."""

from __future__ import annotations

from loadtest.report.render import Facts as Facts
from loadtest.report.render import run_json as run_json
from loadtest.report.render import search_json as search_json
from loadtest.report.render import write as write

__all__ = ["Facts", "run_json", "search_json", "write"]
