"""Free questions beside the windows: bounded in number, and in the share of the engine's time they may take."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from cluster.engine.base import AskRun
from cluster.errors import CapacityError, ConfigError, NotReadyError, SightlineError, UnavailableError
from cluster.types import AskResult, AskSpec


@dataclass(slots=True, eq=False)
class Conversation:
    """``turns``: (question, answer) pairs, the last ones; ``users``: questions under way or waiting on it; ``over``: it
    is not gone on with."""

    id: str
    camera: str
    turns: deque[tuple[str, str]]
    used_s: float = 0.0
    users: int = 0
    over: bool = False
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Conversations:
    """At most ``limit`` of them, the last ``turns`` turns of each, until they are idle for ``idle_s``.

    A conversation belongs to one camera. Questions on it are answered one after the other: a second one waits for the
    first, so that it is asked with the first's answer before it; a third is refused.

    Args:
        limit: above the number of questions that may be under way at once, so that one idle conversation can always
            make room for a new one.
        clock: monotonic seconds.
    """

    def __init__(
        self, *, limit: int = 64, turns: int = 16, idle_s: float = 3600.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self._turns = turns
        self._idle_s = idle_s
        self._clock = clock
        # In order of their last use.
        self._known: OrderedDict[str, Conversation] = OrderedDict()
        self._in_use: set[Conversation] = set()

    def __len__(self) -> int:
        return len(self._known)

    @asynccontextmanager
    async def begin_turn(self, camera: str, id: str) -> AsyncIterator[Conversation]:
        """The conversation ``id``, or for an empty one a new one, for one question; :meth:`said` remembers its answer.

        Raises:
            NotReadyError: there is no such conversation, or not any more.
            ConfigError: it is about another camera.
            CapacityError: two questions are on it already.
        """
        self._expire()
        conversation = self._find(camera, id) if id else Conversation(secrets.token_hex(8), camera, self._new_turns())
        conversation.users += 1
        self._in_use.add(conversation)
        try:
            async with conversation.turn:
                if conversation.over:
                    raise _over(id)
                yield conversation
        finally:
            conversation.users -= 1
            if not conversation.users:
                self._in_use.discard(conversation)
            self._touch(conversation)

    def _find(self, camera: str, id: str) -> Conversation:
        known = self._known.get(id)
        if known is None:
            raise _over(id)
        if known.camera != camera:
            raise ConfigError(
                f"conversation {id!r} is about camera {known.camera!r}; begin a new one about camera {camera!r}"
            )
        if known.users >= 2:
            raise CapacityError(f"conversation {id!r} has a question waiting already; wait for its answer")
        return known

    def add_turn(self, conversation: Conversation, question: str, answer: str) -> None:
        """One more turn. A new conversation can be gone on with from here on; one that was not answered cannot."""
        if conversation.over:
            return
        conversation.turns.append((question, answer))
        self._known[conversation.id] = conversation
        self._touch(conversation)
        if len(self._known) > self.limit:
            del self._known[next(one.id for one in self._known.values() if not one.users)]

    def end_camera(self, camera: str) -> None:
        """The camera forgets: what was said about it may rest on what it saw, so its conversations are over, those
        with a question under way too."""
        for one in [*self._known.values(), *self._in_use]:
            if one.camera == camera:
                one.over = True
                one.turns.clear()
                self._known.pop(one.id, None)

    def _touch(self, conversation: Conversation) -> None:
        conversation.used_s = self._clock()
        if conversation.id in self._known:
            self._known.move_to_end(conversation.id)

    def _new_turns(self) -> deque[tuple[str, str]]:
        return deque(maxlen=self._turns)

    def _expire(self) -> None:
        limit = self._clock() - self._idle_s
        for id in [one.id for one in self._known.values() if not one.users and one.used_s < limit]:
            del self._known[id]


def _over(id: str) -> NotReadyError:
    return NotReadyError(f"there is no conversation {id!r}, or it is over; ask without it to begin a new one")


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

    def step(self, *, windows_wait: bool) -> None:
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

    def cancel_camera(self, stream: str, error: Exception, *, waiting: bool = True) -> None:
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
