"""The JSON schema of the configuration, for editors and for the documentation."""

from __future__ import annotations

import json
from typing import Any

from cluster.config.root import SightlineConfig


def schema() -> dict[str, Any]:
    """JSON schema (2020-12) of a configuration file."""
    body = SightlineConfig.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **body, "title": "Sightline configuration"}


def schema_text() -> str:
    """The schema as ``configs/schema.json`` holds it."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"
