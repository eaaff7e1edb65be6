"""Requests that are no HTTP: answered, and not written down as failures of ours, one exception each."""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError

from cluster.gateway.http.replies import reply

log = logging.getLogger(__name__)


class _Theirs(logging.Filter):
    """Lets everything through but what clients do to themselves; whoever wants to see that asks for DEBUG."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionError):
            return True
        log.debug("%s: %r", record.getMessage(), error)
        return False


server_log = logging.getLogger("cluster.gateway.http.aiohttp")
"""For aiohttp's server, which logs every request that it cannot read with a traceback, at ERROR."""
server_log.addFilter(_Theirs())


async def expect(request: web.Request) -> web.Response | None:
    """``Expect: 100-continue`` is answered; anything else is refused, and not quoted: it may be no text at all."""
    if request.version != HttpVersion11:
        return None
    if request.headers.get("Expect", "").lower() != "100-continue":
        return reply({"error": "of Expect only 100-continue is known"}, 417)
    writer: Any = request.writer
    await writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    # What is counted is the reply.
    writer.output_size = 0
    return None
