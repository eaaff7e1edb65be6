"""``PicturesClient``: pictures of cameras and footage of incidents from a gateway, blocking."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import grpc
from sightline.v1 import pictures_pb2, pictures_pb2_grpc

from cluster.alerts.clips.store import Deleted, Kind
from cluster.client import GatewayClient
from cluster.decoder.footage.pictures import Picture
from cluster.errors import SightlineError, UnavailableError
from cluster.wire.credentials import ClientCredentials

FILE_S = 300.0


@dataclass(frozen=True, slots=True)
class About:
    """What a file of an incident is; ``size``: bytes; ``note``: what is missing in it, empty when it is whole."""

    camera: str
    media_type: str
    size: int
    etag: str
    note: str


class PicturesClient(GatewayClient):
    """A :class:`~cluster.client.GatewayClient` for pictures and clips; raises what that raises."""

    def __init__(self, address: str, *, deadline_s: float = 10.0, credentials: ClientCredentials | None = None) -> None:
        super().__init__(address, deadline_s=deadline_s, credentials=credentials)
        self._pictures = pictures_pb2_grpc.PicturesStub(self._channel)

    def picture(self, camera: str, *, kept: bool = False, width: int = 0) -> Picture:
        """The newest picture; ``kept``: patches that the model does not see are dark; ``width``: 0 is its own."""
        reply = self._call(self._pictures.Picture, pictures_pb2.PictureRequest(camera=camera, kept=kept, width=width))
        return Picture(reply.jpeg, reply.etag, reply.pts, reply.age_s, reply.width, reply.height)

    def footage(
        self, incident: str, kind: Kind = "clip", *, offset: int = 0, length: int = 0
    ) -> tuple[About, Iterator[bytes]]:
        """What the file is, and its bytes: from ``offset`` on, at most ``length`` (0: to the end)."""
        request = pictures_pb2.FootageRequest(incident=incident, kind=kind, offset=offset, length=length)
        call = self._pictures.Footage(request, timeout=FILE_S, metadata=self._metadata)
        try:
            about = next(iter(call)).about
        except grpc.RpcError as error:
            raise self._explain(error) from None
        except StopIteration:
            raise UnavailableError(f"{self.address} sent nothing") from None
        return About(about.camera, about.media_type, about.size, about.etag, about.note), self._data(call)

    def forget_footage(self, camera: str) -> Deleted:
        """Delete all snapshots and clips of a camera."""
        reply = self._call(self._pictures.Forget, pictures_pb2.ForgetFootageRequest(camera=camera))
        return Deleted(reply.files, reply.bytes)

    def _data(self, call: grpc.Call) -> Iterator[bytes]:
        try:
            for part in call:
                yield part.data
        except grpc.RpcError as error:
            raise _broken(self._explain(error)) from None
        finally:
            call.cancel()


def _broken(error: SightlineError) -> SightlineError:
    return UnavailableError(f"the file broke off: {error}")
