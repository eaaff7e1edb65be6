"""``sightline doctor``: each thing that is wrong is found, with what to do."""

import json
import socket
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from alert_parts import Make
from redis_server import RedisServer

from actors.cli import doctor
from actors.cli.doctor import findings
from actors.cli.doctor_cluster import (
    alert_findings,
    camera_findings,
    cluster_findings,
    replica_findings,
)
from cluster.alerts.dispatcher import Outbox, SinkStatus
from cluster.alerts.incident import Delivery
from cluster.codec.nvdec import Nvdec, NvdecError
from cluster.config import load_config
from cluster.errors import ConfigError, NotReadyError
from cluster.lab.bench.processes import free_port
from cluster.types import CameraStatus
from cluster.types.cameras import NOT_ASKED
from cluster.types.reports import ReplicaStatus

MODEL = {"name": "tiny-qwen2_5_vl"}


def cautions(**config):
    config = load_config(None, {"model": MODEL, "gateway": {"port": 0, "http_port": 0}, **config})
    return [(each.found, each.remedy) for each in findings(config) if (each.what, each.state) == ("caution", "warning")]


def found(**config):
    config = {"model": MODEL, "gateway": {"port": 0, "http_port": 0}, **config}
    return {each.what: each for each in findings(load_config(None, config))}


def test_a_machine_in_order():
    rows = found()
    assert {"versions", "GPU driver", "NVDEC", "disk", "folders", "clock", "ports"} <= rows.keys()
    assert not [each for each in rows.values() if each.state == "wrong"]
    assert "torch" in rows["versions"].found


def test_what_is_wrong_is_said_with_a_remedy(tmp_path):
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        rows = found(
            model={"name": "tiny-nothing"},
            gateway={"port": port, "http_port": 0},
            alerts={"folder": str(tmp_path / "file" / "below")},
            tiers={"redis_url": "redis://:secret-1@127.0.0.1:1"},
            cluster={"decode": "cuda"},
        )
    wrong = {what for what, each in rows.items() if each.state == "wrong"}
    assert wrong >= {"model and settings", "ports", "folders", "Redis"}
    assert "Address already in use" in rows["ports"].found
    assert "choose another gateway.port" in rows["ports"].remedy
    assert "secret-1" not in str(rows)


def test_the_folder_of_state_is_the_one_that_serve_would_use(cli):
    (cli.folder / "file").touch()
    ports = ("--set", "gateway.port=0", "--set", "gateway.http_port=0", "--json", "-")
    below = str(cli.folder / "file" / "below")
    for done in (cli("doctor", "--state", below, *ports), cli("doctor", *ports, SIGHTLINE_STATE=below)):
        rows = {each["what"]: each for each in json.loads(done.stdout)}
        assert (done.returncode, rows["folders"]["state"]) == (1, "wrong")
        assert below in rows["folders"]["found"]
        assert "choose another --state" in rows["folders"]["remedy"]
        assert below in rows["disk"]["found"]


def test_a_gpu_is_one_that_torch_works_on(monkeypatch):
    """A driver is not enough: builds of torch for the CPU are refused by every replica, an hour into a roll-out."""

    def nvidia_smi(*command):
        return "NVIDIA H200, 570.1, 143771 MiB" if command[0] == "nvidia-smi" else ""

    monkeypatch.setattr(doctor, "_output_of", nvidia_smi)
    monkeypatch.setattr(
        "torch.ones", refuse := Mock(side_effect=AssertionError("Torch not compiled with CUDA enabled"))
    )
    row = found(model=MODEL | {"device": "cuda"})["GPU driver"]
    assert (row.state, "Torch not compiled with CUDA" in row.found) == ("wrong", True)
    assert "build of torch with CUDA" in row.remedy
    refuse.side_effect = None
    row = found(model=MODEL | {"device": "cuda"})["GPU driver"]
    assert (row.state, row.found) == ("ok", "NVIDIA H200, 570.1, 143771 MiB")
    monkeypatch.setattr(doctor, "_output_of", lambda *command: "")
    assert found(model=MODEL | {"device": "cuda"})["GPU driver"].state == "ok", "a container may lack nvidia-smi"


@pytest.mark.parametrize(
    ("cluster", "camera", "state"),
    [("auto", None, "warning"), ("cuda", None, "wrong"), ("cpu", None, "ok"), ("cpu", "cuda", "wrong")],
)
def test_nvdec_that_is_broken_matters_where_it_is_asked_for(monkeypatch, cluster, camera, state):
    monkeypatch.setattr(Nvdec, "check", Mock(side_effect=NvdecError("the driver has no NVDEC library")))
    cameras = [
        {"name": "gate", "source": "rtsp://gate/", "decode": camera, "questions": [{"id": "q", "text": "Fire?"}]}
    ]
    row = found(cluster={"decode": cluster}, cameras=cameras)["NVDEC"]
    assert (row.state, bool(row.remedy)) == (state, state != "ok")


def test_of_a_ray_cluster_its_address_is_asked_and_not_this_machine(tmp_path):
    """Its processes may be on any machine, as when it is started."""
    (tmp_path / "file").touch()
    plain = {"allow_plain_inside": True}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cluster = {"ray_address": f"127.0.0.1:{port}", "state_dir": str(tmp_path / "file" / "below")}
        device = MODEL | {"device": "cuda"}
        rows = found(cluster=cluster, gateway={"port": port, "http_port": 0}, model=device, security=plain)
        assert rows["Ray"] == ("Ray", "ok", f"answers at 127.0.0.1:{port}", "")
        assert not [each for each in rows.values() if each.state == "wrong"]
    row = found(cluster={"ray_address": "127.0.0.1:1"}, security=plain)["Ray"]
    assert (row.state, "no Ray cluster answers" in row.found, "ray start" in row.remedy) == ("wrong", True, True)


def test_ports_are_those_that_serve_would_take():
    several = found(
        gateway={"port": 23_451, "http_port": 0}, cluster={"gateways": 2, "placement": {"gateway": "gate"}}
    )["ports"]
    assert (several.state, "gateway.http_port to 0" in several.remedy) == ("wrong", True)
    assert found()["ports"].state == "ok"


def test_a_model_with_random_weights_is_warned_of():
    [(said, remedy)] = cautions()
    assert ("random weights" in said, "demo" in remedy) == (True, True)
    assert cautions(model={"name": "demo"}) == []
    [(said, _)] = cautions(engine="simulated", simulated={"costs": "demo-cpu"})
    assert "random weights" not in said


def test_a_camera_that_the_bundled_model_does_not_know_is_warned_of():
    question = [{"id": "q", "text": "Are people fighting?"}]
    cameras = [{"name": "gate", "source": "rtsp://10.0.0.1/1"}, {"name": "drawn", "source": "demo://gate"}]
    [(said, remedy)] = cautions(model={"name": "demo"}, cameras=cameras, questions=question)
    assert (said[:13], "not real pictures" in said) == ("camera gate: ", True)
    assert remedy == "name a checkpoint in model.name"


def test_thousands_of_cameras_that_it_does_not_know_take_a_line():
    cameras = [{"name": f"gate-{number}", "source": f"rtsp://10.0.0.1/{number}"} for number in range(3000)]
    question = [{"id": "q", "text": "Are people fighting?"}]
    said = [each for each, _ in cautions(model={"name": "demo"}, cameras=cameras, questions=question)]
    assert [each[:40] for each in said if "real pictures" in each] == ["3000 cameras (gate-0, …): answers mean l"]
    for number, each in enumerate(cameras[:100]):
        each["questions"] = [{"id": "own", "text": f"Is bay {number} free?"}]
    said = [each for each, _ in cautions(model={"name": "demo"}, cameras=cameras[:100], questions=question)]
    assert len([each for each in said if "mean little" in each]) == 5
    assert "and 95 more remarks on cameras" in said


def test_an_accelerator_whose_load_nobody_knows_is_warned_of():
    """Cameras would be accepted, and run at full quality, whatever the load."""
    unset = "scheduling.costs is not set"
    [remedy] = [remedy for said, remedy in cautions(model=MODEL | {"device": "cuda"}) if said.startswith(unset)]
    assert "sightline bench cost --model tiny-qwen2_5_vl --out" in remedy
    assert unset not in str(cautions(model=MODEL | {"device": "cuda"}, scheduling={"costs": "qwen2.5-vl-7b-h100"}))
    assert unset not in str(cautions())


def test_memories_that_the_tiers_cannot_hold_are_warned_of(monkeypatch):
    seven = {"name": "Qwen/Qwen2.5-VL-7B-Instruct"}
    monkeypatch.setattr("cluster.control.fleet_settings.host_memory_bytes", lambda: 8 * 2**30)
    cameras = [{"name": f"c{n}", "questions": [{"id": "q", "text": "Fire?"}]} for n in range(24)]
    # 7/8 of 176 MiB by tokens of 30,016 bytes.
    held = found(model=seven, cameras=cameras[:23])["memory.cap"].found
    assert "176MiB per camera hold about 5,379 tokens, or 1.3 min" in held

    def short(**config):
        return [pair for pair in cautions(model=seven, **config) if "memory.cap" in "".join(pair)]

    assert short(cameras=cameras[:23]) == []
    [(said, remedy)] = short(cameras=cameras)
    assert said.startswith("tiers.node_bytes is 4.0 GiB, but 24 cameras at their memory.cap take 4.1 GiB")
    assert "lower memory.cap" in remedy
    assert short(cameras=cameras, memory={"cap": "64MiB"}) == []
    assert short(cameras=cameras, tiers={"redis_url": "redis://127.0.0.1:1"}) == []
    # The lowest tier that there is.
    [(said, _)] = short(cameras=cameras, tiers={"levels": ["host"]})
    assert said.startswith("tiers.host_bytes is 1.0 GiB")
    large = short(cameras=cameras, tiers={"host_bytes": "4GiB", "node_bytes": "5GiB"})
    assert any("take up to 9.2 GiB of this machine's 8.0 GiB" in said for said, _ in large)


@pytest.mark.parametrize(
    ("options", "state", "remedy"),
    [
        ((), "warning", "allkeys-lru"),
        # Nothing is ever evicted without a limit.
        (("--maxmemory-policy", "allkeys-lru"), "warning", "set maxmemory"),
        # As at a provider.
        (("--maxmemory-policy", "allkeys-lru", "--maxmemory", "8mb", "--rename-command", "CONFIG", ""), "ok", ""),
        (("--replicaof", "127.0.0.1", "1"), "wrong", "primary"),
        (("--cluster-enabled", "yes", "--cluster-port", str(free_port())), "wrong", "without cluster mode"),
    ],
)
def test_a_redis_that_does_not_take_what_comes(tmp_path, options, state, remedy):
    server = RedisServer(tmp_path)
    server.start(*options)
    try:
        row = found(tiers={"redis_url": server.url})["Redis"]
        camera = {"name": "gate", "questions": [{"id": "q", "text": "Fire?"}], "memory": {"cap": "9MiB"}}
        full = found(tiers={"redis_url": server.url}, cameras=[camera])["Redis"]
    finally:
        server.kill()
    assert (row.state, remedy in row.remedy) == (state, True), row
    if state == "ok":
        assert (full.state, "lower memory.cap" in full.remedy) == ("warning", True)


def test_an_option_that_redis_does_not_have_is_said():
    with pytest.raises(ConfigError, match=r"tiers\.redis_url: .* with the options of redis-py") as refused:
        found(tiers={"redis_url": "rediss://:secret-1@127.0.0.1:1?ssl_ca_cert=/etc/ca.pem"})
    assert "secret-1" not in str(refused.value)


def test_the_command(cli):
    done = cli("doctor", "--set", "gateway.port=0", "--set", "gateway.http_port=0", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert {each["state"] for each in json.loads(done.stdout)} <= {"ok", "warning"}
    assert cli("doctor", "--set", "model.name=tiny-nothing", "--set", "gateway.port=0").returncode == 1


def states(rows):
    return {each.what: (each.state, each.found, bool(each.remedy)) for each in rows}


def test_cameras_of_a_running_cluster():
    good = CameraStatus("gate", state="running", windows_done=100)
    assert states(camera_findings([good])) == {"cameras": ("ok", "1 of 1 running", False)}
    bad = [
        CameraStatus(f"c{i}", source="rtsp://u:secret-1@h/", state="backoff", reason="rtsp://u:secret-1@h/ refuses")
        for i in range(7)
    ]
    rows = states(camera_findings([good, *bad]))
    assert rows["cameras"][0] == "wrong"
    assert rows["cameras"][1].startswith("1 of 8 running; c0: ")
    assert rows["cameras"][1].endswith("; and 2 more")
    assert "secret-1" not in str(rows)
    full = states(camera_findings([CameraStatus("a", rung="shed", windows_done=94, windows_dropped=6), good]))
    assert full["quality"] == ("wrong", "not answered: a", True)
    assert "windows" not in full
    assert states(camera_findings([CameraStatus("a", windows_done=94, windows_lost=6)]))["windows"][0] == "warning"
    assert states(camera_findings([]))["cameras"][0] == "warning"
    told = states(camera_findings([CameraStatus("a", state="running", reason="keyframes only"), good]))
    assert told["running cameras"] == ("warning", "a: keyframes only", True)


def test_cameras_that_only_wait_are_not_in_order():
    """As after a start at which no decoder took any."""
    good = CameraStatus("gate", state="running", windows_done=100)
    waiting = [CameraStatus("yard", reason="no decoder is ready"), CameraStatus("dock", state="connecting")]
    rows = states(camera_findings([good, *waiting]))
    assert rows["cameras"] == ("warning", "1 of 3 running; yard: no decoder is ready; dock: connecting", True)
    lost = CameraStatus("hall", state="backoff", reason="refused")
    both = [*camera_findings([lost, *waiting])]
    assert [each.state for each in both] == ["wrong", "warning"]
    assert states(camera_findings([CameraStatus("hall", state="paused"), good]))["cameras"][0] == "ok"


def test_a_camera_outside_the_hours_of_its_questions_is_in_order():
    yard = CameraStatus("yard", state="running", reason=NOT_ASKED)
    assert states(camera_findings([yard])) == {"cameras": ("ok", "1 of 1 running", False)}


def test_replicas_of_a_running_cluster():
    assert states(replica_findings([])) == {"replicas": ("wrong", "none is ready", True)}
    assert states(replica_findings([ReplicaStatus("replica-0", utilisation=0.5)])) == {
        "replicas": ("ok", "1 ready, the fullest 50%", False),
        "memory": ("ok", "every tier works", False),
    }
    rows = [*replica_findings([ReplicaStatus("replica-0", backlog_s=40), ReplicaStatus("replica-1", draining=True)])]
    assert [(each.state, each.found) for each in rows] == [
        ("wrong", "replica-0: backlog of 40 s"),
        ("warning", "drained: replica-1"),
        ("ok", "every tier works"),
    ]


def test_tiers_and_sinks_of_a_running_cluster():
    replicas = [ReplicaStatus(f"replica-{number}", memory="redis: nobody answers") for number in range(2)]
    assert states(replica_findings(replicas))["memory"] == ("wrong", "redis: nobody answers", True)
    assert states(replica_findings([ReplicaStatus("replica-0")]))["memory"][0] == "ok"
    sinks = {
        "ops": SinkStatus(3, 0, 3, 0, "connection refused", kind="webhook"),
        # Its dead letter was sent again.
        "log": SinkStatus(0, 1, 0, 1, "", kind="log"),
        "mail": SinkStatus(0, 0, 0, 0, "", kind="notify"),
    }
    letter = Delivery(Make().event(), "mail", "dead")
    rows = states(alert_findings(Outbox(sinks, "", 0, 0, 0, 0, [letter])))
    assert rows == {
        "alerts": ("ok", "kept; 3 sinks", False),
        "sink ops": ("wrong", "webhook: connection refused", True),
        "sink mail": ("wrong", "notify: 1 alerts permanently refused", True),
    }
    refused = [Delivery(None, "log", "dead", 1, "answered 404")] * 2
    rows = states(alert_findings(Outbox(sinks, "", 0, 0, 0, 0, refused)))
    assert rows["sink log"] == ("wrong", "log: 2 alerts permanently refused", True)
    assert states(alert_findings(Outbox({}, "disk is full", 4, 0, 0, 0, [])))["alerts"][0] == "wrong"
    assert states(alert_findings(Outbox({}, "", 0, 0, 2, 0, [])))["alerts"][0] == "wrong"


def test_a_disk_with_little_room_is_warned_of_with_the_number():
    rows = states(alert_findings(Outbox({}, "", 0, 0, 0, 0, [], free_bytes=700_000)))
    assert rows["alerts"][0] == "ok"
    assert rows["disk"] == ("warning", "700 kB free for incidents", True)
    for room in (0, 6 * 10**9):
        assert "disk" not in states(alert_findings(Outbox({}, "", 0, 0, 0, 0, [], free_bytes=room)))


class WithoutAlerts:
    """A client of a cluster with ``alerts.enabled: false``."""

    address = "127.0.0.1:50051"

    def cameras_list(self):
        return [CameraStatus("gate", state="running")]

    def replicas_and_decoders(self):
        return [ReplicaStatus("replica-0")], None

    def outbox(self, dead):
        raise NotReadyError("this cluster makes no incidents; alerts.enabled is off")


def test_a_cluster_without_alerts_is_in_order():
    rows = states(cluster_findings(WithoutAlerts()))
    assert rows["alerts"] == ("ok", "off (alerts.enabled)", False)
    assert {state for state, *_ in rows.values()} == {"ok"}


def test_a_gateway_that_is_away_or_both_at_once(cli):
    done = cli("doctor", "-g", "127.0.0.1:1", "--json", "-")
    assert done.returncode == 1
    [row] = json.loads(done.stdout)
    assert (row["what"], row["state"]) == ("gateway", "wrong")
    assert cli("doctor", "-g", "127.0.0.1:1", "--set", "gateway.port=0").returncode == 2


def test_a_full_disk_is_that_of_the_setting_that_chose_it(monkeypatch, tmp_path):
    monkeypatch.setattr("cluster.alerts.dispatcher.LEAST_FREE_BYTES", 2**70)
    for section, key in (("alerts", "folder"), ("clips", "folder"), ("cluster", "state_dir")):
        [row] = doctor._disks(load_config(None, {section: {key: str(tmp_path)}}))
        assert f"choose another {'--state' if section == 'cluster' else f'{section}.{key}'}" in row.remedy


def test_every_disk_that_is_written_to_is_looked_at_once(monkeypatch, tmp_path):
    """Clips, the largest of all, may be on a disk of their own."""
    folders = {"alerts": {"folder": str(tmp_path / "a")}, "clips": {"folder": "/dev/shm/sightline-doctor"}}
    config = load_config(None, folders | {"cluster": {"state_dir": str(tmp_path / "b")}})
    free = {"/dev/shm": 10**9}
    monkeypatch.setattr(
        "shutil.disk_usage", lambda path: SimpleNamespace(free=free.get(str(path), 10**12)), raising=True
    )
    [clips, other] = doctor._disks(config)
    assert (clips.state, other.state) == ("warning", "ok")
    assert clips.found == "1.0 GB free for /dev/shm/sightline-doctor"
    assert "choose another clips.folder" in clips.remedy


def test_a_folder_that_cannot_be_looked_at_ends_no_check(tmp_path):
    rows = found(alerts={"folder": str(tmp_path / ("a" * 300))})
    assert (rows["disk"].state, rows["folders"].state) != ("wrong", "ok")
    assert "File name too long" in rows["folders"].found
