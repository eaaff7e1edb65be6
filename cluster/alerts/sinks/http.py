"""HTTP client of the sinks: posts JSON with a deadline and maps replies to delivery results."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cluster.alerts.sinks import DeliveryError
from cluster.errors import ConfigError
from cluster.redaction import redact

if TYPE_CHECKING:
    import aiohttp

_SAID = 200
"""Characters of an error's body that are kept."""


def check_url(url: str) -> str:
    """Return an http(s) address unchanged.

    Raises:
        ConfigError: anything else.
    """
    try:
        parts = urlsplit(url)
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError:
        parts, port_is_fine = urlsplit(""), False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_fine:
        raise ConfigError(f"url must be an address like https://host/path, not {redact(url)!r}")
    return url


class HttpPoster:
    """Connection pool to one address. ``post`` returns once the reply confirms the alert.

    408, 425, 429, 5xx and connection errors are retryable; any other reply but 2xx is final: the receiver understood
    and refused the alert. Redirects are not followed, so that a signed alert goes nowhere else.
    """

    def __init__(self, url: str, timeout_s: float, *, connections: int = 16) -> None:
        self._url = url
        self._shown = redact(url)
        self._timeout_s = timeout_s
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def post(self, body: bytes, headers: Mapping[str, str]) -> None:
        """POST one body. Raises ``DeliveryError``."""
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections),
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            )
        try:
            async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as reply:
                if 200 <= reply.status < 300:
                    return
                said = (await reply.content.read(_SAID)).decode("utf-8", "replace").split("\n")[0].strip()
        except TimeoutError:
            raise DeliveryError(f"{self._shown} did not answer within {self._timeout_s:g} s", retryable=True) from None
        except (aiohttp.ClientError, OSError) as error:
            raise DeliveryError(
                f"{self._shown}: {redact(str(error)) or type(error).__name__}", retryable=True
            ) from None
        retryable = reply.status in (408, 425, 429) or reply.status >= 500
        raise DeliveryError(f"{self._shown} answered {reply.status}{': ' + said if said else ''}", retryable=retryable)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
            # The transports of closed connections end in the next iterations of the loop.
            await asyncio.sleep(0)
