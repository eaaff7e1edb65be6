"""``open_door_mb``: peak memory growth of a gateway process under attacks by unauthenticated callers.

Every attack runs against its own process with production's servers and limits. Meanwhile new connections send health
probes over HTTP and gRPC, and an authenticated client lists the cameras over both.
"""

import asyncio
import contextlib
import http.client
import multiprocessing
import os
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import grpc
from certificates import Authority
from fuzz.server import TOKEN, serve
from grpc_health.v1 import health_pb2, health_pb2_grpc
from http2_attacks import PLAIN, TLS, Target
from process_memory import process_memory_mib
from sightline.v1 import cameras_pb2, cameras_pb2_grpc

from cluster.errors import SightlineError
from cluster.hosts import raise_file_limit
from cluster.lab.bench.harness import BenchResult
from cluster.wire.tls import TlsFiles

PROBE_S = 3.0
"""Timeout of a probe."""
BEARER = f"Bearer {TOKEN}"
FILES = 8192


def measure(seed: int) -> BenchResult:
    """See the module."""
    del seed
    with tempfile.TemporaryDirectory(prefix="sightline-doors-") as name:
        folder = Path(name)
        files = Authority().issue(folder, "gateway")
        rows = [measure_attack(folder, what, ()) for what in PLAIN]
        rows += [measure_attack(folder, what, files) for what in TLS]
    missed = sum(row[kind] for row in rows for kind in ("probes_missed", "clients_missed"))
    refused = sum(row["rpc_probes_missed"] for row in rows)
    notes = [
        f"{missed} probes over HTTP and calls with a token without an answer within {PROBE_S:g} s",
        f"{refused} probes over new gRPC connections without one: its cap has no reserve",
    ]
    return BenchResult({"open_door_mb": max(row["growth_mb"] for row in rows)}, rows, notes)


def measure_attack(folder: Path, what: str, tls: tuple[Path, ...]) -> dict[str, Any]:
    """Run one attack against a new gateway process; returns its row of the table.

    Raises:
        SightlineError: the gateway, or whoever attacks it, died.
    """
    with gateway(folder, tls) as (process, target), _rpc_client(target, tls) as rpc_client:
        asking: dict[str, Callable[[], None]] = {
            "http probe": _http(target, tls, "/readyz"),
            "http client": _http(target, tls, "/v1/cameras"),
            "rpc probe": _rpc_probe(target, tls),
            "rpc client": rpc_client,
        }
        for ask in asking.values():
            ask()
        before = process_memory_mib("VmRSS", process)
        Path(f"/proc/{process}/clear_refs").write_text("5")
        asked, missed, slowest = 0, dict.fromkeys(asking, 0), 0.0
        with _forked(_attack, what, target) as (_, seen):
            while not seen.poll(0.05):
                for kind, ask in asking.items():
                    began = time.monotonic()
                    try:
                        ask()
                    except (OSError, http.client.HTTPException, grpc.RpcError, SightlineError):
                        missed[kind] += 1
                    asked, slowest = asked + 1, max(slowest, time.monotonic() - began)
            outcomes = _received(seen, f"the attack {what!r}")
        growth = process_memory_mib("VmHWM", process) - before
    return {
        "attack": what,
        "growth_mb": round(growth, 1),
        "asked": asked,
        "probes_missed": missed["http probe"],
        "rpc_probes_missed": missed["rpc probe"],
        "clients_missed": missed["http client"] + missed["rpc client"],
        "slowest_ms": round(1e3 * slowest),
        "seen": ", ".join(f"{name} {count}" for name, count in outcomes.most_common(4)),
    }


@contextmanager
def gateway(folder: Path, tls: tuple[Path, ...] = ()) -> Iterator[tuple[int, Target]]:
    """Start a gateway process; yields its process id and ports. ``tls``: certificate and key.

    Raises:
        SightlineError: it did not start, or died.
    """
    with _forked(_serve, folder / "log", tls) as (process, pipe):
        addresses = _received(pipe, "the gateway")
        ports = {name: int(address.rpartition(":")[2]) for name, address in addresses.items()}
        assert process.pid is not None
        yield process.pid, Target(ports["gateway"], ports["http"])
        if not process.is_alive():
            raise SightlineError(f"the gateway died with exit code {process.exitcode}")


@contextmanager
def _forked(function: Callable[..., None], *arguments: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """Start a process with one end of a pipe; yields it with the other end, and kills it afterwards."""
    # Forked from a server that has imported everything, so that imports do not count as growth.
    forking = multiprocessing.get_context("forkserver")
    # Python 3.11's fork server does not take over sys.path.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    forking.set_forkserver_preload([serve.__module__])
    ours, its = forking.Pipe()
    process = forking.Process(target=function, args=(its, *arguments), daemon=True)
    process.start()
    its.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()


def _received(pipe: Connection, who: str) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise SightlineError(f"{who} ended before its time") from None


def _serve(pipe: Connection, log: Path, tls: tuple[Path, ...]) -> None:
    with contextlib.suppress(EOFError):
        asyncio.run(serve(log, pipe.send, pipe.recv, tls=TlsFiles(*tls) if tls else None))


def _attack(pipe: Connection, what: str, target: Target) -> None:
    raise_file_limit(FILES)

    async def attack() -> None:
        await {**PLAIN, **TLS}[what](target)

    asyncio.run(attack())
    pipe.send(target.seen)


def _http(target: Target, tls: tuple[Path, ...], path: str) -> Callable[[], None]:
    context = ssl.create_default_context(cafile=tls[0]) if tls else None

    def ask() -> None:
        connection = (
            http.client.HTTPSConnection("localhost", target.http, timeout=PROBE_S, context=context)
            if tls
            else http.client.HTTPConnection("127.0.0.1", target.http, timeout=PROBE_S)
        )
        try:
            connection.request("GET", path, headers={} if path == "/readyz" else {"Authorization": BEARER})
            if (status := connection.getresponse().status) != 200:
                raise SightlineError(f"{path}: {status}")
        finally:
            connection.close()

    return ask


def _channel(target: Target, tls: tuple[Path, ...]) -> grpc.Channel:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    if not tls:
        return grpc.insecure_channel(f"127.0.0.1:{target.rpc}", options)
    return grpc.secure_channel(f"localhost:{target.rpc}", grpc.ssl_channel_credentials(tls[0].read_bytes()), options)


def _rpc_probe(target: Target, tls: tuple[Path, ...]) -> Callable[[], None]:
    def ask() -> None:
        with _channel(target, tls) as channel:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PROBE_S)

    return ask


@contextmanager
def _rpc_client(target: Target, tls: tuple[Path, ...]) -> Iterator[Callable[[], None]]:
    """An authenticated call over one connection opened before the attack, like a push agent's."""
    with _channel(target, tls) as channel:
        stub, metadata = cameras_pb2_grpc.CamerasStub(channel), (("authorization", BEARER),)

        def ask() -> None:
            stub.List(cameras_pb2.ListCamerasRequest(), metadata=metadata, timeout=PROBE_S)

        yield ask
