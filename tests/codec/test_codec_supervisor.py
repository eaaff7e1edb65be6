import itertools
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.codec import Backoff, CameraState, FileSource, PushSource, SourceStatus, SourceSupervisor, StreamHeader
from cluster.codec.supervisor import LOGIN
from cluster.errors import SourceError
from cluster.types import EncodedPacket

HEADER = StreamHeader("h264", 64, 64, b"")
PACKET = EncodedPacket("h264", b"x", 0, 0, True, 0)
QUICK = Backoff(first_s=0.01, longest_s=0.02, jitter=0.0)


class Scripted:
    """A live source that does, attempt by attempt, what the script says: an error, or so many packets."""

    live = True
    pushed = False

    def __init__(self, script: list[SourceError | int]) -> None:
        self.script = script
        self.attempt = -1
        self.closed = threading.Event()

    @property
    def ended(self) -> bool:
        return self.attempt + 1 >= len(self.script)

    def open(self) -> StreamHeader:
        self.attempt += 1
        step = self.script[self.attempt]
        if isinstance(step, SourceError):
            raise step
        return HEADER

    def packets(self) -> Iterator[EncodedPacket]:
        step = self.script[self.attempt]
        assert isinstance(step, int)
        yield from [PACKET] * step

    def close(self) -> None:
        self.closed.set()


def refused() -> SourceError:
    return SourceError("the camera refuses", retryable=True)


def run(source: Scripted, backoff: Backoff = QUICK) -> tuple[list[SourceStatus], int, SourceStatus]:
    told: list[SourceStatus] = []
    packets: list[EncodedPacket] = []
    last = SourceSupervisor(source, backoff, seed=1).run(lambda header: None, packets.append, told.append)
    return told, len(packets), last


def test_failures_back_off_and_recover() -> None:
    told, packets, last = run(Scripted([refused(), refused(), 3, refused(), 2]))
    assert packets == 5
    assert last.state is CameraState.ENDED
    waits = [status for status in told if status.state is CameraState.BACKOFF]
    assert [status.reason for status in waits] == [
        "the camera refuses",
        "the camera refuses",
        "the connection was lost: the stream ended",
        "the camera refuses",
    ]
    assert [status.retry_in_s for status in waits] == [0.01, 0.02, 0.02, 0.02]
    assert [status.state for status in told].count(CameraState.RUNNING) == 2
    assert [status.state for status in told[:3]] == [
        CameraState.CONNECTING,
        CameraState.BACKOFF,
        CameraState.CONNECTING,
    ]


def test_refused_logins_wait_longer_and_do_not_lock_the_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hikvision and Dahua lock after five refusals (their defaults) within half an hour."""
    at_s = [0.0, *itertools.accumulate(LOGIN.delay_s(attempt, 1.0) for attempt in range(20))]
    assert max(sum(begin <= each < begin + 1800 for each in at_s) for begin in at_s) < 5
    monkeypatch.setattr("cluster.codec.supervisor.LOGIN", Backoff(first_s=0.03, factor=2.0, longest_s=0.06, jitter=0.0))
    login = SourceError("the camera refuses this password", retryable=True, login=True)
    told, _, _ = run(Scripted([login, login, login, refused(), login, 1, login, 1]))
    waits = [status.retry_in_s for status in told if status.state is CameraState.BACKOFF]
    assert waits == [0.03, 0.06, 0.06, 0.02, 0.03, 0.02, 0.03]


def test_a_source_that_opens_but_sends_nothing_does_not_run() -> None:
    """Its failure stays known while it is tried again, until video comes."""
    told, _, _ = run(Scripted([0, 0, 1, 0]))
    assert [(status.state, status.reason) for status in told[:5]] == [
        (CameraState.CONNECTING, ""),
        (CameraState.BACKOFF, "the connection was lost: the stream ended"),
        (CameraState.CONNECTING, "the connection was lost: the stream ended"),
        (CameraState.BACKOFF, "the connection was lost: the stream ended"),
        (CameraState.CONNECTING, "the connection was lost: the stream ended"),
    ]
    assert [status.state for status in told].count(CameraState.RUNNING) == 1


def test_patience_starts_anew_after_running_well() -> None:
    told, _, _ = run(Scripted([refused(), refused(), 1, 1]), Backoff(0.01, 2.0, 1.0, 0.0, well_after_s=0.0))
    waits = [status.retry_in_s for status in told if status.state is CameraState.BACKOFF]
    assert waits == [0.01, 0.02, 0.01]


def test_a_hopeless_source_is_an_error_at_once() -> None:
    source = Scripted([SourceError("not a video", retryable=False), 3])
    told, packets, last = run(source)
    assert (last.state, last.reason, packets) == (CameraState.ERROR, "not a video", 0)
    assert told[-1] == last
    assert source.closed.is_set()


def test_stop_ends_a_long_backoff() -> None:
    supervisor = SourceSupervisor(Scripted([refused(), 1]), Backoff(first_s=3600, longest_s=3600))
    waiting = threading.Event()
    result: list[SourceStatus] = []

    def on_state(status: SourceStatus) -> None:
        if status.state is CameraState.BACKOFF:
            waiting.set()

    thread = threading.Thread(
        target=lambda: result.append(supervisor.run(lambda header: None, lambda packet: None, on_state))
    )
    thread.start()
    assert waiting.wait(10)
    supervisor.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert (result[0].state, result[0].reason) == (CameraState.ENDED, "stopped")


def test_stop_before_run_returns_at_once() -> None:
    supervisor = SourceSupervisor(Scripted([3]))
    supervisor.stop()
    assert supervisor.run(lambda header: None, lambda packet: None).reason == "stopped"


def test_a_pushed_camera_waits_and_reopens_for_each_session_without_backoff() -> None:
    source = PushSource()
    told: list[SourceStatus] = []
    headers: list[StreamHeader] = []
    got: list[int] = []
    second = threading.Event()

    def on_packet(packet: EncodedPacket) -> None:
        got.append(packet.sequence)
        second.set()

    supervisor = SourceSupervisor(source)
    thread = threading.Thread(target=lambda: supervisor.run(headers.append, on_packet, told.append))
    thread.start()
    source.begin_session(HEADER, "a")
    source.offer([PACKET])
    assert second.wait(10)
    other = StreamHeader("hevc", 8, 8, b"")
    source.begin_session(other, "b")
    source.offer([PACKET])
    source.end_session()
    thread.join(10)
    assert not thread.is_alive()
    assert headers == [HEADER, other]
    assert got == [0, 0]
    assert [status.state for status in told] == [
        CameraState.WAITING,
        CameraState.RUNNING,
        CameraState.WAITING,
        CameraState.RUNNING,
        CameraState.ENDED,
    ]


def test_a_session_that_begins_when_a_camera_ends_is_refused_and_not_lost() -> None:
    source = PushSource()
    source.begin_session(HEADER, "a")
    source.offer([PACKET])
    source.end_session()
    refused: list[str] = []

    def begin_another(status: SourceStatus) -> None:
        if status.state is CameraState.ENDED:
            try:
                source.begin_session(HEADER, "b")
            except SourceError as error:
                refused.append(str(error))

    assert SourceSupervisor(source).run(lambda _: None, lambda _: None, begin_another).state is CameraState.ENDED
    assert refused == ["the camera no longer accepts packets"]


def test_errors_of_the_callers_own_come_through_and_close_the_source() -> None:
    source = Scripted([3])

    def fail(packet: EncodedPacket) -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        SourceSupervisor(source).run(lambda header: None, fail)
    assert source.closed.is_set()


def test_a_missing_file_is_an_error_with_its_name() -> None:
    status = SourceSupervisor(FileSource("nowhere.mp4")).run(lambda header: None, lambda packet: None)
    assert status == SourceStatus(CameraState.ERROR, "nowhere.mp4 does not exist")


@given(
    st.integers(0, 10_000),
    st.floats(0, 1),
    st.floats(0.001, 10),
    st.floats(1, 10),
    st.floats(0, 1),
    st.floats(0.001, 3600),
)
def test_delays_are_bounded(
    attempt: int, draw: float, first: float, factor: float, jitter: float, longest: float
) -> None:
    delay = Backoff(first, factor, longest, jitter).delay_s(attempt, draw)
    assert 0 <= delay <= longest


def test_delays_grow_and_spread() -> None:
    backoff = Backoff(first_s=1.0, factor=2.0, longest_s=60.0, jitter=0.2)
    assert [backoff.delay_s(attempt, 0.5) for attempt in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert backoff.delay_s(2, 0.0) == pytest.approx(3.2)
    assert backoff.delay_s(2, 1.0) == pytest.approx(4.8)


def test_a_looped_file_goes_on_once_there_are_file_descriptors_again(clips: dict[str, Path]) -> None:
    """They ran out as it was opened for its second round."""
    told: list[SourceStatus] = []
    sequences: list[int] = []
    clocks: list[bool] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    supervisor = SourceSupervisor(FileSource(clips["b_frames"], loop=True), QUICK)

    def feed(packet: EncodedPacket) -> None:
        sequences.append(packet.sequence)
        if len(sequences) == 80:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        if len(sequences) == 90:
            supervisor.stop()

    def tell(status: SourceStatus) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        told.append(status)

    supervisor.run(lambda header: clocks.append(header.new_clock), feed, tell)
    [reason] = [status.reason for status in told if status.state is CameraState.BACKOFF]
    assert reason.endswith("cannot be opened: too many open files")
    assert sequences == [*range(80), *range(10)]
    assert clocks == [False, True], "times start over"
