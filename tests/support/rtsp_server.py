"""A real RTSP server (GStreamer's) for tests: run as a script by the system's Python, imported for ``RtspServer``.

    /usr/bin/python3 tests/support/rtsp_server.py --port 8554 /street=street.mp4

serves each file once per client, at its own pace, over TCP or UDP. H.264 and HEVC in MP4.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

SYSTEM_PYTHON = "/usr/bin/python3"
PACKAGES = (
    "gir1.2-gst-rtsp-server-1.0 python3-gi gstreamer1.0-plugins-base gstreamer1.0-plugins-good gstreamer1.0-plugins-bad"
)
MISSING = (
    f"tests need GStreamer's RTSP server for {SYSTEM_PYTHON}: install the Debian packages {PACKAGES} (make setup does)"
)
_UNUSABLE = 3
_START_S = 20.0


class RtspServer:
    """The server as a child process on a loopback port; a context manager.

    ``mounts``: path (with leading slash) -> video file. ``port`` 0 takes a free one and keeps it over restarts.
    """

    def __init__(self, mounts: dict[str, Path], port: int = 0) -> None:
        self.mounts = mounts
        self.port = port
        self._process: subprocess.Popen[str] | None = None

    def url(self, mount: str) -> str:
        return f"rtsp://127.0.0.1:{self.port}{mount}"

    def start(self) -> None:
        """Returns when the port listens; fails with the packages to install when GStreamer is missing."""
        command = [SYSTEM_PYTHON, str(Path(__file__).resolve()), "--port", str(self.port)]
        command += [f"{mount}={path}" for mount, path in self.mounts.items()]
        if not Path(SYSTEM_PYTHON).exists():
            raise RuntimeError(MISSING)
        # The virtual environment's variables must not leak into the system's Python.
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _START_S)
        line = self._process.stdout.readline() if ready else ""
        if not line.startswith("listening "):
            self._process.kill()
            _, errors = self._process.communicate()
            code = self._process.returncode
            raise RuntimeError(MISSING if code == _UNUSABLE else f"the RTSP server did not start ({code}): {errors}")
        self.port = int(line.split()[1])

    def freeze(self) -> None:
        """Stop answering, with every connection left open."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Die at once, as in a power cut."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def tears_down(self, within_s: float) -> bool:
        """Whether a client has asked to end a session (TEARDOWN, RFC 2326 §10.7), or does so in time."""
        assert self._process is not None
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], within_s)
        return bool(ready) and self._process.stdout.readline() == "TEARDOWN\n"

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def __enter__(self) -> RtspServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _serve(port: int, mounts: dict[str, str]) -> int:
    try:
        import gi

        gi.require_version("Gst", "1.0")
        gi.require_version("GstRtspServer", "1.0")
        from gi.repository import GLib, Gst, GstRtspServer
    except (ImportError, ValueError) as error:
        print(f"{error}; {MISSING}", file=sys.stderr)
        return _UNUSABLE
    Gst.init(None)
    for element in ("qtdemux", "h264parse", "rtph264pay"):
        if Gst.ElementFactory.find(element) is None:
            print(f"no GStreamer element {element}; {MISSING}", file=sys.stderr)
            return _UNUSABLE
    server = GstRtspServer.RTSPServer()
    server.set_address("127.0.0.1")
    server.set_service(str(port))
    for mount, path in mounts.items():
        codec = "h265" if "hevc" in Path(path).name else "h264"
        factory = GstRtspServer.RTSPMediaFactory()
        factory.set_launch(
            f"( filesrc location={path} ! qtdemux ! {codec}parse ! rtp{codec}pay name=pay0 pt=96 config-interval=1 )"
        )
        server.get_mount_points().add_factory(mount, factory)
    server.connect(
        "client-connected",
        lambda _, client: client.connect("teardown-request", lambda *_: print("TEARDOWN", flush=True)),
    )
    if not server.attach(None):
        print(f"port {port} is taken", file=sys.stderr)
        return 1
    print(f"listening {server.get_bound_port()}", flush=True)
    GLib.MainLoop().run()
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("mounts", nargs="+", metavar="/PATH=FILE")
    arguments = parser.parse_args()
    raise SystemExit(_serve(arguments.port, dict(mount.split("=", 1) for mount in arguments.mounts)))
