"""Free questions beside the windows: bounded in number, and in the share of the engine's time they may take."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from cluster.engine.base import AskRun
from cluster.errors import CapacityError, SightlineError, UnavailableError
from cluster.types import AskResult, AskSpec

log = logging.getLogger(__name__)

# Seconds of engine time that questions may have saved up while none was asked.
_SAVED_S = 1.0


@dataclass(eq=False, slots=True)
class _Question:
    spec: AskSpec
    piece: Callable[[str], None]
    done: Future[AskResult]
    until: float
    run: AskRun | None = None


class AskQueue:
    """Questions of one engine, answered one after the other, a step at a time.

    ``offer`` and ``len`` may be called from any thread, everything else from the engine's only. While windows wait,
    questions take no more than ``share`` of the time; otherwise as much as there is.

    Args:
        begin: starts a question on the engine.
        share: 0 to 1; 0 lets questions wait until no window does.
        limit: most questions that wait or are being answered.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        begin: Callable[[AskSpec], AskRun],
        *,
        share: float = 0.2,
        limit: int = 16,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._begin = begin
        self._share, self._limit = share, limit
        self._clock = clock
        self._waiting: deque[_Question] = deque()
        self._closed = False
        self._saved_s = _SAVED_S if share > 0 else 0.0
        self._last = clock()
        # Of the queue alone; never held while a question takes a step or somebody is told of its end.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, spec: AskSpec, piece: Callable[[str], None], *, timeout_s: float) -> Future[AskResult]:
        """Queue a question; ``piece`` is told the answer's text as it comes, on the engine's thread.

        Cancelling the future ends the question. It raises ``UnavailableError`` when time runs out.

        Raises:
            CapacityError: too many questions wait.
            UnavailableError: the engine has stopped.
        """
        done: Future[AskResult] = Future()
        with self._lock:
            if self._closed:
                raise _stopping()
            # Those whose asker left take nobody's place.
            for question in [each for each in self._waiting if each.done.cancelled()]:
                self._waiting.remove(question)
            if len(self._waiting) >= self._limit:
                raise CapacityError(f"{self._limit} questions wait already; ask again in a moment")
            self._waiting.append(_Question(spec, piece, done, self._clock() + timeout_s))
        return done

    def turn(self, *, windows_wait: bool) -> None:
        """Take one step of the first question, if it may be taken; end those that nobody waits for, or whose time is
        over, wherever they stand."""
        began = self._clock()
        self._saved_s = min(_SAVED_S if self._share > 0 else 0.0, self._saved_s + (began - self._last) * self._share)
        self._last = began
        for question in self._take(lambda each: each.done.cancelled() or began > each.until):
            _fail(question, UnavailableError("the answer took too long; ask again, or about less with --since"))
        with self._lock:
            first = self._waiting[0] if self._waiting else None
        if first is None or (windows_wait and self._saved_s <= 0):
            return
        if self._over(first):
            self._take(lambda each: each is first)
        if windows_wait:
            # A long step is paid for by as long a pause as its share of the time asks for.
            self._saved_s -= self._clock() - began

    def drop(self, stream: str, error: Exception, *, waiting: bool = True) -> None:
        """End the questions about a camera; without ``waiting`` only one that is being answered."""
        for question in self._take(lambda each: each.spec.stream == stream and (waiting or each.run is not None)):
            _fail(question, error)

    def close(self) -> None:
        """End all questions and take no more: the engine stops."""
        with self._lock:
            self._closed = True
        for question in self._take(lambda _: True):
            _fail(question, _stopping())

    def _take(self, which: Callable[[_Question], bool]) -> list[_Question]:
        """Out of the queue."""
        with self._lock:
            taken = [question for question in self._waiting if which(question)]
            for question in taken:
                self._waiting.remove(question)
        return taken

    def _over(self, question: _Question) -> bool:
        """Take a step; whether the question is done with."""
        try:
            if question.run is None:
                question.run = self._begin(question.spec)
            piece = question.run.step()
            if piece is None:
                _settle(question, question.run.result)
                return True
            if piece:
                question.piece(piece)
        except SightlineError as error:
            _fail(question, error)
            return True
        except Exception as error:
            log.exception("a question about camera %r failed", question.spec.stream)
            _fail(question, UnavailableError(f"the question could not be answered: {error}"))
            return True
        return False


def _stopping() -> UnavailableError:
    return UnavailableError("the replica is stopping; ask again in a moment")


def _settle(question: _Question, result: AskResult) -> None:
    if question.done.set_running_or_notify_cancel():
        question.done.set_result(result)


def _fail(question: _Question, error: Exception) -> None:
    if question.done.set_running_or_notify_cancel():
        question.done.set_exception(error)
