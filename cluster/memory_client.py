"""``MemoryClient``: asking a gateway about the past, blocking."""

from __future__ import annotations

from collections.abc import Generator

import grpc
from sightline.v1 import memory_pb2, memory_pb2_grpc

from cluster.client import GatewayClient
from cluster.errors import UnavailableError
from cluster.types import MemoryStatus
from cluster.wire.credentials import ClientCredentials
from cluster.wire.memory_wire import (
    ForgottenCamera,
    Told,
    check_camera,
    check_name,
    check_question,
    forgotten_from_proto,
    status_from_proto,
    told_from_proto,
)
from cluster.wire.status import is_ours


class MemoryClient(GatewayClient):
    """A :class:`~cluster.client.GatewayClient` for cameras' memories; raises what that raises."""

    def __init__(
        self,
        address: str,
        *,
        deadline_s: float = 30.0,
        credentials: ClientCredentials | None = None,
    ) -> None:
        super().__init__(address, deadline_s=deadline_s, credentials=credentials)
        self._memory = memory_pb2_grpc.MemoryStub(self._channel)

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
    ) -> Generator[str | Told, None, None]:
        """Pieces of the answer as they come, then how it came about; closing the iterator stops the answer.

        Asked when the first piece is. See ``AskRequest`` for the arguments.

        Raises:
            ConfigError: not a question.
            UnavailableError: the answer was not complete after ``timeout_s``.
        """
        # Before it goes into a message: what is no text does not fit into one.
        request = memory_pb2.AskRequest(
            camera=check_camera(camera),
            text=check_question(text),
            conversation=check_name(conversation, "the conversation"),
            since_s=since_s,
            max_new_tokens=max_new_tokens,
            with_pictures=with_pictures,
        )
        call = self._memory.Ask(request, timeout=timeout_s, metadata=self._metadata)
        try:
            for event in call:
                if event.WhichOneof("event") == "result":
                    yield told_from_proto(event.result, camera)
                    return
                yield event.piece
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not is_ours(error):
                raise UnavailableError(
                    f"the answer was not complete after {timeout_s:g} s; allow more time, or ask about less"
                ) from None
            raise self._explain(error) from None
        finally:
            call.cancel()
        raise UnavailableError(f"the gateway at {self.address} ended the answer without a result")

    def forget(self, camera: str, before_s: float = 0.0) -> ForgottenCamera:
        """Forget what was seen more than ``before_s`` seconds before the newest frame, and what was kept of incidents
        more than so many seconds ago; 0 forgets everything."""
        request = memory_pb2.ForgetRequest(camera=check_camera(camera), before_s=before_s)
        return forgotten_from_proto(self._call(self._memory.Forget, request))

    def memory(self, camera: str) -> MemoryStatus:
        """What the camera remembers."""
        request = memory_pb2.DescribeRequest(camera=check_camera(camera))
        return status_from_proto(self._call(self._memory.Describe, request))
