"""``GatewayClient``: what the CLI asks a gateway, with deadlines and errors in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from sightline.v1 import (
    cameras_pb2,
    cameras_pb2_grpc,
    replicas_pb2,
    replicas_pb2_grpc,
    results_pb2,
    results_pb2_grpc,
)

from cluster.control.cameras.managed import Managed, entry_from_json
from cluster.errors import SightlineError, UnavailableError
from cluster.gateway import replicas
from cluster.hosts import is_loopback
from cluster.redaction import SourceAddress
from cluster.types import Answer, CameraStatus, Question
from cluster.types.reports import ReplicaStatus
from cluster.wire.channel import CLUSTER_MESSAGE_BYTES, channel_options, split_address
from cluster.wire.convert import answer_from_proto, question_to_proto, status_from_proto
from cluster.wire.credentials import ClientCredentials
from cluster.wire.status import is_ours, to_error

T = TypeVar("T")


class GatewayClient:
    """Blocking client of one gateway; a context manager.

    Every method raises the :class:`SightlineError` the gateway meant (``UnknownCameraError``, ``ConfigError``, ...), or
    ``UnavailableError`` when no gateway answers within ``deadline_s``. ``credentials``: token and TLS,
    none unless given.
    """

    def __init__(
        self,
        address: str,
        *,
        deadline_s: float = 10.0,
        credentials: ClientCredentials | None = None,
    ) -> None:
        self.address = address
        self._deadline_s = deadline_s
        credentials = credentials or ClientCredentials()
        self._metadata = credentials.metadata(loopback=is_loopback(split_address(address)[0]))
        options = channel_options(address, CLUSTER_MESSAGE_BYTES, internal=False)
        tls = credentials.channel_credentials()
        self._channel = (
            grpc.insecure_channel(address, options) if tls is None else grpc.secure_channel(address, tls, options)
        )
        self._cameras = cameras_pb2_grpc.CamerasStub(self._channel)
        self._replicas = replicas_pb2_grpc.ReplicasStub(self._channel)
        self._results = results_pb2_grpc.ResultsStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def cameras_list(self) -> list[CameraStatus]:
        """Every camera, in the gateway's order."""
        reply = self._call(self._cameras.List, cameras_pb2.ListCamerasRequest())
        return [status_from_proto(status) for status in reply.cameras]

    def camera_get(self, name: str) -> CameraStatus:
        return status_from_proto(self._call(self._cameras.Get, cameras_pb2.GetCameraRequest(name=name)))

    def camera_add(
        self,
        name: str,
        source: str | SourceAddress = "",
        questions: Sequence[Question] = (),
        settings: dict[str, Any] | None = None,
        *,
        force: bool = False,
        manager: str = "",
        takeover: bool = False,
    ) -> CameraStatus:
        """``settings``: keys of a camera as in the configuration file; ``force``: also when there is no room for it;
        ``manager``: whose it is from now on (empty: ``cluster``); ``takeover``: also when it is another's now."""
        request = cameras_pb2.AddCameraRequest(
            name=name,
            source=SourceAddress(source).reveal(),
            questions=[question_to_proto(question) for question in questions],
            settings_json=json.dumps(settings) if settings else "",
            force=force,
            manager=manager,
            takeover=takeover,
        )
        return status_from_proto(self._call(self._cameras.Add, request))

    def camera_update(
        self,
        name: str,
        source: str | SourceAddress = "",
        settings: dict[str, Any] | None = None,
        *,
        manager: str = "",
        takeover: bool = False,
    ) -> CameraStatus:
        """Other settings for a camera, all of them; see :meth:`camera_add`. Questions are a key of the settings."""
        request = cameras_pb2.UpdateCameraRequest(
            name=name,
            source=SourceAddress(source).reveal(),
            settings_json=json.dumps(settings) if settings else "",
            manager=manager,
            takeover=takeover,
        )
        return status_from_proto(self._call(self._cameras.Update, request))

    def camera_remove(self, name: str, *, manager: str = "", takeover: bool = False) -> None:
        request = cameras_pb2.RemoveCameraRequest(name=name, manager=manager, takeover=takeover)
        self._call(self._cameras.Remove, request)

    def cameras_export(self, names: Collection[str] = (), *, secrets: bool = False) -> list[Managed]:
        """Cameras as they were written, sources in full only with ``secrets``; all of them without ``names``. For
        administrators."""
        request = cameras_pb2.ExportCamerasRequest(names=sorted(names), secrets=secrets)
        reply = self._call(self._cameras.Export, request)
        return [Managed(entry=entry_from_json(each.entry_json), manager=each.manager) for each in reply.cameras]

    def replicas_list(self) -> list[ReplicaStatus]:
        """Every replica, by name."""
        reply = self._call(self._replicas.List, replicas_pb2.ListReplicasRequest())
        return [replicas.from_proto(status) for status in reply.replicas]

    def replica_drain(self, name: str, *, undo: bool = False) -> ReplicaStatus:
        """Take the cameras off a replica, or with ``undo`` let it have some again."""
        request = replicas_pb2.DrainReplicaRequest(name=name, undo=undo)
        return replicas.from_proto(self._call(self._replicas.Drain, request))

    def watch(self, cameras: Collection[str] = ()) -> Iterator[tuple[Answer, int]]:
        """Answers as they come, each with how many were missed before it; ends when the gateway stops.

        Subscribed when this returns; answers published from then on arrive.
        """
        try:
            grpc.channel_ready_future(self._channel).result(timeout=self._deadline_s)
        except grpc.FutureTimeoutError:
            raise self._nobody() from None
        call = self._results.Watch(results_pb2.WatchRequest(cameras=list(cameras)), metadata=self._metadata)
        call.initial_metadata()
        return self._answers(call)

    def _answers(self, call: Any) -> Iterator[tuple[Answer, int]]:
        try:
            for message in call:
                yield answer_from_proto(message), message.missed
        except grpc.RpcError as error:
            raise self._explain(error) from None
        finally:
            call.cancel()

    def _call(self, method: Callable[..., T], request: object) -> T:
        try:
            return method(request, timeout=self._deadline_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._explain(error) from None

    def _explain(self, error: Any) -> SightlineError:
        if is_ours(error):
            return to_error(error)
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return self._nobody()
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return UnavailableError(f"the gateway at {self.address} did not answer within {self._deadline_s:g} s")
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return UnavailableError(f"{self.address} answers, but it is no Sightline gateway")
        return to_error(error)

    def _nobody(self) -> UnavailableError:
        return UnavailableError(f"no Sightline gateway answers at {self.address}; start one with `sightline serve`")
