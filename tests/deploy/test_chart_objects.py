"""Every preset renders, lints, and is what Kubernetes and the operators expect, to the letter."""

import json
import re
import shutil
from typing import Any

import jsonschema
import pytest
import yaml
from chart_parts import (
    CARDS,
    CHART,
    PRESETS,
    VARIANTS,
    documents,
    helm,
    of_kind,
    pods,
    rendered,
    serve_config,
    template,
    validate,
)
from promtool import promtool
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.schema import ServeApplicationSchema

from actors.serve_app import NOT_THE_REPLICAS
from actors.session import FLAGS, OBJECT_STORE_BYTES, ONE_THREAD
from cluster.config.load import load_tree
from cluster.control.fleet_settings import fleet_settings

MOST_PODS = 40


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_lint(preset: str | None) -> None:
    files = [] if preset is None else ["-f", str(CHART / f"values-{preset}.yaml")]
    done = helm("lint", str(CHART), "--strict", *files)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_object_is_valid(variant: str) -> None:
    objects = rendered(variant)
    assert len({(each["kind"], each["metadata"]["name"]) for each in objects}) == len(objects)
    for each in objects:
        validate(each)


NAMES = (
    "fullnameOverride",
    "cameras.secretNames[0]",
    "control.persistence.existingClaim",
    "gateway.ingress.className",
    "gateway.ingress.host",
    "gateway.ingress.tlsSecretName",
    "gateway.tls.secretName",
    "gateway.tokens.key",
    "gateway.tokens.secretName",
    "gcsRedis.passwordKey",
    "gcsRedis.secretName",
    "gcsRedis.storageClass",
    "image.pullSecrets[0]",
    "internalTls.name",
    "internalTls.secretName",
    "kvRedis.passwordKey",
    "kvRedis.secretName",
    "memoryKey.key",
    "memoryKey.secretName",
    "models.existingClaim",
    "monitoring.podMonitor.serverName",
    "monitoring.podMonitor.tokenSecretName",
    "replicas.runtimeClassName",
    "secretEnv[0].key",
    "secretEnv[0].name",
    "secretEnv[0].secretName",
)


@pytest.mark.parametrize("word", ["no", "null"])
def test_names_that_yaml_takes_for_something_else_are_names(word: str) -> None:
    """As of the release and its namespace; the API server refuses an object with a label of no or 123."""

    def made(name: str) -> Any:
        names = [part for each in (*NAMES, f"env.{name}") for part in ("--set-string", f"{each}={name}")]
        on = ["--set", "gateway.ingress.enabled=true,decoders.maxPods=40,monitoring.podMonitor.pods=true"]
        values = ["-f", str(CHART / "values-city.yaml"), "--kube-version", "1.30.0"]
        done = helm("template", name, str(CHART), "-n", name, *values, *names, *on)
        assert done.returncode == 0, done.stderr
        objects = documents(done.stdout)
        [service] = of_kind(objects, "RayService")
        service["spec"]["serveConfigV2"] = yaml.safe_load(service["spec"]["serveConfigV2"])
        return objects

    assert made(word) == json.loads(json.dumps(made("qqq")).replace("qqq", word))


def test_validation_finds_what_is_wrong() -> None:
    [service] = of_kind(rendered("default"), "RayService")
    service["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParam"] = {}
    with pytest.raises(jsonschema.ValidationError, match="rayStartParam"):
        validate(service)
    [service] = of_kind(rendered("default"), "RayService")
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["tolerationz"] = []
    with pytest.raises(Exception, match="tolerationz"):
        validate(service)


@pytest.mark.parametrize("variant", VARIANTS)
def test_configuration_is_one_that_sightline_takes(variant: str, monkeypatch) -> None:
    monkeypatch.setenv("KV_REDIS_PASSWORD", "x")
    config = serve_config(rendered(variant))
    [processes, replicas] = config["applications"]
    full = load_tree(processes["args"]["configuration"])
    part = load_tree(replicas["args"]["configuration"])
    assert full.security.tokens_file == "/etc/sightline/tokens/tokens.json"
    assert full.gateway.host == "0.0.0.0"
    assert full.model.device == ("cpu" if variant == "default" else "cuda")
    for section in set(type(full).model_fields) - {*NOT_THE_REPLICAS, "cluster"}:
        assert getattr(part, section) == getattr(full, section), section
    # A change of what a replica does not read must not load its model anew.
    assert not set(replicas["args"]["configuration"]) & set(NOT_THE_REPLICAS)
    unread = ("gateways", "decoders", "max_decoders", "replicas")
    assert part.cluster.placement.gateway is None
    place = part.cluster.placement.model_copy(update={"gateway": full.cluster.placement.gateway})
    numbers = {name: getattr(full.cluster, name) for name in unread}
    assert part.cluster.model_copy(update=numbers | {"placement": place}) == full.cluster


def test_a_replica_of_vllm_has_a_gpu_per_rank() -> None:
    """Of four GPUs, two replicas; four replicas would have waited for GPUs for ever."""
    arguments = ("tensor_parallel_size=2", "pipeline_parallel_size=1")
    vllm = "config.engine=vllm", *(f"config.vllm.arguments.{each}" for each in arguments)
    cluster = serve_config(rendered("city", *vllm))["applications"][0]["args"]["configuration"]["cluster"]
    whole = serve_config(rendered("city"))["applications"][0]["args"]["configuration"]["cluster"]
    assert cluster["replicas"] * 2 == whole["replicas"] == 32


def test_a_configuration_without_a_model_has_the_bundled_one() -> None:
    """Not the configuration's own default, a preset with random weights."""
    text = "config.questions[0].text=Is anyone there?"
    config = serve_config(rendered("default", "config.questions[0].id=person", text))
    for application in config["applications"]:
        assert load_tree(application["args"]["configuration"]).model.name == "demo"


@pytest.mark.parametrize("variant", VARIANTS)
def test_ray_resources_hold_exactly_the_processes(variant: str) -> None:
    objects = rendered(variant)
    cluster = of_kind(objects, "RayService")[0]["spec"]["rayClusterConfig"]
    configuration = serve_config(objects)["applications"][0]["args"]["configuration"]["cluster"]
    autoscaled = cluster["enableInTreeAutoscaling"]
    assert autoscaled is (variant == "everything")
    offered: dict[str, int] = {}
    for group in cluster["workerGroupSpecs"]:
        for name, amount in group["resources"].items():
            offered[name] = offered.get(name, 0) + int(amount) * group["replicas"]
        assert group["minReplicas"] == group["replicas"]
        grows = autoscaled and group["groupName"] == "decoders"
        assert group["maxReplicas"] == (MOST_PODS if grows else group["replicas"])
        if grows:
            assert configuration["max_decoders"] == MOST_PODS * int(group["resources"]["sightline_decoder"])
    assert ("max_decoders" in configuration) is autoscaled
    place = configuration["placement"]
    # One to a pod, of control as well, since all of them take the same ports.
    assert configuration["gateways"] == (4 if variant == "everything" else 1)
    assert offered["sightline_gateway"] == configuration["gateways"]
    assert place.get("gateway") == ("sightline_gateway" if variant == "everything" else None)
    assert {group["resources"].get("sightline_gateway", "1") for group in cluster["workerGroupSpecs"]} == {"1"}
    assert offered[place["decoder"]] == configuration["decoders"]
    assert offered[place["replica"]] == configuration["replicas"]
    assert serve_config(objects)["applications"][1]["deployments"] == [
        {"name": "replica", "num_replicas": configuration["replicas"]}
    ]
    assert offered[place["control"]] >= 8
    assert offered.get("GPU", configuration["replicas"]) == configuration["replicas"]
    assert cluster["headGroupSpec"]["resources"] == {"CPU": "0"}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group["rayStartParams"]["object-store-memory"] == str(OBJECT_STORE_BYTES)


def test_every_pod_has_the_credentials_of_the_registry() -> None:
    objects = rendered("everything")
    jobs = {each["metadata"]["name"]: each["spec"]["template"] for each in of_kind(objects, "Job")}
    for name, pod in (pods(objects) | jobs).items():
        assert pod["spec"].get("imagePullSecrets") == [{"name": "registry"}], name


def test_only_the_autoscaler_gets_a_token_to_scale() -> None:
    objects = rendered("everything")
    found = pods(objects)
    [service] = of_kind(objects, "RayService")
    options = service["spec"]["rayClusterConfig"]["autoscalerOptions"]
    head = found["head"]["spec"]
    [token] = [each["name"] for each in head["volumes"] if "projected" in each]
    assert token in {each["name"] for each in options["volumeMounts"]}
    for component, pod in found.items():
        mounted = {each["name"] for c in pod["spec"]["containers"] for each in c["volumeMounts"]}
        assert token not in mounted, component
        if component != "control":
            assert not pod["spec"].get("automountServiceAccountToken"), component
        # KubeRay gives the right to this account, so nobody else may have it.
        assert (pod["spec"].get("serviceAccountName") == head["serviceAccountName"]) is (component == "head")
    assert head["serviceAccountName"] in {each["metadata"]["name"] for each in of_kind(objects, "ServiceAccount")}
    assert options["securityContext"] == head["containers"][0]["securityContext"]
    assert "autoscalerOptions" not in of_kind(rendered("city"), "RayService")[0]["spec"]["rayClusterConfig"]


def test_cores_may_be_a_number() -> None:
    objects = rendered("default", "decoders.resources.limits.cpu=8")
    assert pods(objects)["decoder"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] == 8
    validate(of_kind(objects, "RayService")[0])


def test_labels_of_a_build_are_valid(tmp_path) -> None:
    """As of ``helm package --version 0.1.0+build.7``: the API server refuses a label with a plus."""
    shutil.copytree(CHART, tmp_path / "sightline")
    about = tmp_path / "sightline" / "Chart.yaml"
    about.write_text(re.sub(r"(ersion: 0\.1\.0)\n", r"\1+build.7\n", about.read_text()))
    done = template("city", chart=tmp_path / "sightline")
    labels = [each["metadata"]["labels"] for each in documents(done.stdout)]
    assert {each["helm.sh/chart"] for each in labels} == {"sightline-0.1.0_build.7"}
    for value in (value for each in labels for value in each.values()):
        assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", value), value


def test_environment_is_that_of_the_command_line() -> None:
    for component, pod in pods(rendered("default")).items():
        found = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
        assert (FLAGS | ONE_THREAD).items() <= found.items(), component
        assert found["OMP_WAIT_POLICY"] == "PASSIVE", "threads of a replica on a CPU do not spin for cores of decoders"


def test_environment_of_ones_own_counts() -> None:
    """The API server refuses a RayService that has a name twice."""
    found_pods = pods(rendered("minimal", "env.HF_HOME=/models/hub", "env.HOME=/home/me"))
    del found_pods["gcs-redis"]
    for component, pod in found_pods.items():
        entries = pod["spec"]["containers"][0]["env"]
        found = {each["name"]: each.get("value") for each in entries}
        assert len(found) == len(entries), component
        assert (found["HF_HOME"], found["HOME"]) == ("/models/hub", "/home/me"), component


def _of_release(expression: str) -> str:
    """The expression with this release's labels in each selector of ours, by splitting at the metrics' names."""
    labels = 'namespace="cctv",release="sightline"'
    parts = re.split(r"(sightline_[a-z0-9_]+)", expression)
    for at in range(1, len(parts), 2):
        rest = parts[at + 1]
        parts[at] += f"{{{labels}," if rest.startswith("{") else f"{{{labels}}}"
        parts[at + 1] = rest.removeprefix("{")
    return "".join(parts)


def test_rules_are_of_this_release_and_link_to_runbooks(tmp_path) -> None:
    objects = rendered("city", "monitoring.rules.runbooks=https://docs.city.example/sightline/")
    wanted = [yaml.safe_load(path.read_text()) for path in sorted((CHART / "rules").glob("*.yaml"))]
    found = [rule["spec"] for rule in of_kind(objects, "PrometheusRule")]
    for spec in wanted:
        for rule in (rule for group in spec["groups"] for rule in group["rules"]):
            rule["expr"] = _of_release(rule["expr"])
            rule["labels"] |= {"namespace": "cctv", "release": "sightline"}
            note = rule["annotations"]
            note["runbook_url"] = f"https://docs.city.example/sightline/{note['runbook_url']}"
    assert found == wanted
    assert found
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": found[0]["groups"]}))
    assert promtool("check", "rules", "--lint=none", str(file))[0] == 0
    both = ("monitoring.podMonitor.rayMetrics=true", "monitoring.podMonitor.pods=true")
    monitors = of_kind(rendered("city", *both), "PodMonitor")
    assert len(monitors) == 3
    for endpoint in (each for monitor in monitors for each in monitor["spec"]["podMetricsEndpoints"]):
        assert endpoint["relabelings"] == [{"targetLabel": "release", "replacement": "sightline"}]


def test_dashboards_go_in_unchanged_but_for_the_address_of_their_runbooks() -> None:
    def dashboards(*settings: str) -> dict[str, str]:
        maps = of_kind(rendered("city", *settings), "ConfigMap")
        shown = [each for each in maps if each["metadata"]["labels"].get("grafana_dashboard") == "1"]
        return {name: text for each in shown for name, text in each["data"].items()}

    files = {path.name: json.loads(path.read_text()) for path in (CHART / "dashboards").glob("*.json")}
    assert {name: json.loads(text) for name, text in dashboards().items()} == files
    assert files
    for text in dashboards("monitoring.rules.runbooks=https://docs.city.example").values():
        [address] = [each["query"] for each in json.loads(text)["templating"]["list"] if each["name"] == "runbooks"]
        assert address == "https://docs.city.example/docs/operations.md"


@pytest.mark.parametrize("card", CARDS)
def test_a_preset_for_a_card_is_one_that_sightline_takes(card: str) -> None:
    done = template(f"minimal+{card}")
    assert done.returncode == 0, done.stderr
    objects = documents(done.stdout)
    for each in objects:
        validate(each)
    config = load_tree(serve_config(objects)["applications"][0]["args"]["configuration"])
    # Its costs are of that card, for that model.
    costs = fleet_settings(config).costs
    assert (costs is None) == (card == "l4")
    assert costs is None or card in costs.device.lower()
    asked = pods(objects)["replica"]["spec"]["containers"][0]["resources"]
    gib = int(asked["limits"]["memory"].removesuffix("Gi"))
    assert asked["limits"]["nvidia.com/gpu"] == 1
    assert (config.tiers.node_bytes + config.tiers.host_bytes) / 2**30 < gib


def test_http_route_leads_to_the_gateways_http_port() -> None:
    assert not of_kind(rendered("city"), "HTTPRoute")
    objects = rendered("everything")
    [route] = of_kind(objects, "HTTPRoute")
    assert route["spec"]["parentRefs"] == [{"name": "edge", "namespace": "gateways", "sectionName": "https"}]
    assert route["spec"]["hostnames"] == ["*.sightline.city"]
    # Envoy Gateway ends events and live video after 15 s otherwise.
    assert [rule["timeouts"] for rule in route["spec"]["rules"]] == [{"request": "0s"}]
    [[backend]] = [rule["backendRefs"] for rule in route["spec"]["rules"]]
    [service] = [each for each in of_kind(objects, "Service") if each["metadata"]["name"] == backend["name"]]
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]}["http"] == backend["port"]


def test_every_process_is_scraped_once_where_pods_are() -> None:
    objects = rendered("city", "monitoring.podMonitor.pods=true", "decoders.perPod=2", "config.alerts.enabled=false")
    cluster = serve_config(objects)["applications"][0]["args"]["configuration"]["cluster"]
    first = cluster["metrics_port"]
    ports = {}
    for component, pod in pods(objects).items():
        mine = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
        ports[component] = [mine[name] for name in sorted(mine) if name.startswith("process-")]
    # Controller and reconciler; two decoders; four replicas and their tier.
    wanted = {"control": 2, "gateway": 0, "decoder": 2, "replica": 5, "head": 0}
    assert {each: ports[each] for each in wanted} == {
        component: list(range(first, first + count)) for component, count in wanted.items()
    }
    gateway, processes = of_kind(objects, "PodMonitor")
    scraped = [each["port"] for each in processes["spec"]["podMetricsEndpoints"]]
    assert scraped == [f"process-{number}" for number in range(5)]
    for endpoint in processes["spec"]["podMetricsEndpoints"]:
        assert endpoint["scheme"] == "https"
        # Not that of the processes, with which it could be one.
        assert endpoint["tlsConfig"]["cert"] == {"secret": {"name": "sightline-metrics-tls", "key": "tls.crt"}}
        assert endpoint["tlsConfig"]["ca"] == {"secret": {"name": "sightline-internal-tls", "key": "ca.crt"}}
        assert endpoint["tlsConfig"]["serverName"] == "sightline"
    assert [(each["operator"], each["values"]) for each in gateway["spec"]["selector"]["matchExpressions"]] == [
        ("In", ["control", "gateway"])
    ]
    [endpoint] = gateway["spec"]["podMetricsEndpoints"]
    [keep] = endpoint["metricRelabelings"]
    kept = re.compile(keep["regex"])
    assert (keep["action"], keep["sourceLabels"]) == ("keep", ["process", "__name__"])
    assert kept.fullmatch("gateway;sightline_build_info")
    assert kept.fullmatch("gateway-1;sightline_build_info")
    assert kept.fullmatch("decoder-0;sightline_process_up")
    assert not kept.fullmatch("decoder-0;sightline_build_info")


def test_upgrade_needs_no_second_pool_of_gpus() -> None:
    for variant in VARIANTS:
        [service] = of_kind(rendered(variant), "RayService")
        assert service["spec"]["upgradeStrategy"] == {"type": "None"}


def test_changed_questions_leave_the_replicas_and_the_pods_alone() -> None:
    before, after = (
        rendered("minimal"),
        rendered("minimal", "config.alerts.cooldown_s=5", "decoders.perPod=2", "gateways.pods=2"),
    )
    [old, new] = [of_kind(each, "RayService")[0]["spec"]["rayClusterConfig"] for each in (before, after)]
    [gateways] = [each for each in new["workerGroupSpecs"] if each["groupName"] == "gateways"]
    gateways |= {"replicas": 0, "minReplicas": 0, "maxReplicas": 0}
    assert old == new
    [old_apps, new_apps] = [serve_config(each)["applications"] for each in (before, after)]
    assert old_apps[0] != new_apps[0]
    assert old_apps[1] == new_apps[1]


def test_more_replicas_restart_none_that_run() -> None:
    """Serve restarts all replicas of an application when this changes."""
    found = [
        ServeApplicationSchema.model_validate(serve_config(objects)["applications"][1])
        for objects in (rendered("city"), rendered("city", "replicas.pods=9"))
    ]
    assert [each.deployments[0].num_replicas for each in found] == [32, 36]
    assert len(set(map(get_app_code_version, found))) == 1


def test_other_ports_of_the_gateway_change_its_service_alone() -> None:
    """KubeRay changes no pod that runs: it would say other ports than its gateway listens on."""
    before, after = rendered("city"), rendered("city", "gateway.grpcPort=443", "gateway.httpPort=8443")
    changed = [(old["kind"], old["metadata"]["name"]) for old, new in zip(before, after, strict=True) if old != new]
    assert ("Service", "sightline-gateway") in changed
    assert "RayService" not in {kind for kind, _ in changed}
    [control] = [pod for name, pod in pods(after).items() if name == "control"]
    ports = {port["name"]: port["containerPort"] for port in control["spec"]["containers"][0]["ports"]}
    gateway = serve_config(after)["applications"][0]["args"]["configuration"]["gateway"]
    assert (ports["grpc"], ports["http"]) == (gateway["port"], gateway["http_port"])
