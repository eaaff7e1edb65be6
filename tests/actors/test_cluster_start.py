"""What is wrong is said in one line, and nothing is left running."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from cluster_parts import configuration, ray_processes
from ray.exceptions import RayError
from ray.serve.schema import DeploymentStatusOverview

from actors import runtime
from actors.remote import find_actor
from actors.runtime import Cluster
from actors.session import RaySession
from cluster.config import SightlineConfig
from cluster.errors import ConfigError, ModelError, SightlineError


def with_gateway(**changes) -> SightlineConfig:
    config = configuration([])
    return config.model_copy(update={"gateway": config.gateway.model_copy(update=changes)})


def refused(config: SightlineConfig, kind: type[ConfigError], reason: str) -> None:
    with pytest.raises(kind, match=reason) as caught:
        Cluster(config).start()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    assert not ray.is_initialized()
    assert ray_processes() == []


@pytest.mark.parametrize("key", ["port", "http_port"])
def test_port_in_use(key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(
            with_gateway(**{key: port}), ConfigError, rf"127\.0\.0\.1:{port}: Address already in use.*gateway\.{key}"
        )


def test_address_of_another_machine() -> None:
    refused(with_gateway(host="203.0.113.9"), ConfigError, r"cannot listen on 203\.0\.113\.9")


def test_unknown_model_and_wrong_family(tmp_path) -> None:
    config = configuration([])
    missing = config.model_copy(update={"model": config.model.model_copy(update={"name": "tiny-nothing"})})
    refused(missing, ModelError, "no model 'tiny-nothing'")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    wrong = config.model_copy(update={"model": config.model.model_copy(update={"name": str(tmp_path)})})
    refused(wrong, ModelError, "family 'llava'")


def test_no_ray_cluster_at_the_address() -> None:
    config = configuration([])
    elsewhere = config.cluster.model_copy(update={"ray_address": "127.0.0.1:1"})
    refused(config.model_copy(update={"cluster": elsewhere}), ConfigError, "no Ray cluster answers")


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_checkpoint_that_does_not_load_stops_everything(tmp_path) -> None:
    """Only the replica can find out, after everything else was started."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    config = configuration([])
    refused(
        config.model_copy(update={"model": config.model.model_copy(update={"name": str(tmp_path)})}),
        ModelError,
        "the tokenizer of .* has no token",
    )


@pytest.mark.cluster
@pytest.mark.timeout(400)
@pytest.mark.parametrize("late", [1, 2])
def test_ray_that_is_late_is_started_once_more(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes run by then: those of the start that failed are ended."""
    from ray._private import services

    answers, left = services.get_node, []

    def get_node(*given, **named):
        if len(left) < late:
            left.append([process.pid for process in ray_processes()])
            raise Exception("The current node timed out during startup.\nIt may be overloaded.")
        return answers(*given, **named)

    monkeypatch.setattr(services, "get_node", get_node)
    session = RaySession(None)
    if late > 1:
        with pytest.raises(SightlineError, match=r"^Ray did not start: The current node timed out during startup\.$"):
            session.start()
    else:
        session.start()
        assert ray.is_initialized()
    assert left[0]
    assert not [pid for pids in left for pid in pids if psutil.pid_exists(pid)]
    session.stop(10.0)
    assert ray_processes() == []
    # Nor does a look that comes after the end start one, as of the thread that follows the processes, which is not
    # waited for where Ray hangs.
    with pytest.raises(RayError):
        find_actor("gateway")
    assert not ray.is_initialized()
    assert ray_processes() == []


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_an_end_that_is_asked_for_while_ray_starts_leaves_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    def terminated(*_, **__):
        left.extend(ray_processes())
        raise SystemExit

    left: list[psutil.Process] = []
    monkeypatch.setattr(services, "get_node", terminated)
    session = RaySession(None)
    with pytest.raises(SystemExit):
        session.start()
    assert left
    assert ray_processes() == []


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_what_does_not_come_up_is_told_with_its_last_exception_and_its_logs(tmp_path, monkeypatch) -> None:
    (tmp_path / "logs").write_text("no folder")
    config = configuration([])
    # Each process makes the folder of its logs when it starts.
    cluster = config.cluster.model_copy(update={"start_timeout_s": 30.0, "log_dir": str(tmp_path / "logs")})
    started = Cluster(config.model_copy(update={"cluster": cluster}))
    monkeypatch.setattr("actors.preflight.check_folders", lambda _: None)
    with pytest.raises(SightlineError) as caught:
        started.start()
    told = str(caught.value)
    assert "\n" not in told
    for name in ("gateway", "decoder-0"):
        assert f"; {name}: FileExistsError: [Errno 17] File exists: '{tmp_path}/logs'" in told
    assert told.endswith(f"; the logs are in {tmp_path}/logs")
    assert ray_processes() == []


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_a_machine_that_is_too_slow_is_told_the_limit_that_it_missed() -> None:
    config = configuration([])
    cluster = config.cluster.model_copy(update={"start_timeout_s": 0.25})
    with pytest.raises(SightlineError, match=r"^a process did not start within 0\.25 s \(cluster\.start_timeout_s\)"):
        Cluster(config.model_copy(update={"cluster": cluster})).start()
    assert ray_processes() == []


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_a_ray_that_dies_meanwhile_is_told_long_before_the_start_times_out() -> None:
    def on_phase(phase: str) -> None:
        if phase == "starting gateway":
            next(each for each in ray_processes() if each.name() == "raylet").kill()

    with pytest.raises(SightlineError, match=r"^the cluster did not start: raylet of Ray died; the logs are in /"):
        Cluster(configuration([]), on_phase=on_phase).start()
    assert ray_processes() == []


INTERRUPTED = """
import sys, time
sys.path.insert(0, {parts!r})
from cluster_parts import configuration
from actors import runtime
from actors.runtime import Cluster
with Cluster(configuration([]), on_phase=lambda phase: print(phase, flush=True)):
    time.sleep(60)
"""


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_interrupt_in_the_middle_of_starting_leaves_no_process() -> None:
    code = INTERRUPTED.format(parts=str(Path(__file__).parents[1] / "support"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        for line in driver.stdout:
            if line.startswith("starting decoders"):
                break
        started = psutil.Process(driver.pid).children(recursive=True)
        assert len(started) > 5
        driver.send_signal(signal.SIGINT)
        assert driver.wait(90) != 0
    _, left = psutil.wait_procs(started, timeout=60)
    assert left == []


def test_what_serve_says_of_replicas_is_told_while_it_answers(monkeypatch) -> None:
    cluster = Cluster(configuration([]))
    cluster._serving = True
    states = {name: object.__new__(DeploymentStatusOverview) for name in ("replica", "quiet")}
    for name, said in (("replica", "Traceback:\n  a line\nValueError: no such shape"), ("quiet", "")):
        object.__setattr__(states[name], "message", said)
    found = SimpleNamespace(applications={"sightline": SimpleNamespace(deployments=states)})
    monkeypatch.setattr("ray.serve.status", lambda: found)
    assert list(cluster._last_words()) == ["replica: ValueError: no such shape"]

    def away() -> None:
        raise RayError("the controller of Serve is gone")

    monkeypatch.setattr("ray.serve.status", away)
    assert list(cluster._last_words()) == [], "why it did not start is told without it"


def test_processes_are_followed_whatever_ray_says_meanwhile(monkeypatch, caplog) -> None:
    cluster = Cluster(configuration([]))
    told = iter([OSError("the GCS is unavailable"), ValueError("no such node")])

    def wanted(*_):
        error = next(told, None)
        if error is not None:
            raise error
        cluster._ending.set()
        return {}

    monkeypatch.setattr(runtime, "FOLLOW_S", 0.001)
    monkeypatch.setattr(runtime, "wanted_processes", wanted)
    cluster._follow_processes(cluster._config, None)
    assert "the GCS is unavailable" in caplog.text
    assert "no such node" in caplog.text
