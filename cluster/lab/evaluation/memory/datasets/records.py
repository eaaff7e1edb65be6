"""Annotation files as lists of records, from JSON or Parquet, and access to their fields."""

import json
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError

Record = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """All records of an annotation file: a JSON list of objects (or an object with one list in it), or a Parquet table.

    Raises:
        ConfigError: unreadable, another format, or Parquet without pyarrow.
    """
    if path.suffix == ".parquet":
        return _parquet(path)
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if isinstance(body, dict):
        lists = [value for value in body.values() if isinstance(value, list)]
        body = lists[0] if len(lists) == 1 else body
    if not isinstance(body, list) or not all(isinstance(each, dict) for each in body):
        raise ConfigError(f"{path} is not a list of annotations: each must be an object in one list")
    return body


def _parquet(path: Path) -> list[Record]:
    try:
        # Optional dependency.
        from pyarrow import ArrowException, parquet  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ConfigError(
            f"{path} is Parquet, which takes pyarrow to read: pip install pyarrow, or save the annotations as JSON"
        ) from None
    try:
        rows: list[Record] = parquet.read_table(str(path)).to_pylist()
    except (OSError, ArrowException) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    return rows


def text(record: Record, *names: str) -> str:
    """First of these fields that exists, as text.

    Raises:
        ConfigError: missing, empty or not text.
    """
    name, value = _first(record, names)
    if isinstance(value, str) and value.strip():
        return value.strip()
    raise ConfigError(f"{name} is {value!r} and must be text")


def texts(record: Record, name: str) -> tuple[str, ...]:
    """A field as a list of texts.

    Raises:
        ConfigError: missing, or not a list of texts.
    """
    _, value = _first(record, (name,))
    if isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value):
        return tuple(each.strip() for each in value)
    raise ConfigError(f"{name} is {value!r} and must be a list of texts")


def _first(record: Record, names: tuple[str, ...]) -> tuple[str, Any]:
    for name in names:
        if name in record:
            return name, record[name]
    raise ConfigError(f"it has no {' or '.join(names)}")


def seconds(record: Record, name: str) -> float:
    """A field in seconds.

    Raises:
        ConfigError: missing, or not a number.
    """
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} is {value!r} and must be a number of seconds")
    return float(value)
