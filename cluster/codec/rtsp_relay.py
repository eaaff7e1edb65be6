"""Loopback relay between FFmpeg and an RTSP server, which ends a session that the server redirects.

FFmpeg follows an RTSP redirect to any host, sends the password there, and has no option that forbids it.
"""

import contextlib
import re
import selectors
import socket
import ssl
import threading
from urllib.parse import SplitResult

PORTS = {"rtsp": 554, "rtsps": 322}
_CHUNK = 2**16
_LONGEST_HANDSHAKE = 2**18
_REDIRECT = re.compile(rb"\+?0*3\d\d(?!\d)")


class RtspRelay(threading.Thread):
    """Relays one TCP session. With ``rtsps`` it speaks TLS to the server, without verification, as FFmpeg does.

    ``redirected``: the server answered with a redirect, and the session was ended.
    """

    def __init__(self, address: SplitResult, timeout_s: float) -> None:
        """Connect to the server of ``address`` and listen for FFmpeg at :attr:`url`.

        Raises:
            OSError: the server cannot be reached within ``timeout_s``.
        """
        super().__init__(name=f"rtsp relay {address.hostname}", daemon=True)
        self.redirected = False
        port = address.port or PORTS[address.scheme]
        server = socket.create_connection((address.hostname or "", port), timeout=timeout_s)
        if address.scheme == "rtsps":
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            server = context.wrap_socket(server, server_hostname=address.hostname)
        server.settimeout(None)
        self._server = server
        # It listens until the session ends: nobody else can take the port to which FFmpeg sends the password.
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1)
        self._listener.settimeout(timeout_s)
        userinfo, at, _ = address.netloc.rpartition("@")
        here = f"{userinfo}{at}127.0.0.1:{self._listener.getsockname()[1]}"
        self.url = address._replace(scheme="rtsp", netloc=here).geturl()

    def close(self) -> None:
        """End the session, from any thread."""
        for each in (self._server, self._listener):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        with contextlib.suppress(OSError), self._server, self._listener:
            client, _ = self._listener.accept()
            with client:
                self._relay(client)

    def _relay(self, client: socket.socket) -> None:
        replies = b""
        # Redirects of later replies are not followed.
        playing = False
        with selectors.DefaultSelector() as ready:
            ready.register(client, selectors.EVENT_READ)
            ready.register(self._server, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    if key.fileobj is client:
                        data = client.recv(_CHUNK)
                        playing = playing or data.startswith(b"PLAY ")
                        self._server.sendall(data)
                    else:
                        data = self._receive()
                        if not playing:
                            replies += data
                            self.redirected = _redirects(replies)
                            if self.redirected or len(replies) > _LONGEST_HANDSHAKE:
                                return
                        client.sendall(data)
                    if not data:
                        return

    def _receive(self) -> bytes:
        """What the server sent; of TLS also what is decrypted already, of which the socket tells nothing."""
        data = self._server.recv(_CHUNK)
        while isinstance(self._server, ssl.SSLSocket) and self._server.pending():
            data += self._server.recv(_CHUNK)
        return data


def _redirects(replies: bytes) -> bool:
    """Whether a status line says 3xx, wherever it stands: message borders are the sender's claim."""
    statuses = (reply.split(None, 2)[1:2] for reply in replies.split(b"RTSP/")[1:])
    return any(_REDIRECT.match(status) for found in statuses for status in found)
