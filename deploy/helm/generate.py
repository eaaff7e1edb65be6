"""Writes values.schema.json and the table of README.md from the chart's values.yaml and the configuration schema.

In values.yaml a comment above a key is its description, and a line ``# @schema {...}`` in it adds to what the default
says: any JSON schema, or one of the shorthands ``resources``, ``tolerations``, ``peers``, ``quantity``,
``configuration``. Every mapping is closed, so that a misspelt key is refused.

Run it with ``make schema``; ``--check`` writes nothing and says whether the files are up to date.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "sightline"
CONFIGURATION = Path(__file__).parents[2] / "configs" / "schema.json"
BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"

OWNED = {
    "model": ["device"],
    "gateway": ["host", "port", "http_port"],
    "security": [
        *("tokens_file", "tls", "internal_tls", "memory_key_file", "allow_unauthenticated", "allow_plain_inside"),
    ],
    "cluster": [
        *(
            "ray_address",
            "gateways",
            "decoders",
            "max_decoders",
            "replicas",
            "placement",
            "log_dir",
            "state_dir",
            "metrics_port",
        ),
    ],
    "alerts": ["folder"],
    "kubernetes": ["enabled", "namespace", "kubeconfig", "context"],
}
"""Keys of the configuration that the chart sets, and nobody else may."""

QUANTITY = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"}
_AMOUNTS = {
    "type": "object",
    "additionalProperties": False,
    "required": ["cpu", "memory"],
    "properties": {
        # Written without quotes by most, and by `--set`.
        "cpu": QUANTITY | {"type": ["string", "number"]},
        "memory": QUANTITY,
        "ephemeral-storage": QUANTITY,
    },
}
_SELECTOR = {"type": "object"}
SHORTHANDS: dict[str, dict[str, Any]] = {
    "quantity": QUANTITY,
    "resources": {
        "additionalProperties": False,
        "required": ["requests", "limits"],
        "properties": {"requests": _AMOUNTS, "limits": _AMOUNTS},
    },
    "tolerations": {
        "items": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "key": {"type": "string"},
                "operator": {"enum": ["Exists", "Equal"]},
                "value": {"type": "string"},
                "effect": {"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
                "tolerationSeconds": {"type": "integer"},
            },
        }
    },
    "scheduling": {
        "additionalProperties": False,
        "properties": {
            "affinity": {"type": "object"},
            "topologySpreadConstraints": {"type": "array", "items": {"type": "object"}},
            "priorityClassName": {"type": "string"},
        },
    },
    "peers": {
        "items": {
            "type": "object",
            "additionalProperties": False,
            "minProperties": 1,
            "properties": {"podSelector": _SELECTOR, "namespaceSelector": _SELECTOR, "ipBlock": {"type": "object"}},
        }
    },
}
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


class Value:
    """One key of values.yaml: its path, default, description and what ``@schema`` adds."""

    def __init__(self, path: str, default: Any, comments: list[str]) -> None:
        self.path, self.default = path, default
        self.extra: dict[str, Any] = {}
        described = []
        for line in comments:
            if line.startswith("@schema "):
                self.extra |= json.loads(line.removeprefix("@schema "))
            else:
                described.append(line)
        self.description = " ".join(described)
        if not self.description:
            raise SystemExit(f"values.yaml: {path} has no description above it")

    @property
    def section(self) -> bool:
        """Whether its keys are values of their own."""
        return isinstance(self.default, dict) and bool(self.default) and not self.extra


def read_values(text: str) -> list[Value]:
    """Every key in the file's order, sections before what is in them."""
    lines = text.splitlines()
    found: list[Value] = []

    def walk(node: yaml.MappingNode, defaults: dict[str, Any], prefix: str) -> None:
        for key, below in node.value:
            name = str(key.value)
            value = Value(prefix + name, defaults[name], _comments(lines, key.start_mark.line))
            found.append(value)
            if value.section and isinstance(below, yaml.MappingNode):
                walk(below, defaults[name], f"{prefix}{name}.")

    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    walk(root, yaml.safe_load(text), "")
    return found


def _comments(lines: list[str], row: int) -> list[str]:
    """The comment lines right above a row."""
    found: list[str] = []
    while row > 0 and lines[row - 1].lstrip().startswith("#"):
        row -= 1
        found.insert(0, lines[row].lstrip().removeprefix("#").strip())
    return found


def schema(values: list[Value], configuration: dict[str, Any]) -> dict[str, Any]:
    """The closed JSON schema of the values."""
    root: dict[str, Any] = _closed()
    root |= {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the Sightline chart"}
    # Helm hands this to every chart of a parent chart.
    root["properties"]["global"] = {"type": "object"}
    objects = {"": root}
    for value in values:
        parent, _, name = value.path.rpartition(".")
        below = _closed() if value.section else _leaf(value)
        below["description"] = value.description
        objects[parent]["properties"][name] = below
        objects[value.path] = below
    closed = copy.deepcopy(configuration)
    root["$defs"] = closed.pop("$defs")
    root["properties"]["config"] |= {"properties": closed["properties"], "additionalProperties": False}
    for section, keys in OWNED.items():
        target = root["$defs"][closed["properties"][section]["$ref"].rpartition("/")[2]]
        for key in keys:
            del target["properties"][key]
    _drop(root, {"default", "examples"})
    return root


def _closed() -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": {}}


def _leaf(value: Value) -> dict[str, Any]:
    made: dict[str, Any] = {"type": TYPES[type(value.default)]}
    for key, given in value.extra.items():
        made |= SHORTHANDS.get(key, {} if key == "configuration" else {key: given})
    return made


def _drop(node: Any, keys: set[str]) -> None:
    """Helm takes defaults from values.yaml alone; a property of that name is no keyword."""
    if isinstance(node, list):
        for each in node:
            _drop(each, keys)
    elif isinstance(node, dict):
        for key in keys & node.keys():
            del node[key]
        for key, below in node.items():
            for each in below.values() if key in ("properties", "$defs") else [below]:
                _drop(each, keys)


def table(values: list[Value]) -> str:
    """The values as Markdown."""
    rows = ["| value | default | what |", "|---|---|---|"]
    for value in values:
        default = "" if value.section else f"`{json.dumps(value.default, ensure_ascii=False)}`"
        rows.append(f"| `{value.path}` | {default} | {value.description} |".replace("| |", "|  |"))
    return "\n".join(rows)


def generated() -> dict[Path, str]:
    """What the files must hold."""
    values = read_values((CHART / "values.yaml").read_text(encoding="utf-8"))
    made = schema(values, json.loads(CONFIGURATION.read_text(encoding="utf-8")))
    readme = CHART / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    return {
        CHART / "values.schema.json": json.dumps(made, indent=1, ensure_ascii=False) + "\n",
        readme: f"{before}{BEGIN}\n\n{table(values)}\n\n{END}{after}",
    }


def main(arguments: list[str]) -> int:
    """0: the files are up to date (now)."""
    stale = [path for path, text in generated().items() if not path.exists() or path.read_text("utf-8") != text]
    if "--check" in arguments:
        for path in stale:
            print(f"{path.name} is not up to date: make schema", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(generated()[path], encoding="utf-8")
        print(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
