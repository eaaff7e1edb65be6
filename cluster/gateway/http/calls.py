"""In-process calls of the gateway's gRPC services, under the same guard (``InProcessCalls``)."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Any

from cluster.errors import UnavailableError
from cluster.gateway.guard import Guard
from cluster.security.roles import current_principal
from cluster.wire.status import as_refused

_AHEAD = 4
"""Buffered messages of a stream; beyond it the service waits for the reader."""


class InProcessCalls:
    """Calls ``services`` (by full name, like ``sightline.v1.Cameras``) as the current principal.

    ``guard``: checks every call as for gRPC; None: everybody may do everything.

    :meth:`unary` and :meth:`stream` raise the guard's errors, ``RefusedError`` with the service's code and message, and
    unexpected exceptions of the service unchanged.
    """

    def __init__(self, services: Mapping[str, Any], guard: Guard | None = None) -> None:
        self._services, self._guard = services, guard

    async def unary(self, method: str, request: Any) -> Any:
        """Make a unary call; ``method``: key of :data:`~cluster.security.roles.RULES`."""
        with self._serving(method, request):
            try:
                return await self._behavior(method)(request, _Context())
            except Exception as error:
                raise as_refused(error) from None

    async def stream(self, method: str, request: Any, *, timeout_s: float | None = None) -> AsyncGenerator[Any, None]:
        """Yield messages as they arrive; closing the generator ends the call. Checked at the first message."""
        with self._serving(method, request):
            async with aclosing(self.inner_stream(method, request, timeout_s=timeout_s)) as messages:
                async for message in messages:
                    yield message

    async def inner_stream(
        self,
        method: str,
        request: Any,
        *,
        timeout_s: float | None = None,
        on_begin: Callable[[], None] | None = None,
    ) -> AsyncGenerator[Any, None]:
        """As :meth:`stream`, for the gateway itself and unchecked. ``on_begin``: called at the initial metadata."""
        behavior = self._behavior(method)
        queue: asyncio.Queue[tuple[Any, Exception | None]] = asyncio.Queue(_AHEAD)

        async def run() -> None:
            try:
                await behavior(request, _Context(timeout_s, lambda message: queue.put((message, None)), on_begin))
            except Exception as error:
                await queue.put((None, error))
            else:
                await queue.put((None, None))

        task = asyncio.create_task(run(), name=method)
        try:
            while True:
                message, error = await queue.get()
                if error is not None:
                    raise as_refused(error) from None
                if message is None:
                    return
                yield message
        finally:
            task.cancel()
            await asyncio.wait([task], timeout=5.0)

    def check(self, method: str, request: Any) -> None:
        """Check and audit a call that is answered without the service."""
        if self._guard is not None:
            self._guard.check_request(current_principal(), method, request)

    def _serving(self, method: str, request: Any) -> AbstractContextManager[None]:
        return nullcontext() if self._guard is None else self._guard.serving(current_principal(), method, request)

    def _behavior(self, method: str) -> Callable[..., Awaitable[Any]]:
        _, service, name = method.split("/")
        if service not in self._services:
            raise UnavailableError(f"this gateway does not serve {service}")
        behavior: Callable[..., Awaitable[Any]] = getattr(self._services[service], name)
        return behavior


class _Context:
    """The parts of ``grpc.aio.ServicerContext`` that our services use."""

    def __init__(
        self,
        timeout_s: float | None = None,
        write: Callable[[Any], Awaitable[None]] | None = None,
        begin: Callable[[], None] | None = None,
    ) -> None:
        self._timeout_s, self._write, self._begin = timeout_s, write, begin

    async def write(self, message: Any) -> None:
        assert self._write is not None, "a unary call writes nothing"
        await self._write(message)

    async def send_initial_metadata(self, metadata: Iterable[Any]) -> None:  # noqa: ARG002
        if self._begin is not None:
            self._begin()

    def time_remaining(self) -> float | None:
        return self._timeout_s
