"""``GatewayClient``: the gateway's services as blocking methods with deadlines and one-sentence errors."""

import json
import re
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any, TypeVar

import grpc
from sightline.v1 import (
    cameras_pb2,
    cameras_pb2_grpc,
    incidents_pb2,
    incidents_pb2_grpc,
    memory_pb2,
    memory_pb2_grpc,
    pictures_pb2,
    pictures_pb2_grpc,
    replicas_pb2,
    replicas_pb2_grpc,
    results_pb2,
    results_pb2_grpc,
)

from cluster.alerts.clips.footage_store import Kind
from cluster.alerts.dispatcher import Outbox
from cluster.alerts.grpc_service import mutes_from_proto, outbox_from_proto, timeline_from_proto
from cluster.alerts.incident import AlertEvent, Incident, IncidentDetail, Mute, Verdict
from cluster.alerts.timeline_store import CameraTimeline
from cluster.control.cameras.managed import ManagedCamera, entry_from_json
from cluster.decoder.footage.pictures import Picture
from cluster.errors import RateLimitError, SightlineError, UnavailableError
from cluster.hosts import is_loopback
from cluster.redaction import SourceAddress
from cluster.types import Answer, CameraStatus, MemoryStatus, Question
from cluster.types.cameras import Discovery
from cluster.types.reports import DecoderNumbers, ReplicaStatus
from cluster.wire import memory_wire
from cluster.wire.channel import open_blocking_channel, split_address
from cluster.wire.convert import answer_from_proto, status_from_proto
from cluster.wire.mapping import from_message, to_message
from cluster.wire.status import is_ours, to_error
from cluster.wire.tls import ClientCredentials

T = TypeVar("T")
FILE_S = 300.0
PACE_S = 0.5
"""Pause of a call beyond the rate limit of its token, in seconds."""
_TLS_REASON = re.compile(r"OPENSSL_internal:(\w+)|Hostname Verification")
TEST_S = 35.0


class GatewayClient(AbstractContextManager["GatewayClient"]):
    """Blocking client of one gateway; a context manager.

    Every method raises the :class:`SightlineError` that the gateway reports (``UnknownCameraError``, ``ConfigError``,
    ...), or ``UnavailableError`` when no gateway answers within ``deadline_s``. ``credentials``: token and TLS; default
    none.
    """

    def __init__(self, address: str, *, deadline_s: float = 10.0, credentials: ClientCredentials | None = None) -> None:
        self.address = address
        self._deadline_s = deadline_s
        # Reading and deleting memories involves tiers that may be slow.
        self._slow_s = 3 * deadline_s
        # Number of the last answer to each set of cameras, and when it was first watched.
        self._watched: dict[frozenset[str], tuple[int, float]] = {}
        credentials = credentials or ClientCredentials()
        self._metadata = credentials.metadata(loopback=is_loopback(split_address(address)[0]))
        self._channel = open_blocking_channel(address, internal=False, tls=credentials.channel_credentials())
        self._cameras = cameras_pb2_grpc.CamerasStub(self._channel)
        self._replicas = replicas_pb2_grpc.ReplicasStub(self._channel)
        self._results = results_pb2_grpc.ResultsStub(self._channel)
        self._memory = memory_pb2_grpc.MemoryStub(self._channel)
        self._incidents = incidents_pb2_grpc.IncidentsStub(self._channel)
        self._pictures = pictures_pb2_grpc.PicturesStub(self._channel)

    def __exit__(self, *error: object) -> None:
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
        """``settings``: camera keys as in the configuration file; ``force``: add it even beyond capacity; ``manager``:
        its new manager (empty: ``cluster``); ``takeover``: take it over from its current manager."""
        request = cameras_pb2.AddCameraRequest(
            name=name,
            source=SourceAddress(source).reveal(),
            questions=[to_message(cameras_pb2.Question, question) for question in questions],
            settings_json=json.dumps(settings or {}),
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
        revision: str = "",
    ) -> CameraStatus:
        """Replace a camera's settings; see :meth:`camera_add`. Questions are a key of the settings. ``revision``: that
        of the settings these are based on. Raises ``NotReadyError``: they have changed since."""
        request = cameras_pb2.UpdateCameraRequest(
            name=name,
            source=SourceAddress(source).reveal(),
            settings_json=json.dumps(settings or {}),
            manager=manager,
            takeover=takeover,
            revision=revision,
        )
        return status_from_proto(self._call(self._cameras.Update, request))

    def camera_remove(self, name: str, *, manager: str = "", takeover: bool = False) -> None:
        request = cameras_pb2.RemoveCameraRequest(name=name, manager=manager, takeover=takeover)
        self._call(self._cameras.Remove, request, self._slow_s)

    def cameras_export(self, names: Collection[str] = (), *, secrets: bool = False) -> list[ManagedCamera]:
        """Cameras as configured, all if ``names`` is empty; sources are redacted without ``secrets``. Needs role
        ``admin``."""
        request = cameras_pb2.ExportCamerasRequest(names=sorted(names), secrets=secrets)
        reply = self._call(self._cameras.Export, request)
        return [
            ManagedCamera(entry=entry_from_json(each.entry_json), manager=each.manager, revision=each.revision)
            for each in reply.cameras
        ]

    def replicas_and_decoders(self) -> tuple[list[ReplicaStatus], DecoderNumbers | None]:
        """Every replica, and how many decoders run and are wanted; ``None`` if their number is fixed."""
        reply = self._call(self._replicas.List, replicas_pb2.ListReplicasRequest())
        decoders = from_message(DecoderNumbers, reply.decoders) if reply.HasField("decoders") else None
        return [from_message(ReplicaStatus, status) for status in reply.replicas], decoders

    def replica_drain(self, name: str, *, undo: bool = False) -> ReplicaStatus:
        """Move all cameras off a replica; ``undo``: let it accept cameras again."""
        request = replicas_pb2.DrainReplicaRequest(name=name, undo=undo)
        return from_message(ReplicaStatus, self._call(self._replicas.Drain, request))

    def watch(self, cameras: Collection[str] = ()) -> Iterator[tuple[Answer, int]]:
        """Answers as they arrive, each with how many were missed before it; ends when the gateway stops.

        The subscription is active when this returns. Called again, it continues after the last answer; after a restart
        of the gateway, the last minute's answers may be repeated.
        """
        watched = frozenset(cameras)
        after, began_s = self._watched.setdefault(watched, (0, time.monotonic()))
        request = results_pb2.WatchRequest(
            cameras=list(cameras), recent=after > 0, after=after, watching_s=time.monotonic() - began_s
        )
        call = self._results.Watch(request, metadata=self._metadata)
        call.initial_metadata()
        if call.done() and call.code() is not grpc.StatusCode.OK:
            raise self._explain(call)

        def read(message: results_pb2.Answer) -> tuple[Answer, int]:
            self._watched[watched] = (message.number, began_s)
            return answer_from_proto(message), message.missed

        return self._stream(call, read)

    def ask(
        self,
        camera: str,
        text: str,
        *,
        conversation: str = "",
        since_s: float = 0.0,
        max_new_tokens: int = 0,
        with_pictures: bool = False,
        timeout_s: float = 120.0,
    ) -> Generator[str | memory_wire.AskOutcome, None, None]:
        """Pieces of the answer as they are generated, then its result; closing the iterator cancels the answer.

        The first ``next()`` sends the question. See ``AskRequest`` for the arguments. Raises ``ConfigError``: not a
        question; ``UnavailableError``: the answer was not complete after ``timeout_s``."""
        # Checked first: a message cannot hold strings that are not UTF-8.
        request = memory_pb2.AskRequest(
            camera=memory_wire.check_camera(camera),
            text=memory_wire.check_question(text),
            conversation=memory_wire.check_name(conversation, "the conversation"),
            since_s=since_s,
            max_new_tokens=max_new_tokens,
            with_pictures=with_pictures,
        )
        call = self._memory.Ask(request, timeout=timeout_s, metadata=self._metadata)
        late = f"the answer was not complete after {timeout_s:g} s; allow more time, or ask about less"
        with closing(self._stream(call, lambda event: event, late)) as events:
            for event in events:
                if event.WhichOneof("event") == "result":
                    yield memory_wire.outcome_from_proto(event.result, camera)
                    return
                yield event.piece
        raise UnavailableError(f"the gateway at {self.address} ended the answer without a result")

    def ask_all(
        self,
        text: str,
        cameras: Collection[str] = (),
        *,
        since_s: float = 0.0,
        max_new_tokens: int = 0,
        with_pictures: bool = False,
        at_once: int = 0,
        deadline_s: float = 0.0,
    ) -> Generator[memory_wire.CameraOutcome | memory_wire.AskAllProgress, None, None]:
        """The cameras' answers as they arrive, with progress; closing the iterator cancels the question. See
        ``AskAllRequest``."""
        request = memory_pb2.AskAllRequest(
            text=memory_wire.check_question(text),
            cameras=list(cameras),
            since_s=since_s,
            max_new_tokens=max_new_tokens,
            with_pictures=with_pictures,
            at_once=at_once,
            deadline_s=deadline_s,
        )
        call = self._memory.AskAll(request, timeout=(deadline_s or 60.0) + self._deadline_s, metadata=self._metadata)
        yield from self._stream(call, memory_wire.all_from_proto)

    def forget(self, camera: str, before_s: float = 0.0) -> memory_wire.ForgottenCamera:
        """Delete memory, footage and incidents older than ``before_s`` seconds; 0: everything."""
        request = memory_pb2.ForgetRequest(camera=memory_wire.check_camera(camera), before_s=before_s)
        return from_message(memory_wire.ForgottenCamera, self._call(self._memory.Forget, request, self._slow_s))

    def memory(self, camera: str) -> MemoryStatus:
        request = memory_pb2.DescribeRequest(camera=memory_wire.check_camera(camera))
        return memory_wire.status_from_proto(self._call(self._memory.Describe, request, self._slow_s))

    def incidents(
        self,
        *,
        camera: str = "",
        subject: str = "",
        only_open: bool = False,
        within_s: float = 0.0,
        before: str = "",
        verdict: str = "",
        limit: int = 0,
    ) -> list[Incident]:
        """Incidents, newest first; see ``ListIncidentsRequest``."""
        request = incidents_pb2.ListIncidentsRequest(
            camera=camera,
            subject=subject,
            only_open=only_open,
            within_s=within_s,
            before=before,
            verdict=verdict,
            limit=limit,
        )
        return [from_message(Incident, each) for each in self._call(self._incidents.List, request).incidents]

    def incident(self, incident_id: str) -> IncidentDetail:
        request = incidents_pb2.GetIncidentRequest(id=incident_id)
        return from_message(IncidentDetail, self._call(self._incidents.Get, request))

    def acknowledge(self, incident_id: str, by: str) -> Incident:
        request = incidents_pb2.AcknowledgeRequest(id=incident_id, by=by)
        return from_message(Incident, self._call(self._incidents.Acknowledge, request))

    def review(self, incident_id: str, verdict: Verdict, by: str) -> Incident:
        """Confirm or reject an incident; an empty verdict withdraws the review."""
        request = incidents_pb2.ReviewRequest(id=incident_id, verdict=verdict, by=by)
        return from_message(Incident, self._call(self._incidents.Review, request))

    def timeline(self, camera: str, since_s: float, until_s: float = 0.0) -> CameraTimeline:
        """A camera's scores and states per minute; ``until_s`` 0: until now."""
        request = incidents_pb2.TimelineRequest(
            camera=memory_wire.check_camera(camera), since_s=since_s, until_s=until_s
        )
        return timeline_from_proto(self._call(self._incidents.Timeline, request, self._slow_s))

    def mute(self, camera: str, subject: str, for_s: float, by: str) -> list[Mute]:
        """Mute for ``for_s`` seconds; empty names match all. Returns the active mutes."""
        request = incidents_pb2.MuteRequest(camera=camera, subject=subject, for_s=for_s, by=by)
        return mutes_from_proto(self._call(self._incidents.Mute, request))

    def unmute(self, camera: str, subject: str) -> list[Mute]:
        request = incidents_pb2.UnmuteRequest(camera=camera, subject=subject)
        return mutes_from_proto(self._call(self._incidents.Unmute, request))

    def mutes(self) -> list[Mute]:
        return mutes_from_proto(self._call(self._incidents.ListMutes, incidents_pb2.ListMutesRequest()))

    def outbox(self, dead: int = 0) -> Outbox:
        """``dead``: maximum number of dead letters to list."""
        return outbox_from_proto(self._call(self._incidents.Outbox, incidents_pb2.OutboxRequest(dead=dead)))

    def resend(self, sink: str = "", key: str = "") -> int:
        """Requeue dead letters; returns how many."""
        return int(self._call(self._incidents.Resend, incidents_pb2.ResendRequest(sink=sink, key=key)).count)

    def test_sink(self, sink: str) -> None:
        """Send a test incident to one sink. Raises ``UnknownCameraError``: no such sink; ``UnavailableError``: the sink
        did not accept it."""
        self._call(self._incidents.TestSink, incidents_pb2.TestSinkRequest(sink=sink), deadline_s=60.0)

    def follow(self, cameras: Collection[str] = (), *, opened: bool = False) -> Iterator[tuple[AlertEvent, int]]:
        """Events as they arrive, each with how many were missed before it; ends when the gateway stops.

        ``opened``: begin with an event for each open incident.
        """
        request = incidents_pb2.FollowRequest(cameras=list(cameras), open=opened)
        call = self._incidents.Follow(request, metadata=self._metadata)
        yield from self._stream(call, lambda message: (from_message(AlertEvent, message), message.missed))

    def picture(self, camera: str, *, kept: bool = False, width: int = 0) -> Picture:
        """The newest picture; ``kept``: darken patches that the model does not see; ``width``: 0 is its own."""
        reply = self._call(self._pictures.Picture, pictures_pb2.PictureRequest(camera=camera, kept=kept, width=width))
        return from_message(Picture, reply)

    def footage(
        self, incident: str, kind: Kind = "clip", *, offset: int = 0, length: int = 0
    ) -> tuple[pictures_pb2.FootageAbout, Iterator[bytes]]:
        """The file's metadata, and its bytes from ``offset`` on, at most ``length`` (0: to the end)."""
        request = pictures_pb2.FootageRequest(incident=incident, kind=kind, offset=offset, length=length)
        call = self._pictures.Footage(request, timeout=FILE_S, metadata=self._metadata)
        try:
            about = next(iter(call)).about
        except grpc.RpcError as error:
            raise self._explain(error) from None
        except StopIteration:
            raise UnavailableError(f"{self.address} sent nothing") from None
        return about, self._data(call)

    def test_source(
        self, name: str, source: str | SourceAddress, settings: dict[str, Any] | None = None
    ) -> pictures_pb2.TestReply:
        """Open a source for a few seconds as the camera ``name`` would; see ``TestRequest``."""
        request = pictures_pb2.TestRequest(
            camera=memory_wire.check_camera(name),
            source=SourceAddress(source).reveal(),
            settings_json=json.dumps(settings or {}),
        )
        reply: pictures_pb2.TestReply = self._call(self._pictures.Test, request, TEST_S)
        return reply

    def discover(self, network: str, user: str = "", password: str = "") -> Generator[Discovery, None, None]:
        """Search a network for ONVIF cameras; closing the iterator stops the search. See ``DiscoverRequest``."""
        request = pictures_pb2.DiscoverRequest(network=network, user=user, password=password)
        call = self._pictures.Discover(request, timeout=FILE_S, metadata=self._metadata)
        yield from self._stream(call, lambda message: from_message(Discovery, message))

    def _data(self, call: Any) -> Iterator[bytes]:
        try:
            yield from self._stream(call, lambda part: bytes(part.data))
        except SightlineError as error:
            raise UnavailableError(f"the file is incomplete: {error}") from None

    def _stream(self, call: Any, read: Callable[[Any], T], late: str = "") -> Generator[T, None, None]:
        try:
            for message in call:
                yield read(message)
        except grpc.RpcError as error:
            raise self._explain(error, late) from None
        finally:
            call.cancel()

    def _call(self, method: Callable[..., T], request: object, deadline_s: float | None = None) -> T:
        limit_s = deadline_s or self._deadline_s
        ends_s = time.monotonic() + limit_s
        while True:
            try:
                return method(request, timeout=limit_s, metadata=self._metadata)
            except grpc.RpcError as error:
                explained = self._explain(error)
                # Commands about thousands of cameras make a call for each: more than a token may make in a second.
                if not isinstance(explained, RateLimitError) or time.monotonic() > ends_s:
                    raise explained from None
            time.sleep(PACE_S)

    def _explain(self, error: Any, late: str = "") -> SightlineError:
        if is_ours(error):
            return to_error(error)
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return self._unavailable(error.details() or "")
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return UnavailableError(
                late
                or f"the gateway at {self.address} did not answer in time: it hangs, or the process that it called "
                "(controller, alerting, decoder or replica) does; see their logs"
            )
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return UnavailableError(f"{self.address} answers, but is not a Sightline gateway")
        return to_error(error)

    def _unavailable(self, details: str = "") -> UnavailableError:
        if reason := _TLS_REASON.search(details):
            said = (reason[1] or "its certificate is for another name").replace("_", " ").lower()
            return UnavailableError(
                f"TLS with {self.address} fails: {said}; see SIGHTLINE_TLS, SIGHTLINE_CA, SIGHTLINE_CERT and "
                "SIGHTLINE_KEY in docs/operations.md"
            )
        if details.startswith("failed to connect") and details.endswith("Socket closed"):
            return UnavailableError(
                f"{self.address} closes connections; if it speaks TLS, set SIGHTLINE_CA or SIGHTLINE_TLS=1, and if it "
                "requires client certificates, SIGHTLINE_CERT and SIGHTLINE_KEY"
            )
        if is_loopback(split_address(self.address)[0]):
            return UnavailableError(f"no Sightline gateway answers at {self.address}; start one with `sightline serve`")
        return UnavailableError(
            f"no Sightline gateway answers at {self.address}; check that it runs there, listens on that port "
            "(gateway.host, gateway.port) and is not behind a firewall, and if it speaks TLS, set SIGHTLINE_CA"
        )
