"""Ports that a cluster chooses and folders that it looks at before it starts."""

import json
import os
import socket

import pytest
from ray._private import accelerators

from actors.preflight import check_folders, check_gpus, check_settings, free_port, preflight
from actors.replica import replica_application
from cluster.config import camera_settings, load_config
from cluster.errors import ConfigError
from cluster.models.catalog import key_heads


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_any_free_one_is_none_that_connections_get(host):
    """Linux gives connections ports from 32768 on: one of those may be taken before the gateway listens."""
    port = free_port(host, 0, "gateway.port")
    assert 20_000 <= port < 32_768
    with socket.create_server((host, port)):
        with pytest.raises(ConfigError, match=f"cannot listen on {host}:{port}: .* choose another gateway.port, or 0"):
            free_port(host, port, "gateway.port")
        assert free_port(host, 0, "gateway.port") != port


def test_a_port_that_is_chosen_is_never_the_one_that_is_named(monkeypatch):
    """Of the thousands that may be chosen one is the page's own."""
    chosen = iter([[23_456], [23_457]])
    monkeypatch.setattr("random.sample", lambda *_: next(chosen))
    named = {"model": {"name": "tiny-qwen2_5_vl"}, "gateway": {"port": 0, "http_port": 23_456}}
    gateway = preflight(load_config(None, named)).gateway
    assert (gateway.port, gateway.http_port) == (23_457, 23_456)


def test_several_gateways_on_one_machine_take_ports_of_their_own():
    cluster = {"gateways": 2, "placement": {"gateway": "gate"}}
    free = {"port": 0, "http_port": 0}
    named = {"model": {"name": "tiny-qwen2_5_vl"}, "cluster": cluster}
    with pytest.raises(ConfigError, match="2 gateways on one machine cannot share ports"):
        preflight(load_config(None, named | {"gateway": {"port": 0}}))
    found = preflight(load_config(None, named | {"gateway": free}))
    assert (found.gateway.port, found.gateway.http_port) == (0, 0), "one number would be for all of them"


def test_a_sink_whose_library_is_not_installed_is_said_before_anything_starts(monkeypatch):
    sink = {"name": "k", "kind": "kafka", "options": {"brokers": "127.0.0.1:1"}}
    config = load_config(None, {"model": {"name": "tiny-qwen2_5_vl"}, "alerts": {"sinks": [sink]}})
    check_settings(config)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"needs confluent-kafka, which is not installed: pip install '\.\[kafka\]' in"
    ):
        check_settings(config)


def test_a_host_that_is_none():
    with pytest.raises(ConfigError, match=r"gateway.host 'nowhere.invalid' is not a known address"):
        free_port("nowhere.invalid", 0, "gateway.port")
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.77:0"):
        free_port("192.0.2.77", 0, "gateway.port")


FOLDERS = ["alerts.folder", "clips.folder", "cluster.log_dir", "cluster.state_dir", "security.audit_log"]


@pytest.mark.parametrize("key", FOLDERS)
def test_a_folder_that_cannot_be_written_is_said_before_anything_starts(tmp_path, key: str) -> None:
    (tmp_path / "file").write_text("")
    section, name = key.split(".")
    config = load_config(None, {section: {name: str(tmp_path / "file" / "below")}})
    with pytest.raises(ConfigError, match=rf"cannot be written: (Not a directory|File exists); choose another .*{key}"):
        check_folders(config)


@pytest.mark.parametrize(
    ("key", "mode"), [("alerts.folder", 0o700), ("clips.folder", 0o700), ("cluster.log_dir", 0o755)]
)
def test_what_is_made_is_for_its_owner_alone_but_for_logs(tmp_path, key: str, mode: int) -> None:
    before = os.umask(0o022)
    section, name = key.split(".")
    check_folders(load_config(None, {section: {name: str(tmp_path / "made")}}))
    os.umask(before)
    assert (tmp_path / "made").stat().st_mode & 0o777 == mode


def test_gpus_that_this_machine_lacks_are_said_before_anything_starts(monkeypatch):
    """Ray would wait for them for ever, as on a cluster to which a node may come."""
    tiny, free = {"name": "tiny-qwen2_5_vl"}, {"port": 0, "http_port": 0}

    def config(device, replicas=1, **more):
        given = {"model": tiny | {"device": device}, "cluster": {"replicas": replicas}, "gateway": free}
        return load_config(None, given | more)

    monkeypatch.setattr("runpy.run_path", lambda path: {"cuda": None})
    for device in ("cuda", "cuda:0"):
        with pytest.raises(ConfigError, match="is a CPU build"):
            preflight(config(device))
    monkeypatch.setattr("runpy.run_path", lambda path: {"cuda": "12.8"})
    card = accelerators.get_accelerator_manager_for_resource("GPU")
    monkeypatch.setattr(card, "get_current_node_num_accelerators", staticmethod(lambda: 2))
    for visible, cards in (("0,1,2", 2), ("1", 1), ("", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        check_gpus(config("cuda", max(1, cards - 1)) if cards else config("cuda:0"))
        with pytest.raises(ConfigError, match=f"each of {cards + 1} replicas .* but Ray finds {cards} on this machine"):
            check_gpus(config("cuda", cards + 1))
    check_gpus(config("cpu"))
    check_gpus(config("cuda", 9, engine="simulated", simulated={"costs": "demo-cpu"}))
    # With vLLM, Ray gave each replica one, and vLLM refused to spread a model over it.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    split = {"engine": "vllm", "vllm": {"arguments": {"tensor_parallel_size": 2}}}
    check_gpus(config("cuda", 1, **split))
    with pytest.raises(
        ConfigError, match=r"cuda, 2 GPUs for each of 2 replicas \(cluster.replicas\), but Ray finds 2 on"
    ):
        check_gpus(config("cuda", 2, **split))
    for given, gpus in ((split, 2), ({}, 1)):
        deployment = replica_application(config("cuda", 1, **given), None)
        assert deployment._bound_deployment.ray_actor_options["num_gpus"] == gpus


def test_of_gpus_of_other_nodes_this_machine_knows_nothing(monkeypatch):
    monkeypatch.setattr("runpy.run_path", lambda path: {"cuda": None})
    with socket.create_server(("127.0.0.1", 0)) as ray:
        cluster = {"ray_address": f"127.0.0.1:{ray.getsockname()[1]}"}
        named = {"model": {"name": "tiny-qwen2_5_vl", "device": "cuda"}, "security": {"allow_plain_inside": True}}
        preflight(load_config(None, named | {"cluster": cluster}))


def test_every_node_takes_the_default_cap_of_the_one_that_started_the_cluster(tmp_path):
    """Where a restarted controller does not have the model's files, cameras' caps would change."""
    shape = {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"} | shape))
    camera = {"name": "a", "questions": [{"id": "fire", "text": "Fire?"}]}
    free = {"port": 0, "http_port": 0}
    read = load_config(None, {"model": {"name": str(tmp_path)}, "cameras": [camera], "gateway": free})
    started = preflight(read)
    (tmp_path / "config.json").unlink()
    key_heads.cache_clear()
    assert camera_settings(read, "a").memory.cap == 64 * 2**20
    assert camera_settings(started, "a").memory.cap == 176 * 2**20
