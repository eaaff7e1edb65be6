"""Network sources other than RTSP against servers of this process, and what redirects and roots may not reach."""

import contextlib
import functools
import hashlib
import http.server
import io
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import av
import pytest
from certificates import Authority
from codec_clips import GEOMETRY, encode, walk

from cluster.codec import FileSource, NetworkSource
from cluster.codec.network import RtpNumbers
from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.errors import SourceError

PICTURES = 60
SLOW_PICTURES, SLOW_S = 12, 0.2


def remux(clip: Path, target: Any, form: str, **options: str) -> None:
    with av.open(str(clip)) as source, av.open(target, "w", format=form, options=options) as out:
        stream = out.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                out.mux(packet)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("http")
    clip = encode(folder / "clip.mp4", walk(PICTURES))
    remux(clip, str(folder / "clip.ts"), "mpegts")
    remux(clip, str(folder / "live.m3u8"), "hls", hls_time="1", hls_list_size="0")
    pictures = encode(folder / "pictures.avi", walk(PICTURES), "mjpeg", format="yuvj420p")
    with av.open(str(pictures)) as source:
        parts = [bytes(packet) for packet in source.demux(video=0) if packet.size]
    head = b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%s\r\n"
    (folder / "camera").write_bytes(b"".join(head % (len(part), part) for part in parts))
    return folder


class Handler(http.server.SimpleHTTPRequestHandler):
    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Authorization"]))
        if self.path.startswith("/moved/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/moved"))
            self.end_headers()
        elif self.path == "/slow":
            self.send_response(200)
            self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
            self.end_headers()
            for part in Path(self.directory, "camera").read_bytes().split(b"--frame")[1 : SLOW_PICTURES + 1]:
                self.wfile.write(b"--frame" + part)
                time.sleep(SLOW_S)
        else:
            super().do_GET()

    def guess_type(self, path: Any) -> str:
        return "multipart/x-mixed-replace; boundary=frame" if path.endswith("camera") else super().guess_type(path)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web(folder: Path) -> Iterator[str]:
    Handler.asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://viewer:hunter22@127.0.0.1:{server.server_port}"
        server.shutdown()


def decoded(source: NetworkSource) -> int:
    """Pictures of a session that the server ends."""
    processor = CodecProcessor(GEOMETRY, CodecOptions(fps=4.0))
    processor.open(source.open())
    try:
        for packet in source.packets():
            processor.feed(packet)
    except SourceError:
        pass
    processor.drain()
    return processor.stats.frames_decoded


@pytest.mark.parametrize("path", ["clip.ts", "live.m3u8", "camera", "clip.mp4"])
def test_a_camera_over_http_plays(web: str, path: str) -> None:
    assert decoded(NetworkSource(f"{web}/{path}")) == PICTURES


def test_mjpeg_over_http_is_timed_as_it_arrives(web: str) -> None:
    source = NetworkSource(f"{web}/slow")
    source.open()
    times = []
    try:
        for packet in source.packets():
            times.append(packet.pts)
    except SourceError:
        pass
    assert len(times) == SLOW_PICTURES
    assert times == sorted(set(times))
    # The first few are read before the stream is known. A clock of 25 pictures a second would be at 0.44 s.
    assert times[-1] - times[0] > 1_000_000


def test_an_http_redirect_is_followed_only_when_allowed(web: str) -> None:
    with pytest.raises(SourceError, match=r"security\.follow_redirects"):
        NetworkSource(f"{web}/moved/clip.ts").open()
    assert [path for path, _ in Handler.asked] == ["/moved/clip.ts"]
    assert decoded(NetworkSource(f"{web}/moved/clip.ts", follow_redirects=True)) == PICTURES


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``ours.pem``, and certificates of it for this host and another, and of a stranger for this host."""
    folder = tmp_path_factory.mktemp("tls")
    ours = Authority()
    ours.write(folder / "ours.pem")
    ours.issue(folder, "right")
    ours.issue(folder, "elsewhere", host="elsewhere")
    Authority("stranger").issue(folder, "stranger")
    return folder


def over_tls(authorities: Path, name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authorities / f"{name}.crt", authorities / f"{name}.key")
    return context


@contextlib.contextmanager
def https(folder: Path, context: ssl.SSLContext) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"https://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_certificate_over_https_is_verified_by_a_given_authority(folder: Path, authorities: Path) -> None:
    ca_file = str(authorities / "ours.pem")
    with https(folder, over_tls(authorities, "right")) as web:
        for path in ("clip.ts", "clip.mp4", "camera"):
            assert decoded(NetworkSource(f"{web}/{path}", ca_file=ca_file)) == PICTURES
        # FFmpeg does not verify what a playlist names.
        with pytest.raises(SourceError, match="or it is HLS"):
            NetworkSource(f"{web}/live.m3u8", ca_file=ca_file).open()
        with pytest.raises(SourceError, match=r"holds no certificates .*source_options.ca_file"):
            NetworkSource(f"{web}/clip.ts", ca_file=str(folder / "clip.mp4")).open()
    for other in ("elsewhere", "stranger"):
        Handler.asked.clear()
        with https(folder, over_tls(authorities, other)) as web:
            with pytest.raises(SourceError, match=r"certificate is not for this host by source_options\.ca_file"):
                NetworkSource(f"{web}/clip.ts", ca_file=ca_file).open()
            assert not Handler.asked
            assert decoded(NetworkSource(f"{web}/clip.ts")) == PICTURES


def test_a_verified_camera_does_not_lead_out_of_tls(web: str, folder: Path, authorities: Path) -> None:
    class Away(Handler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", f"{web}/clip.ts")
            self.end_headers()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Away)
    server.socket = over_tls(authorities, "right").wrap_socket(server.socket, server_side=True)
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        source = f"https://127.0.0.1:{server.server_port}/clip.ts"
        with pytest.raises(SourceError, match="cannot be opened"):
            NetworkSource(source, ca_file=str(authorities / "ours.pem"), follow_redirects=True).open()
        assert not Handler.asked
        assert decoded(NetworkSource(source, follow_redirects=True)) == PICTURES
        server.shutdown()


@pytest.mark.parametrize("scheme", ["rtsps", "rtmps"])
@pytest.mark.parametrize("follow_redirects", [False, True])
def test_a_certificate_of_rtsps_and_rtmps_is_verified(scheme: str, follow_redirects: bool, authorities: Path) -> None:
    """A server whose certificate is not verified gets no request, and so no password."""

    def reached(name: str) -> tuple[bytes, str]:
        got: list[bytes] = []
        with socket.create_server(("127.0.0.1", 0)) as server:

            def run() -> None:
                context = over_tls(authorities, name)
                with contextlib.suppress(OSError), context.wrap_socket(server.accept()[0], server_side=True) as client:
                    got.append(client.recv(7))

            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            source = NetworkSource(
                f"{scheme}://127.0.0.1:{server.getsockname()[1]}/1",
                ca_file=str(authorities / "ours.pem"),
                follow_redirects=follow_redirects,
            )
            with pytest.raises(SourceError) as failure:
                source.open()
            thread.join(10)
        return b"".join(got), str(failure.value)

    first = b"OPTIONS" if scheme == "rtsps" else b"\3"
    assert reached("right")[0].startswith(first)
    for other in ("elsewhere", "stranger"):
        got, said = reached(other)
        assert not got
        assert "source_options.ca_file" in said


def test_a_camera_that_sends_sound_alone_is_tried_again(web: str, folder: Path) -> None:
    with av.open(str(folder / "sound.ts"), "w", format="mpegts") as out:
        stream = out.add_stream("mp2", rate=48_000, layout="mono")
        for index in range(100):
            frame = av.AudioFrame(format="s16", layout="mono", samples=1152)
            frame.sample_rate, frame.pts = 48_000, index * 1152
            frame.planes[0].update(bytes(2 * 1152))
            out.mux(stream.encode(frame))
    source = NetworkSource(f"{web}/sound.ts")
    with pytest.raises(SourceError, match="no video stream") as failure:
        source.open()
    assert failure.value.retryable


def test_a_playlist_opens_no_files_of_this_machine(web: str, folder: Path) -> None:
    (folder / "files.m3u8").write_text((folder / "live.m3u8").read_text().replace("live", f"file://{folder}/live"))
    with pytest.raises(SourceError):
        NetworkSource(f"{web}/files.m3u8", connect_timeout_s=2.0).open()
    for source in (FileSource(folder / "files.m3u8"), FileSource(folder / "live.m3u8")):
        with pytest.raises(SourceError, match="is not a video"):
            source.open()


def serve_once(answer: Callable[[bytes, bytes], bytes], asked: list[bytes]) -> int:
    """An RTSP server of one connection; ``answer`` takes a request and its CSeq line. Returns its port."""
    server = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with server, server.accept()[0] as client, client.makefile("rb") as lines:
            request: list[bytes] = []
            for line in lines:
                request.append(line.strip())
                if not request[-1]:
                    asked.append(b"\n".join(request))
                    client.sendall(answer(request[0], next(each for each in request if each.startswith(b"CSeq"))))
                    request = []

    threading.Thread(target=run, daemon=True).start()
    return int(server.getsockname()[1])


@pytest.mark.parametrize("status", [b"302 Moved", b"0301 x"])
@pytest.mark.parametrize("user", ["viewer:hunter22@", ""])
def test_an_rtsp_redirect_is_not_followed(status: bytes, user: str) -> None:
    asked: list[bytes] = []
    stolen: list[bytes] = []
    thief = serve_once(
        lambda _, cseq: b'RTSP/1.0 401 Who\r\n%s\r\nWWW-Authenticate: Basic realm="x"\r\n\r\n' % cseq, stolen
    )

    def redirect(request: bytes, cseq: bytes) -> bytes:
        if request.startswith(b"OPTIONS"):
            return b"RTSP/1.0 200 OK\r\n%s\r\n\r\n" % cseq
        # Padding that ends within the reply, as a smuggled message would.
        return b"$\0\0\3abcRTSP/1.0 %s\r\n%s\r\nLocation: rtsp://localhost:%d/1\r\n\r\n" % (status, cseq, thief)

    port = serve_once(redirect, asked)
    # Without credentials they may be followed where that is allowed; with them never.
    source = NetworkSource(f"rtsp://{user}127.0.0.1:{port}/1", follow_redirects=bool(user))
    with pytest.raises(SourceError, match="redirects to another address") as failure:
        source.open()
    assert failure.value.retryable
    assert len(asked) == 2
    assert not stolen


@pytest.mark.parametrize(
    ("status", "at", "said"),
    [
        (b"453 Not Enough Bandwidth", b"SETUP", "cannot be opened: it answers 453 Not Enough Bandwidth$"),
        (b"461 Unsupported Transport", b"SETUP", "461 Unsupported Transport .it sends over UDP only.$"),
        (b"503 Service Unavailable", b"PLAY", "it answers 503 Service Unavailable$"),
    ],
)
def test_what_an_rtsp_server_refuses_with_is_told(status: bytes, at: bytes, said: str) -> None:
    """As a recorder whose connections are all taken."""
    about = b"v=0\r\no=- 1 1 IN IP4 0.0.0.0\r\ns=x\r\nt=0 0\r\nm=video 0 RTP/AVP 26\r\na=control:1\r\n"

    def answer(request: bytes, cseq: bytes) -> bytes:
        if request.startswith(at):
            return b"RTSP/1.0 %s\r\n%s\r\n\r\n" % (status, cseq)
        more = b"Session: 1\r\nTransport: RTP/AVP/TCP;unicast;interleaved=0-1\r\n"
        body = about if request.startswith(b"DESCRIBE") else b""
        return b"RTSP/1.0 200 OK\r\n%s\r\n%sContent-Length: %d\r\n\r\n%s" % (cseq, more, len(body), body)

    with pytest.raises(SourceError, match=said):
        NetworkSource(f"rtsp://127.0.0.1:{serve_once(answer, [])}/1").open()


MD5 = b'WWW-Authenticate: Digest realm="x", nonce="n", algorithm=MD5\r\n'
SHA = b'WWW-Authenticate: Digest realm="x", nonce="n", algorithm="SHA-256"\r\n'


@pytest.mark.parametrize(
    ("offers", "said"),
    [(MD5, "RTSP 404"), (SHA + MD5, "RTSP 404"), (MD5 + SHA, "RTSP 404"), (SHA, "SHA digests only")],
)
def test_of_several_digests_md5_is_taken(offers: bytes, said: str) -> None:
    asked: list[bytes] = []

    def digest(text: str) -> str:
        return hashlib.md5(text.encode()).hexdigest()

    def answer(request: bytes, cseq: bytes) -> bytes:
        # RFC 2069 §2.1.2.
        url = request.split()[1].decode()
        right = digest(f"{digest('viewer:x:hunter22')}:n:{digest(f'DESCRIBE:{url}')}")
        if request.startswith(b"OPTIONS"):
            return b"RTSP/1.0 200 OK\r\n%s\r\n\r\n" % cseq
        if f'response="{right}"'.encode() in asked[-1]:
            return b"RTSP/1.0 404 No\r\n%s\r\n\r\n" % cseq
        return b"RTSP/1.0 401 Who\r\n%s\r\n%s\r\n" % (cseq, offers)

    with pytest.raises(SourceError, match=said) as failure:
        NetworkSource(f"rtsp://viewer:hunter22@127.0.0.1:{serve_once(answer, asked)}/1").open()
    assert failure.value.login == (said == "SHA digests only")


@pytest.mark.parametrize("channel", [0, 1])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_holes_in_rtp_numbers_are_found_whatever_lies_between(size: int, channel: int) -> None:
    def packet(after: int, number: int) -> bytes:
        # Reports, of types 200 to 204, have their length there.
        kind = 200 if after % 2 else 96
        return b"$" + struct.pack(">BHBBH", channel + after, 40, 0x80, kind, number % 2**16) + bytes(36)

    reply = b"RTSP/1.0 200 OK\r\nCSeq: 7\r\nContent-Length: 8\r\n\r\n$\r\n\r\n$$$"
    parts = [reply] + [packet(0, number) for number in range(65530, 65540)]
    # Another stream, its reports, a repeated packet, and what is missing: one and two.
    parts += [
        packet(2, 9),
        packet(3, 500),
        packet(3, 600),
        reply,
        packet(0, 65540),
        packet(0, 65540),
        packet(0, 65542),
        packet(0, 65545),
    ]
    numbers, data = RtpNumbers(), b"".join(parts)
    for at in range(0, len(data), size):
        numbers.read(data[at : at + size])
    assert numbers.missing == 3
    # The camera counts anew, and then leaves two out.
    for number in (20, 21, 22, 25):
        numbers.read(packet(0, number + 40000))
    assert numbers.missing == 3 + 1 + 2
    numbers.read(b"$" + bytes(3) + b"no RTP at all" + packet(0, 65600))
    assert numbers.missing == 3 + 1 + 2


def test_an_rtsp_redirect_without_credentials_can_be_allowed() -> None:
    asked: list[bytes] = []
    target = serve_once(lambda _, cseq: b"RTSP/1.0 404 No\r\n%s\r\n\r\n" % cseq, asked)
    port = serve_once(
        lambda _, cseq: b"RTSP/1.0 302 There\r\n%s\r\nLocation: rtsp://127.0.0.1:%d/2\r\n\r\n" % (cseq, target), []
    )
    with pytest.raises(SourceError, match=r"RTSP 404"):
        NetworkSource(f"rtsp://127.0.0.1:{port}/1", follow_redirects=True).open()
    assert asked


def amf(*values: str | float | dict[str, str] | None) -> bytes:
    """AMF0, as RTMP's commands are written."""
    encoded = b""
    for value in values:
        if isinstance(value, str):
            encoded += b"\2" + struct.pack(">H", len(value)) + value.encode()
        elif isinstance(value, dict):
            pairs = (struct.pack(">H", len(key)) + key.encode() + amf(each) for key, each in value.items())
            encoded += b"\3" + b"".join(pairs) + b"\0\0\11"
        else:
            encoded += b"\5" if value is None else b"\0" + struct.pack(">d", value)
    return encoded


def message(kind: int, body: bytes, time_ms: int = 0) -> bytes:
    """A whole RTMP message in one chunk."""
    return b"\3" + time_ms.to_bytes(3, "big") + len(body).to_bytes(3, "big") + bytes([kind]) + b"\1\0\0\0" + body


def serve_rtmp(clip: Path) -> int:
    """A server that plays ``clip`` to one client, in the part of RTMP that a player needs. Returns its port."""
    tags = io.BytesIO()
    remux(clip, tags, "flv")
    server = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with server, server.accept()[0] as client:
            hello = client.recv(1537, socket.MSG_WAITALL)
            client.sendall(b"\3" + bytes(1536) + hello[1:])
            client.recv(1536, socket.MSG_WAITALL)
            client.sendall(message(1, struct.pack(">I", 2**24 - 1)))
            got = b""
            for command, result in ((b"connect", {"code": "NetConnection.Connect.Success"}), (b"createStream", 1.0)):
                while (at := got.find(command)) < 0 or len(got) < at + len(command) + 9:
                    got += client.recv(4096)
                [number] = struct.unpack_from(">d", got, at + len(command) + 1)
                client.sendall(message(20, amf("_result", number, None, result)))
            while b"play" not in got:
                got += client.recv(4096)
            status = {"level": "status", "code": "NetStream.Play.Start"}
            client.sendall(message(20, amf("onStatus", 0.0, None, status)))
            tags.seek(13)
            while head := tags.read(11):
                body = tags.read(int.from_bytes(head[1:4], "big"))
                tags.read(4)
                client.sendall(message(head[0], body, int.from_bytes(head[4:7], "big")))

    threading.Thread(target=run, daemon=True).start()
    return int(server.getsockname()[1])


def test_a_camera_over_rtmp_plays(folder: Path) -> None:
    assert decoded(NetworkSource(f"rtmp://127.0.0.1:{serve_rtmp(folder / 'clip.mp4')}/live/gate")) == PICTURES


def test_a_usb_camera_that_is_missing_or_not_allowed_says_so(tmp_path: Path) -> None:
    missing = f"v4l2://{tmp_path}/video0"
    with pytest.raises(SourceError, match="cannot be opened: No such file or directory"):
        NetworkSource(missing, roots=[tmp_path]).open()
    with pytest.raises(SourceError, match="is not a device that is allowed") as failure:
        NetworkSource(missing, roots=[tmp_path / "other"]).open()
    assert not failure.value.retryable


def test_files_outside_their_roots_are_not_opened(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.mp4"
    link.symlink_to(folder / "clip.mp4")
    messages = set()
    for path in (folder / "clip.mp4", folder / "missing.mp4", tmp_path / ".." / folder.name / "clip.mp4", link):
        with pytest.raises(SourceError, match="is outside the folders") as failure:
            FileSource(path, roots=[tmp_path]).open()
        messages.add(str(failure.value).replace(str(path), ""))
    # It does not tell which of them exist.
    assert len(messages) == 1
    inside = FileSource(link, roots=[folder.parent])
    assert inside.open().codec == "h264"
    inside.close()
