"""The OpenAPI document is one, knows every route, and the page made of it is the one that is here."""

import importlib.util
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from gateway_parts import serving
from http_parts import Client, check, document, operations
from openapi_spec_validator import validate

from cluster.alerts.dispatcher import SinkStatus
from cluster.alerts.incident import AlertEvent, Delivery, Incident
from cluster.gateway.http import application
from cluster.gateway.http.application import table
from cluster.types import CameraStatus, MemoryStatus
from cluster.types.reports import ReplicaStatus

ROOT = Path(__file__).parents[3]


def test_the_document_is_valid():
    validate(document())


def test_every_operation_says_what_it_is():
    ids = [operation["operationId"] for _, _, operation in operations()]
    assert len(ids) == len(set(ids)) == len(table())
    for method, path, operation in operations():
        assert operation["summary"], path
        assert ("requestBody" in operation) == (method in ("POST", "PUT")), path


async def test_the_gateway_serves_it_and_makes_it_once_however_often_strangers_ask(tmp_path, monkeypatch):
    made = []
    describe = application.get_openapi
    monkeypatch.setattr(application, "get_openapi", lambda **options: made.append(1) or describe(**options))
    application.document.cache_clear()
    async with serving(tmp_path, cameras=1, tokens=True) as served, Client(served.url) as client:
        for _ in range(2):
            assert await client("GET", "/v1/openapi.json") == (200, document())
    assert made == [1]


def test_the_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("generate_api", ROOT / "docs" / "generate_api.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert (ROOT / "docs" / "api.md").read_text(encoding="utf-8") == generate.page(), "run `make api-docs`"


@pytest.mark.parametrize(
    "kind", [CameraStatus, Incident, AlertEvent, Delivery, SinkStatus, MemoryStatus, ReplicaStatus]
)
def test_clients_made_of_it_may_rely_on_every_key_of_a_reply(kind):
    """Whatever has a default in Python is in every reply, and was said to be optional."""
    names = {field.name for field in fields(kind)}
    assert set(document()["components"]["schemas"][kind.__name__]["required"]) == names


async def test_the_next_page_of_incidents_after_one_that_was_deleted_is_an_error_it_knows(tmp_path):
    async with serving(tmp_path, cameras=1) as served, Client(served.url) as client:
        assert (await client("GET", "/v1/incidents?before=0123456789abcdef"))[0] == 404


async def test_whatever_all_cameras_answer_is_what_the_document_says(tmp_path):
    """Of each form of answer one, a camera that remembers nothing and one that fails among them."""
    async with serving(tmp_path, cameras=1) as served, Client(served.url) as client:
        served.world.cameras["dark"] = CameraStatus("dark")
        async with client.open("POST", "/v1/ask/all", json={"text": "Who?"}) as reply:
            lines = [json.loads(line) async for line in reply.content]
        for line in lines:
            check("POST", "/v1/ask/all", 200, line)
        assert {each["answer"]["camera"] for each in lines if "answer" in each} == {"cam-000", "dark"}
        said = {"messages": [{"role": "user", "content": "Who?"}]}
        for model, key in {"fleet": "progress", "camera/cam-000": "moments"}.items():
            status, body = await client("POST", "/v1/chat/completions", {"model": model, **said})
            assert (status, key in body["sightline"]) == (200, True), model


def test_every_type_of_a_field_is_described_on_the_page():
    """Enums too: their values are nowhere else."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    described = set(re.findall(r"^### (\w+) \((?:message|enum)\)$", page, re.MULTILINE))
    rows = re.findall(r"^\| `\w+` = \d+ \| (?:repeated |optional )?([A-Z]\w+) \|", page, re.MULTILINE)
    assert rows
    assert set(rows) <= described
