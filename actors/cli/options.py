"""Options shared by commands, and their parsers."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.errors import ConfigError

if TYPE_CHECKING:
    from cluster.client import GatewayClient
    from cluster.wire.tls import ClientCredentials

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])", re.ASCII)
LONGEST_S = 3_650 * 86_400.0


def parse_duration(text: str, option: str) -> float:
    """Parse ``90s``, ``10m``, ``2h``, ``1d`` or a sum as in ``1h30m`` into seconds; ``option``: named in errors. Raises
    ``ConfigError``: another format, zero, or more than ten years."""
    written = text.strip().lower()
    parts = _PART.findall(written)
    units = [unit for _, unit in parts]
    if not parts or "".join(number + unit for number, unit in parts) != written or len(set(units)) < len(units):
        raise ConfigError(f"{option} {text!r} is not a duration; write it as in 90s, 10m, 2h, 1d or 1h30m")
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if not 0 < seconds <= LONGEST_S:
        raise ConfigError(f"{option} {text!r} must be above 0 and at most ten years")
    return seconds


def spoken(seconds: float) -> str:
    """Format seconds: ``8 s``, ``0.5 s``, ``12 min 03 s``, ``2 h 05 min``, ``3 d 04 h``."""
    if seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3_600)
    return f"{hours // 24} d {hours % 24:02d} h"


Gateway = Annotated[
    str,
    typer.Option(
        "--gateway", "-g", metavar="HOST:PORT", envvar="SIGHTLINE_GATEWAY", help="Address of the cluster's gateway."
    ),
]
DEFAULT_GATEWAY = "127.0.0.1:50051"
Config = Annotated[
    Path, typer.Option("--config", "-c", metavar="FILE", help="Configuration file (YAML); see `sightline config`.")
]

Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write JSON to FILE; - for standard output.")]

JsonStream = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write one JSON object per line; - for standard output.")
]

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one key, as in --set window.stride_s=4; may be repeated."),
]

State = Annotated[
    str,
    typer.Option(
        "--state",
        metavar="DIR",
        envvar="SIGHTLINE_STATE",
        help="Folder of state that survives restarts: added cameras, incidents, clips; none: keep nothing. Default: "
        "$XDG_STATE_HOME/sightline or ~/.local/state/sightline.",
    ),
]

Device = Annotated[str, typer.Option(help="cpu or cuda; CUDA_VISIBLE_DEVICES selects the GPU.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or float8.")]
Jobs = Annotated[int | None, typer.Option("--jobs", "-j", metavar="N", min=1, help="Processes. Default: one per core.")]
Model = Annotated[str, typer.Option(metavar="NAME", help="demo, or the folder or hub id of a checkpoint.")]
Window = Annotated[float | None, typer.Option(metavar="S", help="Window length, seconds. Default: the model's.")]
Stride = Annotated[float | None, typer.Option(metavar="S", help="Seconds between windows.")]
Fps = Annotated[float | None, typer.Option(help="Samples per second.")]
AnchorInterval = Annotated[float | None, typer.Option(metavar="S", help="Seconds between anchors.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking for confirmation.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Output file.")]
OutFolder = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for report and generated files.")]

Questions = Annotated[
    list[str] | None,
    typer.Option(
        "--question",
        "-q",
        metavar="[ID[@THRESHOLD]=]TEXT",
        help="Standing yes/no question, replacing the camera's or the cluster's; may be repeated.",
    ),
]
CameraPriority = Annotated[
    str | None,
    typer.Option(
        "--priority",
        metavar="CLASS",
        help="critical: kept on time at the expense of others; normal; background: shed first.",
    ),
]

_QUESTION = re.compile(r"(?:(?P<id>[\w.-]+)(?:@(?P<threshold>[^\s=]*))?=)?(?P<text>.+)", re.DOTALL)


def confirm_deletion(camera: str, alternative: str) -> None:
    """Ask for confirmation to delete everything that a camera has seen; abort without it. Raises ``ConfigError``: there
    is no terminal to ask at; the message names ``--yes`` and the ``alternative``."""
    if not sys.stdin.isatty():
        raise ConfigError(f"this deletes everything that camera {camera!r} has seen; add --yes, or {alternative}")
    typer.confirm(f"Delete everything that camera {camera!r} has seen?", abort=True)


def client_credentials() -> ClientCredentials:
    """Token and TLS from the environment (docs/operations.md). Raises ``ConfigError``: an unreadable file."""
    from cluster.wire.tls import ClientCredentials

    return ClientCredentials.from_environment()


def of_token() -> str:
    """Suffix for messages about empty lists: a token may not see all cameras."""
    return " that this token may see" if client_credentials().token else ""


def connect(gateway: str) -> GatewayClient:
    """Client of the gateway ``host:port``, with the environment's credentials; a context manager."""
    from cluster.client import GatewayClient

    return GatewayClient(gateway, credentials=client_credentials())


def parse_settings(settings: list[str] | None) -> dict[str, Any]:
    """Parse ``a.b=value`` assignments into nested mappings; values are YAML. Raises ``ConfigError``: no ``=``, no key
    before it, or a value that is not YAML."""
    import yaml

    from cluster.config import deep_merge

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
    """Parse ``TEXT``, ``ID=TEXT`` or ``ID@THRESHOLD=TEXT`` into questions of the configuration. Raises ``ConfigError``:
    an empty question, or a threshold that is not a number."""
    found: list[dict[str, Any]] = []
    for index, text in enumerate(questions or [], start=1):
        match = _QUESTION.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"question {index} is empty; write it as TEXT or ID=TEXT")
        question: dict[str, Any] = {"id": match["id"] or f"q{index}", "text": match["text"].strip()}
        if match["threshold"] is not None:
            try:
                question["threshold"] = float(match["threshold"])
            except ValueError:
                raise ConfigError(f"question {text!r}: the threshold {match['threshold']!r} is not a number") from None
        found.append(question)
    return found
