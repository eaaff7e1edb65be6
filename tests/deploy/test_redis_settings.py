"""The two Redis of the chart, run: they start as rendered, ask for the password, and forget or keep as they should."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import redis
from certificates import Authority
from chart_parts import of_kind, pods, rendered, serve_config
from redis.backoff import NoBackoff
from redis.retry import Retry
from waiting import until

from cluster.lab.bench.processes import free_port


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
    port = free_port()
    text = settings["data"]["redis.conf"].replace("dir /data", f"dir {tmp_path}/data")
    authority = Authority()
    authority.write(tmp_path / "ca.crt")
    for name in ("tls", "stranger"):
        (authority if name == "tls" else Authority()).issue(tmp_path, name, host="sightline")
    text = text.replace("/etc/sightline/internal-tls", str(tmp_path)).replace("/run/redis/", f"{tmp_path}/run/")
    text = text.replace("tls-port 6379", f"tls-port {port}") if "tls-port" in text else f"{text}\nport {port}\n"
    (tmp_path / "etc" / "redis.conf").write_text(text)
    [script] = container["args"]
    script = script.replace("/etc/redis/", f"{tmp_path}/etc/").replace("/run/redis/", f"{tmp_path}/run/")
    script = script.replace("/etc/sightline/internal-tls", str(tmp_path)).replace("sleep 60", "sleep 0.5")
    environment = {"REDIS_PASSWORD": "secret-1", "PATH": "/usr/bin:/bin"}
    if any(each.get("valueFrom") == {"resourceFieldRef": {"resource": "limits.memory"}} for each in container["env"]):
        environment["MEMORY_LIMIT"] = str(256 * 2**30)
    process = subprocess.Popen([*container["command"], script], env=environment)
    try:
        yield request.param, port, process, tmp_path
    finally:
        beside = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        process.wait(10)
        for each in beside:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


# Else a refused connection is tried again, for seconds.
ONCE = Retry(NoBackoff(), 0)


def url_of(name, port, folder, user=""):
    """Of the KV Redis, the one that the chart gives to the replicas; Ray's own takes the same certificates."""
    objects = rendered("city")
    url = serve_config(objects)["applications"][1]["args"]["configuration"]["tiers"]["redis_url"]
    url = url.replace("/etc/sightline/internal-tls", str(folder)).replace(":${KV_REDIS_PASSWORD}@", user)
    return url.replace("sightline-kv-redis:6379", f"127.0.0.1:{port}")


def connected(name, port: int, folder, password: str) -> redis.Redis:
    client = redis.from_url(url_of(name, port, folder, f":{password}@"), socket_timeout=5, retry=ONCE)
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
        redis.from_url(url_of(name, port, folder), retry=ONCE).ping()
    with pytest.raises(redis.ConnectionError):
        redis.Redis(port=port, password="secret-1", retry=ONCE).ping()
    with pytest.raises(redis.ConnectionError):
        redis.from_url(url_of(name, port, folder).replace("/tls.", "/stranger."), retry=ONCE).ping()
    settings = client.config_get("maxmemory*")
    keeps = client.config_get("appendonly")["appendonly"]
    if name == "kv-redis":
        assert (settings["maxmemory-policy"], int(settings["maxmemory"]), keeps) == ("allkeys-lru", 192 * 2**30, "no")
    else:
        assert (settings["maxmemory-policy"], int(settings["maxmemory"]), keeps) == ("noeviction", 0, "yes")
    # The shell has become the server, so that it is told when the pod stops; nobody reads the password off it.
    arguments = " ".join(psutil.Process(process.pid).cmdline())
    assert "redis-server" in arguments
    assert "secret-1" not in arguments
    assert (folder / "run" / "redis.conf").stat().st_mode & 0o077 == 0


def test_renewed_certificates_count_without_a_restart(server) -> None:
    """Also by another authority, as after those of the chart; the probes, which restart it, go on all the while."""
    name, port, process, folder = server
    client = connected(name, port, folder, "secret-1")
    client.set("memory", "kept")
    [container] = pods(rendered("city"))[name]["spec"]["containers"]

    def probed() -> int:
        *shell, text = container["livenessProbe"]["exec"]["command"]
        text = text.replace("/run/redis/", f"{folder}/run/").replace("/etc/sightline/internal-tls", str(folder))
        environment = {"REDIS_PASSWORD": "secret-1", "PATH": "/usr/bin:/bin"}
        return subprocess.run([*shell, text], env=environment, timeout=20).returncode

    assert probed() == 0
    renewed = Authority("renewed")
    renewed.write(folder / "ca.crt")
    renewed.issue(folder, "tls", host="sightline")
    assert probed() == 0
    assert connected(name, port, folder, "secret-1").get("memory") == b"kept"
    # Who was connected still is.
    assert client.get("memory") == b"kept"
    assert process.poll() is None


@pytest.mark.cluster
@pytest.mark.timeout(180)
@pytest.mark.parametrize("server", ["gcs-redis"], indirect=True)
@pytest.mark.parametrize("authority", ["ca.crt", "stranger.crt"])
def test_ray_keeps_its_tables_there_and_nowhere_else(server, authority) -> None:
    """Ray's head, started with the address and the environment that the chart gives it."""
    name, port, _, folder = server
    client = connected(name, port, folder, "secret-1")
    objects = rendered("city")
    [service] = of_kind(objects, "RayService")
    address = service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"]
    [container] = pods(objects)["head"]["spec"]["containers"]
    given = {each["name"]: each["value"] for each in container["env"] if each["name"].startswith("RAY_REDIS_")}
    certificates = {key: value.replace("/etc/sightline/internal-tls", str(folder)) for key, value in given.items()}
    certificates["RAY_REDIS_CA_CERT"] = certificates["RAY_REDIS_CA_CERT"].replace("ca.crt", authority)
    environment = {**os.environ, **certificates, "RAY_AUTH_MODE": "disabled", "RAY_num_redis_request_retries": "1"}
    environment["RAY_REDIS_ADDRESS"] = address.replace("sightline-gcs-redis:6379", f"127.0.0.1:{port}")
    head_port = free_port()
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--port", str(head_port)]
    command += ["--num-cpus", "0", "--include-dashboard=false", "--redis-password", "secret-1"]
    command += ["--object-store-memory", str(80 * 2**20)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as ray:
        try:
            until(lambda: ray.poll() is not None or client.dbsize(), "tables or an end", timeout_s=90)
            assert bool(client.dbsize()) == (authority == "ca.crt")
            assert (ray.poll() is None) == (authority == "ca.crt")
        finally:
            below = psutil.Process(ray.pid).children(recursive=True) if ray.poll() is None else []
            ray.terminate()
            for process in psutil.wait_procs(below, 20)[1]:
                process.kill()


@pytest.mark.parametrize("password", ["50%41off", "a/b", "a b", "", "tab\tbed"])
def test_a_password_that_an_address_would_change_is_refused(password) -> None:
    """Replicas sent another one, and every memory missed its tier."""
    [container] = pods(rendered("city"))["kv-redis"]["spec"]["containers"]
    environment = {"REDIS_PASSWORD": password, "PATH": "/usr/bin:/bin"}
    ended = subprocess.run(
        [*container["command"], *container["args"]], env=environment, capture_output=True, text=True, timeout=20
    )
    assert ended.returncode == 1
    assert "may contain only letters, digits and . _ ~ -" in ended.stderr
