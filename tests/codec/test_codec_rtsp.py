"""Against a real server: GStreamer's, in a process of its own that can be killed and frozen."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from codec_clips import FPS, GEOMETRY, encode, process, read, seconds, walk
from rtsp_server import RtspServer

from cluster.codec import Backoff, CameraState, NetworkSource, SourceStatus, SourceSupervisor
from cluster.codec.processor import CodecOptions, CodecProcessor
from cluster.errors import SourceError
from cluster.lab.bench.processes import free_port
from cluster.types import SampledPicture

QUICK = Backoff(first_s=0.05, longest_s=0.2)
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rtsp")
    return {
        "/short": encode(folder / "short.mp4", walk(30)),
        "/b_frames": encode(folder / "b.mp4", walk(30), b_frames=2),
        "/hevc": encode(folder / "hevc.mp4", walk(30), "libx265"),
        "/pieces": encode(
            folder / "hevc_pieces.mp4",
            walk(60, 384, 256),
            "libx265",
            options={"x265-params": "crf=12:wpp=0:log-level=error"},
        ),
        "/slow": encode(folder / "slow.mp4", walk(5), fps=1, times=range(0, 10_000, 2000)),
        # Longer than any test lasts.
        "/long": encode(folder / "long.mp4", walk(1200)),
    }


@pytest.fixture
def server(videos: dict[str, Path]) -> Iterator[RtspServer]:
    with RtspServer(videos) as running:
        yield running


class Camera:
    """A supervised source and its processor in a thread, as a decoder process runs them."""

    def __init__(self, source: NetworkSource) -> None:
        self.processor = CodecProcessor(GEOMETRY, CodecOptions(fps=FPS))
        self.supervisor = SourceSupervisor(source, QUICK)
        self.told: list[SourceStatus] = []
        self.samples: list[SampledPicture] = []
        self._changed = threading.Condition()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.supervisor.run(self.processor.open, self._feed, self._tell)

    def _feed(self, packet: object) -> None:
        samples = self.processor.feed(packet)
        with self._changed:
            self.samples += samples
            self._changed.notify_all()

    def _tell(self, status: SourceStatus) -> None:
        with self._changed:
            self.told.append(status)
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE_S), f"{what}; told {self.told}"

    def wait_for(self, state: CameraState, reason: str = "", after: int = 0) -> SourceStatus:
        def found() -> list[SourceStatus]:
            return [each for each in self.told[after:] if each.state is state and reason in each.reason]

        self.wait(lambda: bool(found()), f"never {state} with {reason!r}")
        return found()[0]

    def wait_for_samples(self, more: int = 5) -> None:
        before = len(self.samples)
        self.wait(lambda: len(self.samples) >= before + more, "no samples")

    def stop(self) -> None:
        self.supervisor.stop()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@pytest.mark.parametrize("mount", ["/short", "/b_frames", "/hevc"])
def test_a_camera_plays(server: RtspServer, mount: str) -> None:
    source = NetworkSource(server.url(mount))
    header = source.open()
    assert header.codec == ("hevc" if mount == "/hevc" else "h264")
    processor = CodecProcessor(GEOMETRY, CodecOptions(fps=FPS))
    processor.open(header)
    packets = list(source.packets())
    samples = [sample for packet in packets for sample in processor.feed(packet)] + processor.drain()
    assert [packet.sequence for packet in packets] == list(range(30))
    # The first packet of a session may have no time yet.
    assert 29 <= len(samples) <= 30
    assert all(
        seconds(after) - seconds(before) == pytest.approx(1 / FPS, abs=0.005)
        for before, after in itertools.pairwise(samples)
    )
    assert not processor.stats.resyncs
    assert processor.stats.frames_decoded == 30
    assert not source.ended


class LeavingOut(threading.Thread):
    """Relays an RTSP session of HEVC without one piece of a picture, as a camera whose line is full."""

    def __init__(self, port: int, piece: int) -> None:
        super().__init__(daemon=True)
        self._port, self._piece = port, piece
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"rtsp://127.0.0.1:{self._listener.getsockname()[1]}"

    def run(self) -> None:
        server, ended = socket.create_connection(("127.0.0.1", self._port)), contextlib.suppress(OSError)
        with ended, self._listener, self._listener.accept()[0] as client, server, server.makefile("rb") as file:
            threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
            while first := file.read(1):
                if first == b"$":
                    head = file.read(3)
                    data = file.read(int.from_bytes(head[1:], "big"))
                    # A fragmentation unit, neither the first nor the last of its picture (RFC 7798 §4.4.3).
                    self._piece -= head[0] == 0 and data[12] >> 1 & 0x3F == 49 and not data[14] & 0xC0
                    first = b"" if self._piece == 0 else first + head + data
                    self._piece -= self._piece == 0
                client.sendall(first)

    @staticmethod
    def _forward(client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(4096):
                server.sendall(data)


def test_a_piece_of_a_picture_that_a_camera_left_out_is_a_gap(server: RtspServer, videos: dict[str, Path]) -> None:
    """HEVC without it is decoded to whatever comes out, up to the next keyframe, and nothing says so."""
    _, whole = process(*read(videos["/pieces"]), fps=FPS)
    relay = LeavingOut(server.port, piece=100)
    relay.start()
    source = NetworkSource(relay.url + "/pieces")
    _, samples = process(source.open(), source.packets(), fps=FPS)
    assert 20 < len(samples) < 60
    assert [sample.gap for sample in samples].count(True) == 1
    start = round(seconds(samples[-1]) * FPS) - 59
    for sample in samples:
        right = whole[round(seconds(sample) * FPS) - start]
        assert abs(sample.luma.astype(int) - right.luma).max() < 40


def test_a_camera_with_a_picture_every_two_seconds_is_open_at_its_second(server: RtspServer) -> None:
    """A picture is whole when the next one begins: after 2 s. Two more for the decoding time would be 6 s."""
    source = NetworkSource(server.url("/slow"), connect_timeout_s=PATIENCE_S)
    began_s = time.monotonic()
    assert source.open().width == 192
    packets = source.packets()
    assert next(packets).keyframe
    assert time.monotonic() - began_s < 5.0
    source.close()


def test_a_wrong_path_says_so(server: RtspServer) -> None:
    with pytest.raises(SourceError, match=r"has no stream at this path \(RTSP 404\)") as failure:
        NetworkSource(server.url("/nobody")).open()
    assert failure.value.retryable


def test_a_refused_connection_says_so_without_the_password() -> None:
    port = free_port()
    with pytest.raises(SourceError, match="refuses the connection") as failure:
        NetworkSource(f"rtsp://admin:secret@127.0.0.1:{port}/1").open()
    assert failure.value.retryable
    assert "secret" not in str(failure.value)


def test_a_silent_host_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(SourceError, match=r"did not answer within 0\.5 s") as failure:
            NetworkSource(f"rtsp://127.0.0.1:{port}/1", connect_timeout_s=0.5).open()
    assert failure.value.retryable


def test_a_server_that_dies_is_found_again(server: RtspServer) -> None:
    camera = Camera(NetworkSource(server.url("/long")))
    camera.wait_for_samples()
    server.kill()
    lost = camera.wait_for(CameraState.BACKOFF)
    assert lost.reason
    assert lost.retry_in_s > 0
    camera.wait_for(CameraState.BACKOFF, "refuses the connection")
    seen, taken = len(camera.told), len(camera.samples)
    server.start()
    camera.wait_for(CameraState.RUNNING, after=seen)
    camera.wait_for_samples()
    camera.stop()
    assert camera.samples[taken].fresh
    assert camera.samples[taken].anchor
    assert camera.told[-1] == SourceStatus(CameraState.ENDED, "stopped")


def test_a_server_that_freezes_is_left_and_found_again(server: RtspServer) -> None:
    camera = Camera(NetworkSource(server.url("/long"), connect_timeout_s=0.7, frozen_timeout_s=0.7))
    camera.wait_for_samples()
    server.freeze()
    frozen = camera.wait_for(CameraState.BACKOFF, "is frozen: no data for 0.7 s")
    assert frozen.retry_in_s > 0
    camera.wait_for(CameraState.BACKOFF, "did not answer within 0.7 s")
    seen, taken = len(camera.told), len(camera.samples)
    server.thaw()
    camera.wait_for(CameraState.RUNNING, after=seen)
    camera.wait(lambda: len(camera.samples) >= taken + 5, "no samples after the thaw")
    camera.stop()
    assert camera.samples[taken].fresh


def test_stopping_does_not_wait_for_a_frozen_server(server: RtspServer) -> None:
    camera = Camera(NetworkSource(server.url("/long"), frozen_timeout_s=3600.0))
    camera.wait_for_samples()
    server.freeze()
    camera.stop()
    assert camera.told[-1].reason == "stopped"


def test_a_session_is_torn_down_when_a_camera_is_stopped(server: RtspServer) -> None:
    """Cameras keep a session that is only disconnected, of the few they allow, until it times out."""
    source = NetworkSource(server.url("/long"))
    camera = Camera(source)
    camera.wait_for_samples()
    camera.stop()
    assert source._session is not None
    assert not source._session.is_alive()
    assert server.tears_down(within_s=PATIENCE_S)


def test_stopping_does_not_wait_for_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        camera = Camera(NetworkSource(f"rtsp://127.0.0.1:{silent.getsockname()[1]}/1", connect_timeout_s=3600.0))
        camera.wait_for(CameraState.CONNECTING)
        camera.stop()
    assert camera.told[-1].reason == "stopped"


def test_a_slow_decoder_loses_whole_groups_and_counts_them(server: RtspServer) -> None:
    source = NetworkSource(server.url("/short"), max_packets=8)
    source.open()
    packets = source.packets()
    taken = [next(packets)]
    session = source._session
    assert session is not None
    # Nothing is taken until the server has sent all.
    session.join(PATIENCE_S)
    taken += packets
    assert len(taken) + session.queue.dropped == 30
    assert session.queue.dropped > 0
    for before, after in itertools.pairwise(taken):
        assert after.sequence == before.sequence + 1 or after.keyframe


def test_a_machine_without_gstreamer_is_told_what_to_install(
    videos: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rtsp_server

    (tmp_path / "gi.py").write_text("raise ImportError('no gi')")
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {rtsp_server.SYSTEM_PYTHON} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr(rtsp_server, "SYSTEM_PYTHON", str(script))
    with pytest.raises(RuntimeError, match=r"gir1\.2-gst-rtsp-server-1\.0"):
        RtspServer(videos).start()
