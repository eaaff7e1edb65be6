"""Parses imported camera lists (CSV, YAML or JSON), reporting errors by line."""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.config.camera import CameraEntry
from cluster.config.load import parse_camera, read_yaml
from cluster.errors import ConfigError

COLUMNS = ("name", "source", "priority", "question", "paused")
MOST_CAMERAS = 5000


@dataclass(frozen=True, slots=True)
class ListedCamera:
    """One entry of a camera list: its line, and the camera or the error."""

    line: int
    name: str
    entry: CameraEntry | None = None
    error: str = ""


def parse_camera_list(text: str) -> list[ListedCamera]:
    """Parse a camera list, keeping its order. CSV starts with a line of column names, :data:`COLUMNS`; YAML and JSON
    hold a list ``cameras`` as in a configuration, or are that list. Variables (``${NAME}``) are not expanded. Raises
    ``ConfigError``: none of the three formats, empty, or too long."""
    # Spreadsheets begin a CSV in UTF-8 with a byte order mark.
    text = text.removeprefix("\ufeff")
    first = next((line for line in text.splitlines() if line.strip()), "")
    is_csv = "name" in [cell.strip().lower() for cell in first.split(",")]
    found: list[ListedCamera] = []
    names: dict[str, int] = {}
    for line, body in _from_csv(text) if is_csv else _from_yaml(text):
        if len(found) >= MOST_CAMERAS:
            raise ConfigError(f"the list has more than {MOST_CAMERAS:,} cameras; import it in parts")
        listed = _camera(line, body)
        if listed.entry is not None and listed.name in names:
            listed = ListedCamera(line, listed.name, error=f"line {names[listed.name]} already has this name")
        names.setdefault(listed.name, line)
        found.append(listed)
    if not found:
        raise ConfigError("the list holds no camera; use CSV with the columns name and source, or YAML or JSON")
    return found


def _camera(line: int, body: Any) -> ListedCamera:
    if not isinstance(body, Mapping) or not isinstance(body.get("name"), str):
        return ListedCamera(line, "", error="a camera needs a name")
    name, source = body["name"], body.get("source") or ""
    if "${" in json.dumps(body, default=str):
        return ListedCamera(line, name, error="variables (${NAME}) are not expanded here; write the value")
    try:
        settings = {str(key): value for key, value in body.items() if key not in ("name", "source")}
        return ListedCamera(line, name, parse_camera(name, source, settings=settings))
    except ConfigError as error:
        return ListedCamera(line, name, error=" ".join(str(error).split()))


def _from_csv(text: str) -> Iterator[tuple[int, Any]]:
    rows = csv.reader(io.StringIO(text), skipinitialspace=True)
    try:
        columns: list[str] = []
        for row in rows:
            if not any(cell.strip() for cell in row):
                continue
            if not columns:
                columns = [cell.strip().lower() for cell in row]
                if unknown := [column for column in columns if column not in COLUMNS]:
                    raise ConfigError(f"line {rows.line_num}: unknown column {unknown[0]!r}; use {', '.join(COLUMNS)}")
                continue
            cells = {column: cell.strip() for column, cell in zip(columns, row, strict=False) if cell.strip()}
            body: dict[str, Any] = {key: cell for key, cell in cells.items() if key != "question"}
            if len(row) > len(columns):
                # An unquoted comma in a question.
                body = {"name": cells.get("name", ""), "columns": "too many; put text with commas in quotes"}
            if "question" in cells:
                body["questions"] = [{"id": "question", "text": cells["question"]}]
            yield rows.line_num, body
    except csv.Error as error:
        raise ConfigError(f"line {rows.line_num}: not CSV: {error}") from None


def _from_yaml(text: str) -> Iterator[tuple[int, Any]]:
    bare = text.lstrip()
    # Wrapping a bare list in `cameras:` moves one written with dashes down by a line.
    head = "cameras:\n" if bare.startswith("- ") else "cameras: " if bare.startswith("[") else ""
    document = read_yaml(head + (bare if head == "cameras: " else text), "the list")
    cameras = document.data.get("cameras")
    if not isinstance(cameras, list):
        raise ConfigError("the list has no `cameras:`; use CSV with the columns name and source, or YAML or JSON")
    for number, body in enumerate(cameras):
        yield (document.line(("cameras", number)) or 1) - head.count("\n"), body
