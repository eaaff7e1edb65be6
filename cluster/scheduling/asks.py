"""Free questions beside the windows: bounded in number, and in the share of the engine's time they may take."""

from __future__ import annotations

import logging
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

    ``offer`` may be called from any thread, ``turn`` from the engine's only. While windows wait, questions take no more
    than ``share`` of the time; otherwise as much as there is.

    Args:
        begin: starts a question on the engine.
        share: 0 to 1.
        limit: most questions that wait or are being answered.
    """

    def __init__(self, begin: Callable[[AskSpec], AskRun], *, share: float = 0.2, limit: int = 16) -> None:
        self._begin = begin
        self._share, self._limit = share, limit
        self._waiting: deque[_Question] = deque()
        self._saved_s = _SAVED_S
        self._last = time.monotonic()

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, spec: AskSpec, piece: Callable[[str], None], *, timeout_s: float) -> Future[AskResult]:
        """Queue a question; ``piece`` is told the answer's text as it comes, on the engine's thread.

        Cancelling the future ends the question. It raises ``UnavailableError`` when time runs out.

        Raises:
            CapacityError: too many questions wait.
        """
        if len(self._waiting) >= self._limit:
            raise CapacityError(f"{self._limit} questions wait already; ask again in a moment")
        done: Future[AskResult] = Future()
        self._waiting.append(_Question(spec, piece, done, time.monotonic() + timeout_s))
        return done

    def ready(self, *, windows_wait: bool) -> bool:
        """Whether a step may be taken now."""
        now = time.monotonic()
        self._saved_s = min(_SAVED_S, self._saved_s + (now - self._last) * self._share)
        self._last = now
        return bool(self._waiting) and (not windows_wait or self._saved_s > 0)

    def turn(self, *, windows_wait: bool) -> None:
        """Take one step of the first question, if it may be taken."""
        while self._waiting and self._waiting[0].done.cancelled():
            self._waiting.popleft()
        if not self.ready(windows_wait=windows_wait):
            return
        question = self._waiting[0]
        began = time.monotonic()
        if self._over(question, began):
            self._waiting.popleft()
        self._saved_s = max(-10.0, self._saved_s - (time.monotonic() - began))

    def _over(self, question: _Question, now: float) -> bool:
        """Take a step; whether the question is done with."""
        if now > question.until:
            _fail(question, UnavailableError("the answer took too long; ask again, or about less with --since"))
            return True
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

    def drop(self, stream: str, error: Exception) -> None:
        """End all questions about a camera; from the engine's thread."""
        for question in [each for each in self._waiting if each.spec.stream == stream]:
            self._waiting.remove(question)
            _fail(question, error)

    def close(self) -> None:
        """End all questions: the engine stops."""
        while self._waiting:
            _fail(self._waiting.popleft(), UnavailableError("the replica is stopping; ask again in a moment"))


def _settle(question: _Question, result: AskResult) -> None:
    if question.done.set_running_or_notify_cancel():
        question.done.set_result(result)


def _fail(question: _Question, error: Exception) -> None:
    if question.done.set_running_or_notify_cancel():
        question.done.set_exception(error)
