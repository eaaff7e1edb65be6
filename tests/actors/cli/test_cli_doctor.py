"""``sightline doctor``: each thing that is wrong is found, with what to do."""

import json
import socket

from redis_server import RedisServer

from actors.cli.doctor import findings
from cluster.config import load_config

MODEL = {"name": "tiny-qwen2_5_vl"}


def found(**config):
    config = {"model": MODEL, "gateway": {"port": 0, "metrics_port": 0}, **config}
    return {each.what: each for each in findings(load_config(None, config))}


def test_a_machine_in_order():
    rows = found()
    assert {"versions", "GPU driver", "NVDEC", "disk", "folders", "clock", "gateway.port"} <= rows.keys()
    assert not [each for each in rows.values() if each.state == "wrong"]
    assert "torch" in rows["versions"].found


def test_what_is_wrong_is_said_with_a_remedy(tmp_path):
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        rows = found(
            model={"name": "tiny-nothing"},
            gateway={"port": port, "metrics_port": 0},
            alerts={"folder": str(tmp_path / "file" / "below")},
            tiers={"redis_url": "redis://:secret-1@127.0.0.1:1"},
            cluster={"decode": "cuda"},
        )
    wrong = {what for what, each in rows.items() if each.state == "wrong"}
    assert wrong >= {"model and settings", "gateway.port", "folders", "Redis"}
    assert "Address already in use" in rows["gateway.port"].found
    assert "choose another gateway.port" in rows["gateway.port"].remedy
    assert "secret-1" not in str(rows)


def test_a_redis_that_refuses_when_it_is_full(tmp_path):
    server = RedisServer(tmp_path)
    server.start()
    try:
        row = found(tiers={"redis_url": server.url})["Redis"]
    finally:
        server.kill()
    assert (row.state, "allkeys-lru" in row.remedy) == ("warning", True)


def test_the_command(cli):
    done = cli("doctor", "--set", "gateway.port=0", "--set", "gateway.metrics_port=0", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert {each["state"] for each in json.loads(done.stdout)} <= {"ok", "warning"}
    assert cli("doctor", "--set", "model.name=tiny-nothing", "--set", "gateway.port=0").returncode == 1
