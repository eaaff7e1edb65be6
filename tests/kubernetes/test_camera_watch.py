"""The API client and the copy that follows it, against a server that speaks the protocol and breaks it."""

import threading
import time

import pytest
from certificates import Authority
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kube_server import KubeServer
from waiting import until

from cluster.config.cluster import KubernetesConfig
from cluster.errors import ConfigError, UnavailableError, UnknownCameraError
from cluster.kubernetes.api import ChangedError, ExpiredError, KubernetesApi
from cluster.kubernetes.watch import CameraWatch

WAIT_S = 10.0


def config(kube, **keys):
    return KubernetesConfig(enabled=True, kubeconfig=str(kube.kubeconfig), **keys)


class Follower:
    """A watch that is started, and how often it said that something changed."""

    def __init__(self, kube, **keys):
        self.changes = 0
        self.watch = CameraWatch(KubernetesApi(config(kube, **keys)), self._count, wait_s=(0.01, 0.05))

    def _count(self):
        self.changes += 1

    def __enter__(self):
        self.watch.start()
        return self

    def __exit__(self, *_):
        assert self.watch.stop(), "the thread does not end"

    def specs(self):
        snapshot = self.watch.snapshot()
        return None if snapshot is None else {name: dict(each.spec) for name, each in snapshot.items()}


def test_lists_in_pages_then_follows(kube):
    kube.page = 2
    for number in range(5):
        kube.apply(f"cam-{number}", {"source": f"rtsp://10.0.0.{number}/"})
    with Follower(kube) as follower:
        until(lambda: len(follower.specs() or ()) == 5)
        kube.apply("cam-1", {"priority": "critical"})
        kube.delete("cam-3")
        kube.apply("cam-9", {})
        until(lambda: follower.specs() == {name: body["spec"] for name, body in kube.objects.items()})
        assert (kube.lists, kube.watches) == (3, 1)
        assert follower.changes == 4


def test_nothing_is_said_of_a_status_or_a_label(kube):
    kube.apply("gate", {})
    with Follower(kube) as follower:
        until(follower.specs)
        api = KubernetesApi(config(kube))
        kube.conflicts = 1
        with pytest.raises(ChangedError):
            api.write_status(api.get("gate"), {"state": "waiting"})
        api.write_status(api.get("gate"), {"state": "running"})
        until(lambda: follower.watch.snapshot()["gate"].status == {"state": "running"})
        assert follower.changes == 1


def test_a_connection_cut_in_mid_line_loses_and_repeats_nothing(kube):
    kube.apply("gate", {"priority": "normal"})
    with Follower(kube) as follower:
        until(follower.specs)
        kube.cut_after = 1
        kube.apply("gate", {"priority": "critical"})
        until(lambda: follower.specs()["gate"] == {"priority": "critical"})
        kube.apply("yard", {"priority": "background"})
        until(lambda: "yard" in follower.specs())
        assert kube.lists == 1
        assert kube.watches == 2
        assert follower.changes == 3


def test_an_expired_version_is_listed_anew_with_what_was_deleted_meanwhile(kube):
    kube.apply("gate", {})
    kube.apply("yard", {})
    with Follower(kube) as follower:
        until(lambda: len(follower.specs() or ()) == 2)
        kube.refuse["true"] = [500, 503]
        kube.disconnect()
        kube.delete("gate")
        kube.apply("dock", {})
        kube.expire()
        until(lambda: set(follower.specs()) == {"yard", "dock"})
        assert kube.lists == 2


def test_bookmarks_keep_the_version_young(kube):
    kube.apply("gate", {})
    with Follower(kube) as follower:
        until(follower.specs)
        # Others' objects move the version on; no event tells of them.
        with kube.lock:
            kube.version += 100
        until(lambda: follower.watch._version == str(kube.version))
        kube.oldest = kube.version
        kube.disconnect()
        kube.apply("yard", {})
        until(lambda: "yard" in follower.specs())
        assert kube.lists == 1


def test_what_is_no_event_is_not_followed_but_listed_anew(kube):
    kube.apply("gate", {})
    with Follower(kube) as follower:
        until(follower.specs)
        for garbage in (
            b"not json\n",
            b'{"type": "ADDED", "object": 7}\n',
            b'{"type": "MOVED", "object": {}}\n',
            b"[]\n",
        ):
            lists, watches = kube.lists, kube.watches
            kube.garbage = garbage
            until(lambda lists=lists, watches=watches: kube.lists > lists and kube.watches > watches, garbage)
        kube.apply("yard", {})
        until(lambda: "yard" in follower.specs())


def test_a_silent_connection_is_opened_again(kube):
    kube.bookmark_s = 30.0
    with Follower(kube, idle_s=0.2) as follower:
        until(lambda: kube.watches >= 2)
        kube.apply("gate", {})
        until(lambda: "gate" in (follower.specs() or {}))
        assert kube.lists == 1


def test_a_server_that_refuses_says_so_and_nothing_counts_as_deleted(kube):
    kube.refuse["list"] = [403] * 3 + [500] * 2
    kube.apply("gate", {})
    with Follower(kube) as follower:
        until(lambda: follower.watch.trouble)
        assert follower.watch.trouble.startswith("the Kubernetes API server refuses this service account (403)")
        assert follower.specs() is None
        until(follower.specs)
        until(lambda: not follower.watch.trouble)


def test_a_watch_that_ends_at_once_is_not_opened_without_a_pause(kube):
    kube.refuse["true"] = [410] * 10_000
    with Follower(kube) as follower:
        until(lambda: follower.specs() is not None)
        time.sleep(0.3)
        assert kube.lists < 30


def test_stops_at_once_while_nothing_is_said(kube):
    kube.bookmark_s = 30.0
    follower = Follower(kube)
    follower.watch.start()
    until(lambda: kube.watches)
    began = time.monotonic()
    assert follower.watch.stop()
    assert time.monotonic() - began < 20


def test_tls_and_a_bearer_token(tmp_path):
    kube = KubeServer(tmp_path, Authority())
    try:
        kube.apply("gate", {})
        with Follower(kube) as follower:
            until(follower.specs)
            kube.apply("yard", {})
            until(lambda: "yard" in follower.specs())
        Authority("another").write(tmp_path / "ca.crt")
        with pytest.raises(UnavailableError, match=r"does not answer.*certificate"):
            KubernetesApi(config(kube)).list()
    finally:
        kube.close()


def test_as_a_pod_by_its_service_account(tmp_path, monkeypatch):
    from kubernetes.config import incluster_config

    from cluster.kubernetes import api as kubernetes_api

    kube = KubeServer(tmp_path, Authority())
    try:
        (tmp_path / "token").write_text(kube.token)
        (tmp_path / "namespace").write_text("yard\n")
        monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
        monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
        monkeypatch.setattr(kubernetes_api, "_ACCOUNT", tmp_path)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", kube.url.rpartition(":")[2])
        kube.apply("gate", {})
        api = KubernetesApi(KubernetesConfig(enabled=True))
        assert api.namespace == "yard"
        [resource], _ = api.list()
        assert api.write_status(resource, {"state": "running"}).status == {"state": "running"}
    finally:
        kube.close()


def test_errors_are_sentences(kube):
    api = KubernetesApi(config(kube, timeout_s=0.3))
    with pytest.raises(UnknownCameraError, match="no Camera resource 'gate' in namespace 'yard'"):
        api.get("gate")
    with pytest.raises(ConfigError, match="no Secret 'none' in namespace 'yard'"):
        api.secret("none")
    kube.secret("ours", username="viewer", password="s3cret")
    assert api.secret("ours") == {"username": "viewer", "password": "s3cret"}
    kube.expire()
    with pytest.raises(ExpiredError):
        list(api.watch("0"))
    kube.refuse["list"] = [404]
    with pytest.raises(UnavailableError, match=r"does not know cameras\.sightline\.io; install its definition"):
        api.list()
    kube.token = "another"
    with pytest.raises(UnavailableError, match=r"refuses this service account \(401\)"):
        api.list()
    kube.delay_s = 1.0
    kube.token = "the-service-account's-token"
    with pytest.raises(UnavailableError, match="does not answer"):
        api.list()


def test_no_server_and_no_identity(kube, tmp_path):
    kube.write_kubeconfig({"server": "http://127.0.0.1:1"}, "x")
    with pytest.raises(UnavailableError, match="does not answer"):
        KubernetesApi(config(kube)).list()
    with pytest.raises(ConfigError, match="needs a service account, which only a pod has"):
        KubernetesApi(KubernetesConfig(enabled=True))
    with pytest.raises(ConfigError, match=r"kubernetes\.kubeconfig .*nothing.* cannot be used"):
        KubernetesApi(KubernetesConfig(enabled=True, kubeconfig=str(tmp_path / "nothing")))


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("apply"), st.sampled_from("abc"), st.sampled_from(["critical", "normal", "background"])),
        st.tuples(st.just("delete"), st.sampled_from("abc"), st.none()),
        st.tuples(st.just("disconnect"), st.none(), st.none()),
        st.tuples(st.just("cut"), st.integers(0, 2), st.none()),
        st.tuples(st.just("expire"), st.none(), st.none()),
        st.tuples(st.just("pause"), st.none(), st.none()),
    ),
    max_size=12,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=ACTS)
def test_whatever_happens_the_copy_ends_like_the_server(kube, acts):
    threads = threading.active_count()
    with Follower(kube) as follower:
        for act, what, value in acts:
            if act == "apply":
                kube.apply(what, {"priority": value})
            elif act == "delete":
                kube.delete(what)
            elif act == "cut":
                kube.cut_after = what
            elif act == "pause":
                time.sleep(0.02)
            else:
                getattr(kube, act)()
        until(lambda: follower.specs() == {name: body["spec"] for name, body in kube.objects.items()}, acts)
        kube.cut_after = None
        assert threading.active_count() < threads + 50
