"""Writes docs/api.md from the protos, with their comments, and from the OpenAPI document: ``make api-docs``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc_tools
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from cluster.gateway.http.application import document
from cluster.security.roles import RULES

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "api.md"

BEGINNING = """\
# API

*Made by `make api-docs` from the protos and the gateway's OpenAPI document; do not edit.*

The gateway has two ports: gRPC (`gateway.port`) for programs and cameras, HTTP (`gateway.metrics_port`) for browsers,
scripts, OpenAI's clients and Prometheus. Both ask for the same API tokens, with the same roles and cameras
(docs/operations.md, "Who may call"): as `authorization: Bearer TOKEN`, or for browsers as the cookie that `POST
/v1/session` sets. Lists and events hold only the cameras that a token is for. The document itself is at `GET
/v1/openapi.json`, and gRPC answers reflection.

# HTTP

Requests have bodies of JSON (`Content-Type: application/json`, at most 64 KiB, no unknown keys). What fails has a
status and `{"error": "one sentence"}`: 400 wrong, 401 no token, 403 not with this token or from another web page, 404
not there, 409 not in its present state, 429 too many, 503 another process is not there right now, 504 too late. An
incident that the token is not for is answered, with its files, as one that never was. Every reply has an
`X-Request-Id`, which the gateway's log has too; a request may bring its own. Requests that another web page makes a
browser send are refused; on a gateway that asks for no tokens and listens on this machine only, so are requests by a
name other than `localhost`.

## Asking

```sh
curl -N https://gateway:9464/v1/ask -H "Authorization: Bearer $TOKEN" -H 'Content-Type: application/json' \\
  -d '{"camera": "gate", "text": "Who came in?", "since_s": 3600}'
```

answers with a line of JSON for every piece, `{"text": "..."}`, and at last `{"result": {...}}`: the whole text, the
moments it rests on and what it cost. What fails after the first piece ends the lines with `{"error": "..."}`.

## OpenAI's protocol

```python
client = openai.OpenAI(base_url="https://gateway:9464/v1", api_key=TOKEN)
client.chat.completions.create(model="camera/gate", messages=[{"role": "user", "content": "Who came in?"}])
```

* `model` is `camera/NAME`; `GET /v1/models` lists the cameras that the token may see. The role `ask` is needed.
* User and assistant messages are the conversation, of which the last 16 turns count; nothing is remembered between
  requests. System and developer messages are put before the last question, since the model's own beginning is shared
  by all questions; together they may have 2,000 characters.
* `stream`, `stream_options.include_usage`, `max_tokens` and `max_completion_tokens` do what they do; no answer is
  longer than `asking.max_new_tokens`. `since_s` is our own: only what was seen in so many seconds before the newest
  frame.
* Answers are greedy: temperature, top_p, seed and penalties have no effect. Tools, pictures and other parts that are
  not text, several choices, stop words, log probabilities and formats other than text are refused.
* `usage` counts tokens of text. `sightline`, beside `choices`, has what the answer rests on; in a stream the last
  chunk of the answer has it. Errors have OpenAI's form; an unknown camera is 404 `model_not_found`.

## Live events

`GET /v1/events` is a stream of server-sent events: `hello` at the beginning; `camera`, a `CameraStatus` that changed
(at most one per camera and second, and every five seconds where only counters and ages changed); `answer`, an answer
with `end_unix_s`, when its window ended; `incident` with `key`, `event` (new, update or end), `cause`, `at_s`,
`quiet` and `incident`; `removed` with a camera's `name`; and `missed` with the number of `events` that were dropped
because they were not read in time, or lost on their way (0: nobody knows how many): fetch the lists again then. Of an
incident's updates, those with the cause `acknowledged` say that somebody sees to it, those with the cause `clip` that
its clip is there or cannot be had (`clip` and `footage_note` of the incident say which; it may have ended by then). A
comment comes every 15 seconds. Ask for the cameras after `hello`, and nothing is missed.
"""


def page() -> str:
    """The whole page."""
    described = document()
    parts = [BEGINNING, "\n## Requests\n", *_routes(described), "\n## Forms\n", *_forms(described)]
    parts += [
        "\n# gRPC\n\nThe services of the gateway, package `sightline.v1`, with the role that each call needs.\n",
        *_services(),
    ]
    return "\n".join(parts).rstrip() + "\n"


_ALWAYS = {"200", "400", "401", "403", "429", "503", "default"}
"""Statuses of replies that need not be said of each request."""


def _routes(document: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            rule = operation["x-rule"]
            role = f"role `{RULES[rule].role}`" if rule else "nobody is asked for a token"
            yield f"### {method.upper()} {path}\n\n{operation['description']} ({role[0].upper()}{role[1:]}.)\n"
            queries = [each for each in operation.get("parameters", ()) if each["in"] == "query"]
            for query in queries:
                yield f"* `{query['name']}` ({query['schema']['type']}): {query['description']}"
            if queries:
                yield ""
            if "requestBody" in operation:
                yield f"Body: {_kind(operation['requestBody']['content']['application/json']['schema'])}."
            ((media, content),) = operation["responses"]["200"]["content"].items()
            said = f"`{media}`" if media != "application/json" else ""
            form = _kind(content["schema"]) if content["schema"] else ""
            known = _ALWAYS if rule else _ALWAYS - {"401"}
            errors = ", ".join(status for status in operation["responses"] if status not in known)
            yield f"Reply: {', '.join(filter(None, (said, form)))}.{f' Also {errors}.' if errors else ''}\n"


def _forms(document: Mapping[str, Any]) -> Iterator[str]:
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield f"### {name}\n\n{_words(schema.get('description', ''))}\n"
        fields = schema.get("properties", {})
        if not fields:
            continue
        yield "| key | type | |\n|---|---|---|"
        for key, field in fields.items():
            notes = [field["description"]] if "description" in field else []
            if key not in schema.get("required", ()):
                default = field.get("default")
                notes.append("may be left away" if default is None else f"{default!r} unless given")
            yield f"| `{key}` | {_kind(field)} | {_cell('; '.join(notes))} |"
        yield ""


def _kind(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        if "prefixItems" in schema:
            return f"({', '.join(_kind(each) for each in schema['prefixItems'])})"
        return f"list of {_kind(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {_kind(schema['additionalProperties'])}"
    return kind


def _services() -> Iterator[str]:
    served = {rule.split("/")[1].rpartition(".")[2] for rule in RULES if rule.startswith("/")}
    for file in _protos():
        comments = _comments(file)
        services = [(number, each) for number, each in enumerate(file.service) if each.name in served]
        if not services:
            continue
        used = _used(
            file, {kind for _, each in services for m in each.method for kind in (m.input_type, m.output_type)}
        )
        for number, service in services:
            yield f"## {service.name}\n\n{comments.get((6, number)) or comments.get((2,), '')}\n"
            yield "| call | role | takes | gives | |\n|---|---|---|---|---|"
            for order, method in enumerate(service.method):
                role = RULES[f"/sightline.v1.{service.name}/{method.name}"].role
                takes = f"{'stream of ' if method.client_streaming else ''}{_short(method.input_type)}"
                gives = f"{'stream of ' if method.server_streaming else ''}{_short(method.output_type)}"
                text = _cell(comments.get((6, number, 2, order), ""))
                yield f"| `{method.name}` | {role} | {takes} | {gives} | {text} |"
            yield ""
        for number, message in enumerate(file.message_type):
            if message.name not in used:
                continue
            yield "\n\n".join(filter(None, (f"### {message.name} (message)", comments.get((4, number))))) + "\n"
            if message.field:
                yield "| field | type | |\n|---|---|---|"
            for order, field in enumerate(message.field):
                text = _cell(comments.get((4, number, 2, order), ""))
                yield f"| `{field.name}` = {field.number} | {_type(field)} | {text} |"
            yield ""


def _used(file: descriptor_pb2.FileDescriptorProto, kinds: set[str]) -> set[str]:
    """Names of the messages that ``kinds`` are made of."""
    known = {f".sightline.v1.{message.name}": message for message in file.message_type}
    found: set[str] = set()
    left = list(kinds)
    while left:
        kind = left.pop()
        if kind in known and known[kind].name not in found:
            found.add(known[kind].name)
            left += [field.type_name for field in known[kind].field]
    return found


def _protos() -> list[descriptor_pb2.FileDescriptorProto]:
    files = sorted((ROOT / "protos").glob("sightline/v1/*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "all")
        include = Path(grpc_tools.__file__).parent / "_proto"
        options = [f"-I{ROOT / 'protos'}", f"-I{include}", "--include_source_info", f"--descriptor_set_out={out}"]
        if protoc.main(["protoc", *options, *map(str, files)]):
            raise SystemExit("the protos cannot be read")
        return list(descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file)


def _comments(file: descriptor_pb2.FileDescriptorProto) -> dict[tuple[int, ...], str]:
    """Path of what is described -> what is said of it; the package's is under ``(2,)``."""
    return {
        tuple(place.path): _words(place.leading_comments)
        for place in file.source_code_info.location
        if place.leading_comments
    }


def _type(field: descriptor_pb2.FieldDescriptorProto) -> str:
    kind = field.type_name.rpartition(".")[2] if field.type_name else _SCALARS[field.type]
    many = field.label == descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
    return f"{'repeated ' if many else ''}{'optional ' if field.proto3_optional else ''}{kind}"


_SCALARS = {
    value: name.removeprefix("TYPE_").lower() for name, value in descriptor_pb2.FieldDescriptorProto.Type.items()
}


def _short(kind: str) -> str:
    return kind.rpartition(".")[2]


def _words(text: str) -> str:
    return text.replace("``", "`").strip()


def _cell(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
