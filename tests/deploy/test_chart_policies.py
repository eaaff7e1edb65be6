"""What the chart promises about security, on what it renders."""

import importlib.util
import json
import subprocess
import sys
import uuid
from typing import Any

import pytest
from chart_parts import (
    CARDS,
    CHART,
    PLAIN_INSIDE,
    PRESETS,
    VARIANTS,
    documents,
    helm,
    notes,
    of_kind,
    pods,
    rendered,
    serve_config,
    template,
    validate,
)

from actors.startup import show_replica
from cluster.kubernetes.hooks import HOOKS

GATEWAYS = ("control", "gateway")
"""Pods with a gateway."""
ANY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)


def containers(variant: str) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    return [(name, pod["spec"], c) for name, pod in pods(rendered(variant)).items() for c in pod["spec"]["containers"]]


@ANY_VARIANT
def test_nothing_runs_as_root_or_writes_to_its_image(variant: str) -> None:
    for name, pod, container in containers(variant):
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
        assert not any("hostPath" in volume for volume in pod["volumes"])


def test_openshift_chooses_who_runs() -> None:
    """Its restricted-v2 refuses pods that ask for a user or group outside the range of their namespace."""
    ours = ("template", "sightline", str(CHART), "--kube-version", "1.30.0", "-f", str(CHART / "values-city.yaml"))
    done = helm(*ours, "--api-versions", "security.openshift.io/v1")
    assert done.returncode == 0, done.stderr
    objects = documents(done.stdout)
    jobs = {each["metadata"]["name"]: each["spec"]["template"] for each in of_kind(objects, "Job")}
    found = pods(objects) | jobs
    assert len(found) == 9
    for name, pod in found.items():
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"], name
        assert not {"runAsUser", "runAsGroup", "fsGroup", "supplementalGroups"} & context.keys(), name


@ANY_VARIANT
def test_everything_has_limits_and_probes(variant: str) -> None:
    for name, pod, container in containers(variant):
        for amounts in (container["resources"]["requests"], container["resources"]["limits"]):
            assert {"cpu", "memory"} <= amounts.keys(), name
        assert container["readinessProbe"]
        assert container["livenessProbe"]
        assert ":latest" not in container["image"]
        for volume in pod["volumes"]:
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": 0}), volume


@ANY_VARIANT
def test_secrets_are_only_referred_to(variant: str) -> None:
    objects = rendered(variant)
    assert len(of_kind(objects, "Secret")) == {"default": 3, "minimal": 4}.get(variant, 0)
    for _, _, container in containers(variant):
        for each in container["env"]:
            named = any(word in each["name"] for word in ("PASSWORD", "TOKEN", "KEY"))
            if named and not each.get("value", "").startswith("/etc/sightline/internal-tls/"):
                assert "secretKeyRef" in each["valueFrom"]
        assert "requirepass %s" in json.dumps(container) or "PASSWORD" not in json.dumps(container.get("args", ""))
    url = serve_config(objects)["applications"][1]["args"]["configuration"].get("tiers", {}).get("redis_url")
    assert url is None or "${KV_REDIS_PASSWORD}" in url


@ANY_VARIANT
def test_only_the_gateway_is_reachable_and_it_asks_for_tokens(variant: str) -> None:
    objects = rendered(variant)
    outside = [each for each in of_kind(objects, "Service") if each["spec"].get("type", "ClusterIP") != "ClusterIP"]
    assert {each["metadata"]["name"] for each in outside} <= {"sightline-gateway"}
    security = serve_config(objects)["applications"][0]["args"]["configuration"]["security"]
    assert security["tokens_file"]
    assert "allow_unauthenticated" not in security
    if outside:
        assert security["tls"]["certificate"]
    [service] = of_kind(objects, "RayService")
    assert service["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}


@ANY_VARIANT
def test_tokens_and_the_certificate_are_mounted_where_gateways_are_alone(variant: str) -> None:
    for component, pod in pods(rendered(variant)).items():
        secrets = {volume["name"] for volume in pod["spec"]["volumes"] if "secret" in volume}
        assert ("tokens" in secrets) == (component in GATEWAYS)
        assert ("tls" in secrets) <= (component in GATEWAYS)
        claims = {volume["name"] for volume in pod["spec"]["volumes"] if "persistentVolumeClaim" in volume}
        assert "data" not in claims or component == "control", "several pods cannot have one claim"


@ANY_VARIANT
def test_the_key_of_memories_is_mounted_where_they_are_written(variant: str) -> None:
    objects = rendered(variant)
    with_redis = any(each["metadata"]["name"] == "sightline-kv-redis" for each in of_kind(objects, "StatefulSet"))
    for component, pod in pods(objects).items():
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
        assert ("memory-key" in mounts) == (with_redis and component in ("control", "replica"))
    for application in serve_config(objects)["applications"]:
        key = application["args"]["configuration"]["security"].get("memory_key_file")
        assert key == ("/etc/sightline/memory-key/key" if with_redis else None)


@ANY_VARIANT
def test_probe_of_the_gateway_speaks_as_the_gateway_does(variant: str) -> None:
    objects = rendered(variant)
    security = serve_config(objects)["applications"][0]["args"]["configuration"]["security"]
    for component in GATEWAYS:
        probe = pods(objects)[component]["spec"]["containers"][0]["readinessProbe"]
        if "client_ca" in security.get("tls", {}):
            assert probe["tcpSocket"] == {"port": "http"}
        else:
            assert (probe["httpGet"]["path"], probe["httpGet"]["port"]) == ("/healthz", "http")
            assert probe["httpGet"]["scheme"] == ("HTTPS" if "tls" in security else "HTTP")


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
def test_a_pod_of_replicas_is_ready_once_all_of_them_have_loaded_their_models() -> None:
    """A drain of nodes, held up by a disruption budget, goes on when pods are ready."""
    for variant, count in (("default", 1), ("minimal", 1), ("city", 4)):
        probe = pods(rendered(variant))["replica"]["spec"]["containers"][0]["readinessProbe"]
        *shell, text = probe["exec"]["command"]
        # Those of this test alone.
        mark = uuid.uuid4().hex
        command = [*shell, text.replace("@sightline-replica-", f"@sightline-replica-{mark}")]
        assert command[-1] != text
        held = []
        for number in range(count):
            assert subprocess.run(command).returncode == 1, f"{variant}: ready with {number} of {count}"
            held.append(show_replica(f"{mark}{number}"))
        assert subprocess.run(command).returncode == 0
        held.pop().close()
        assert subprocess.run(command).returncode == 1, "one of them has ended"
        for each in held:
            each.close()


def test_the_service_leads_to_every_gateway_and_nowhere_else() -> None:
    for settings, wanted in ((("gateways.pods=2",), set(GATEWAYS)), ((), {"control"})):
        objects = rendered("city", *settings)
        [service] = [each for each in of_kind(objects, "Service") if each["metadata"]["name"] == "sightline-gateway"]
        chosen = service["spec"]["selector"].items()
        led = {name for name, pod in pods(objects).items() if chosen <= pod["metadata"]["labels"].items()}
        # A control pod from before an upgrade has no label of gateways: without others it must be found all the same.
        assert led - {"gateway"} == wanted - {"gateway"}
        assert ("gateway" in led) == ("gateway" in wanted)
        assert ("app.kubernetes.io/component" in dict(chosen)) == (wanted == {"control"})


def test_the_gateway_sees_who_calls_from_outside() -> None:
    """Its limits are by address, and the audit log names it: by default Kubernetes puts a node's in its place."""
    for settings, wanted in ((), "Local"), (("gateway.service.externalTrafficPolicy=Cluster",), "Cluster"):
        services = of_kind(rendered("city", *settings), "Service")
        [spec] = [each["spec"] for each in services if each["metadata"]["name"] == "sightline-gateway"]
        assert (spec["type"], spec["externalTrafficPolicy"]) == ("LoadBalancer", wanted)
    assert "externalTrafficPolicy" not in str(of_kind(rendered("default"), "Service")), "Kubernetes refuses it there"


def test_an_audit_log_with_a_retention_has_the_same_room_at_every_gateway() -> None:
    """It has no limit of bytes, and a pod that exceeds its volume's is evicted."""
    settings = ("gateways.pods=2", "control.persistence.enabled=false", "control.persistence.size=80Gi")
    for component in GATEWAYS:
        volumes = pods(rendered("city", *settings))[component]["spec"]["volumes"]
        [data] = [each for each in volumes if each["name"] == "data"]
        assert data["emptyDir"] == {"sizeLimit": "80Gi"}


def selected(policy: dict[str, Any], labels: dict[str, str]) -> bool:
    selector = policy["spec"]["podSelector"]
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", [])
    )


@ANY_VARIANT
def test_every_port_of_every_pod_is_behind_a_network_policy(variant: str) -> None:
    objects = rendered(variant)
    policies = of_kind(objects, "NetworkPolicy")
    reachable: dict[str, set[str]] = {}
    for component, pod in pods(objects).items():
        mine = [policy for policy in policies if selected(policy, pod["metadata"]["labels"])]
        assert any("Ingress" in policy["spec"]["policyTypes"] for policy in mine), component
        names = {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}
        for policy in mine:
            for rule in policy["spec"].get("ingress", []):
                ports = {port["port"] for port in rule.get("ports", [])}
                assert ports <= names, "a policy names a port that the pod does not have"
                if "from" not in rule:
                    reachable.setdefault(component, set()).update(ports or names)
                assert ports or rule["from"] == [{"podSelector": policy["spec"]["podSelector"]}]
    # From anywhere: the gateway, where no clients are named; nothing else.
    assert reachable == ({} if variant == "everything" else {pod: {"grpc", "http"} for pod in GATEWAYS})


def test_with_closed_egress_every_pod_that_connects_finds_names_and_the_api_server() -> None:
    """In a namespace that denies the rest as well: a hook that cannot, fails the upgrade. DNS' pods listen on port 5353
    on OpenShift, and it is their port that counts."""
    objects = rendered("everything", "networkPolicy.egress[0].to[0].ipBlock.cidr=10.9.0.1/32")
    jobs = {each["metadata"]["name"]: each["spec"]["template"] for each in of_kind(objects, "Job")}
    closed = [each for each in of_kind(objects, "NetworkPolicy") if "Egress" in each["spec"]["policyTypes"]]
    for name, pod in (pods(objects) | jobs).items():
        mine = [policy for policy in closed if selected(policy, pod["metadata"]["labels"])]
        assert mine, name
        rules = [rule for policy in mine for rule in policy["spec"].get("egress", [])]
        anywhere = [rule["ports"] for rule in rules if rule["to"] == [{"namespaceSelector": {}}]]
        found = {(each["port"], each["protocol"]) for ports in anywhere for each in ports}
        connects = "redis" not in name
        assert found == ({(53, "UDP"), (53, "TCP"), (5353, "UDP"), (5353, "TCP")} if connects else set()), name
        assert ({"to": [{"ipBlock": {"cidr": "10.9.0.1/32"}}]} in rules) == connects, name


def test_the_two_redis_are_two() -> None:
    objects = rendered("city")
    settings = {each["metadata"]["name"]: each["data"].get("redis.conf", "") for each in of_kind(objects, "ConfigMap")}
    assert "maxmemory-policy allkeys-lru" in settings["sightline-kv-redis"]
    assert "maxmemory-policy noeviction" in settings["sightline-gcs-redis"]
    assert "appendonly yes" in settings["sightline-gcs-redis"]
    [service] = of_kind(objects, "RayService")
    ray = service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert ray["redisAddress"] == "rediss://sightline-gcs-redis:6379"
    for text in settings.values():
        assert ("port 0\ntls-port 6379" in text) == ("maxmemory-policy" in text), "neither speaks plain"
    assert "externalStorageNamespace" not in ray
    memories = serve_config(objects)["applications"][1]["args"]["configuration"]["tiers"]["redis_url"]
    assert memories.startswith("rediss://")
    assert "@sightline-kv-redis:6379/0?ssl_ca_certs=/etc/sightline/internal-tls/ca.crt&" in memories
    plain = rendered("city", PLAIN_INSIDE, "internalTls.secretName=")
    [service] = of_kind(plain, "RayService")
    address = service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"]
    assert address == "sightline-gcs-redis:6379"
    assert "tls-port" not in str(of_kind(plain, "ConfigMap"))
    assert "RAY_REDIS_" not in str(pods(plain)["head"])
    kept = {
        each["metadata"]["name"]: each["spec"].get("volumeClaimTemplates") for each in of_kind(objects, "StatefulSet")
    }
    assert kept["sightline-gcs-redis"]
    assert not kept["sightline-kv-redis"]


def test_least_rights() -> None:
    objects = rendered("everything")
    assert of_kind(objects, "ClusterRole") == of_kind(objects, "ClusterRoleBinding") == []
    role, uninstall, update = of_kind(objects, "Role")
    # Whoever may patch RayClusters may run any pod: a hook, while it runs.
    assert [(rule["resources"], rule["verbs"]) for each in (update, uninstall) for rule in each["rules"]] == [
        (["rayservices"], ["get"]),
        (["rayclusters"], ["list", "get", "patch"]),
        (["rayservices"], ["delete"]),
        (["rayclusters"], ["list"]),
    ]
    hooked = [each for each in objects if "helm.sh/hook" in each["metadata"].get("annotations", {})]
    assert {each["kind"] for each in hooked} == {"ServiceAccount", "Role", "RoleBinding", "Job"}
    assert {each["metadata"]["name"] for each in hooked} == {"sightline-update", "sightline-uninstall"}
    allowed = {
        (resource, verb): rule.get("resourceNames")
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert allowed == {
        **{("cameras", verb): None for verb in ("get", "list", "watch")},
        **{("cameras/status", verb): None for verb in ("update",)},
        ("secrets", "get"): ["gate"],
    }
    binding, _, of_update = of_kind(objects, "RoleBinding")
    assert [each["name"] for each in binding["subjects"]] == ["sightline-control"]
    assert [each["name"] for each in of_update["subjects"]] == ["sightline-update"]
    for component, pod in pods(objects).items():
        assert pod["spec"]["automountServiceAccountToken"] == (component == "control")
        # With the autoscaler the head's account has rights, by KubeRay.
        account = component if component in ("control", "head") else "worker"
        assert pod["spec"]["serviceAccountName"] == f"sightline-{account}"
    assert pods(rendered("default"))["head"]["spec"]["serviceAccountName"] == "sightline-worker"
    assert of_kind(rendered("default", "cameras.enabled=false"), "Role") == [update]


def test_rays_redis_goes_after_the_cluster_whose_finalizer_needs_it() -> None:
    for variant in VARIANTS:
        objects = rendered(variant)
        before = [each for each in of_kind(objects, "Job") if each["metadata"]["name"] == "sightline-uninstall"]
        redis = any(each["metadata"]["name"] == "sightline-gcs-redis" for each in of_kind(objects, "StatefulSet"))
        assert [each["metadata"]["annotations"]["helm.sh/hook"] for each in before] == ["pre-delete"] * redis
        for job in of_kind(objects, "Job"):
            [container] = job["spec"]["template"]["spec"]["containers"]
            assert importlib.util.find_spec(container["command"][-1])
            hook, service = container["args"]
            assert (hook in HOOKS, service) == (True, "sightline")
            # A node pulls a new image of some GB within it; Helm's --timeout is what ends the wait before.
            assert job["spec"]["activeDeadlineSeconds"] >= 1800


def test_hooks_run_where_the_control_pod_may() -> None:
    settings = ("control.nodeSelector.zone=a", "control.tolerations[0].operator=Exists")
    objects = rendered("default", "gcsRedis.enabled=true", *settings)
    jobs = [each["spec"]["template"]["spec"] for each in of_kind(objects, "Job")]
    assert len(jobs) == 2
    for pod in (*jobs, pods(objects)["control"]["spec"]):
        assert (pod["nodeSelector"], pod["tolerations"]) == ({"zone": "a"}, [{"operator": "Exists"}])


@pytest.mark.parametrize(("key", "name"), [("kvRedis", "kv-redis"), ("gcsRedis", "gcs-redis"), ("head", "head")])
def test_pods_run_on_the_nodes_that_their_values_name(key: str, name: str) -> None:
    values = ("nodeSelector.zone=a", "tolerations[0].operator=Exists", "scheduling.priorityClassName=high")
    objects = rendered("city", *(f"{key}.{value}" for value in values))
    for component, pod in pods(objects).items():
        found = [pod["spec"].get(each) for each in ("nodeSelector", "tolerations", "priorityClassName")]
        assert (found == [{"zone": "a"}, [{"operator": "Exists"}], "high"]) == (component == name)
    for each in of_kind(objects, "StatefulSet"):
        validate(each)


def test_a_lost_head_restarts_no_model_that_is_large() -> None:
    """Nothing is answered for the minutes that it takes to load; the trial without a GPU has no Redis."""
    for preset in (*PRESETS, *(f"minimal+{card}" for card in CARDS)):
        done = template(preset)
        assert done.returncode == 0, done.stderr
        [service] = of_kind(documents(done.stdout), "RayService")
        assert ("gcsFaultToleranceOptions" in service["spec"]["rayClusterConfig"]) == (preset is not None), preset
    assert "When the head pod is lost, every pod restarts" in notes(None)
    kept = notes("minimal")
    assert "After ten minutes without a head every pod restarts" in kept
    assert "set gcsRedis.enabled" not in kept


def test_a_redis_of_ones_own_keeps_rays_tables() -> None:
    objects = rendered("city", "gcsRedis.address=rediss://redis.city:6380")
    assert not [each["metadata"]["name"] for each in objects if "gcs-redis" in each["metadata"]["name"]]
    assert not [each for each in of_kind(objects, "Job") if each["metadata"]["name"] == "sightline-uninstall"]
    [service] = of_kind(objects, "RayService")
    ray = service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert ray["redisAddress"] == "rediss://redis.city:6380"
    assert ray["redisPassword"]["valueFrom"]["secretKeyRef"]["name"] == "sightline-gcs-redis"


def budget_pods(objects: list[dict[str, Any]]) -> dict[str, int]:
    """Name of a budget -> pods of its group."""
    [service] = of_kind(objects, "RayService")
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return {f"sightline-{group['groupName'].removesuffix('s')}": group["replicas"] for group in groups}


def test_disruption_budgets_say_what_kubernetes_can_count() -> None:
    """It cannot ask a RayCluster for its number of pods, so only whole minAvailable works."""
    for variant in VARIANTS:
        for budget in of_kind(rendered(variant), "PodDisruptionBudget"):
            assert isinstance(budget["spec"]["minAvailable"], int)
            # One of a single pod would block every drain.
            assert budget["spec"]["minAvailable"] < budget_pods(rendered(variant))[budget["metadata"]["name"]]
            assert "maxUnavailable" not in budget["spec"]
            # Pods that are not ready count as missing: two of a broken card could be evicted no more otherwise.
            assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_gpus_are_asked_for_where_replicas_run_and_nowhere_else() -> None:
    for variant, gpus in (("default", None), ("minimal", 1), ("city", 4)):
        for component, pod in pods(rendered(variant)).items():
            [container] = pod["spec"]["containers"]
            expected = gpus if component == "replica" else None
            assert container["resources"]["limits"].get("nvidia.com/gpu") == expected
    tolerated = pods(rendered("city"))["replica"]["spec"]["tolerations"]
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in tolerated
