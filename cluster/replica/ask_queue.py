"""Free questions, answered between windows: bounded in number and in their share of the engine's time."""

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
from typing import TYPE_CHECKING

from cluster.errors import CapacityError, ConfigError, DeviceError, NotReadyError, SightlineError, UnavailableError
from cluster.types import AskResult, AskSpec

if TYPE_CHECKING:
    from cluster.engine.base import AskRun

log = logging.getLogger(__name__)

# Maximum engine time, in seconds, that accrues to questions while none runs.
_SAVED_S = 1.0


@dataclass(slots=True, eq=False)
class Conversation:
    """``turns``: (question, answer); ``users``: running and waiting questions; ``over``: it cannot be continued."""

    id: str
    camera: str
    turns: deque[tuple[str, str]]
    used_s: float = 0.0
    users: int = 0
    over: bool = False
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Conversations:
    """At most ``limit`` conversations with their last ``turns`` turns, expiring after ``idle_s`` without use.

    A conversation belongs to one camera. Its questions are answered one at a time: a second one waits for the first,
    whose answer becomes part of its context; a third is refused.

    Args:
        limit: must exceed the number of concurrent questions, so that an idle conversation can be evicted.
        clock: monotonic seconds.
    """

    def __init__(
        self, *, limit: int = 64, turns: int = 16, idle_s: float = 3600.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self._turns = turns
        self._idle_s = idle_s
        self._clock = clock
        # In order of last use.
        self._known: OrderedDict[str, Conversation] = OrderedDict()
        self._in_use: set[Conversation] = set()

    @asynccontextmanager
    async def begin_turn(self, camera: str, id: str) -> AsyncIterator[Conversation]:
        """Begin one question in conversation ``id``, or in a new one if empty; :meth:`add_turn` stores its answer.

        Raises:
            NotReadyError: the conversation is unknown or has ended.
            ConfigError: it is about another camera.
            CapacityError: it already has two questions.
        """
        self._expire()
        if id:
            conversation = self._find(camera, id)
        else:
            conversation = Conversation(secrets.token_hex(8), camera, deque(maxlen=self._turns))
        conversation.users += 1
        self._in_use.add(conversation)
        try:
            async with conversation.turn:
                if conversation.over:
                    raise _unknown(id)
                yield conversation
        finally:
            conversation.users -= 1
            if not conversation.users:
                self._in_use.discard(conversation)
            self._touch(conversation)

    def _find(self, camera: str, id: str) -> Conversation:
        known = self._known.get(id)
        if known is None:
            raise _unknown(id)
        if known.camera != camera:
            raise ConfigError(f"conversation {id!r} is about another camera; begin a new one about camera {camera!r}")
        if known.users >= 2:
            raise CapacityError(f"conversation {id!r} has a question waiting already; wait for its answer")
        return known

    def add_turn(self, conversation: Conversation, question: str, answer: str) -> None:
        """Store one turn. A new conversation can be continued once it has a turn."""
        if conversation.over:
            return
        conversation.turns.append((question, answer))
        self._known[conversation.id] = conversation
        self._touch(conversation)
        if len(self._known) > self.limit:
            del self._known[next(one.id for one in self._known.values() if not one.users)]

    def end_camera(self, camera: str) -> None:
        """End all conversations of a camera whose memory is deleted, including those with a running question."""
        for one in [*self._known.values(), *self._in_use]:
            if one.camera == camera:
                one.over = True
                one.turns.clear()
                self._known.pop(one.id, None)

    def _touch(self, conversation: Conversation) -> None:
        conversation.used_s = self._clock()
        if conversation.id in self._known:
            self._known.move_to_end(conversation.id)

    def _expire(self) -> None:
        limit = self._clock() - self._idle_s
        for id in [one.id for one in self._known.values() if not one.users and one.used_s < limit]:
            del self._known[id]


def _unknown(id: str) -> NotReadyError:
    return NotReadyError(f"there is no conversation {id!r}, or it is over; ask without it to begin a new one")


@dataclass(eq=False, slots=True)
class _Question:
    spec: AskSpec
    piece: Callable[[str], None]
    done: Future[AskResult]
    until: float
    run: "AskRun | None" = None


class AskQueue:
    """Free questions of one engine, answered one after another, a step at a time.

    ``offer`` and ``len`` may be called from any thread, everything else only from the engine's. While windows wait,
    questions take at most ``share`` of the time, otherwise all that is left. ``MemoryServicer`` bounds their number.

    Args:
        begin: starts a question on the engine.
        share: 0 to 1; with 0 questions wait until no window does.
        clock: monotonic seconds.
    """

    def __init__(
        self, begin: Callable[[AskSpec], "AskRun"], *, share: float = 0.2, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._begin, self._share, self._clock = begin, share, clock
        self._waiting: deque[_Question] = deque()
        self._closed = False
        self._saved_s = _SAVED_S if share > 0 else 0.0
        self._last = clock()
        # Guards the queue only; never held during a step or while reporting a result.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, spec: AskSpec, piece: Callable[[str], None], *, timeout_s: float) -> Future[AskResult]:
        """Enqueue a question; ``piece`` receives the answer's text as it is generated, on the engine's thread.

        Cancelling the future ends the question. It raises ``UnavailableError`` on timeout, as does this call if the
        engine has stopped.
        """
        done: Future[AskResult] = Future()
        with self._lock:
            if self._closed:
                raise stopping()
            # Cancelled questions no longer count towards that bound, but would pile up here while the engine is busy.
            self._waiting = deque(each for each in self._waiting if not each.done.cancelled())
            self._waiting.append(_Question(spec, piece, done, self._clock() + timeout_s))
        return done

    def step(self, *, windows_wait: bool) -> None:
        """Take one step of the first question, if the share allows; end all cancelled and timed-out questions. After
        ``DeviceError`` :meth:`close` ends the rest."""
        began = self._clock()
        self._saved_s = min(_SAVED_S, self._saved_s + (began - self._last) * self._share)
        self._last = began
        for question in self._take(lambda each: each.done.cancelled() or began > each.until):
            _fail(question, UnavailableError("the answer took too long; ask again, or about less with --since"))
        with self._lock:
            first = self._waiting[0] if self._waiting else None
        if first is None or (windows_wait and self._saved_s <= 0):
            return
        if self._advance(first):
            self._take(lambda each: each is first)
        if windows_wait:
            # May go negative: a long step is followed by a proportional pause.
            self._saved_s -= self._clock() - began

    def cancel_camera(self, stream: str, error: Exception, *, waiting: bool = True) -> None:
        """Fail the questions about a camera; without ``waiting``, only the one being answered."""
        for question in self._take(lambda each: each.spec.stream == stream and (waiting or each.run is not None)):
            _fail(question, error)

    def close(self) -> None:
        """Fail all questions and accept no more, since the engine stops."""
        with self._lock:
            self._closed = True
        for question in self._take(lambda _: True):
            _fail(question, stopping())

    def _take(self, which: Callable[[_Question], bool]) -> list[_Question]:
        """Remove matching questions from the queue."""
        with self._lock:
            taken = [question for question in self._waiting if which(question)]
            for question in taken:
                self._waiting.remove(question)
        return taken

    def _advance(self, question: _Question) -> bool:
        """Take one step of a question; returns whether it is finished."""
        try:
            if question.run is None:
                question.run = self._begin(question.spec)
            piece = question.run.step()
            if piece is None:
                if question.done.set_running_or_notify_cancel():
                    question.done.set_result(question.run.result)
                return True
            if piece:
                question.piece(piece)
        except DeviceError:
            raise
        except SightlineError as error:
            _fail(question, error)
            return True
        except Exception as error:
            log.exception("a question about camera %r failed", question.spec.stream)
            _fail(question, UnavailableError(f"the question could not be answered: {error}"))
            return True
        return False


def stopping() -> UnavailableError:
    """Error of calls that the engine thread will no longer carry out."""
    return UnavailableError("the replica is stopping; try again in a moment")


def _fail(question: _Question, error: Exception) -> None:
    if question.done.set_running_or_notify_cancel():
        question.done.set_exception(error)
