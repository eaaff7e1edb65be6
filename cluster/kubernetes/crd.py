"""The CustomResourceDefinition of ``Camera``, generated from the configuration's schema (``sightline config crd``).

A structural schema as apiextensions.k8s.io/v1 requires: no references, a type at every node, ``nullable`` in place of a
union with null, bounds in the form of OpenAPI 3.0. It has no defaults: the cluster fills in missing keys, and a default
in the schema would override that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cluster.config.camera import CameraEntry
from cluster.kubernetes.keys import camel, in_camel
from cluster.kubernetes.resource import GROUP, KIND, PLURAL, POLYGONS, VERSION, Credentials

Node = dict[str, Any]

_KEPT = (
    "description",
    "type",
    "enum",
    "pattern",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minimum",
    "maximum",
)
_SHARE: Node = {"type": "number", "minimum": 0, "maximum": 1}
_ADDRESS_CHARS = 2048

_POLYGON: Node = {
    "type": "object",
    "description": "Corners (points), or a rectangle (x, y, width, height), in shares of the picture.",
    "properties": {
        "points": {
            "type": "array",
            "minItems": 3,
            "maxItems": 256,
            "items": {"type": "object", "required": ["x", "y"], "properties": {"x": _SHARE, "y": _SHARE}},
        },
        **dict.fromkeys(("x", "y", "width", "height"), _SHARE),
    },
    "x-kubernetes-validations": [
        {
            "rule": "has(self.points) != (has(self.x) && has(self.y) && has(self.width) && has(self.height))",
            "message": "give points, or all of x, y, width and height",
        }
    ],
}
_SPEC_RULES = [
    {
        # `SourceAddress.holds_password` as far as CEL can express it; that property decides.
        "rule": "!has(self.source) || !self.source.matches("
        "'://[^@]*:[^@]*@|(?i)[?&;_/](pass|password|passwd|passphrase|pwd|psw|token|key|apikey|auth|secret)=')",
        "message": "source must hold no password; put it into a Secret, and name that under credentials",
    },
    {
        "rule": "!has(self.credentials) || (has(self.source) && self.source.contains('://'))",
        "message": "credentials need a source that is an address, as rtsp://10.0.0.11/stream1",
    },
]
_WINDOW_RULES = [
    {
        "rule": "!has(self.strideSeconds) || !has(self.lengthSeconds) || self.strideSeconds <= self.lengthSeconds",
        "message": "strideSeconds must not exceed lengthSeconds",
    }
]


def definition() -> Node:
    """The CustomResourceDefinition object."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {"kind": KIND, "listKind": f"{KIND}List", "plural": PLURAL, "singular": "camera"},
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [
                        _column("State", ".status.state"),
                        _column("Accepted", '.status.conditions[?(@.type=="Accepted")].status'),
                        _column("Replica", ".status.replica"),
                        _column("Quality", ".status.rung"),
                        _column("Lag", ".status.lagSeconds", kind="number"),
                        _column("Last answer", ".status.lastAnswer"),
                        _column("Reason", ".status.reason", priority=1),
                        _column("Age", ".metadata.creationTimestamp", kind="date"),
                    ],
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "description": "A camera of Sightline.",
                            "required": ["spec"],
                            "properties": {
                                "apiVersion": {"type": "string"},
                                "kind": {"type": "string"},
                                "metadata": {"type": "object"},
                                "spec": spec_schema(),
                                "status": status_schema(),
                            },
                        }
                    },
                }
            ],
        },
    }


def definition_text() -> str:
    """The object as the YAML file that is installed."""
    import yaml

    # Through JSON, so that repeated values are written out instead of as aliases.
    plain = json.loads(json.dumps(definition()))
    return "# Written by `sightline config crd`.\n" + yaml.safe_dump(plain, sort_keys=False, width=120)


def spec_schema() -> Node:
    """Schema of ``spec``: every key of a camera but its name, and its credentials."""
    whole = CameraEntry.model_json_schema()
    spec = _section(whole, whole.get("$defs", {}))
    del spec["properties"]["name"]
    spec["required"] = [key for key in spec.get("required", []) if key != "name"]
    if not spec["required"]:
        del spec["required"]
    spec["description"] = "Keys given here override the cluster's settings."
    properties = spec["properties"]
    properties["source"]["maxLength"] = _ADDRESS_CHARS
    properties["credentials"] = _section(Credentials.model_json_schema(), {})
    properties["window"]["x-kubernetes-validations"] = _WINDOW_RULES
    properties["questions"] |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["id"]}
    for key, description in POLYGONS.items():
        listed = {each: properties[camel(key)][each] for each in ("type", "maxItems")}
        properties[camel(key)] = {**listed, "items": _POLYGON, "description": description}
    spec["x-kubernetes-validations"] = _SPEC_RULES
    return spec


def status_schema() -> Node:
    """Schema of ``status``, which only the cluster writes (``cluster.kubernetes.resource``)."""
    text: Node = {"type": "string"}
    condition = {
        "type": "object",
        "required": ["type", "status", "lastTransitionTime", "reason", "message"],
        "properties": {
            "type": text,
            "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
            "reason": text,
            "message": text,
            "lastTransitionTime": {"type": "string", "format": "date-time"},
            "observedGeneration": {"type": "integer", "format": "int64"},
        },
    }
    answer = {
        "type": "object",
        "required": ["question"],
        "properties": {"question": text, "score": {"type": "number"}, "positive": {"type": "boolean"}},
    }
    return {
        "type": "object",
        "properties": {
            "observedGeneration": {"type": "integer", "format": "int64"},
            "state": {**text, "description": "waiting, connecting, running, backoff, error or ended."},
            "reason": {**text, "description": "Reason of the state."},
            "manager": {**text, "description": "Manager of the camera; any but kubernetes is a conflict."},
            "source": {**text, "description": "Source without its password."},
            "decoder": text,
            "replica": text,
            "rung": {**text, "description": "Of the quality ladder."},
            "rungReason": text,
            "lagSeconds": {"type": "number", "description": "Seconds from a window's last frame to its answer."},
            "lastAnswer": {**text, "description": "Newest answer of each question, as text."},
            "answers": {
                "type": "array",
                "items": answer,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["question"],
            },
            "conditions": {
                "type": "array",
                "items": condition,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
            },
        },
    }


def _column(name: str, path: str, *, kind: str = "string", priority: int = 0) -> Node:
    return {"name": name, "type": kind, "jsonPath": path, **({"priority": priority} if priority else {})}


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
    found: Node = _described(node) | {key: node[key] for key in _KEPT if key in node}
    for bound in ("Minimum", "Maximum"):
        if (value := node.get(f"exclusive{bound}")) is not None:
            found |= {bound.lower(): value, f"exclusive{bound}": True}
    if node.get("type") == "array":
        found["items"] = _node(node["items"], definitions)
    elif node.get("type") == "object":
        # Parameters of a policy: only the cluster knows its policies.
        found["x-kubernetes-preserve-unknown-fields"] = True
    return found


def _union(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Node:
    """Union of a type and null, or of number and text."""
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
