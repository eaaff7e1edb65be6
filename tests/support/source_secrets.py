"""Passwords of sources in every legal place, through a real cluster that cannot reach them: who shows one?

Each source has two random words in its secret. An output shows the secret when one of the words is in it: as it is, in
hexadecimal, or in Base64 at any offset, which also finds every percent-encoding.
"""

import base64
import contextlib
import io
import json
import logging
import os
import random
import re
import shutil
import signal
import socketserver
import string
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import av

from cluster.config import CameraEntry, load_config, parse_camera
from cluster.errors import SightlineError
from cluster.kubernetes.resource import CameraResource, Outcome, status_of
from cluster.lab.bench.harness import BenchResult
from cluster.lab.bench.processes import free_port
from cluster.logs import JsonFormatter, TextFormatter
from cluster.security.roles import Role
from cluster.security.tokens import make_token, write_tokens
from cluster.types import CameraStatus

SOURCES = 200
START_S = 180.0
SETTLE_S = 60.0
CLI = [sys.executable, "-c", "import sys; from actors.cli import main; sys.exit(main())"]

# {u} user, {q} secret escaped, {a} and {b} the words of the secret, {h} host and port, {p} its port.
FORMS = {
    "userinfo": "rtsp://{u}:{q}@{h}/live",
    "userinfo, rtsps": "rtsps://{u}:{q}@{h}/live",
    "userinfo, http": "http://{u}:{q}@{h}/live.mjpg",
    "userinfo, IPv6": "rtsp://{u}:{q}@[::1]:{p}/live",
    "userinfo with @": "rtsp://{u}:{a}@{b}@{h}/live",
    "userinfo with /": "rtsp://{u}:{a}/{b}@{h}/live",
    "userinfo with ?": "rtsp://{u}:{a}?{b}@{h}/live",
    "userinfo with #": "rtsp://{u}:{a}#{b}@{h}/live",
    "userinfo with :": "rtsp://{u}:{a}:{b}@{h}/live",
    "userinfo with @ and /": "rtsp://{u}:{a}@x/{b}@{h}/live",
    "token as user": "rtsp://{a}{b}@{h}/live",
    "query": "rtsp://{h}/live?user={u}&password={q}&channel=1",
    "query, semicolons": "rtsp://{h}/live?USR={u};PWD={q};channel=1",
    "query, bare marks": "rtsp://{h}/live?user={u}&password={a}@/{b}",
    "query, several": "http://{h}/live?apiKey={a}&X-Signature={b}",
    "query, unknown name": "rtsp://{h}/live?k={a}&{b}",
    "fragment": "rtsp://{h}/live#{q}",
    "path, XMEye": "rtsp://{h}/user={u}_password={a}_{b}_channel=1_stream=0.sdp?real_stream",
    "path, user:password@": "rtsp://{h}/{u}:{q}@live/1",
    "path, parameters": "rtsp://{h}/live;user={u};password={q}",
    "path, named": "rtsp://{h}/login/{u}/password/{a}{b}/live",
    "stream key": "rtmp://{h}/live/{a}{b}",
    "no path": "https://{h}?mode=caller&passphrase={a}&streamid=#!::u={u},s={b}",
    "file": "file:///nowhere/clip.mp4?token={q}",
    "no scheme": "{u}:{q}@{h}/live",
}
LOCAL = ("file", "no scheme")
"""Forms that are refused when a camera is added: there is no such file."""
MARKS = "@/:?#&%+ ;="


@dataclass(frozen=True, slots=True)
class Canary:
    """A camera whose source holds a secret of the words ``parts``."""

    name: str
    form: str
    source: str
    parts: tuple[str, str]

    @property
    def needles(self) -> Iterator[str]:
        """What a text that shows a part of the secret has in it, of letters, digits, ``+`` and ``/``."""
        for part in self.parts:
            data = part.encode()
            yield from (part, data.hex())
            for offset in range(3):
                # The digits that no neighbour of the word has a share in.
                first, last = -(-8 * offset // 6), 8 * (offset + len(data)) // 6
                yield base64.b64encode(bytes(offset) + data).decode()[first:last]


def make_canaries(rng: random.Random, ports: list[int]) -> list[Canary]:
    """Sources of every form in turn, at every port in turn."""
    found = []
    for number in range(SOURCES):
        form = list(FORMS)[number % len(FORMS)]
        first, second = ("".join(rng.choices(string.ascii_letters + string.digits, k=12)) for _ in range(2))
        port = ports[number // len(FORMS) % len(ports)]
        secret = f"{first}{rng.choice(MARKS)}{second}"
        values = {"u": "operator", "q": quote(secret, safe=""), "a": first, "b": second, "p": port}
        source = FORMS[form].format(**values, h=f"127.0.0.1:{port}")
        found.append(Canary(f"canary-{number:03d}", form, source, (first, second)))
    return found


class Outputs:
    """What was said, by whom."""

    def __init__(self, canaries: list[Canary]) -> None:
        self._canaries = canaries
        self._said: dict[str, list[str]] = {}

    def add(self, where: str, text: str | bytes) -> None:
        """One output."""
        text = text if isinstance(text, str) else text.decode(errors="replace")
        self._said.setdefault(where, []).append(text)

    def leaks(self) -> dict[str, set[str]]:
        """Output -> the cameras whose secret is in it."""
        found = {}
        for where, texts in self._said.items():
            # Every word once: logs say the same again and again.
            words = "\n".join({word for text in texts for word in re.findall(r"[A-Za-z0-9+/]{6,}", text)})
            found[where] = {each.name for each in self._canaries if any(needle in words for needle in each.needles)}
        return found

    def rows(self) -> list[dict[str, Any]]:
        """``named``: cameras that the output is about, without which it proves nothing."""
        leaks = self.leaks()
        return [
            {
                "output": where,
                "kB": round(sum(map(len, texts)) / 1e3, 1),
                "named": len({name for text in texts for name in re.findall(r"canary-\d{3}", text)}),
                "leaked": len(leaks[where]),
                "first": next(
                    (f"{each.name} ({each.form})" for each in self._canaries if each.name in leaks[where]), ""
                ),
            }
            for where, texts in self._said.items()
        ]


def measure(seed: int) -> BenchResult:
    """``secrets_leaked``: cameras whose secret is in any output."""
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="sl-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        answering = stack.enter_context(_refusing_camera())
        canaries = make_canaries(random.Random(seed), [free_port(), answering])
        outputs = Outputs(canaries)
        watch_classes(canaries, outputs)
        watch_cluster(canaries, outputs, folder)
    leaked = set().union(*outputs.leaks().values())
    forms = sorted({each.form for each in canaries if each.name in leaked})
    notes = [f"{SOURCES} sources of {len(FORMS)} forms: {', '.join(FORMS)}"]
    notes += [f"leaked: {', '.join(forms)}"] if forms else []
    return BenchResult({"secrets_leaked": float(len(leaked))}, outputs.rows(), notes)


# -- in this process: what no cluster is needed for ----------------------------------------------
def watch_classes(canaries: Iterable[Canary], outputs: Outputs) -> None:
    """Texts of the types, of errors in settings, of PyAV's and FFmpeg's own, in both formats of a log."""
    stream = io.StringIO()
    logger = logging.Logger("libraries")
    handlers = []
    for formatter in (TextFormatter(), JsonFormatter("bench")):
        handler = logging.StreamHandler(stream)
        handler.setFormatter(formatter)
        logger.addHandler(handler)
        logging.getLogger("libav").addHandler(handler)
        handlers.append(handler)
    entries = []
    av.logging.set_level(av.logging.DEBUG)
    try:
        for canary in canaries:
            entry = parse_camera(canary.name, canary.source)
            entries.append(entry)
            outputs.add("types", f"{entry!r} {entry} {entry.source} {entry.model_dump_json()} {entry.model_dump()}")
            for wrong in ({"priority": canary.source}, {"windw": canary.source}, {"sampling": {"fps": canary.source}}):
                outputs.add("errors of settings", f"{canary.name}: {_refused(canary, wrong)}")
            _quote_libraries(logger, canary, entry)
            outputs.add("Kubernetes status", json.dumps(_kubernetes_status(canary)))
    finally:
        av.logging.set_level(None)
        for handler in handlers:
            logging.getLogger("libav").removeHandler(handler)
    outputs.add("libraries' errors in a log", stream.getvalue())
    config = load_config(None, {"questions": [QUESTION], "cameras": [entry.model_dump() for entry in entries]})
    outputs.add("configuration in a report", json.dumps(config.model_dump(mode="json")))


QUESTION = {"id": "person", "text": "Is there a person?"}


def _refused(canary: Canary, wrong: dict[str, Any]) -> str:
    try:
        parse_camera(canary.name, canary.source, (), wrong)
    except SightlineError as error:
        return f"{error} {error!r}"
    raise AssertionError("wrong settings were taken")


def _quote_libraries(logger: logging.Logger, canary: Canary, entry: CameraEntry) -> None:
    address = entry.source.openable()
    if not address.startswith(("file:", "operator")):
        try:
            av.open(address, timeout=(1.0, 1.0)).close()
        except (av.FFmpegError, OSError, ValueError) as error:
            try:
                raise RuntimeError(f"{canary.name} is lost: {error}") from error
            except RuntimeError:
                logger.exception("camera %s: %s", canary.name, address)
    try:
        logger.warning("camera %s: port %s", canary.name, urlsplit(canary.source).port)
    except ValueError:
        logger.exception("camera %s", canary.name)
    # What a library that reads the address in another way takes for a host, a port or a path.
    for piece in (canary.source, unquote(canary.source), *re.split(r"[/?#@:=&;]", canary.source)):
        logger.warning("camera %s: %s is not known", canary.name, piece)


def _kubernetes_status(canary: Canary) -> dict[str, Any]:
    body = {"metadata": {"name": canary.name, "resourceVersion": "1"}, "spec": {"source": canary.source}}
    resource = CameraResource.of(body)
    try:
        entry = resource.entry()
        outcome = Outcome("True", "Accepted", repr(entry))
    except SightlineError as error:
        outcome = Outcome("False", "Invalid", f"{error} {resource!r}")
    status = CameraStatus(canary.name, source=canary.source, reason=f"cannot open {canary.source}")
    return {"name": canary.name, **status_of(resource, outcome, status, "", {})}


# -- a cluster -----------------------------------------------------------------------------------
def watch_cluster(canaries: list[Canary], outputs: Outputs, folder: Path) -> None:
    """`sightline serve` with cameras from its file, from `cameras apply`, `cameras add` and HTTP; none can open."""
    configured, applied, added, posted = canaries[:20], canaries[20:160], canaries[160:163], canaries[163:]
    (folder / "in").mkdir()
    # Who is asked for a token is written into the audit log.
    os.environ["SIGHTLINE_TOKEN"], token = make_token("bench", [Role.ADMIN])
    write_tokens(folder / "in/tokens.json", [token])
    config, cameras, addresses = folder / "in/c.yaml", folder / "in/cameras.yaml", folder / "in/a.json"
    with _hook() as (hook, told):
        # JSON is YAML.
        config.write_text(json.dumps(_configuration(folder, configured, hook)))
        cameras.write_text(json.dumps({"cameras": [{"name": each.name, "source": each.source} for each in applied]}))
        command = [*CLI, "serve", "-c", str(config), "--json", str(addresses)]
        environment = {**os.environ, "RAY_TMPDIR": str(folder / "r")}
        (folder / "r").mkdir()
        with (folder / "serve.log").open("wb") as said:
            serving = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment)
            try:
                where = _addresses(addresses, serving)
                to = ["--gateway", where["gateway"]]
                outputs.add("CLI: apply", _run("cameras", "apply", "-f", str(cameras), "--force", "--json", "-", *to))
                for each in added:
                    outputs.add("CLI: add", _run("cameras", "add", each.name, each.source, "--force", *to))
                    outputs.add("CLI: add", _run("cameras", "add", each.name, f"{each.source}&", *to))
                for each in posted:
                    body = {"name": each.name, "source": each.source, "force": True}
                    outputs.add("HTTP: add", _http(where["metrics"], "/v1/cameras", body))
                    outputs.add("HTTP: refusals", each.name + _http(where["metrics"], "/v1/cameras", {**body, "x": 1}))
                    outputs.add("HTTP: refusals", each.name + _http(where["metrics"], "/v1/cameras", body))
                _settle(where["metrics"], sum(each in configured or each.form not in LOCAL for each in canaries))
                _look(outputs, where, to, cameras)
                outputs.add("processes' arguments", "\n".join(_arguments(serving.pid)))
            finally:
                serving.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    serving.wait(60.0)
                serving.kill()
                serving.wait()
    outputs.add("sinks: webhook", "\n".join(told))
    for name, path in _files(folder):
        outputs.add(name, path.read_bytes())


def _look(outputs: Outputs, where: Mapping[str, str], to: list[str], cameras: Path) -> None:
    for line in (
        ["cameras", "list"],
        ["cameras", "list", "--json", "-"],
        ["cameras", "export"],
        ["incidents", "list", "--json", "-"],
    ):
        outputs.add(f"CLI: {' '.join(line[:2])}", _run(*line, *to))
    changed = re.sub(r"(\w+://[^\"]*)", r"\1&x", cameras.read_text())
    other = cameras.with_name("other.yaml")
    other.write_text(changed)
    outputs.add("CLI: apply", _run("cameras", "apply", "-f", str(other), "--dry-run", *to))
    for path in ("/v1/cameras", "/v1/cameras/canary-000", "/v1/incidents", "/v1/fleet", "/v1/events", "/metrics"):
        outputs.add(f"HTTP: {path}", _http(where["metrics"], path))
    other.write_text(changed.replace('"name"', '"nam"'))
    outputs.add("CLI: config check", _run("config", "check", "-c", str(other)))


def _configuration(folder: Path, cameras: Iterable[Canary], hook: str) -> dict[str, Any]:
    return {
        "engine": "simulated",
        "model": {"name": "demo"},
        "simulated": {"costs": "demo-cpu"},
        "memory": {"enabled": False},
        "tiers": {"node": False},
        "gateway": {"port": 0, "http_port": 0},
        "source": {"connect_timeout_s": 1.0},
        "questions": [QUESTION],
        "cameras": [{"name": each.name, "source": each.source} for each in cameras],
        "security": {"tokens_file": str(folder / "in/tokens.json"), "audit_log": str(folder / "audit.log")},
        "alerts": {
            "folder": str(folder / "alerts"),
            "health": {"offline": {"after_s": 1.0}},
            "sinks": [
                {"name": "log", "kind": "log"},
                {"name": "hook", "kind": "webhook", "options": {"url": hook}},
            ],
        },
        "cluster": {
            "decoders": 1,
            "start_timeout_s": START_S,
            "log_dir": str(folder / "logs"),
            # Cameras as they were given, addresses with their secrets among them; never the user's own.
            "state_dir": str(folder / "in/state"),
        },
    }


def _addresses(file: Path, serving: subprocess.Popen[bytes]) -> dict[str, str]:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and serving.poll() is None:
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, str] = json.loads(file.read_text())
            return found
        time.sleep(0.2)
    said = file.parents[1].joinpath("serve.log").read_text()
    raise SightlineError(f"`sightline serve` did not start: {said[-2000:]}")


def _settle(address: str, count: int) -> None:
    """Until every camera has said why it does not run, and alerting had time to tell of it."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        cameras = json.loads(_http(address, "/v1/cameras"))["cameras"]
        if sum(each["state"] in ("backoff", "error") and bool(each["reason"]) for each in cameras) == count:
            break
        time.sleep(0.5)
    time.sleep(5.0)


def _run(*arguments: str) -> str:
    done = subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=120, check=False)
    return done.stdout + done.stderr


def _http(address: str, path: str, body: object = None) -> str:
    """A reply, or what of an endless one came within a few seconds."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['SIGHTLINE_TOKEN']}"}
    request = urllib.request.Request(f"http://{address}{path}", data, headers)
    read = b""
    endless = path == "/v1/events"
    deadline = time.monotonic() + 5.0
    try:
        with urllib.request.urlopen(request, timeout=2.0 if endless else 30.0) as reply:
            while (chunk := reply.read1(2**16)) and not (endless and time.monotonic() > deadline):
                read += chunk
    except urllib.error.HTTPError as error:
        read += error.read()
    except TimeoutError:
        pass
    return read.decode()


def _arguments(pid: int) -> Iterator[str]:
    """Command lines of the processes below ``pid``."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in task.joinpath("children").read_text().split():
                with contextlib.suppress(OSError):
                    yield Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
                yield from _arguments(int(child))


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Whatever the cluster wrote, but what it was given."""
    names = {"logs": "logs", "alerts": "alerts' folder", "r": "Ray's folder", "audit.log": "audit log"}
    for path in sorted(folder.rglob("*")):
        top = path.relative_to(folder).parts[0]
        if top != "in" and path.is_file() and not path.is_symlink():
            yield names.get(top, "serve's output"), path


# -- what it talks to ----------------------------------------------------------------------------
class _Refusing(socketserver.StreamRequestHandler):
    """A camera that wants another password at every path."""

    def handle(self) -> None:
        number = ""
        for line in self.rfile:
            name, _, value = line.decode(errors="replace").partition(":")
            number = value.strip() if name.lower() == "cseq" else number
            if not line.strip():
                head = f'RTSP/1.0 401 Unauthorized\r\nCSeq: {number}\r\nWWW-Authenticate: Basic realm="camera"\r\n\r\n'
                self.wfile.write(head.encode())


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that leave are no errors."""


@contextlib.contextmanager
def _refusing_camera() -> Iterator[int]:
    with _Server(("127.0.0.1", 0), _Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@contextlib.contextmanager
def _hook() -> Iterator[tuple[str, list[str]]]:
    """Address of a webhook, and the bodies it was sent."""
    told: list[str] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/", told
        server.shutdown()
