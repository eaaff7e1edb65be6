"""Free questions beside the windows: order, share of the time, limit, deadlines, and every way to end early."""

from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import DeviceError, NotReadyError, UnavailableError
from cluster.replica.ask_queue import AskQueue
from cluster.types import AskResult, AskSpec


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Run:
    """An answer of so many pieces, each of which takes so long."""

    def __init__(self, spec: AskSpec, clock: Clock, pieces: int, step_s: float) -> None:
        self._spec, self._clock, self._left, self._step_s = spec, clock, pieces, step_s
        self.steps = 0

    def step(self) -> str | None:
        self._clock.now += self._step_s
        self.steps += 1
        self._left -= 1
        return None if self._left < 0 else f"{self._left}"

    @property
    def result(self) -> AskResult:
        return AskResult(self._spec.stream, self._spec.text, (), 0, 0, 0, 0, 0, 0.0, 0.0)


class Engine:
    """Begins runs, or fails to, as ``text`` of a question says."""

    def __init__(self, pieces: int = 2, step_s: float = 0.5) -> None:
        self.clock = Clock()
        self.runs: dict[str, Run] = {}
        self._pieces, self._step_s = pieces, step_s

    def ask(self, spec: AskSpec) -> Run:
        if spec.text == "no memory":
            raise NotReadyError("it has none")
        if spec.text == "lost":
            raise DeviceError("the GPU failed")
        if spec.text == "broken":
            raise RuntimeError("out of luck")
        self.runs[spec.text] = Run(spec, self.clock, self._pieces, self._step_s)
        return self.runs[spec.text]

    def queue(self, **options: float) -> AskQueue:
        return AskQueue(self.ask, clock=self.clock, **options)  # type: ignore[arg-type]


def offer(queue: AskQueue, text: str, stream: str = "cam", timeout_s: float = 1000.0) -> Future[AskResult]:
    return queue.offer(AskSpec(stream, text), lambda _: None, timeout_s=timeout_s)


def drain(queue: AskQueue) -> None:
    for _ in range(100):
        queue.step(windows_wait=False)
    assert len(queue) == 0


def test_questions_are_answered_one_after_the_other_piece_by_piece() -> None:
    engine = Engine(pieces=3)
    queue = engine.queue()
    pieces: list[str] = []
    first = queue.offer(AskSpec("cam", "one"), pieces.append, timeout_s=100)
    second = offer(queue, "two")
    for _ in range(3):
        queue.step(windows_wait=False)
    assert pieces == ["2", "1", "0"]
    assert not first.done()
    assert "two" not in engine.runs
    queue.step(windows_wait=False)
    assert first.result(0).text == "one"
    assert not second.done()
    drain(queue)
    assert second.result(0).text == "two"


def test_questions_whose_clients_left_do_not_pile_up_while_the_engine_takes_no_step() -> None:
    queue = Engine().queue()
    kept = offer(queue, "kept")
    for number in range(100):
        offer(queue, f"left {number}").cancel()
    assert len(queue) <= 2
    drain(queue)
    assert kept.result(0).text == "kept"


@given(
    share=st.floats(0.05, 1.0),
    steps=st.floats(0.01, 40.0),
    window_s=st.floats(0.01, 5.0),
    turns=st.integers(1, 400),
)
def test_while_windows_wait_questions_take_no_more_than_their_share(
    share: float, steps: float, window_s: float, turns: int
) -> None:
    engine = Engine(pieces=10**9, step_s=steps)
    queue = engine.queue(share=share)
    offer(queue, "endless", timeout_s=1e12)
    began = engine.clock.now
    for _ in range(turns):
        engine.clock.now += window_s
        queue.step(windows_wait=True)
    taken = engine.runs["endless"].steps * steps if engine.runs else 0.0
    # What was saved up, and the step that overdraws it.
    assert taken <= share * (engine.clock.now - began) + 1.0 + steps + 1e-6


def test_the_share_is_given() -> None:
    engine = Engine(pieces=10**9, step_s=0.1)
    queue = engine.queue(share=0.25)
    offer(queue, "endless", timeout_s=1e9)
    for _ in range(4000):
        engine.clock.now += 0.1
        queue.step(windows_wait=True)
    assert engine.runs["endless"].steps * 0.1 == pytest.approx(0.25 * (engine.clock.now - 100), rel=0.05)


def test_time_that_nobody_else_wanted_is_not_paid_for() -> None:
    engine = Engine(pieces=10**9, step_s=10.0)
    queue = engine.queue(share=0.2)
    offer(queue, "endless", timeout_s=1e9)
    for _ in range(50):
        queue.step(windows_wait=False)
    steps = engine.runs["endless"].steps
    assert steps == 50
    queue.step(windows_wait=True)
    assert engine.runs["endless"].steps == steps + 1


def test_a_share_of_nothing_waits_until_no_window_does() -> None:
    engine = Engine()
    queue = engine.queue(share=0.0)
    done = offer(queue, "one")
    for _ in range(100):
        engine.clock.now += 1.0
        queue.step(windows_wait=True)
    assert not engine.runs
    drain(queue)
    assert done.result(0).text == "one"


def test_a_question_whose_time_is_over_ends_wherever_it_stands_even_while_none_may_be_answered() -> None:
    engine = Engine()
    queue = engine.queue(share=0.0)
    long, short = offer(queue, "long", timeout_s=1000), offer(queue, "short", timeout_s=5)
    engine.clock.now += 6
    queue.step(windows_wait=True)
    with pytest.raises(UnavailableError, match="too long"):
        short.result(0)
    assert not long.done()
    assert len(queue) == 1


def test_a_question_under_way_ends_when_its_time_is_over() -> None:
    engine = Engine(pieces=1000, step_s=2.0)
    queue = engine.queue()
    done = offer(queue, "one", timeout_s=5)
    for _ in range(5):
        queue.step(windows_wait=False)
    with pytest.raises(UnavailableError, match="too long"):
        done.result(0)
    assert engine.runs["one"].steps == 3


def test_a_cancelled_question_takes_no_further_step() -> None:
    engine = Engine(pieces=1000)
    queue = engine.queue()
    first, second = offer(queue, "one"), offer(queue, "two")
    queue.step(windows_wait=False)
    assert first.cancel()
    queue.step(windows_wait=False)
    assert engine.runs["one"].steps == 1
    assert engine.runs["two"].steps == 1
    assert second.cancel()
    queue.step(windows_wait=False)
    assert len(queue) == 0


def test_a_question_that_fails_says_why_and_the_next_is_answered() -> None:
    engine = Engine()
    queue = engine.queue()
    refused, broken, good = offer(queue, "no memory"), offer(queue, "broken"), offer(queue, "good")

    def hang_up(_: str) -> None:
        raise ConnectionError("gone")

    deaf = queue.offer(AskSpec("cam", "deaf"), hang_up, timeout_s=100)
    drain(queue)
    with pytest.raises(NotReadyError, match="it has none"):
        refused.result(0)
    with pytest.raises(UnavailableError, match="out of luck"):
        broken.result(0)
    with pytest.raises(UnavailableError, match="gone"):
        deaf.result(0)
    assert good.result(0).text == "good"


def test_a_lost_gpu_ends_the_engine_and_with_it_the_question() -> None:
    queue = Engine().queue()
    asked = offer(queue, "lost")
    with pytest.raises(DeviceError):
        queue.step(windows_wait=False)
    queue.close()
    with pytest.raises(UnavailableError, match="the replica is stopping"):
        asked.result(0)


def test_dropping_a_camera_ends_its_questions_only() -> None:
    engine = Engine(pieces=1000)
    queue = engine.queue()
    mine, other, waiting = offer(queue, "mine"), offer(queue, "other", "yard"), offer(queue, "waiting")
    queue.step(windows_wait=False)
    queue.cancel_camera("cam", NotReadyError("forgotten"), waiting=False)
    with pytest.raises(NotReadyError, match="forgotten"):
        mine.result(0)
    assert not waiting.done()
    queue.cancel_camera("cam", UnavailableError("removed"))
    with pytest.raises(UnavailableError, match="removed"):
        waiting.result(0)
    assert not other.done()
    assert len(queue) == 1


def test_closing_ends_all_and_nothing_is_taken_any_more() -> None:
    queue = Engine().queue()
    waiting = [offer(queue, "one"), offer(queue, "two")]
    queue.step(windows_wait=False)
    queue.close()
    for done in waiting:
        with pytest.raises(UnavailableError, match="stopping"):
            done.result(0)
    with pytest.raises(UnavailableError, match="stopping"):
        offer(queue, "three")
    assert len(queue) == 0
