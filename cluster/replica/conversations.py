"""Conversations about a camera's past: what was said, by id, for follow-up questions."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from cluster.errors import CapacityError, ConfigError, NotReadyError


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
    async def turn(self, camera: str, id: str) -> AsyncIterator[Conversation]:
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

    def said(self, conversation: Conversation, question: str, answer: str) -> None:
        """One more turn. A new conversation can be gone on with from here on; one that was not answered cannot."""
        if conversation.over:
            return
        conversation.turns.append((question, answer))
        self._known[conversation.id] = conversation
        self._touch(conversation)
        if len(self._known) > self.limit:
            del self._known[next(one.id for one in self._known.values() if not one.users)]

    def forget(self, camera: str) -> None:
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
