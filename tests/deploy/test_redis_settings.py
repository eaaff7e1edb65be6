"""The two Redis of the chart, run: they start as rendered, ask for the password, and forget or keep as they should."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time

import psutil
import pytest
import redis
from chart_parts import of_kind, pods, rendered


@pytest.fixture(params=["kv-redis", "gcs-redis"])
def server(request, tmp_path):
    """The container's own command with its paths moved to a folder; the port is the only thing added."""
    if shutil.which("redis-server") is None:
        pytest.fail("the tests need redis-server; make test installs it")
    objects = rendered("city")
    [container] = pods(objects)[request.param]["spec"]["containers"]
    [settings] = [each for each in of_kind(objects, "ConfigMap") if each["metadata"]["name"].endswith(request.param)]
    for folder in ("etc", "run", "data"):
        (tmp_path / folder).mkdir()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    text = settings["data"]["redis.conf"].replace("dir /data", f"dir {tmp_path}/data")
    (tmp_path / "etc" / "redis.conf").write_text(f"{text}\nport {port}\n")
    [script] = container["args"]
    script = script.replace("/etc/redis/", f"{tmp_path}/etc/").replace("/run/redis/", f"{tmp_path}/run/")
    environment = {"REDIS_PASSWORD": "secret-1", "PATH": "/usr/bin:/bin"}
    process = subprocess.Popen([*container["command"], script], env=environment)
    try:
        yield request.param, port, process, tmp_path
    finally:
        process.terminate()
        process.wait(10)


def connected(port: int, password: str | None) -> redis.Redis:
    client = redis.Redis(port=port, password=password, socket_timeout=5)
    deadline = time.monotonic() + 20
    while True:
        with contextlib.suppress(redis.ConnectionError):
            client.ping()
            return client
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_it_starts_asks_for_the_password_and_forgets_as_it_should(server) -> None:
    name, port, process, folder = server
    client = connected(port, "secret-1")
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=port).ping()
    settings = client.config_get("maxmemory*")
    keeps = client.config_get("appendonly")["appendonly"]
    if name == "kv-redis":
        assert (settings["maxmemory-policy"], int(settings["maxmemory"]), keeps) == ("allkeys-lru", 240 * 2**30, "no")
    else:
        assert (settings["maxmemory-policy"], int(settings["maxmemory"]), keeps) == ("noeviction", 0, "yes")
    # The shell has become the server, so that it is told when the pod stops; nobody reads the password off it.
    arguments = " ".join(psutil.Process(process.pid).cmdline())
    assert "redis-server" in arguments
    assert "secret-1" not in arguments
    assert (folder / "run" / "redis.conf").stat().st_mode & 0o077 == 0
