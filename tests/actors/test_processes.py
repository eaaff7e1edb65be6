"""What a change of the configuration restarts: the processes that read it, and no other."""

import os
import signal
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayError

from actors import replica
from actors.processes import Watchdog, processes, wanted_processes
from actors.remote import NAMESPACE
from actors.runtime import FOLLOW_S
from actors.session import RaySession
from actors.startup import ActorProcess
from cluster.alerts.health import default_rule
from cluster.config import CameraEntry, camera_settings, load_config
from cluster.config.sources import file_roots
from cluster.decoder.footage.camera import clip_lookback_s
from cluster.errors import UnavailableError
from cluster.hosts import is_below
from cluster.redaction import SourceAddress

BASE = {
    "model": {"name": "tiny-qwen2_5_vl"},
    "questions": [{"id": "person", "text": "Is there a person?"}],
    "kubernetes": {"enabled": True},
}
DECODERS = {"decoder-0", "decoder-1"}
ALL = {"controller", "gateway", "alerting", "reconciler", *DECODERS}


def digests(**changes) -> dict[str, str]:
    return {each.name: each.digest for each in processes(load_config(None, BASE | changes), "run", None)}


@pytest.mark.parametrize(
    ("changes", "restarted"),
    [
        ({}, set()),
        ({"questions": [{"id": "car", "text": "Is there a car?"}]}, {"controller"}),
        ({"cameras": [{"name": "gate"}]}, {"controller"}),
        ({"cameras": [{"name": "gate", "source": "rtsp://10.0.0.11/1"}]}, {"controller"}),
        ({"cameras": [{"name": "gate", "source": "/clips/gate.mp4"}]}, {"controller", *DECODERS}),
        ({"window": {"stride_s": 4}}, {"controller"}),
        ({"alerts": {"retention": "7d"}}, {"alerting"}),
        ({"alerts": {"cooldown_s": 5}}, {"alerting", "gateway"}),
        ({"alerts": {"consecutive": 5}}, {"alerting", "gateway", *DECODERS}),
        ({"clips": {"after_s": 5}}, {"alerting", *DECODERS}),
        ({"gateway": {"credit": 8}}, {"gateway", *DECODERS}),
        ({"cluster": {"replicas": 2}}, {"controller"}),
        ({"cluster": {"max_decoders": 4}}, {"controller"}),
        ({"kubernetes": {"enabled": True, "resync_s": 5}}, {"reconciler"}),
        ({"security": {"calls_per_s": 5}}, ALL),
        ({"model": {"name": "tiny-internvl3"}}, ALL),
    ],
)
def test_a_change_restarts_what_reads_it(changes, restarted) -> None:
    before, after = digests(), digests(**changes)
    assert {name for name in before if before[name] != after[name]} == restarted


def test_gateways_rehearse_with_the_rule_and_decoders_keep_packets_for_it() -> None:
    rule = {"consecutive": 7, "release": 3, "hysteresis": 0.2, "cooldown_s": 90, "update_s": 30, "severity": "info"}
    config = load_config(None, BASE | {"alerts": rule})
    given = {each.name: each.arguments[0] for each in processes(config, "run", None)}
    assert asdict(default_rule(given["gateway"].alerts)).items() >= rule.items()
    # Seven windows of 40 s every 8 s, after 10 s of lead; three strides later the last of them is answered.
    camera = camera_settings(config, CameraEntry(name="gate"))
    assert clip_lookback_s(camera, given["decoder-0"]) == 10 + 40 + 6 * 8 + 3 * 8


def test_decoders_are_those_that_the_controller_decided_on() -> None:
    config = load_config(None, BASE | {"cluster": {"decoders": 1, "max_decoders": 4}})
    found = {each.name for each in processes(config, "run", None, ["decoder-0", "decoder-3"])}
    assert {name for name in found if name.startswith("decoder")} == {"decoder-0", "decoder-3"}


def test_a_controller_that_hangs_holds_up_no_pass_over_the_processes(monkeypatch) -> None:
    waited = []

    def late(_reply, *, timeout_s=10.0):
        waited.append(timeout_s)
        raise UnavailableError("a process of the cluster did not answer")

    monkeypatch.setattr("actors.processes.await_reply_blocking", late)
    asked = SimpleNamespace(decoder_names=SimpleNamespace(remote=lambda: None))
    monkeypatch.setattr("actors.processes.controller", lambda: asked)
    config = load_config(None, BASE | {"cluster": {"decoders": 1, "max_decoders": 4}, "tiers": {"node": False}})
    found = wanted_processes(config, "run", None, ["decoder-2", "alerting"])
    assert {name for name in found if name.startswith("decoder")} == {"decoder-0", "decoder-2"}
    # The supervisor begins one every two seconds, and restarts whoever hangs.
    assert sum(waited) <= 2.0


def test_more_decoders_restart_none() -> None:
    before, after = digests(), digests(cluster={"decoders": 3})
    assert after.keys() - before.keys() == {"decoder-2"}
    assert {name for name in before if before[name] != after[name]} == {"controller"}


def test_more_gateways_restart_nobody_and_each_has_a_name_and_a_node_of_its_own() -> None:
    alone = {"gateway": {"port": 0, "http_port": 0}}
    before, after = digests(**alone), digests(**alone, cluster={"gateways": 3})
    assert after.keys() - before.keys() == {"gateway-1", "gateway-2"}
    assert {name for name in before if before[name] != after[name]} == set()
    moved = digests(**alone, cluster={"placement": {"gateway": "g"}})
    assert {name for name in before if before[name] != moved[name]} == {"gateway"}
    for placement, resource in (({"control": "c"}, "c"), ({"control": "c", "gateway": "g"}, "g")):
        config = load_config(None, BASE | alone | {"cluster": {"gateways": 2, "placement": placement}})
        found = [each for each in processes(config, "run", None) if each.name.startswith("gateway")]
        assert [config.cluster.placement.of(each.role) for each in found] == [resource, resource]


@pytest.mark.parametrize("allowed", [None, [], ["/allowed"]])
def test_decoders_may_open_the_files_of_the_configuration_and_no_others(allowed, tmp_path) -> None:
    """They are not given its cameras."""
    written, other = tmp_path / "gate.mp4", tmp_path / "yard.mp4"
    config = load_config(
        None, BASE | {"cameras": [{"name": "gate", "source": str(written)}], "security": {"file_roots": allowed}}
    )
    [decoder] = [each for each in processes(config, "run", None) if each.name == "decoder-0"]
    roots = file_roots(decoder.arguments[0], SourceAddress(str(written)))
    assert is_below(written, roots)
    assert not is_below(other, roots)
    assert is_below(Path("/allowed/clip.mp4"), roots) == (allowed == ["/allowed"])
    assert is_below(Path("here.mp4"), roots) == (allowed is None)


@pytest.mark.parametrize(("placement", "shared"), [({}, 32), ({"replica": "r"}, 4), ({"replica": "elsewhere"}, 1)])
def test_replicas_share_the_cores_of_their_own_node(monkeypatch, placement, shared) -> None:
    nodes = [{"NodeID": "here", "Resources": {"r": 4.0}}, {"NodeID": "there", "Resources": {"r": 28.0}}]
    monkeypatch.setattr(replica.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(replica.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    assert replica.neighbours(load_config(None, {"cluster": {"replicas": 32, "placement": placement}})) == shared


def test_a_controller_that_hangs_does_not_hold_up_the_other_processes(monkeypatch) -> None:
    waited = []

    def get(_, timeout):
        waited.append(timeout)
        raise GetTimeoutError

    monkeypatch.setattr("actors.remote.ray.get", get)
    hangs = SimpleNamespace(decoder_names=SimpleNamespace(remote=object))
    monkeypatch.setattr("actors.processes.controller", lambda: hangs)
    config = load_config(None, BASE | {"cluster": {"decoders": 1, "max_decoders": 4}, "tiers": {"node": False}})
    wanted = wanted_processes(config, "run", None, ["decoder-0", "decoder-2", "gateway"])
    assert {name for name in wanted if name.startswith("decoder")} == {"decoder-0", "decoder-2"}
    assert waited[0] <= FOLLOW_S


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_what_hangs_is_restarted_and_what_only_starts_is_not(tmp_path) -> None:
    class Hanging(ActorProcess):
        def __init__(self) -> None:
            """Without a configuration."""

    class Starting(ActorProcess):
        def __init__(self, log: Path) -> None:
            with log.open("a") as lines:
                lines.write("began\n")
            time.sleep(1000)

    starts = tmp_path / "starts"
    watchdog = Watchdog(stall_s=2.0)

    def watch_until(condition) -> None:
        until_s = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < until_s
            watchdog.restart_hung(["hanging", "starting", "absent"])
            time.sleep(0.1)

    def asked() -> int:
        try:
            return ray.get(hanging.process_id.remote(), timeout=1.0)
        except RayError:
            return 0

    session = RaySession(None)
    session.start()
    try:
        options = {"num_cpus": 0, "max_restarts": -1, "namespace": NAMESPACE}
        hanging = ray.remote(Hanging).options(name="hanging", **options).remote()
        starting = ray.remote(Starting).options(name="starting", **options).remote(starts)
        watch_until(lambda: starts.exists() and asked())
        began, first = time.monotonic(), asked()
        watch_until(lambda: time.monotonic() > began + 5.0)
        assert asked() == first, "it answers"
        os.kill(first, signal.SIGSTOP)
        watch_until(lambda: asked() not in (0, first))
        assert starts.read_text() == "began\n"
        del starting
    finally:
        session.stop(10.0)
