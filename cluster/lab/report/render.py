"""From a report to ``report.html`` (one file, no requests to anywhere) and ``report.json``."""

from __future__ import annotations

import base64
from pathlib import Path

import jinja2

from cluster.errors import SightlineError
from cluster.lab.report import charts, timeline
from cluster.lab.report.model import Report, ratio
from cluster.lab.report.truth import Tally


def render(report: Report) -> str:
    """The page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("cluster.lab.report", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "times": times_text,
        "percent": percent_text,
        "compact": charts.compact,
        "seconds": seconds_text,
        "tally": tally_text,
        "data_uri": _data_uri,
    }
    environment.globals |= {
        "saving": saving_text,
        "live_timeline": timeline.live_timeline,
        "compared_timeline": timeline.compared_timeline,
        "tokens_per_window": charts.tokens_per_window,
    }
    return environment.get_template("report.html").render(report=report)


def write_report(report: Report, folder: Path) -> tuple[Path, Path]:
    """Write both files; returns the paths of the page and of the JSON.

    Raises:
        SightlineError: the folder cannot be written (full disk, permissions).
    """
    page, data = folder / "report.html", folder / "report.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        page.write_text(render(report), encoding="utf-8")
        data.write_text(report.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise SightlineError(f"cannot write the report to {folder}: {error.strerror or error}") from None
    return page, data


def times_text(value: float | None) -> str:
    """``7.2×``."""
    if value is None:
        return "–"
    if value > 1000:
        return "over 1000×"
    return f"{value:.0f}×" if value >= 20 else f"{value:.1f}×"


def saving_text(full: float, ours: float) -> str:
    """``7.2×`` as much in full as ours; ``all of it`` when ours is nothing."""
    if full and not ours:
        return "all of it"
    return times_text(ratio(full, ours))


def percent_text(value: float | None) -> str:
    """``8.4 %``, ``52 %`` for a share."""
    if value is None:
        return "–"
    percent = 100 * value
    return f"{percent:.1f} %" if 0 < percent < 10 else f"{percent:.0f} %"


def tally_text(value: Tally) -> str:
    """``18 of 20``; a dash where nothing was judged."""
    return f"{value.right} of {value.judged}" if value.judged else "–"


def seconds_text(value: float) -> str:
    """``350 ms``, ``4.1 s``."""
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"


def _data_uri(jpeg: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"
