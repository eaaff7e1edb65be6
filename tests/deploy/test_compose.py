"""Compose on one machine: valid by the specification's schema (of docker-compose 1.29.2, Apache-2.0), made of files
that are there, nothing open to others, and its configurations, tokens and scrapes are right."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from chart_parts import ROOT
from jsonschema import Draft7Validator
from promtool import needs_promtool, promtool

from actors.session import FLAGS
from cluster.config import load_config
from cluster.security.roles import Role
from cluster.security.tokens import TokenFile

FOLDER = ROOT / "deploy" / "compose"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
OURS = ("cpu", "nvidia")
SETTINGS = {"cpu": ".env", "nvidia": "nvidia.env"}


def settings(name):
    """The variables of one of the two."""
    lines = (FOLDER / SETTINGS[name]).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def filled(text, name):
    """With the variables of one of the two, as Compose fills them in."""
    return re.sub(r"\$\{(\w+):-\w+\}", lambda found: settings(name)[found[1]], text)


def mounts(name):
    """``(source, target)`` of a service's mounts; a source without a slash is a volume."""
    return [tuple(each.split(":")[:2]) for each in SERVICES[name].get("volumes", [])]


def test_it_is_what_the_specification_allows():
    schema = json.loads(Path(__file__).with_name("compose").joinpath("compose_spec.json").read_text())
    problems = [f"{list(each.path)}: {each.message}" for each in Draft7Validator(schema).iter_errors(COMPOSE)]
    assert not problems
    broken = {**COMPOSE, "services": {"x": {"ports": "80"}}}
    assert list(Draft7Validator(schema).iter_errors(broken)), "a schema that finds nothing"


def test_every_file_and_volume_is_there():
    for name, service in SERVICES.items():
        for source, _ in mounts(name):
            if source.startswith("."):
                assert (FOLDER / source).exists(), (name, source)
            else:
                assert source in COMPOSE["volumes"], (name, source)
        if "build" in service:
            context = (FOLDER / service["build"]["context"]).resolve()
            assert context == ROOT
            for each in OURS:
                assert (context / filled(service["build"]["dockerfile"], each)).is_file()
        for needed in service.get("depends_on", {}):
            assert needed in SERVICES
            assert "healthcheck" in SERVICES[needed]


def test_one_of_two_is_started_unless_told_otherwise():
    assert {name: SERVICES[name]["profiles"] for name in OURS} == {name: [name] for name in OURS}
    for name in OURS:
        assert settings(name)["COMPOSE_PROFILES"] == name
        assert settings(name)["COMPOSE_PROJECT_NAME"] == "sightline"
        # Both services of one run are one image.
        assert SERVICES[name]["image"] == filled(SERVICES["tokens"]["image"], name)
    assert [settings(name)["SIGHTLINE_VARIANT"] for name in OURS] == ["cpu", "cuda"]
    [device] = SERVICES["nvidia"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


def test_nothing_is_open_to_other_machines_and_nobody_is_root_for_long():
    for name, service in SERVICES.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service
        assert re.search(r":(v?\d+\.\d+\.\d+|cpu|cuda)$", filled(service["image"], "cpu")), name
    assert SERVICES["tokens"]["network_mode"] == "none"
    assert all(SERVICES[name]["read_only"] for name in (*OURS, "tokens"))


def test_no_container_takes_the_machines_memory_or_fills_its_disk_with_logs():
    units = {"k": 2**10, "m": 2**20, "g": 2**30}

    def size(text):
        return int(text[:-1]) * units[text[-1]]

    for name, service in SERVICES.items():
        limit = size(filled(service["mem_limit"], name if name in OURS else "cpu"))
        assert 2**28 <= limit <= 2**35, name
        log = service["logging"]["options"]
        assert size(log["max-size"]) * int(log["max-file"]) <= 2**27, name
        # In memory, of which tmpfs takes half of the machine's by itself.
        folders = [re.search(r"size=(\w+)", each) for each in service.get("tmpfs", [])]
        assert all(folders), name
        assert sum(size(found[1]) for found in folders) < limit, name
    # One camera of the bundled model takes 2.3 GB.
    assert size(filled(SERVICES["cpu"]["mem_limit"], "cpu")) > 2.3e9 + size("2g")
    # Ray keeps what its processes write in /tmp: some ten of them, two files each.
    logs = int(FLAGS["RAY_ROTATION_MAX_BYTES"]) * (1 + int(FLAGS["RAY_ROTATION_BACKUP_COUNT"]))
    assert 40 * logs < size("2g")
    command = SERVICES["prometheus"]["command"]
    assert any(each.startswith("--storage.tsdb.retention.size=") for each in command)


def test_grafanas_admin_has_a_password_that_is_made():
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/tokens/grafana"
    assert ("tokens", "/tokens") in mounts("grafana")
    assert not any("PASSWORD" in key and not key.endswith("__FILE") for key in environment)
    # What its image runs as, which alone may read it.
    [script] = SERVICES["tokens"]["command"]
    assert "chown 472:0 /tokens/grafana.part" in script


@pytest.mark.parametrize("name", OURS)
def test_a_container_is_not_called_unhealthy_while_it_may_still_start(name):
    [source] = [source for source, target in mounts(name) if target == "/etc/sightline/sightline.yaml"]
    dockerfile = (ROOT / filled(SERVICES[name]["build"]["dockerfile"], name)).read_text()
    [start_s] = re.findall(r"--start-period=(\d+)s", dockerfile)
    assert int(start_s) >= load_config(FOLDER / source).cluster.start_timeout_s


def test_the_documentation_names_the_model_that_is_fetched():
    model = load_config(FOLDER / "nvidia.yaml").model.name.partition("/")[2].removesuffix("-Instruct")
    [line] = [each for each in (ROOT / "docs" / "operations.md").read_text().splitlines() if "nvidia.env up" in each]
    assert model in line


@pytest.mark.parametrize("name", OURS)
def test_its_configuration_is_right(name):
    [source] = [source for source, target in mounts(name) if target == "/etc/sightline/sightline.yaml"]
    config = load_config(FOLDER / source)
    volumes = {target for _, target in mounts(name)}
    for path in (config.security.tokens_file, config.security.audit_log):
        assert any(path.startswith(f"{target}/") for target in volumes), path
    ports = [int(port.rpartition(":")[2]) for port in SERVICES[name]["ports"]]
    assert ports == [config.gateway.port, config.gateway.http_port]
    assert config.model.device == ("cuda" if name == "nvidia" else "cpu")


def test_its_commands_are_known():
    told = subprocess.run(
        [Path(sys.executable).with_name("sightline"), "serve", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for name in OURS:
        command, *rest = SERVICES[name]["command"]
        assert command == "serve"
        assert all(each in told for each in rest if each.startswith("--"))


@pytest.mark.parametrize("interrupted", ["never", "admin", "prometheus", "grafana"])
def test_tokens_are_made_once(tmp_path, interrupted):
    """The very script, with folders of this machine; also after a start that ended before a secret was in its file."""
    [script] = SERVICES["tokens"]["command"]
    for folder in ("/tokens", "/state", "/tmp"):
        (tmp_path / folder[1:]).mkdir()
    script = re.sub(r"(?<![\w/])/(tokens|state|tmp)\b", rf"{tmp_path}/\1", script)
    # Only root may give files away.
    script = re.sub(r"chown (-R )?\d+:\d+", "true", script).replace("exec sleep infinity", "exit 0").replace("$$", "$")
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT}/protos"}
    command = [*SERVICES["tokens"]["entrypoint"], script]
    if interrupted != "never":
        made = rf"(?m)^( *\S.* > /tokens/{interrupted}\.part)$".replace("/tokens", f"{tmp_path}/tokens")
        broken = re.sub(made, r"\1; kill -9 0", script)
        assert broken != script
        ended = subprocess.run([*command[:-1], broken], env=environment, capture_output=True, start_new_session=True)
        assert ended.returncode == -9
        assert not (tmp_path / "tmp" / "done").exists()
    for _ in range(2):
        subprocess.run(command, check=True, env=environment, capture_output=True)
        names = ("admin", "prometheus", "grafana")
        secrets = {name: (tmp_path / "tokens" / name).read_text().strip() for name in names}
        assert len(secrets["grafana"]) >= 32
        known = TokenFile(tmp_path / "state" / "tokens.json")
        assert known.verify(secrets["admin"]).roles == {Role.ADMIN}
        assert known.verify(secrets["prometheus"]).roles == {Role.VIEW}
        kept = locals().get("kept", secrets)
        assert secrets == kept
    assert all((tmp_path / "tokens" / name).stat().st_mode & 0o077 == 0 for name in names)
    assert (tmp_path / "tmp" / "done").exists(), "what the healthcheck looks for"


@needs_promtool
def test_prometheus_scrapes_the_gateway(tmp_path):
    text = (FOLDER / "prometheus.yml").read_text()
    for source, target in mounts("prometheus"):
        if source.startswith(".") and source != "./prometheus.yml":
            text = text.replace(str(Path(target).parent), str((FOLDER / source).resolve().parent))
    (tmp_path / "token").write_text("x")
    text = text.replace("/tokens/prometheus", str(tmp_path / "token"))
    (tmp_path / "prometheus.yml").write_text(text)
    code, said = promtool("check", "config", str(tmp_path / "prometheus.yml"))
    assert code == 0, said
    assert "rules found" in said
    [target] = yaml.safe_load(text)["scrape_configs"][0]["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert all(host in SERVICES[name]["networks"]["default"]["aliases"] for name in OURS)
    assert int(port) == load_config(FOLDER / "cpu.yaml").gateway.http_port


def test_grafana_has_the_charts_dashboards():
    places = dict(mounts("grafana"))
    dashboards = FOLDER / next(source for source, target in places.items() if target == "/var/lib/grafana/dashboards")
    assert len(list(dashboards.glob("*.json"))) >= 5
    provider = yaml.safe_load((FOLDER / "grafana" / "dashboards.yaml").read_text())["providers"][0]
    assert provider["options"]["path"] == places["../helm/sightline/dashboards"]
    source = yaml.safe_load((FOLDER / "grafana" / "datasource.yaml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in SERVICES
