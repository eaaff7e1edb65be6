"""What the chart does not take: open doors, contradictions, misspelt keys. Each is said in one sentence."""

import json

import pytest
import yaml
from chart_parts import CHART, OPEN, PLAIN_INSIDE, serve_config, template

TOKENS = "gateway.tokens.secretName=t"
OIDC = (
    "config.security.oidc.issuer=https://sso.city",
    "config.security.oidc.client_id=sightline",
    "config.security.oidc.url=https://sightline.city",
    "config.security.oidc.groups[0].group=operators",
    "config.security.oidc.groups[0].roles[0]=view",
)


def refused(*settings: str, preset: str | None = None) -> str:
    done = template(preset, *settings)
    assert done.returncode != 0, settings
    return done.stderr


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("gateway.allowUnauthenticated=true",), "allowUnauthenticated: Invalid type"),
        (("gateway.allowUnauthenticated=yes",), "gateway.allowUnauthenticated must be one of the following"),
        (("gateway.allowPlaintext=yes",), "gateway.allowPlaintext must be one of the following"),
        (("internalTls.allowPlain=yes",), "internalTls.allowPlain must be one of the following"),
        ((OPEN, TOKENS), "contradict each other"),
        ((OPEN, *OIDC), "gateway.allowUnauthenticated nobody: leave one out"),
        (("gateway.tls.clientCertificates=true",), "needs gateway.tls.secret"),
        (("gateway.httpPort=50051",), "are both 50051"),
        (("kvRedis.enabled=true", "config.tiers.redis_url=redis://elsewhere:6379"), "names another: leave one out"),
        ((TOKENS, "monitoring.podMonitor.enabled=true"), "needs monitoring.podMonitor.tokenSecretName"),
        (("gateway.ingress.enabled=true",), "needs gateway.ingress.host"),
        (("gcsRedis.enabled=true", "gcsRedis.address=redis.city:6379"), "needs gcsRedis.secretName"),
        (("gateway.httpRoute.enabled=true",), "needs gateway.httpRoute.parentRefs"),
        (
            ("monitoring.podMonitor.enabled=true", "monitoring.podMonitor.pods=true", "decoders.perPod=17"),
            "has ports for 16 processes of a pod",
        ),
        (("decoders.pods=3", "decoders.maxPods=2"), "decoders.maxPods is 2, below decoders.pods"),
        (("config.cluster.max_decoders=4",), "max_decoders"),
        (("config.model.name=org/model", "replicas.pods=2"), "models.cache.accessMode must be ReadWriteMany"),
        (
            ("config.model.name=org/model", "replicas.pods=2", "models.cache.accessMode=ReadWriteOncePod"),
            "models.cache.accessMode must be ReadWriteMany",
        ),
        (("config.security.audit_log=/var/log/audit.jsonl",), "audit_log is /var/log/audit.jsonl, where nothing"),
        (("config.clips.folder=/clips",), "config.clips.folder is /clips, where nothing can be written"),
        (("networkPolicy.operator=null",), "would let everybody reach Ray's dashboard"),
    ],
)
def test_open_doors_and_contradictions(settings: tuple[str, ...], reason: str) -> None:
    assert reason in refused(*settings)


def test_said_in_words_it_runs_without_tokens() -> None:
    done = template(None, PLAIN_INSIDE, OPEN)
    assert done.returncode == 0, done.stderr
    objects = [each for each in yaml.safe_load_all(done.stdout) if each]
    security = serve_config(objects)["applications"][0]["args"]["configuration"]["security"]
    assert security["allow_unauthenticated"] is True
    assert "tokens_file" not in security


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("imgae.tag=1", "imgae"),
        ("gateway.grpcprot=6000", "grpcprot"),
        ("gateway.service.tpye=ClusterIP", "tpye"),
        ("replicas.resources.limits.memroy=1Gi", "memroy"),
        ("config.window.strde_s=4", "strde_s"),
        ("config.alerts.health.offline.afterr_s=4", "afterr_s"),
        ("config.windows.stride_s=4", "windows"),
        ("secretEnv[0].nam=x", "nam"),
        ("gateway.service.type=Clusterip", "gateway.service.type"),
        ("decoders.pods=0", "decoders.pods"),
        ("decoders.pods=many", "decoders.pods"),
        ("redisImage.tag=latest", "redisImage.tag"),
        ("image.digest=sha256:12", "image.digest"),
        # What the chart decides is not for the configuration to say.
        ("config.gateway.port=6000", "port"),
        ("config.security.tokens_file=x", "tokens_file"),
        ("config.security.allow_unauthenticated=true", "allow_unauthenticated"),
        ("config.cluster.replicas=7", "replicas"),
        ("config.model.device=cuda", "device"),
        ("config.kubernetes.namespace=elsewhere", "namespace"),
    ],
)
def test_misspelt_and_wrong_values(setting: str, named: str) -> None:
    told = refused(setting)
    assert "don't meet the specifications of the schema" in told
    assert named in told


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
