"""Client of the Kubernetes API server: list, watch, status and Secrets, with readable errors.

All calls block and have a deadline. The official client is imported lazily: it is large, and most clusters never need
it.
"""

import base64
import binascii
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from cluster.config.cluster import KubernetesConfig
from cluster.errors import ConfigError, SightlineError, UnavailableError, UnknownCameraError
from cluster.kubernetes.resource import GROUP, KIND, PLURAL, VERSION, CameraResource

T = TypeVar("T")

PAGE = 500
"""Objects per page of a list."""

MAX_LINE = 8 * 2**20
"""Maximum bytes of an event; a server stores objects of at most 1.5 MiB."""

RAY_CLUSTERS = "rayclusters.ray.io"
WATCH_S = 300
"""Seconds after which the server ends a watch, which is then reopened."""

HEAD_GROUP = "head"
_GROUP_KEYS = ("replicas", "minReplicas", "maxReplicas", "rayStartParams", "resources", "template")
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ExpiredError(SightlineError):
    """The server no longer has the changes since the requested version: everything must be listed again."""


class ChangedError(SightlineError):
    """The object has changed since it was read."""


class KubernetesApi:
    """One namespace's ``Camera`` resources. Raises ``ConfigError``: no such kubeconfig or context, or, without a
    kubeconfig, not running in a pod."""

    def __init__(self, config: KubernetesConfig) -> None:
        from kubernetes import client

        self._timeouts = (config.timeout_s, config.timeout_s)
        self._watch_timeouts = (config.timeout_s, config.idle_s)
        settings = client.Configuration()
        namespace = _configure(config, settings)
        # Callers decide about retries.
        settings.retries = 0
        self.namespace = config.namespace or namespace
        self._client = client.ApiClient(settings)
        self._objects: Any = client.CustomObjectsApi(self._client)
        self._core: Any = client.CoreV1Api(self._client)
        self._where: dict[str, Any] = {
            "group": GROUP,
            "version": VERSION,
            "namespace": self.namespace,
            "plural": PLURAL,
        }
        self._lock = threading.Lock()
        self._watching: Any = None
        self._closed = False

    def close(self) -> None:
        """End the current watch, from any thread; no further watch can be opened."""
        with self._lock:
            self._closed, watching = True, self._watching
        if watching is not None:
            # The server may close the connection at the same moment.
            with contextlib.suppress(OSError, RuntimeError):
                watching.shutdown()

    def list(self) -> tuple[list[CameraResource], str]:
        """All resources, and the version to watch from. Raises ``UnavailableError``: the server does not answer, denies
        access, or does not know the resource."""
        found: list[CameraResource] = []
        page: dict[str, Any] = {"limit": PAGE}
        while True:
            answer = self._call(self._objects.list_namespaced_custom_object, **self._where, **page)
            try:
                found += [CameraResource.of(each) for each in answer["items"]]
                metadata = answer["metadata"]
                version, rest = str(metadata["resourceVersion"]), metadata.get("continue")
            except (KeyError, TypeError, ValueError, AttributeError):
                raise UnavailableError("the Kubernetes API server gave no list of Camera resources") from None
            if not rest:
                return found, version
            page["_continue"] = rest

    def watch(self, version: str) -> Iterator[tuple[str, CameraResource | str]]:
        """Yield changes since ``version`` as they happen: ``(ADDED | MODIFIED | DELETED, resource)`` and ``(BOOKMARK,
        version)``. Ends when the server ends the watch. Raises ``ExpiredError``: ``version`` is too old, or an event is
        invalid; ``UnavailableError``: as :meth:`list`, an error event, or a broken connection."""
        response = self._call(
            self._objects.list_namespaced_custom_object,
            **self._where,
            watch=True,
            allow_watch_bookmarks=True,
            resource_version=version,
            timeout_seconds=WATCH_S,
            _request_timeout=self._watch_timeouts,
            _preload_content=False,
        )
        with self._lock:
            if self._closed:
                response.close()
                return
            self._watching = response
        try:
            for line in self._lines(response):
                yield _event(line)
        finally:
            with self._lock:
                self._watching = None
            response.close()

    def get(self, name: str) -> CameraResource:
        """Read one resource. Raises ``UnknownCameraError``: there is none; ``UnavailableError``: as :meth:`list`."""
        read = self._objects.get_namespaced_custom_object
        return _resource(self._call(read, self._refused(name), **self._where, name=name))

    def write_status(self, resource: CameraResource, status: Mapping[str, Any]) -> CameraResource:
        """Write a resource's status; returns the new resource.

        Raises:
            ChangedError: the resource has changed since it was read.
            UnknownCameraError: it no longer exists.
            UnavailableError: as :meth:`list`.
        """
        body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, **resource.body, "status": dict(status)}
        write = self._objects.replace_namespaced_custom_object_status
        refused = self._refused(resource.name)
        return _resource(self._call(write, refused, **self._where, name=resource.name, body=body))

    def secret(self, name: str) -> dict[str, str]:
        """Values of a Secret in the namespace, by key, without those that are not text. Raises ``ConfigError``: it does
        not exist, or access is denied; ``UnavailableError``: as :meth:`list`."""

        def read(**options: Any) -> Any:
            return json.loads(self._core.read_namespaced_secret(name, self.namespace, **options).data)

        refused = {
            404: ConfigError(f"there is no Secret {name!r} in namespace {self.namespace!r}"),
            403: ConfigError(f"the service account may not read the Secret {name!r}; see docs/cameras.md"),
        }
        answer = self._call(read, refused, _preload_content=False)
        data = answer.get("data") if isinstance(answer, Mapping) else None
        found = {}
        for key, value in (data or {}).items():
            try:
                found[str(key)] = base64.b64decode(value, validate=True).decode()
            except (binascii.Error, UnicodeDecodeError, TypeError, ValueError):
                continue
        return found

    def ray_clusters(self, service: str) -> Sequence[str]:
        """RayClusters, by name, that KubeRay created for a RayService. Raises ``UnavailableError`` as :meth:`list`."""
        where = self._ray("rayclusters", label_selector=f"ray.io/originated-from-cr-name={service}")
        found = self._call(self._objects.list_namespaced_custom_object, what=RAY_CLUSTERS, **where)
        return [str(each["metadata"]["name"]) for each in found["items"]]

    def delete_ray_service(self, service: str) -> None:
        """Delete a RayService if it exists. Raises ``UnavailableError`` as :meth:`list`."""
        from kubernetes.client.exceptions import ApiException

        def delete(**options: Any) -> None:
            try:
                self._objects.delete_namespaced_custom_object(**self._ray("rayservices", name=service), **options)
            except ApiException as error:
                if error.status != 404:
                    raise

        self._call(delete, what="rayservices.ray.io", verbs="delete")

    def update_ray_cluster(self, cluster: str, service: str) -> Sequence[str]:
        """Copy pod counts and templates from a RayService to the groups of the same names in its RayCluster; returns
        the names of groups that differed. Running pods are left alone. Raises ``ChangedError``: the groups have changed
        since they were read, or the server finds the new ones invalid; ``UnavailableError``: as :meth:`list`, or no
        such RayCluster or RayService."""
        where = self._ray("rayclusters", name=cluster)
        read = self._objects.get_namespaced_custom_object
        wanted = self._call(read, what="rayservices.ray.io", verbs="get", **self._ray("rayservices", name=service))
        wanted = wanted["spec"]["rayClusterConfig"]
        found = self._call(read, what=RAY_CLUSTERS, **where)["spec"]
        groups = {str(each["groupName"]): each for each in wanted.get("workerGroupSpecs", [])}
        pairs = [(HEAD_GROUP, "/spec/headGroupSpec", found["headGroupSpec"], wanted["headGroupSpec"])]
        for index, group in enumerate(found.get("workerGroupSpecs", [])):
            name = str(group["groupName"])
            pairs.append((name, f"/spec/workerGroupSpecs/{index}", group, groups.get(name, {})))
        changes: list[dict[str, Any]] = []
        names = []
        for name, path, before, after in pairs:
            if "replicas" in after:
                # With different limits, Ray's autoscaler chooses between them.
                least, most = after.get("minReplicas", after["replicas"]), after.get("maxReplicas", after["replicas"])
                now = min(max(before.get("replicas", least), least), most)
                after = {**after, "replicas": now if least < most else after["replicas"]}
            keys = [key for key in _GROUP_KEYS if key in after and before.get(key) != after[key]]
            if not keys:
                continue
            names.append(name)
            if name != HEAD_GROUP:
                changes.append({"op": "test", "path": f"{path}/groupName", "value": name})
            # ``add`` also replaces.
            changes += [{"op": "add", "path": f"{path}/{key}", "value": after[key]} for key in keys]
        if changes:
            patch, kind = self._objects.patch_namespaced_custom_object, "application/json-patch+json"
            self._call(patch, what=RAY_CLUSTERS, **where, body=changes, _content_type=kind)
        return names

    def _ray(self, plural: str, **which: str) -> dict[str, Any]:
        return {**self._where, "group": "ray.io", "version": "v1", "plural": plural, **which}

    def _refused(self, camera: str) -> dict[int, SightlineError]:
        """Errors by HTTP status for calls about one resource."""
        return {
            404: UnknownCameraError(f"there is no Camera resource {camera!r} in namespace {self.namespace!r}"),
            409: ChangedError(f"camera {camera!r} has changed meanwhile"),
        }

    def _lines(self, response: Any) -> Iterator[bytes]:
        """Complete lines; an unterminated last line was cut off and is dropped."""
        from urllib3.exceptions import HTTPError

        rest = bytearray()
        try:
            for part in response.stream(65536, decode_content=False):
                rest += part
                *lines, last = bytes(rest).split(b"\n")
                rest = bytearray(last)
                if len(rest) > MAX_LINE:
                    raise UnavailableError(f"the Kubernetes API server sent an event of more than {MAX_LINE} bytes")
                yield from filter(None, lines)
        except (HTTPError, OSError, AttributeError, ValueError) as error:
            # A response closed under its reader raises the latter two.
            if not self._closed:
                raise UnavailableError(f"the watch of the Kubernetes API server broke: {_short(error)}") from None

    def _call(
        self,
        method: Callable[..., T],
        refused: Mapping[int, SightlineError] | None = None,
        *,
        what: str = "",
        verbs: str = "list, get and patch",
        **arguments: Any,
    ) -> T:
        """Call the API. ``refused``: errors by HTTP status; ``what``, ``verbs``: for messages about objects other than
        ``Camera`` resources, and the permissions needed."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            return method(**{"_request_timeout": self._timeouts, **arguments})
        except ApiException as error:
            raise (refused or {}).get(error.status) or self._refusal(error, what, verbs) from None
        except RecursionError:
            raise UnavailableError("the Kubernetes API server has an object that is nested too deeply") from None
        except (HTTPError, OSError, ValueError) as error:
            raise UnavailableError(f"the Kubernetes API server does not answer: {_short(error)}") from None

    def _refusal(self, error: Any, what: str, verbs: str) -> SightlineError:
        definition = f"{PLURAL}.{GROUP}"
        if what and error.status in (409, 422):
            # A failed patch test and an invalid object have the same status and reason; only the message differs.
            return ChangedError(f"the {what} changed meanwhile, or would not be valid: {_short(error.body or '')}")
        if not what and error.status == 410:
            return ExpiredError("that version is too old for the Kubernetes API server")
        if not what and error.status == 404:
            return UnavailableError(
                f"the Kubernetes cluster does not know {definition}; install its definition (docs/cameras.md)"
            )
        if error.status in (401, 403):
            ours = f"get, list and watch {definition} in namespace {self.namespace!r}, and to update their status"
            return UnavailableError(
                f"the Kubernetes API server refuses this service account ({error.status}); it must be allowed to "
                f"{f'{verbs} {what}' if what else ours}"
            )
        about = f" about {what}" if what else ""
        return UnavailableError(f"the Kubernetes API server answers {error.status} {error.reason}{about}")


def _configure(config: KubernetesConfig, settings: Any) -> str:
    """Set server and identity; returns their default namespace."""
    from kubernetes.config import ConfigException, list_kube_config_contexts, load_incluster_config, load_kube_config

    if config.kubeconfig is None:
        try:
            load_incluster_config(settings)
            return (_ACCOUNT / "namespace").read_text().strip()
        except (ConfigException, OSError):
            raise ConfigError(
                "kubernetes.enabled needs a service account, which only a pod has; name kubernetes.kubeconfig"
            ) from None
    try:
        load_kube_config(config.kubeconfig, config.context, settings, persist_config=False)
        contexts, current = list_kube_config_contexts(config.kubeconfig)
    except (ConfigException, OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"kubernetes.kubeconfig {config.kubeconfig} cannot be used: {_short(error)}") from None
    wanted = config.context or current["name"]
    chosen: Mapping[str, Any] = next((each["context"] for each in contexts if each["name"] == wanted), {})
    return str(chosen.get("namespace", "default"))


def _event(line: bytes) -> tuple[str, CameraResource | str]:
    try:
        event = json.loads(line)
        kind, body = event["type"], event["object"]
        if kind == "BOOKMARK":
            return kind, str(body["metadata"]["resourceVersion"])
        if kind == "ERROR":
            if body.get("code") == 410:
                raise ExpiredError("that version is too old for the Kubernetes API server")
            raise UnavailableError(f"the Kubernetes API server ends the watch: {body.get('message', body)}")
        if kind in ("ADDED", "MODIFIED", "DELETED"):
            return kind, CameraResource.of(body)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise ExpiredError("the Kubernetes API server sent an invalid watch event") from None
    raise ExpiredError(f"the Kubernetes API server sent an event of the unknown kind {str(kind)[:40]!r}")


def _resource(body: Any) -> CameraResource:
    try:
        return CameraResource.of(body)
    except ValueError as error:
        raise UnavailableError(f"the Kubernetes API server gave {error}") from None


def _short(error: object) -> str:
    while isinstance(reason := getattr(error, "reason", None), BaseException):
        # Unwrap what urllib3 reports as "Max retries exceeded".
        error = reason
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + " …"
