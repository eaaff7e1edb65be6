"""An installation without values: what it makes for itself is what Sightline takes, and opens nothing."""

import base64
import datetime
import re
import shutil

import pytest
from chart_parts import CHART, documents, notes, of_kind, pods, rendered, serve_config, template
from cryptography import x509

from cluster.config.load import load_tree
from cluster.errors import UnauthenticatedError
from cluster.security.roles import Role
from cluster.security.tokens import TokenFile
from cluster.wire.tls import TlsFiles


def secret(name: str, *settings: str) -> dict[str, bytes]:
    [found] = [each for each in of_kind(rendered("default", *settings), "Secret") if each["metadata"]["name"] == name]
    assert found["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    return {key: base64.b64decode(value) for key, value in found["data"].items()}


def test_tokens_open_what_their_names_say(tmp_path) -> None:
    made = secret("sightline-tokens")
    file = tmp_path / "tokens.json"
    file.write_bytes(made["tokens.json"])
    file.chmod(0o600)
    tokens = TokenFile(file)
    assert tokens.verify(made["admin"].decode()).roles == {Role.ADMIN}
    assert tokens.verify(made["view"].decode()).roles == {Role.VIEW}
    with pytest.raises(UnauthenticatedError):
        tokens.verify("")
    # Only the hashes are mounted.
    [service] = of_kind(rendered("default"), "RayService")
    [control] = [g for g in service["spec"]["rayClusterConfig"]["workerGroupSpecs"] if g["groupName"] == "control"]
    [volume] = [each for each in control["template"]["spec"]["volumes"] if each["name"] == "tokens"]
    assert [item["key"] for item in volume["secret"]["items"]] == ["tokens.json"]


def test_a_secret_that_is_there_gets_the_key_that_is_asked_for_now(tmp_path) -> None:
    """As after an upgrade that names another key: pods that mount it would never begin."""
    there = secret("sightline-tokens")
    text = " ".join(f'"{key}" "{base64.b64encode(value).decode()}"' for key, value in there.items() if key != "view")
    chart = shutil.copytree(CHART, tmp_path / "sightline")
    template_file = chart / "templates" / "secrets.yaml"
    looked_up = '(lookup "v1" "Secret" $.Release.Namespace $secret.name).data'
    assert looked_up in template_file.read_text()
    template_file.write_text(template_file.read_text().replace(looked_up, f"(dict {text})"))

    def kept(*settings: str) -> dict[str, bytes]:
        done = template(None, *settings, chart=chart)
        assert done.returncode == 0, done.stderr
        [found] = [each for each in documents(done.stdout) if each["metadata"]["name"] == "sightline-tokens"]
        return {key: base64.b64decode(value) for key, value in found["data"].items()}

    assert kept() == {key: value for key, value in there.items() if key != "view"}
    extended = kept("gateway.tokens.key=people.json")
    assert extended["admin"] == there["admin"]
    (tmp_path / "people.json").write_bytes(extended["people.json"])
    (tmp_path / "people.json").chmod(0o600)
    tokens = TokenFile(tmp_path / "people.json")
    assert tokens.verify(there["admin"].decode()).roles == {Role.ADMIN}
    assert tokens.verify(extended["view"].decode()).roles == {Role.VIEW}


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("sightline-tls", {"localhost", "sightline-gateway", "sightline-gateway.cctv.svc"}),
        ("sightline-internal-tls", {"sightline"}),
    ],
)
def test_certificates_are_for_their_hosts_and_signed_by_their_authority(tmp_path, name: str, hosts: set[str]) -> None:
    made = secret(name)
    for key, content in made.items():
        (tmp_path / key).write_bytes(content)
    TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "ca.crt").context()
    certificate = x509.load_pem_x509_certificate(made["tls.crt"])
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert hosts <= set(names.get_values_for_type(x509.DNSName))
    authority = x509.load_pem_x509_certificate(made["ca.crt"])
    certificate.verify_directly_issued_by(authority)
    for each in (certificate, authority):
        assert each.not_valid_after_utc - each.not_valid_before_utc <= datetime.timedelta(days=366)
    assert ("metrics.crt" in made) == (name == "sightline-internal-tls")
    if "metrics.crt" in made:
        metrics = x509.load_pem_x509_certificate(made["metrics.crt"])
        metrics.verify_directly_issued_by(authority)
        names = metrics.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        # Not for the processes' name: whoever has it is none of them (tests/wire/test_rpc_tls_inside.py).
        assert names.get_values_for_type(x509.DNSName) == ["prometheus"]
    assert "expire one year after their Secret was" in notes(None)


HOURS = re.compile(r"(\d+)h")


def test_cert_manager_renews_what_nobody_names(tmp_path) -> None:
    objects = rendered("city", "monitoring.podMonitor.pods=true")
    asked = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "Certificate")}
    assert asked.keys() == {f"sightline-{name}" for name in ("authority", "tls", "internal-tls", "metrics-tls")}
    assert {each["metadata"]["name"] for each in of_kind(objects, "Secret")} == set()
    assert "expire one year" not in notes("city")
    issuers = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "Issuer")}
    lifetimes = {}
    for name, spec in asked.items():
        assert spec["secretName"] == name
        life, before = (int(HOURS.fullmatch(spec[key])[1]) for key in ("duration", "renewBefore"))
        assert 0 < before < life <= 366 * 24, name
        lifetimes[name] = life, before
        assert spec["issuerRef"]["name"] in issuers
    # The authority outlives what it signs, and goes on with its key: no process is without trust during a renewal.
    assert lifetimes["sightline-authority"][1] >= max(
        life for name, (life, _) in lifetimes.items() if name != "sightline-authority"
    )
    assert asked["sightline-authority"]["privateKey"]["rotationPolicy"] == "Never"
    assert issuers["sightline-authority"] == {"ca": {"secretName": "sightline-authority"}}
    assert asked["sightline-internal-tls"]["dnsNames"] == ["sightline"]
    assert {"server auth", "client auth"} <= set(asked["sightline-internal-tls"]["usages"])
    assert "sightline" not in asked["sightline-metrics-tls"]["dnsNames"]
    mounted = {volume["secret"]["secretName"] for pod in pods(objects).values() for volume in secret_volumes(pod)}
    assert {"sightline-tls", "sightline-internal-tls"} <= mounted
    assert not mounted & {"sightline-authority", "sightline-metrics-tls"}


def secret_volumes(pod):
    return [volume for volume in pod["spec"]["volumes"] if "secret" in volume]


def test_cert_manager_leaves_alone_what_is_named() -> None:
    issuer = ("certManager.issuer.name=public", "certManager.hosts[0]=cctv.city")
    named = {each["metadata"]["name"]: each["spec"] for each in of_kind(rendered("city", *issuer), "Certificate")}
    assert named["sightline-tls"]["issuerRef"] == {
        "name": "public",
        "kind": "ClusterIssuer",
        "group": "cert-manager.io",
    }
    assert named["sightline-tls"]["dnsNames"] == ["cctv.city"]
    # Whoever else that issuer signs for must not pass for a process.
    assert named["sightline-internal-tls"]["issuerRef"]["name"] == "sightline-authority"
    [monitor] = of_kind(rendered("city", *issuer), "PodMonitor")
    assert monitor["spec"]["podMetricsEndpoints"][0]["tlsConfig"]["serverName"] == "cctv.city"
    own = rendered("city", "gateway.tls.secretName=mine", "internalTls.secretName=inner")
    assert not of_kind(own, "Certificate")
    assert not of_kind(own, "Issuer")


def test_redis_and_its_key_are_made_when_one_is_wanted() -> None:
    with_redis = ("kvRedis.enabled=true", "gcsRedis.enabled=true")
    assert len(secret("sightline-memory-key", *with_redis)["key"]) >= 16
    assert len(secret("sightline-kv-redis", *with_redis)["password"]) >= 32
    assert len(secret("sightline-gcs-redis", *with_redis)["password"]) >= 32


def test_without_values_the_bundled_model_watches_its_clip() -> None:
    config = load_tree(serve_config(rendered("default"))["applications"][0]["args"]["configuration"])
    assert (config.model.name, config.model.device) == ("demo", "cpu")
    assert [str(camera.source) for camera in config.cameras] == ["demo://gate"]
    assert config.questions
    own = rendered("default", "config.questions[0].id=person", "config.questions[0].text=Is anyone there?")
    assert load_tree(serve_config(own)["applications"][0]["args"]["configuration"]).cameras == []


def test_a_checkpoint_by_hub_id_is_kept_on_a_claim() -> None:
    claims = {each["metadata"]["name"] for each in of_kind(rendered("minimal"), "PersistentVolumeClaim")}
    assert "sightline-model-cache-readwriteonce" in claims
    for variant in ("default", "city"):
        claims = {each["metadata"]["name"] for each in of_kind(rendered(variant), "PersistentVolumeClaim")}
        assert claims == {"sightline-data"}


def test_with_another_access_mode_the_checkpoint_has_another_claim() -> None:
    """Kubernetes refuses to change that of a claim, and Helm's upgrade would fail: as with a second pod of replicas."""
    objects = rendered("minimal", "models.cache.accessMode=ReadWriteMany", "replicas.pods=2")
    name = "sightline-model-cache-readwritemany"
    [claim] = [each for each in of_kind(objects, "PersistentVolumeClaim") if each["metadata"]["name"] == name]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    [volume] = [each for each in pods(objects)["replica"]["spec"]["volumes"] if each["name"] == "model-cache"]
    assert volume["persistentVolumeClaim"] == {"claimName": name}


def test_a_checkpoint_by_hub_id_has_its_room_without_a_claim_too() -> None:
    """Below /tmp a larger one than its limit would get the pod evicted, again and again."""
    settings = ("models.cache.enabled=false", "models.cache.size=200Gi", "replicas.pods=2")
    objects = rendered("minimal", *settings)
    claims = {each["metadata"]["name"] for each in of_kind(objects, "PersistentVolumeClaim")}
    assert claims == {"sightline-data"}
    pod = pods(objects)["replica"]["spec"]
    [home] = [each["value"] for each in pod["containers"][0]["env"] if each["name"] == "HF_HOME"]
    [mounted] = [each for each in pod["containers"][0]["volumeMounts"] if home.startswith(each["mountPath"] + "/")]
    [volume] = [each for each in pod["volumes"] if each["name"] == mounted["name"]]
    assert volume == {"name": "model-cache", "emptyDir": {"sizeLimit": "200Gi"}}
