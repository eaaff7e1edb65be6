"""The onvif-zeep-async client confined to one address: no redirects, bounded replies."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from onvif import ONVIFCamera

from cluster.errors import SourceError

MOST_BYTES = 2**20
"""Size limit of one reply."""


class _BoundedResponse(aiohttp.ClientResponse):
    """Response of at most :data:`MOST_BYTES`."""

    async def read(self) -> bytes:
        """Read the body. Raises ``SourceError`` if it is too long, or the login was refused."""
        if self.status == 401:
            raise SourceError("it refuses this user or password", retryable=False, login=True)
        body = bytearray()
        async for chunk in self.content.iter_any():
            body += chunk
            if len(body) > MOST_BYTES:
                raise SourceError(f"a reply is longer than {MOST_BYTES} bytes", retryable=False)
        return bytes(body)


class _ConfinedCamera(ONVIFCamera):
    """Reaches every service at the initial address (``nat_override``), through ``session``."""

    session: aiohttp.ClientSession

    async def create_onvif_service(self, *args: Any, **kwargs: Any) -> Any:
        """Create a service that uses ``session``, not the library's own session, which follows redirects."""
        service = await super().create_onvif_service(*args, **kwargs)
        service.transport.session = self.session
        return service


async def _refuse_redirect(*_: Any) -> None:
    raise SourceError("it redirects to another address, which is not followed", retryable=False)


@asynccontextmanager
async def confined_device(url: str, user: str, password: str) -> AsyncGenerator[Any, None]:
    """A device at ``url`` (scheme, address and port) with its services resolved; anonymous without ``user``. Password
    digests are WS-UsernameToken's, by the device's clock, and those of HTTP where a device asks for them."""
    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_refuse_redirect)
    parts = urlsplit(url)
    host = f"{parts.scheme}://{parts.hostname}" if parts.scheme == "https" else str(parts.hostname)
    device = _ConfinedCamera(
        host, parts.port or 80, user or None, password or None, adjust_time=True, nat_override=True
    )
    digest = (aiohttp.DigestAuthMiddleware(user, password),) if user else ()
    try:
        # Cameras have self-signed certificates.
        connector = aiohttp.TCPConnector(ssl=False)
        async with aiohttp.ClientSession(
            connector=connector, response_class=_BoundedResponse, trace_configs=[trace], middlewares=digest
        ) as device.session:
            await device.update_xaddrs()
            yield device
    finally:
        await device.close()
