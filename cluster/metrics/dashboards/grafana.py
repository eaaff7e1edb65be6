"""Dashboards as Grafana reads them, from descriptions of a few words: panels laid out in rows, 24 columns wide."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

SCHEMA_VERSION = 41
"""Of Grafana 12; older ones down to 9 read it, newer ones bring it up to date by themselves."""

COLUMNS = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
RUNBOOKS = "docs/operations.md"
"""Where panels find the runbooks; whoever hosts the documentation puts its address into the variable ``runbooks``."""

Kind = Literal["timeseries", "stat", "table", "bargauge"]
Need = Literal["", "dcgm", "kubernetes", "nvml", "ray", "redis"]


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    * ``queries``: (expression, legend) pairs
    * ``unit``: as Grafana calls it: ``s``, ``bytes``, ``percentunit``, ``short``, ``reqps`` …
    * ``limits``: (value, colour) from low to high; below the first one it is green
    * ``alert``: the alert whose runbook says what to do about it
    * ``needs``: what must be there besides Sightline itself
    """

    title: str
    queries: Sequence[tuple[str, str]]
    description: str
    unit: str = "short"
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    limits: Sequence[tuple[float, str]] = ()
    alert: str = ""
    stack: bool = False
    top: float | None = None
    needs: Need = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """``uid`` is part of links to it and must never change; ``variables``: (name, metric, label) to choose from."""

    uid: str
    title: str
    description: str
    rows: Sequence[Row]
    variables: Sequence[tuple[str, str, str]] = ()

    def panels(self) -> Iterator[Panel]:
        """All of them."""
        for row in self.rows:
            yield from row.panels

    def to_json(self) -> str:
        """The file that Grafana is provisioned with."""
        body = {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["sightline"],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "",
            "links": [_neighbours()],
            "templating": {"list": [*_variables(self.variables)]},
            "annotations": {"list": []},
            "panels": list(_laid_out(self.rows)),
        }
        return json.dumps(body, indent=1) + "\n"


def concrete(expression: str, interval: str = "5m") -> str:
    """The expression with Grafana's variables replaced, as Prometheus evaluates it for all values."""
    return re.sub(r"\$\{?[a-z]+\}?", ".*", expression.replace("$__rate_interval", interval))


def _neighbours() -> dict[str, Any]:
    return {
        "type": "dashboards",
        "title": "Sightline",
        "tags": ["sightline"],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
    }


def _variables(choices: Sequence[tuple[str, str, str]]) -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    yield {"name": "runbooks", "type": "constant", "hide": 2, "query": RUNBOOKS}
    for name, metric, label in choices:
        query = f"label_values({metric}, {label})"
        yield {
            "name": name,
            "type": "query",
            "datasource": SOURCE,
            "definition": query,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }


def _laid_out(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Panels from left to right, in a new line where one does not fit any more."""
    number, y = 0, 0
    for row in rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
            "panels": [],
        }
        y += 1
        x = line = 0
        for panel in row.panels:
            number += 1
            if x + panel.width > COLUMNS:
                x, y, line = 0, y + line, 0
            place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            yield _panel(panel, number, place)
            x, line = x + panel.width, max(line, panel.height)
        y += line


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    steps += [{"color": color, "value": value} for value, color in panel.limits]
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.top is not None:
        defaults["max"] = panel.top
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "fillOpacity": 30 if panel.stack else 5,
            "lineWidth": 1,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stack else "none"},
            "thresholdsStyle": {"mode": "line" if panel.limits else "off"},
        }
    body: dict[str, Any] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel.kind),
        "targets": [
            _target(panel.kind, expression, legend, at) for at, (expression, legend) in enumerate(panel.queries)
        ],
    }
    if panel.alert:
        address = f"${{runbooks}}#{panel.alert.lower()}"
        body["links"] = [{"title": f"Runbook: {panel.alert}", "url": address, "targetBlank": True}]
    return body


def _target(kind: Kind, expression: str, legend: str, at: int) -> dict[str, Any]:
    now = kind in ("table", "stat", "bargauge")
    return {
        "refId": chr(ord("A") + at),
        "datasource": SOURCE,
        "expr": expression,
        "legendFormat": legend,
        "instant": now,
        "range": not now,
        "format": "table" if kind == "table" else "time_series",
    }


def _options(kind: Kind) -> dict[str, Any]:
    if kind == "timeseries":
        return {
            "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    if kind == "table":
        return {"showHeader": True}
    reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if kind == "stat":
        return {"reduceOptions": reduce, "colorMode": "value", "graphMode": "area", "textMode": "auto"}
    return {"reduceOptions": reduce, "displayMode": "gradient", "orientation": "horizontal"}
