"""Cost models as JSON files: those that come with Sightline, by name, and the operator's own, by path."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

from cluster.control.costs.model import CostModel
from cluster.errors import ConfigError, SightlineError

SHIPPED = Path(__file__).parent


def names() -> list[str]:
    """Cost models that come with Sightline."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def load(name_or_path: str | Path) -> CostModel:
    """A shipped cost model by its name, or any by its path.

    Raises:
        ConfigError: there is none, or the file is not a cost model.
    """
    path = Path(name_or_path)
    if str(name_or_path) in names():
        path = SHIPPED / f"{name_or_path}.json"
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError(
            f"there is no cost model {str(name_or_path)!r}; give a file that sightline bench cost --out wrote, or one "
            f"of: {', '.join(names())}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); write it anew with: sightline bench cost --out") from None
    wanted = {field.name for field in fields(CostModel)}
    if not isinstance(body, dict) or set(body) != wanted:
        raise ConfigError(
            f"{path} is not a cost model, which has exactly the keys {', '.join(sorted(wanted))}; "
            "write one with: sightline bench cost --out"
        )
    return CostModel(**body)


def save(costs: CostModel, path: Path) -> None:
    """Write a cost model where :func:`load` reads it.

    Raises:
        SightlineError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(asdict(costs), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise SightlineError(f"cannot write {path}: {error.strerror or error}; choose another place") from None
