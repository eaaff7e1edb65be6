"""``IncidentsClient``: asking a gateway about incidents, blocking."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import grpc
from sightline.v1 import incidents_pb2, incidents_pb2_grpc

from cluster.alerts.incident import AlertEvent, Incident, Mute
from cluster.alerts.service import Detail, Outbox
from cluster.alerts.wire import (
    detail_from_proto,
    event_from_proto,
    incident_from_proto,
    mutes_from_proto,
    outbox_from_proto,
)
from cluster.client import GatewayClient
from cluster.wire.credentials import ClientCredentials


class IncidentsClient(GatewayClient):
    """A :class:`~cluster.client.GatewayClient` for incidents; raises what that raises."""

    def __init__(self, address: str, *, deadline_s: float = 10.0, credentials: ClientCredentials | None = None) -> None:
        super().__init__(address, deadline_s=deadline_s, credentials=credentials)
        self._incidents = incidents_pb2_grpc.IncidentsStub(self._channel)

    def incidents(
        self, *, camera: str = "", subject: str = "", only_open: bool = False, since_s: float = 0.0, limit: int = 0
    ) -> list[Incident]:
        """Newest first; see ``ListIncidentsRequest``."""
        request = incidents_pb2.ListIncidentsRequest(
            camera=camera, subject=subject, only_open=only_open, since_s=since_s, limit=limit
        )
        return [incident_from_proto(each) for each in self._call(self._incidents.List, request).incidents]

    def incident(self, incident_id: str) -> Detail:
        request = incidents_pb2.GetIncidentRequest(id=incident_id)
        return detail_from_proto(self._call(self._incidents.Get, request))

    def acknowledge(self, incident_id: str, by: str) -> Incident:
        request = incidents_pb2.AcknowledgeRequest(id=incident_id, by=by)
        return incident_from_proto(self._call(self._incidents.Acknowledge, request))

    def mute(self, camera: str, subject: str, for_s: float, by: str) -> list[Mute]:
        """Empty names stand for all; returns the mutes that hold."""
        request = incidents_pb2.MuteRequest(camera=camera, subject=subject, for_s=for_s, by=by)
        return mutes_from_proto(self._call(self._incidents.Mute, request))

    def unmute(self, camera: str, subject: str) -> list[Mute]:
        request = incidents_pb2.UnmuteRequest(camera=camera, subject=subject)
        return mutes_from_proto(self._call(self._incidents.Unmute, request))

    def mutes(self) -> list[Mute]:
        return mutes_from_proto(self._call(self._incidents.ListMutes, incidents_pb2.ListMutesRequest()))

    def outbox(self, dead: int = 0) -> Outbox:
        """``dead``: most dead letters to list."""
        return outbox_from_proto(self._call(self._incidents.Outbox, incidents_pb2.OutboxRequest(dead=dead)))

    def resend(self, sink: str = "", key: str = "") -> int:
        """Try dead letters again; how many."""
        return int(self._call(self._incidents.Resend, incidents_pb2.ResendRequest(sink=sink, key=key)).count)

    def follow(self, cameras: Collection[str] = (), *, opened: bool = False) -> Iterator[tuple[AlertEvent, int]]:
        """Events as they come, each with how many were missed before it; ends when the gateway stops.

        ``opened``: first one for each incident that is open.
        """
        request = incidents_pb2.FollowRequest(cameras=list(cameras), open=opened)
        call: Any = self._incidents.Follow(request, metadata=self._metadata)
        try:
            for message in call:
                yield event_from_proto(message), message.missed
        except grpc.RpcError as error:
            raise self._explain(error) from None
        finally:
            call.cancel()
