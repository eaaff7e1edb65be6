"""The CustomResourceDefinition of ``Camera``, generated from the configuration's schema (``sightline config crd``).

A structural schema as apiextensions.k8s.io/v1 requires: no references, a type at every node, ``nullable`` instead of a
union with null, bounds as in OpenAPI 3.0.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.config import deep_merge
from cluster.config.camera import CameraEntry
from cluster.kubernetes.keys import camel, in_camel
from cluster.kubernetes.resource import POLYGONS, Credentials

Node = dict[str, Any]

_KEPT = ("type", "enum", "pattern")
_BOUNDS = ("minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum")


def definition() -> Node:
    """The CustomResourceDefinition: ``crd.yaml`` with every key of a camera in its ``spec``."""
    import yaml

    whole: Node = yaml.safe_load(Path(__file__).with_name("crd.yaml").read_text(encoding="utf-8"))
    properties = whole["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    properties["spec"] = deep_merge(_generated(), properties["spec"])
    return whole


def definition_text() -> str:
    """The definition as an installable YAML file."""
    import yaml

    # Through JSON, so that repeated values are written out instead of becoming YAML aliases.
    plain = json.loads(json.dumps(definition()))
    return "# Written by `sightline config crd`.\n" + yaml.safe_dump(plain, sort_keys=False, width=120)


def _generated() -> Node:
    whole = CameraEntry.model_json_schema()
    spec = _section(whole, whole.get("$defs", {}))
    spec["properties"]["credentials"] = _section(Credentials.model_json_schema(), {})
    # These differ from the configuration's form; crd.yaml defines them.
    for key in POLYGONS:
        spec["properties"][camel(key)] = {}
    del spec["properties"]["name"]
    spec["required"].remove("name")
    if not spec["required"]:
        del spec["required"]
    return spec


def _section(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Node:
    properties = {camel(key): _node(value, definitions) for key, value in node["properties"].items()}
    found: Node = {"type": "object", **_described(node), "properties": properties}
    if required := [camel(key) for key in node.get("required", [])]:
        found["required"] = required
    return found


def _described(node: Mapping[str, Any]) -> Node:
    return {"description": in_camel(node["description"])} if "description" in node else {}


def _node(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Node:
    if "$ref" in node:
        return _section(definitions[node["$ref"].rsplit("/", 1)[1]], definitions) | _described(node)
    if "anyOf" in node:
        return _union(node, definitions)
    found: Node = _described(node) | {key: node[key] for key in (*_KEPT, *_BOUNDS) if key in node}
    for bound in ("Minimum", "Maximum"):
        if (value := node.get(f"exclusive{bound}")) is not None:
            found |= {bound.lower(): value, f"exclusive{bound}": True}
    if node.get("type") == "array":
        found["items"] = _node(node["items"], definitions)
    elif node.get("type") == "object":
        # Parameters of a policy, which only the cluster can validate.
        found["x-kubernetes-preserve-unknown-fields"] = True
    return found


def _union(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Node:
    """Union of a type and null, or of a number and a string."""
    described = _described(node)
    kinds = [each for each in node["anyOf"] if each.get("type") != "null"]
    nullable = {"nullable": True} if len(kinds) < len(node["anyOf"]) else {}
    if len(kinds) == 1:
        return {**_node(kinds[0], definitions), **described, **nullable}
    if {each.get("type") for each in kinds} <= {"integer", "number", "string"}:
        pattern = next((each["pattern"] for each in kinds if "pattern" in each), None)
        return {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            **({} if pattern is None else {"pattern": pattern}),
            **described,
            **nullable,
        }
    return {"x-kubernetes-preserve-unknown-fields": True, **described, **nullable}
