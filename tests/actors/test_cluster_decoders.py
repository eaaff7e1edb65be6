"""The number of decoders follows the load, and cameras that move from one to another lose no window."""

import asyncio
import threading
import time
from urllib.request import urlopen

import pytest
from cluster_parts import configuration, until
from process_faults import count_windows, take_before
from watched_cameras import STRIDE_S, WatchedCameras

from actors.runtime import Cluster
from cluster.codec import FileSource
from cluster.lab.scenes.street_clips import make_clip
from cluster.wire.push import PushAgent

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

LIGHT = ("dock", "gate", "hall", "lane", "yard")
HEAVY = 4
SPEED = 60
WAIT_S = 120.0


@pytest.fixture
def watched(tmp_path):
    scale = {"decoders": 1, "max_decoders": 2, "decoders_hold_s": 2.0, "log_dir": str(tmp_path / "logs")}
    config = configuration([], **scale)
    window = config.window.model_copy(update={"length_s": 2 * STRIDE_S, "stride_s": STRIDE_S})
    watched = WatchedCameras(tmp_path)
    with Cluster(config.model_copy(update={"window": window})) as cluster:
        watched.begin(cluster.gateway_address, LIGHT)
        yield cluster, watched
        watched.stop_pushing()
    watched.end()


class Heavy:
    """Cameras whose video runs many times as fast as it should, from a loop of its own."""

    def __init__(self, watched: WatchedCameras, clip) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._pushes = []
        for number in range(HEAVY):
            watched.client.camera_add(f"heavy-{number}", "", [])
            source = FileSource(clip, loop=True, realtime=True, speed=SPEED)
            push = PushAgent(source, watched.gateway, f"heavy-{number}").run()
            self._pushes.append(asyncio.run_coroutine_threadsafe(push, self._loop))

    def stop(self) -> None:
        for push in self._pushes:
            push.cancel()


def test_load_adds_a_decoder_and_quiet_removes_it(watched, tmp_path) -> None:
    cluster, cameras = watched

    def decoders() -> set[str]:
        return {camera.decoder for camera in cameras.client.cameras_list() if camera.name in LIGHT}

    until("answers of every camera", lambda: all(camera.ledger.seen > 1 for camera in cameras.cameras.values()), WAIT_S)
    assert decoders() == {"decoder-0"}
    time.sleep(STRIDE_S / 2)
    before = {name: take_before(cameras, name) for name in LIGHT}
    clip = tmp_path / "heavy.mp4"
    make_clip("street", clip, seconds=8, fps=25, size=(640, 384))
    heavy = Heavy(cameras, clip)
    until("another decoder with some of the cameras", lambda: decoders() == {"decoder-0", "decoder-1"}, WAIT_S)
    page = urlopen(f"http://{cluster.metrics_address}/metrics", timeout=10).read().decode()
    assert 'sightline_fleet_wanted{process="controller",role="decoder"} 2.0' in page
    heavy.stop()
    until("one decoder with every camera", lambda: decoders() == {"decoder-0"}, WAIT_S)
    seen = {name: camera.ledger.seen for name, camera in cameras.cameras.items()}
    until("its end", lambda: set(cluster.readiness().decoders) == {"decoder-0"}, WAIT_S)
    until(
        "answers afterwards",
        lambda: all(camera.ledger.seen > 2 + seen[name] for name, camera in cameras.cameras.items()),
        WAIT_S,
    )
    time.sleep(STRIDE_S / 2)
    found = {name: count_windows(cameras, name, each) for name, each in before.items()}
    assert all(windows.balanced(watched=True) for windows in found.values()), found
    # Whatever the load left undone was dropped and counted. A move loses nothing, unless the machine is so busy that
    # the first frame at the next decoder comes a stride late.
    assert all(cameras.client.camera_get(name).windows_lost <= 1 for name in LIGHT)
