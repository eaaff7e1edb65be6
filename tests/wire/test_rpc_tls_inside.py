"""TLS between the processes of a cluster: only they get in, and certificates that expire are replaced as they run."""

import asyncio
import socket
import threading
import time
import urllib.request
from contextlib import contextmanager

import grpc
import pytest
import rpc_serving
from certificates import Authority
from kv_parts import OURS, Node
from memory_parts import Replica
from prometheus_client import CollectorRegistry, Counter
from security_parts import guarded_gateway
from sightline.v1 import memory_pb2, memory_pb2_grpc, results_pb2, results_pb2_grpc

from cluster.codec.supervisor import Backoff
from cluster.config import load_config
from cluster.config.secrets import peer_tls
from cluster.config.security import SecurityConfig
from cluster.decoder.frame_sender import FrameSender
from cluster.errors import ConfigError
from cluster.gateway.merger import ResultsMerger
from cluster.memory.tiers.arena import Arena
from cluster.memory.tiers.remote import RemoteTier
from cluster.replica import memory_service as memory
from cluster.replica.frames_service import FramesServicer, WindowCounters
from cluster.security.roles import Role
from cluster.wire.answers import AnswerHub, ResultsServicer
from cluster.wire.channel import ChannelPool, open_channel
from cluster.wire.metrics_server import FederatedCollector, MetricsServer
from cluster.wire.server import RpcServer, is_serving
from cluster.wire.tls import PeerTls, TlsFiles

QUICK = Backoff(first_s=0.05, longest_s=0.2, jitter=0.0)
NAME = "sightline"


@pytest.fixture
def authority():
    return Authority()


def peers(authority, folder, process="inner", *, host=NAME, valid_s=3600.0, name=NAME):
    """A process's side of the cluster's TLS, with files of its own."""
    ca = authority.write(folder / f"{process}-ca.crt")
    return PeerTls(TlsFiles(*authority.issue(folder, process, host=host, valid_s=valid_s), ca), name)


def serving(tls, *servicers):
    return rpc_serving.serving(*servicers, tls=tls)


async def test_only_processes_of_the_cluster_get_in(tmp_path, authority):
    ours = peers(authority, tmp_path)
    ca = (tmp_path / "inner-ca.crt").read_bytes()
    foreign = peers(Authority("stranger"), tmp_path, "foreign")
    # Knows whom to trust, but is trusted by nobody.
    certificate, key = (file.read_bytes() for file in (foreign.files.certificate, foreign.files.key))
    async with serving(ours, ResultsServicer(AnswerHub())) as address:
        assert await is_serving(address, tls=peers(authority, tmp_path, "another"), timeout_s=30.0)
        assert not await is_serving(address)
        assert not await is_serving(address, tls=foreign)
        assert not await is_serving(address, tls=peers(authority, tmp_path, "misled", name="elsewhere"))
        for credentials in (grpc.ssl_channel_credentials(ca), grpc.ssl_channel_credentials(ca, key, certificate)):
            channel = grpc.aio.secure_channel(address, credentials, ours.options())
            with pytest.raises(grpc.RpcError) as caught:
                await memory_pb2_grpc.MemoryStub(channel).Describe(memory_pb2.DescribeRequest(), timeout=30)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await channel.close()


async def test_a_server_with_a_certificate_for_something_else_is_not_believed(tmp_path, authority):
    async with serving(peers(authority, tmp_path, "other", host="other"), ResultsServicer(AnswerHub())) as address:
        assert not await is_serving(address, tls=peers(authority, tmp_path))


async def test_what_the_authority_signed_for_others_may_not_call(tmp_path, authority):
    """As of a company's own, which signs for every service there is."""
    tls, printer = peers(authority, tmp_path), peers(authority, tmp_path, "printer", host="printer")
    services = ResultsServicer(AnswerHub()), memory.MemoryServicer(Replica())
    async with serving(tls, *services) as address:
        assert await is_serving(address, tls=peers(authority, tmp_path, "another"), timeout_s=30.0)
        assert not await is_serving(address, tls=printer, timeout_s=30.0)
        async with open_channel(address, tls=printer) as channel:
            described = memory_pb2_grpc.MemoryStub(channel).Describe(memory_pb2.DescribeRequest(camera="gate"))
            watched = results_pb2_grpc.ResultsStub(channel).Watch(results_pb2.WatchRequest()).read()
            for call in (described, watched):
                with pytest.raises(grpc.aio.AioRpcError, match="not for sightline") as caught:
                    await asyncio.wait_for(call, 30)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    # Who scrapes the pages of metrics has one of its own, with which it can do nothing else.
    with page(tls) as address:
        assert up(address, printer) == (2, 1)


async def test_answers_frames_and_questions_over_it(tmp_path, authority, make, until):
    tls, scripted, hub = peers(authority, tmp_path), Replica(), AnswerHub()
    frames = Taking()
    services = [ResultsServicer(hub), FramesServicer(frames, credit=8), memory.MemoryServicer(scripted)]
    client = peers(authority, tmp_path, "client")
    merged = AnswerHub()
    merger = ResultsMerger(merged, retry_s=0.05, tls=client)
    sender, pool = FrameSender(lambda events: None, backoff=QUICK, tls=client), ChannelPool(tls=client)
    async with serving(tls, *services) as address:
        with merged.subscribe() as seen:
            merger.follow([address])
            await until(lambda: len(hub._subscriptions) == 1)
            hub.publish([make.answer()])
            async with asyncio.timeout(30):
                assert (await anext(seen))[0] == make.answer()
        sender.assign(make.spec("gate"), address)
        assert sender.send(make.sample("gate", 0))
        await until(lambda: frames.taken == 1)
        async with pool.lease(address) as channel:
            await memory_pb2_grpc.MemoryStub(channel).Describe(memory_pb2.DescribeRequest(camera="gate"), timeout=30)
        await merger.stop()
        await sender.stop(0.1)


class Taking:
    """A replica that counts frames."""

    taken = 0

    async def on_open(self, spec):
        pass

    async def on_frame(self, sample, arrived_s):
        self.taken += 1

    async def on_close(self, camera, flush):
        pass

    async def on_lost(self, cameras):
        pass

    def counters(self, camera):
        return WindowCounters()


async def test_a_certificate_that_expires_while_it_runs(tmp_path, authority, make, until):
    """Streams go on, newcomers are refused until the file is renewed, and nobody restarts."""
    began = time.monotonic()
    tls = peers(authority, tmp_path, valid_s=2.0)
    hub, merged = AnswerHub(), AnswerHub()
    merger = ResultsMerger(merged, retry_s=0.05, tls=tls)
    pool = ChannelPool(tls=tls)
    async with serving(tls, ResultsServicer(hub)) as address:
        merger.follow([address])
        await until(lambda: len(hub._subscriptions) == 1)
        assert await is_serving(address, tls=tls, timeout_s=30.0)
        async with pool.lease(address) as before:
            await asyncio.sleep(max(0.0, began + 3.1 - time.monotonic()))
            assert not await is_serving(address, tls=tls)
            with merged.subscribe() as seen:
                hub.publish([make.answer()])
                async with asyncio.timeout(30):
                    assert (await anext(seen))[0] == make.answer()
            authority.issue(tmp_path, "inner", host=NAME)
            assert await is_serving(address, tls=tls, timeout_s=30.0)
            async with pool.lease(address) as after:
                assert after is not before
        assert len(pool._channels) == 0
        await merger.stop()


async def test_half_a_renewal_changes_nothing(tmp_path, authority, caplog):
    tls = peers(authority, tmp_path)
    async with serving(tls, ResultsServicer(AnswerHub())) as address:
        (tmp_path / "inner.key").write_bytes(authority.issue(tmp_path, "other")[1].read_bytes())
        for _ in range(3):
            assert await is_serving(address, tls=tls, timeout_s=30.0)
        assert tls.renewals() == 0
    # By the server and by its client, once each and not with every connection.
    assert len([each for each in caplog.records if "was not renewed" in each.getMessage()]) == 2


def test_files_that_go_while_they_are_read_are_read_later(tmp_path, authority, monkeypatch):
    tls = peers(authority, tmp_path)
    before = tls.client_context()
    ca, away = tmp_path / "inner-ca.crt", tmp_path / "away"
    authority.issue(tmp_path, "inner", host=NAME)
    with monkeypatch.context() as patch:
        make = tls._reloading._make
        patch.setattr(tls._reloading, "_make", lambda: ca.rename(away) and make())
        assert tls.client_context() is before
        assert tls.renewals() == 0
    away.rename(ca)
    assert tls.client_context() is not before
    assert tls.renewals() == 1


def test_a_tier_comes_back_after_its_certificate_was_renewed(tmp_path, authority):
    """Everything is signed anew by another authority while the node is down: the old channel could never reach it."""
    tls = peers(authority, tmp_path)

    class Secure(Node):
        async def _start(self, port):
            self.server = RpcServer(tls=tls)
            self.server.add(self.servicer)
            bound = self.server.bind("127.0.0.1", port)
            await self.server.start()
            return f"127.0.0.1:{bound}"

    node = Secure(Arena(2**23))
    tier = RemoteTier(node.address, fingerprint=OURS, deadline_s=1.0, backoff=QUICK, tls=tls)
    try:
        assert tier.nbytes() == 0
        assert tier.state().up
        node.stop()
        tier.nbytes()
        assert not tier.state().up
        renewed = Authority("renewed")
        renewed.issue(tmp_path, "inner", host=NAME)
        renewed.write(tmp_path / "inner-ca.crt")
        node = Secure(Arena(2**23), port=int(node.address.rpartition(":")[2]))
        until = time.monotonic() + 10
        while not tier.state().up and time.monotonic() < until:
            time.sleep(0.05)
        assert tier.state().up
    finally:
        tier.close()
        node.stop()


@contextmanager
def page(tls):
    registry = CollectorRegistry()
    Counter("sightline_things", "Of a test.", registry=registry).inc(2)
    server = MetricsServer(registry=registry, tls=tls)
    try:
        yield server.address
    finally:
        server.close()


def up(address, tls):
    found = FederatedCollector(lambda: {"decoder-0": address}, tls=tls, timeout_s=2.0).collect()
    samples = {sample.name: sample.value for family in found for sample in family.samples}
    return samples.get("sightline_things_total"), samples["sightline_process_up"]


def test_metrics_pages_are_for_the_gateway_alone(tmp_path, authority):
    with page(peers(authority, tmp_path)) as address:
        assert up(address, peers(authority, tmp_path, "gateway")) == (2, 1)
        assert up(address, None) == (None, 0)
        assert up(address, peers(Authority("stranger"), tmp_path, "foreign")) == (None, 0)
        with pytest.raises(OSError, match=r"\S"):
            urllib.request.urlopen(f"http://{address}/metrics", timeout=2)


def test_who_does_not_shake_hands_holds_up_nobody(tmp_path, authority):
    tls = peers(authority, tmp_path)
    with page(tls) as address:
        host, _, port = address.rpartition(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(20)]
        assert up(address, tls) == (2, 1)
        for connection in silent:
            connection.close()


def test_a_renewed_page(tmp_path, authority):
    tls = peers(authority, tmp_path, valid_s=1.0)
    with page(tls) as address:
        time.sleep(2.1)
        assert up(address, tls) == (None, 0)
        authority.issue(tmp_path, "inner", host=NAME)
        assert up(address, tls) == (2, 1)


async def test_the_gateway_shows_its_certificate_to_a_replica(monkeypatch, tmp_path, authority):
    tls = peers(authority, tmp_path, "replica")
    certificate, key = authority.issue(tmp_path, "gateway-inside", host=NAME)
    inner = {"certificate": str(certificate), "key": str(key), "ca": str(tmp_path / "replica-ca.crt")}
    served = memory.MemoryServicer(Replica())

    async def described(**security):
        async with guarded_gateway(monkeypatch, tmp_path, **security) as (_, addresses, directory, secrets):
            directory.address = address
            metadata = (("authorization", f"Bearer {secrets[Role.VIEW]}"),)
            async with open_channel(addresses.rpc) as channel:
                request = memory_pb2.DescribeRequest(camera="gate")
                return await memory_pb2_grpc.MemoryStub(channel).Describe(request, metadata=metadata, timeout=30)

    async with serving(tls, served) as address:
        assert (await described(internal_tls=inner)).camera == "gate"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await described()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_settings(tmp_path, authority):
    assert peer_tls(SecurityConfig()) is None
    certificate, key = authority.issue(tmp_path, "inner", host="cluster")
    keys = {"certificate": str(certificate), "key": str(key), "ca": str(authority.write(tmp_path / "ca.crt"))}
    made = peer_tls(SecurityConfig.model_validate({"internal_tls": {**keys, "name": "cluster"}}))
    assert made is not None
    assert (made.name, made.files.client_ca) == ("cluster", tmp_path / "ca.crt")
    with pytest.raises(ConfigError, match="certificate, key and ca go together; give all three or none"):
        load_config(None, {"security": {"internal_tls": {"certificate": str(certificate)}}})
    with pytest.raises(ConfigError, match="TLS cannot use certificate"):
        peer_tls(SecurityConfig.model_validate({"internal_tls": {**keys, "key": str(tmp_path / "none")}}))


def test_a_cluster_of_several_machines_is_not_open_by_accident(tmp_path, authority):
    machines = {"cluster": {"ray_address": "10.0.0.1:6379"}}
    with pytest.raises(ConfigError, match=r"security.internal_tls: processes of a Ray cluster reach each other"):
        load_config(None, machines)
    load_config(None, machines | {"security": {"allow_plain_inside": True}})
    load_config(None, machines | {"security": {"internal_tls": {"certificate": "c", "key": "k", "ca": "a"}}})


def test_threads_share_it(tmp_path, authority):
    """Renewed while many ask: everyone gets credentials, and the renewal is counted once."""
    tls = peers(authority, tmp_path)
    failures = []

    def ask():
        try:
            for _ in range(50):
                tls.credentials()
                tls.client_context()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    authority.issue(tmp_path, "inner", host=NAME)
    for thread in threads:
        thread.join(20)
    assert failures == []
    assert tls.renewals() >= 1
