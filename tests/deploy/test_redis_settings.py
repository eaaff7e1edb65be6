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
from certificates import Authority
from chart_parts import of_kind, pods, rendered, serve_config


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
    authority = Authority()
    authority.write(tmp_path / "ca.crt")
    for name in ("tls", "stranger"):
        (authority if name == "tls" else Authority()).issue(tmp_path, name, host="sightline")
    text = text.replace("/etc/sightline/internal-tls", str(tmp_path))
    text = text.replace("tls-port 6379", f"tls-port {port}") if "tls-port" in text else f"{text}\nport {port}\n"
    (tmp_path / "etc" / "redis.conf").write_text(text)
    [script] = container["args"]
    script = script.replace("/etc/redis/", f"{tmp_path}/etc/").replace("/run/redis/", f"{tmp_path}/run/")
    environment = {"REDIS_PASSWORD": "secret-1", "PATH": "/usr/bin:/bin"}
    process = subprocess.Popen([*container["command"], script], env=environment)
    try:
        yield request.param, port, process, tmp_path
    finally:
        process.terminate()
        process.wait(10)


def url_of(name, port, folder, user=""):
    """Of the KV Redis, the one that the chart gives to the replicas."""
    if name != "kv-redis":
        return f"redis://{user}127.0.0.1:{port}/0"
    objects = rendered("city")
    url = serve_config(objects)["applications"][1]["args"]["configuration"]["tiers"]["redis_url"]
    url = url.replace("/etc/sightline/internal-tls", str(folder)).replace(":${KV_REDIS_PASSWORD}@", user)
    return url.replace("sightline-kv-redis:6379", f"127.0.0.1:{port}")


def connected(name, port: int, folder, password: str) -> redis.Redis:
    client = redis.from_url(url_of(name, port, folder, f":{password}@"), socket_timeout=5)
    deadline = time.monotonic() + 20
    while True:
        with contextlib.suppress(redis.ConnectionError):
            client.ping()
            return client
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_it_starts_asks_for_the_password_and_forgets_as_it_should(server) -> None:
    name, port, process, folder = server
    client = connected(name, port, folder, "secret-1")
    with pytest.raises(redis.AuthenticationError):
        redis.from_url(url_of(name, port, folder)).ping()
    if name == "kv-redis":
        with pytest.raises(redis.ConnectionError):
            redis.Redis(port=port, password="secret-1").ping()
        with pytest.raises(redis.ConnectionError):
            redis.from_url(url_of(name, port, folder).replace("/tls.", "/stranger.")).ping()
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
