"""``Results``: answers fan out to whoever watches, through bounded queues where the newest answers win."""

import grpc.aio
from sightline.v1 import results_pb2, results_pb2_grpc

from cluster.errors import SightlineError
from cluster.security.roles import current_principal
from cluster.types import Answer
from cluster.wire.convert import answer_to_proto
from cluster.wire.fan_out import FanOut
from cluster.wire.status import abort

SERVICE = "sightline.v1.Results"


class AnswerHub(FanOut[Answer]):
    """Answers by their cameras."""

    def __init__(self, *, limit: int = 256, max_subscribers: int = 1024, recent: int = 0) -> None:
        super().__init__(
            lambda answer: answer.stream, "watch", limit=limit, max_subscribers=max_subscribers, recent=recent
        )


class ResultsServicer(results_pb2_grpc.ResultsServicer):
    """``Watch`` over a hub. A client that reads slowly loses the oldest answers; only its own queue fills."""

    def __init__(self, hub: AnswerHub) -> None:
        self._hub = hub

    async def Watch(self, request: results_pb2.WatchRequest, context: grpc.aio.ServicerContext) -> None:  # noqa: N802
        """See protos/sightline/v1/results.proto; initial metadata tells the client that it is subscribed."""
        try:
            with self._hub.subscribe(
                request.cameras, seen=current_principal().sees, recent=request.recent
            ) as subscription:
                await context.send_initial_metadata(())
                async for answer, missed in subscription:
                    await context.write(answer_to_proto(answer, missed))
        except SightlineError as error:
            await abort(context, error)
