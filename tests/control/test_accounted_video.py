"""Windows that die with a camera's decoder and replica: counted by the controller, once, and no others."""

from __future__ import annotations

from typing import ClassVar

import pytest

from cluster.config import CameraEntry, QuestionConfig, SightlineConfig, camera_settings
from cluster.control.directory import Directory
from cluster.types import MICROSECONDS, PatchGeometry
from cluster.types.reports import AccountedSpan, CameraMoment, CameraReport, DecoderInfo, ReplicaInfo, StreamReport

STRIDE_S = 2.0
GEOMETRY = PatchGeometry(patch=14, merge=2, temporal=2)
SETTINGS = {"window": {"length_s": 4, "stride_s": STRIDE_S}, "sampling": {"anchor_interval_s": 4}}


class Site:
    """One camera whose clock is the controller's less ``behind_s``; processes have clocks of their own."""

    CLOCKS: ClassVar = {"decoder-0": 1000.0, "decoder-1": -7.0, "r1": 50_000.0, "r2": 3.0}

    def __init__(self, heartbeat_s: float = 1.0) -> None:
        self.directory = Directory(heartbeat_s=heartbeat_s, heartbeat_timeout_s=100)
        self.settings = camera_settings(
            SightlineConfig(),
            CameraEntry.model_validate(
                {"name": "gate", "questions": [QuestionConfig(id="q", text="Anyone?").model_dump()], **SETTINGS}
            ),
        )
        for name in ("decoder-0", "decoder-1"):
            self.directory.join_decoder(DecoderInfo(name, name, f"{name}:1", "", 1), 0.0)
        for name in ("r1", "r2"):
            self.directory.join_replica(ReplicaInfo(name, f"{name}:1", "", 1, GEOMETRY), 0.0)
        self.directory.add(self.settings)
        self.behind_s = 0.0

    def _moment(self, process: str, at_s: float) -> CameraMoment:
        return CameraMoment(round((at_s - self.behind_s) * MICROSECONDS), at_s + self.CLOCKS[process])

    def _span(self, process: str, begin_s: float, end_s: float) -> AccountedSpan:
        return AccountedSpan(self._moment(process, begin_s), self._moment(process, end_s))

    def decoder(
        self, name: str, now_s: float, begin_s: float, end_s: float, *, idle: bool = False, counted: int = 0
    ) -> None:
        span = None if idle else self._span(name, begin_s, end_s)
        clock_s = now_s + self.CLOCKS[name]
        counts = {"windows_dropped": counted, "windows_lost": 0}
        report = CameraReport("gate", "running", counts=counts, run=name, now_s=clock_s, accounted=span, idle=idle)
        assert self.directory.heartbeat_decoder(name, name, [report], now_s)

    def replica(self, name: str, now_s: float, begin_s: float, end_s: float, before=None) -> None:
        spans = {"accounted": self._span(name, begin_s, end_s)}
        if before is not None:
            spans["accounted_before"] = self._span(name, *before)
        report = StreamReport("gate", run=name, now_s=now_s + self.CLOCKS[name], **spans)
        assert self.directory.heartbeat_replica(name, [report], now_s)

    @property
    def lost(self) -> int:
        lost = self.directory.status("gate").windows_lost
        assert lost == self.directory.windows_lost
        return lost

    def run(self, until_s: float) -> None:
        """Decoder 0 and replica r1 serve the camera from 0 on; the replica settles windows a second after their end."""
        for now_s in range(1, int(until_s) + 1):
            settled_s = (now_s - 1) // STRIDE_S * STRIDE_S
            self.decoder("decoder-0", now_s, 0.0, settled_s)
            self.replica("r1", now_s, 0.0, settled_s)


@pytest.fixture
def site() -> Site:
    return Site()


def test_nothing_is_lost_while_both_live(site) -> None:
    site.run(60)
    assert site.lost == 0


@pytest.mark.parametrize(("first_s", "windows"), [(21.5, 0), (23.0, 1), (24.5, 2), (40.0, 10)])
def test_whole_strides_until_the_next_replicas_first_frame_are_lost(site, first_s, windows) -> None:
    """By hand: the last settled window ended at 20."""
    site.run(21)
    for now_s in (first_s + 1, first_s + 5, first_s + 9):
        site.decoder("decoder-1", now_s, first_s, first_s)
        site.replica("r2", now_s, first_s, first_s)
    assert site.lost == windows


@pytest.mark.parametrize(("heartbeat_s", "early"), [(1.0, 5), (10.0, 0)])
def test_what_a_decoder_says_at_its_next_heartbeat_is_not_lost_before(heartbeat_s: float, early: int) -> None:
    """By hand: 20 to 45 are 12 strides, of which the decoder counts 7 from 30 on. It says so in its next report, which
    at long heartbeats comes after the replica's."""
    site = Site(heartbeat_s)
    site.run(21)
    site.decoder("decoder-1", 31, 30.0, 30.0)
    site.replica("r2", 46, 45.0, 45.0)
    assert site.lost == 0
    if heartbeat_s == 1.0:
        site.decoder("decoder-1", 47, 30.0, 45.0, counted=7)
    site.replica("r2", 50, 45.0, 49.0)
    assert site.lost == early
    site.decoder("decoder-1", 51, 30.0, 45.0, counted=7)
    site.replica("r2", 75, 45.0, 73.0)
    assert site.lost == 5


def test_the_next_replica_may_come_much_later_than_the_decoder_which_counts_until_then(site) -> None:
    site.run(21)
    for now_s in range(31, 57):
        site.decoder("decoder-1", now_s, 29.1, now_s, counted=int((now_s - 29.1) // STRIDE_S))
    assert site.lost == 0, "the replica may still be there"
    site.replica("r2", 60, 57.0, 57.0)
    site.decoder("decoder-1", 62, 29.1, 58.0, counted=13)
    site.replica("r2", 62, 57.0, 57.0)
    assert site.lost + 13 == 18, "whole strides of 2 in 37 seconds, of which two decoders' pieces make one"
    site.replica("r2", 70, 57.0, 68.0)
    assert site.lost == 5


def test_a_replica_that_lives_on_counts_what_a_decoder_left_out(site) -> None:
    site.run(21)
    site.decoder("decoder-1", 31, 30.0, 30.0)
    # It settles what waited, and has no frame of the new decoder's yet.
    site.replica("r1", 35, 0.0, 22.0)
    site.replica("r1", 36, 0.0, 30.2)
    site.replica("r1", 46, 0.0, 44.0)
    site.replica("r2", 60, 50.0, 58.0)
    assert site.lost == 0


def test_a_replica_that_dies_before_it_counted_that(site) -> None:
    site.run(21)
    site.decoder("decoder-1", 31, 30.0, 30.0)
    site.replica("r1", 32, 0.0, 22.0)
    site.decoder("decoder-1", 36, 30.0, 34.0, counted=2)
    site.replica("r2", 40, 35.0, 36.0)
    assert site.lost == 6 - 2, "whole strides from 22 to 35"


def test_a_decoder_that_lives_on_counts_what_a_replica_took_with_it(site) -> None:
    site.run(21)
    for now_s in range(22, 40):
        site.decoder("decoder-0", now_s, 0.0, now_s)
    site.replica("r2", 40, 35.0, 36.0)
    site.replica("r2", 50, 35.0, 46.0)
    assert site.lost == 0


def test_a_decoder_that_moves_a_camera_whose_replica_closes_it_in_between(site) -> None:
    """Last reports arrive after the new ones."""
    site.run(21)
    site.decoder("decoder-1", 25, 24.2, 24.2)
    site.replica("r1", 25, 24.3, 24.3, before=(0.0, 22.0))
    site.decoder("decoder-0", 25.5, 0.0, 22.0)
    site.replica("r1", 40, 24.3, 38.0, before=(0.0, 22.0))
    assert site.lost == 1, "from 22 to 24.2"


def test_video_that_an_agent_kept_meanwhile_is_not_lost(site) -> None:
    """By the camera's clock it goes on where it was, eight seconds late."""
    site.run(21)
    site.behind_s = 8.0
    site.decoder("decoder-1", 30, 29.0, 29.0)
    site.replica("r2", 40, 29.1, 36.0)
    assert site.lost == 0


def test_a_clock_that_jumped_is_not_believed(site) -> None:
    site.run(21)
    site.behind_s = -5000.0
    site.decoder("decoder-1", 30, 29.0, 29.0)
    site.replica("r2", 40, 29.1, 36.0)
    assert site.lost == 4


def test_no_window_of_a_pause_is_lost(site) -> None:
    site.run(21)
    site.directory.update(site.settings.model_copy(update={"paused": True}), 21.0)
    site.replica("r1", 22, 0.0, 22.0)
    site.directory.update(site.settings, 500.0)
    site.replica("r1", 501, 0.0, 22.0)
    site.decoder("decoder-1", 502, 501.0, 501.0)
    site.replica("r2", 510, 501.1, 508.0)
    assert site.lost == 0


def test_no_window_is_lost_while_nothing_is_asked(site) -> None:
    site.run(21)
    for now_s in range(22, 40):
        site.decoder("decoder-0", now_s, 0.0, 0.0, idle=True)
    site.decoder("decoder-1", 60, 59.0, 59.0)
    site.replica("r2", 70, 59.1, 66.0)
    assert site.lost == 0


def test_two_decoders_that_die_before_there_is_a_replica(site) -> None:
    site.run(21)
    site.decoder("decoder-1", 31, 30.0, 30.5)
    site.directory.leave_decoder("decoder-1")
    site.directory.join_decoder(DecoderInfo("decoder-1", "decoder-1", "decoder-1:1", "", 1), 40.0)
    site.decoder("decoder-1", 41, 40.5, 41.0)
    site.replica("r2", 50, 45.0, 48.0)
    assert site.lost == 12, "whole strides from 20 to 45"
