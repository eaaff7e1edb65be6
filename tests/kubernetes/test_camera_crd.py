"""The definition of the resource: as installed, structural as Kubernetes asks for, and of one mind with the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.config import CameraEntry
from cluster.config.problems import section_of
from cluster.errors import ConfigError
from cluster.kubernetes.crd import definition, definition_text
from cluster.kubernetes.keys import camel
from cluster.kubernetes.resource import ACCEPTED, CameraResource, Outcome, status_of, worth_writing
from cluster.types import CameraStatus, LastAnswer

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "sightline"
WHOLE = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SPEC = WHOLE["properties"]["spec"]


def plain(node):
    """The schema as JSON Schema has it: closed as the server's strict validation is, bounds and null in its words."""
    if isinstance(node, list):
        return [plain(each) for each in node]
    if not isinstance(node, dict):
        return node
    found = {key: value for key, value in node.items() if not key.startswith("x-kubernetes")}
    for bound in ("minimum", "maximum"):
        if found.pop(f"exclusive{bound.capitalize()}", False):
            found[f"exclusive{bound.capitalize()}"] = found.pop(bound)
    if "properties" in found:
        found["properties"] = {key: plain(value) for key, value in found["properties"].items()}
        found.setdefault("additionalProperties", False)
    if "items" in found:
        found["items"] = plain(found["items"])
    nullable = found.pop("nullable", False)
    return {"anyOf": [found, {"type": "null"}]} if nullable else found


def spec_problem(spec):
    errors = list(jsonschema.Draft202012Validator(plain(SPEC)).iter_errors(spec))
    return errors[0].message if errors else ""


def code_problem(spec):
    body = {"metadata": {"name": "gate", "resourceVersion": "1"}, "spec": spec}
    try:
        CameraResource.of(body).entry({"username": "u", "password": "p"})
    except ConfigError as error:
        return str(error)
    return ""


def test_the_chart_has_the_definition_of_this_version():
    assert (CHART / "crds" / "cameras.yaml").read_text() == definition_text(), "run: sightline config crd"


def nodes(node, path="spec"):
    yield path, node
    for key, value in node.get("properties", {}).items():
        yield from nodes(value, f"{path}.{key}")
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")


def test_it_is_structural():
    """https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/: a type at each
    node, nothing but plain constraints, no references, no union beside a type, and no defaults of ours."""
    allowed = {
        "type",
        "description",
        "properties",
        "required",
        "items",
        "enum",
        "pattern",
        "nullable",
        "format",
        "anyOf",
    }
    allowed |= {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minItems"}
    allowed |= {"maxItems", "x-kubernetes-validations", "x-kubernetes-int-or-string", "x-kubernetes-list-type"}
    allowed |= {"x-kubernetes-list-map-keys", "x-kubernetes-preserve-unknown-fields"}
    for path, node in nodes(WHOLE, ""):
        assert set(node) <= allowed, path
        either = node.get("x-kubernetes-int-or-string", False)
        assert either != ("type" in node), path
        assert ("anyOf" in node) == either, path
        assert node.get("type") != "array" or "items" in node, path
        for keys in [node.get("x-kubernetes-list-map-keys", [])]:
            assert set(keys) <= set(node.get("items", {}).get("required", [])), path
        assert set(node.get("required", [])) <= set(node.get("properties", {})), path


def test_descriptions_name_the_keys_of_a_resource():
    """Not those of a configuration, as ``length_s``: `kubectl explain` shows them."""
    described = [node["description"] for _, node in nodes(SPEC) if "description" in node]
    assert [text for text in described if re.search(r"[a-z]_s\b", text)] == []
    assert "Seconds between answers; must not exceed lengthSeconds." in described


def test_every_key_of_a_camera_is_there_under_its_own_name():
    def keys(model):
        found = {}
        for key, field in model.model_fields.items():
            section = section_of(field.annotation)
            assert camel(key) not in found
            found[camel(key)] = keys(section) if section else None
        return found

    def compare(expected, node, path):
        inside = node.get("items", node)["properties"]
        assert set(expected) <= set(inside), path
        for key, below in expected.items():
            if below:
                compare(below, inside[key], f"{path}.{key}")

    expected = keys(CameraEntry)
    del expected["name"]
    compare(expected, SPEC, "spec")
    assert set(SPEC["properties"]) - set(expected) == {"credentials"}


def test_the_examples_are_right():
    documents = list(yaml.safe_load_all((CHART / "examples" / "cameras.yaml").read_text()))
    cameras = [each for each in documents if each["kind"] == "Camera"]
    assert len(cameras) >= 2
    for camera in cameras:
        jsonschema.Draft202012Validator(plain(WHOLE)).validate({**camera, "metadata": {}})
        assert code_problem(camera["spec"]) == ""


@pytest.mark.parametrize(
    ("spec", "right"),
    [
        ({}, True),
        ({"window": None, "questions": None}, True),
        ({"memory": {"retention": "24h", "cap": 65536}}, True),
        ({"memory": {"retention": "a day"}}, False),
        ({"questions": [{"id": "q", "text": "Fire?", "cooldownSeconds": 60}]}, True),
        ({"questions": [{"id": "q"}]}, False),
        ({"questions": [{"id": "q", "text": "Fire?", "threshold": 1}]}, False),
        ({"sampling": {"fps": 0}}, False),
        ({"sampling": {"framesPerSecond": 2}}, False),
        ({"sampling": {"fps": "fast"}}, False),
        ({"pruning": {"policy": "replenish", "options": {"threshold": 0.1}}}, True),
        ({"privacyMasks": [{"x": 0, "y": 0, "width": 0.5, "height": 0.5}]}, True),
        ({"privacyMasks": [{"points": [{"x": 0, "y": 0}, {"x": 1, "y": 0}, {"x": 1, "y": 2}]}]}, False),
        ({"privacyMasks": [{"points": [{"x": 0, "y": 0}]}]}, False),
        ({"zones": [{"x": 0, "y": 0, "width": 0.5, "height": 0.5}]}, True),
        ({"zones": [{"points": [{"x": 0, "y": 0}, {"x": 1, "y": 0}, {"x": 1, "y": 0.2}]}]}, True),
        ({"zones": [{"x": 0, "y": 0, "width": 0.5, "height": 0.5}] * 5}, False),
        ({"name": "gate"}, False),
        ({"source": 7}, False),
        ([], False),
    ],
)
def test_schema_and_code_agree(spec, right):
    assert (spec_problem(spec) == "") is right
    if isinstance(spec, dict):
        assert (code_problem(spec) == "") is right


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(spec=st.dictionaries(st.sampled_from(sorted(SPEC["properties"])) | st.text(max_size=4), VALUES, max_size=4))
@example(spec={"\n": None})
def test_any_spec_is_a_camera_or_one_sentence(spec):
    assert "\n" not in code_problem(spec)


def resource(status=None, generation=3):
    return CameraResource.of(
        {
            "metadata": {"name": "gate", "resourceVersion": "9", "uid": "u", "generation": generation},
            "spec": {},
            "status": status or {},
        }
    )


def test_statuses_fit_the_definition_and_their_times_tell_of_changes():
    camera = CameraStatus(
        "gate",
        source="rtsp://u:hunter2@h/",
        state="backoff",
        reason="rtsp://u:hunter2@h/ refused",
        replica="replica-0",
        manager="kubernetes",
        rung="stride",
        rung_reason="the replica is full",
        latency_s=0.5,
        last_answers=(LastAnswer("person", 0.123, False, 4),),
    )
    first = status_of(resource(), ACCEPTED, camera, "2026-01-01T00:00:00Z", {})
    validator = jsonschema.Draft202012Validator(plain(WHOLE["properties"]["status"]))
    validator.validate(first)
    assert "hunter2" not in json.dumps(first)
    refused = Outcome("False", "Invalid", "camera gate: rtsp://u:hunter2@h/ is wrong" + "!" * 5000)
    second = status_of(resource(first, 4), refused, camera, "2026-01-02T00:00:00Z", first)
    validator.validate(second)
    assert len(json.dumps(second)) < 4096
    times = {each["type"]: each["lastTransitionTime"][:10] for each in second["conditions"]}
    assert times == {"Accepted": "2026-01-02", "Running": "2026-01-01", "Conflict": "2026-01-01"}
    assert worth_writing(first, first) == "nothing"
    assert worth_writing(first, {**first, "lagSeconds": 7.0, "lastAnswer": "person 0.99 yes"}) == "later"
    assert worth_writing(first, {**first, "state": "running"}) == "soon"
    assert worth_writing(first, second) == "soon"
    validator.validate(status_of(resource(), ACCEPTED, None, "2026-01-01T00:00:00Z", {"conditions": "rubbish"}))


@pytest.mark.parametrize("body", [None, 7, {}, {"metadata": 3}, {"metadata": {"name": "gate"}}])
def test_what_is_no_object(body):
    with pytest.raises(ValueError, match=r"metadata\.name"):
        CameraResource.of(body)
