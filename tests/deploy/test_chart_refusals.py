"""What the chart does not take: open doors, contradictions, misspelt keys. Each is said in one sentence."""

import json
import shutil
from pathlib import Path

import pytest
from chart_parts import CHART, OPEN, PLAIN, PLAIN_INSIDE, documents, helm, serve_config, template

TOKENS = "gateway.tokens.secretName=t"
OIDC = (
    "config.security.oidc.issuer=https://sso.city",
    "config.security.oidc.client_id=sightline",
    "config.security.oidc.url=https://sightline.city",
    "config.security.oidc.groups[0].group=operators",
    "config.security.oidc.groups[0].roles[0]=view",
)


def refused(*settings: str, chart: Path = CHART) -> str:
    done = template(None, *settings, chart=chart)
    assert done.returncode != 0, settings
    return done.stderr


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart with the one object that refuses, before it has any of its lines: the others take most of Helm's
    time."""
    folder = tmp_path_factory.mktemp("chart") / CHART.name
    shutil.copytree(CHART, folder)
    for path in (folder / "templates").iterdir():
        if path.suffix != ".tpl" and path.name != "rayservice.yaml":
            path.unlink()
    return folder


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ((OPEN, TOKENS), "contradict each other"),
        ((PLAIN, "gateway.tls.secretName=t"), "gateway.allowPlaintext contradict each other"),
        ((PLAIN_INSIDE, "internalTls.secretName=t"), "internalTls.allowPlain contradict each other"),
        ((OPEN, *OIDC), "gateway.allowUnauthenticated contradict each other"),
        (("gateway.tls.clientCertificates=true",), "needs gateway.tls.secret"),
        (("gateway.httpPort=50051",), "are both 50051"),
        (("kvRedis.enabled=true", "config.tiers.redis_url=redis://elsewhere:6379"), "redis_url contradict each other"),
        ((TOKENS, "monitoring.podMonitor.enabled=true"), "needs monitoring.podMonitor.tokenSecretName"),
        (("gateway.ingress.enabled=true",), "needs gateway.ingress.host"),
        (("gcsRedis.enabled=true", "gcsRedis.address=redis.city:6379"), "needs gcsRedis.secretName"),
        (("gateway.httpRoute.enabled=true",), "needs gateway.httpRoute.parentRefs"),
        (
            ("monitoring.podMonitor.enabled=true", "monitoring.podMonitor.pods=true", "decoders.perPod=17"),
            "supports at most 16 processes per pod",
        ),
        (
            ("replicas.gpuResource=nvidia.com/mig-3g.71gb", "replicas.gpusPerPod=2"),
            "replicas.gpusPerPod must be 1 with MIG slices",
        ),
        (
            ("replicas.gpusPerPod=3", "config.engine=vllm", "config.vllm.arguments.tensor_parallel_size=2"),
            "config.vllm.arguments give each replica 2 GPUs: set it to a multiple",
        ),
        (("decoders.pods=3", "decoders.maxPods=2"), "decoders.maxPods is 2, below decoders.pods"),
        (("config.model.name=org/model", "replicas.pods=2"), "models.cache.accessMode must be ReadWriteMany"),
        (
            ("config.model.name=org/model", "replicas.pods=2", "models.cache.accessMode=ReadWriteOncePod"),
            "models.cache.accessMode must be ReadWriteMany",
        ),
        (("config.security.audit_log=/var/log/audit.jsonl",), "audit_log is /var/log/audit.jsonl, which is not"),
        (("config.clips.folder=/clips",), "config.clips.folder is /clips, which is not writable"),
        (("internalTls.name=cctv",), "needs internalTls.secretName"),
        (("networkPolicy.operator=null",), "would let anyone reach Ray's dashboard"),
    ],
)
def test_open_doors_and_contradictions(refusing: Path, settings: tuple[str, ...], reason: str) -> None:
    assert reason in refused(*settings, chart=refusing)


@pytest.mark.parametrize("release", ["4711-cctv", "cctv.prod"])
def test_releases_whose_name_no_service_may_have(refusing: Path, release: str) -> None:
    """The API server would refuse the Service when half of the chart is installed."""
    told = helm("template", release, str(refusing), "--kube-version", "1.30.0")
    assert told.returncode != 0
    assert f"{release}-sightline is not a valid Service name: set fullnameOverride" in told.stderr
    named = ("--set", "fullnameOverride=cctv-prod", "--kube-version", "1.30.0")
    assert helm("template", release, str(refusing), *named).returncode == 0


def test_the_whole_chart_refuses_as_well() -> None:
    assert "would let anyone reach Ray's dashboard" in refused("networkPolicy.operator=null")


def test_said_in_words_it_runs_without_tokens() -> None:
    done = template(None, PLAIN_INSIDE, OPEN)
    assert done.returncode == 0, done.stderr
    objects = documents(done.stdout)
    security = serve_config(objects)["applications"][0]["args"]["configuration"]["security"]
    assert security["allow_unauthenticated"] is True
    assert "tokens_file" not in security


WRONG = {
    "imgae.tag=1": "(root): Additional property imgae",
    "gateway.grpcprot=6000": "gateway: Additional property grpcprot",
    "gateway.service.tpye=ClusterIP": "gateway.service: Additional property tpye",
    "replicas.resources.limits.memroy=1Gi": "replicas.resources.limits: Additional property memroy",
    "config.window.strde_s=4": "config.window: Additional property strde_s",
    "config.alerts.health.offline.afterr_s=4": "config.alerts.health.offline: Additional property afterr_s",
    "config.windows.stride_s=4": "config: Additional property windows",
    "secretEnv[0].nam=x": "secretEnv.0: Additional property nam",
    "gateway.service.type=Clusterip": "gateway.service.type must be one of the following",
    "decoders.pods=0": "decoders.pods: Must be greater than or equal to 1",
    "replicas.pods=many": "replicas.pods: Invalid type",
    "redisImage.tag=latest": "redisImage.tag: Must not validate the schema",
    "image.digest=sha256:12": "image.digest: Does not match pattern",
    # Open doors are said in words.
    "gateway.allowUnauthenticated=yes": "gateway.allowUnauthenticated must be one of the following",
    "gateway.allowPlaintext=true": "gateway.allowPlaintext: Invalid type",
    "internalTls.allowPlain=yes": "internalTls.allowPlain must be one of the following",
    # What the chart decides is not for the configuration to say.
    "config.gateway.port=6000": "config.gateway: Additional property port",
    "config.security.tokens_file=x": "config.security: Additional property tokens_file",
    "config.security.allow_unauthenticated=true": "config.security: Additional property allow_unauthenticated",
    "config.cluster.replicas=7": "config.cluster: Additional property replicas",
    "config.cluster.max_decoders=4": "config.cluster: Additional property max_decoders",
    "config.model.device=cuda": "config.model: Additional property device",
    "config.kubernetes.namespace=elsewhere": "config.kubernetes: Additional property namespace",
}


def test_misspelt_and_wrong_values() -> None:
    """All of them at once: Helm lists every violation of the schema, each in a line that names its key."""
    told = refused(*WRONG)
    assert "don't meet the specifications of the schema" in told
    for reason in WRONG.values():
        assert f"- {reason}" in told or f": {reason}" in told, reason
    told = refused("gateway.allowUnauthenticated=true", "gateway.allowPlaintext=yes", "decoders.pods=many")
    for reason in (
        "gateway.allowUnauthenticated: Invalid type",
        "gateway.allowPlaintext must be one of the following",
        "decoders.pods: Invalid type",
    ):
        assert reason in told, reason


def test_schema_is_closed_everywhere() -> None:
    opened: list[str] = []

    def walk(node: object, path: str) -> None:
        if isinstance(node, dict):
            if (
                "properties" in node
                and isinstance(node["properties"], dict)
                and node.get("additionalProperties") is not False
            ):
                opened.append(path)
            for key, below in node.items():
                walk(below, f"{path}.{key}")
        elif isinstance(node, list):
            for each in node:
                walk(each, path)

    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["additionalProperties"] is False
    walk(schema, "")
    assert opened == []
