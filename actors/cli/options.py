"""Options that several commands share, and what they mean."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from cluster.wire.credentials import ClientCredentials

Gateway = Annotated[
    str,
    typer.Option(
        "--gateway", "-g", metavar="HOST:PORT", envvar="SIGHTLINE_GATEWAY", help="Gateway of the cluster to talk to."
    ),
]
DEFAULT_GATEWAY = "127.0.0.1:50051"

Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write it as JSON; - for standard output.")]

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one key, as in --set window.stride_s=4; may be repeated."),
]

_QUESTION = re.compile(r"(?:(?P<id>[\w.-]+)(?:@(?P<threshold>[\d.]+))?=)?(?P<text>.+)", re.DOTALL)


def client_credentials() -> ClientCredentials:
    """Token and TLS as the environment gives them (docs/operations.md).

    Raises:
        ConfigError: a file that it names cannot be read.
    """
    from cluster.wire.credentials import ClientCredentials

    return ClientCredentials.from_environment()


def parse_settings(settings: list[str] | None) -> dict[str, Any]:
    """``a.b=value`` assignments as nested mappings; values are read as YAML.

    Raises:
        ConfigError: no ``=`` in it, no key before it, or a value that is not YAML.
    """
    import yaml

    from cluster.config import deep_merge
    from cluster.errors import ConfigError

    tree: dict[str, Any] = {}
    for setting in settings or []:
        key, equals, text = setting.partition("=")
        if not equals or not all(part for part in key.split(".")):
            raise ConfigError(f"--set {setting!r} is not KEY=VALUE, as in --set window.stride_s=4")
        try:
            value: Any = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"--set {setting!r}: the value is not valid YAML; quote it") from None
        for part in reversed(key.split(".")):
            value = {part: value}
        tree = deep_merge(tree, value)
    return tree


def parse_questions(questions: list[str] | None) -> list[dict[str, Any]]:
    """``TEXT``, ``ID=TEXT`` or ``ID@THRESHOLD=TEXT`` as the configuration writes questions.

    Raises:
        ConfigError: an empty question, or a threshold that is no number.
    """
    from cluster.errors import ConfigError

    found: list[dict[str, Any]] = []
    for index, text in enumerate(questions or [], start=1):
        match = _QUESTION.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"question {index} is empty; write it as TEXT or ID=TEXT")
        question: dict[str, Any] = {"id": match["id"] or f"q{index}", "text": match["text"].strip()}
        if match["threshold"]:
            try:
                question["threshold"] = float(match["threshold"])
            except ValueError:
                raise ConfigError(f"question {text!r}: the threshold {match['threshold']!r} is not a number") from None
        found.append(question)
    return found
