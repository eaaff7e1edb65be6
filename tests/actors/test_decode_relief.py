"""A decoder that has no time for all its cameras: what it tells them, and when it takes them back."""

import logging

import pytest

from actors.decoder import Decoder
from cluster.decoder.decode_load import HOLD_S, DecodeBacklog, DecodePressure
from cluster.types.cameras import Priority


class Camera:
    """As :class:`~cluster.decoder.running_camera.RunningCamera` looks to its decoder."""

    def __init__(self, name: str, priority: Priority, behind_s: float | None) -> None:
        self.name, self.priority, self.behind_s = name, priority, behind_s
        self.behind = False

    @property
    def decode_backlog(self) -> DecodeBacklog | None:
        return None if self.behind_s is None else DecodeBacklog(self.name, self.priority, self.behind_s, 8.0)

    def set_behind(self, behind: bool) -> None:
        self.behind = behind


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """Without its tasks, which need a cluster."""
    made = object.__new__(Decoder)
    made._pressure = DecodePressure()
    cameras = [Camera(f"gate-{number}", Priority.NORMAL, 6.0) for number in range(8)]
    cameras += [Camera("lobby", Priority.BACKGROUND, 6.0), Camera("track", Priority.CRITICAL, 6.0)]
    cameras += [Camera("file", Priority.BACKGROUND, None)]
    made._cameras = {camera.name: camera for camera in cameras}
    made.now_s = 0.0
    monkeypatch.setattr("actors.decoder.time.monotonic", lambda: made.now_s)
    return made


def behind(decoder: Decoder) -> list[str]:
    return [name for name, camera in decoder._cameras.items() if camera.behind]


def test_the_least_urgent_gives_way_and_the_log_says_so(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="actors.decoder"):
        decoder._apply_decode_pressure()
    assert behind(decoder) == ["lobby"]
    assert "0.8 strides behind: down to keyframes: lobby" in caplog.text


def test_a_camera_that_began_anew_meanwhile_is_told_again(decoder: Decoder) -> None:
    decoder._apply_decode_pressure()
    decoder._cameras["lobby"] = Camera("lobby", Priority.BACKGROUND, 0.0)
    decoder._apply_decode_pressure()
    assert behind(decoder) == ["lobby"]


def test_with_time_again_everyone_is_decoded(decoder: Decoder) -> None:
    decoder._apply_decode_pressure()
    for camera in decoder._cameras.values():
        camera.behind_s = None if camera.behind_s is None else 0.0
    decoder._apply_decode_pressure()
    assert behind(decoder) == ["lobby"], "not at once"
    decoder.now_s += HOLD_S
    decoder._apply_decode_pressure()
    assert behind(decoder) == []


def test_a_decoder_without_cameras_has_time(decoder: Decoder) -> None:
    decoder._cameras = {}
    decoder._apply_decode_pressure()
    assert decoder._pressure.behind == 0.0
