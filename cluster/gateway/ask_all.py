"""Asks many cameras one free question, within limits of concurrency, length and time (``AskAll``)."""

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from operator import attrgetter

import grpc
import grpc.aio
from sightline.v1 import incidents_pb2, memory_pb2

from cluster.errors import ConfigError, SightlineError
from cluster.security.limits import ConcurrencyLimit
from cluster.security.roles import EVERY, current_principal, in_scope, note_cameras
from cluster.types import CameraStatus
from cluster.wire.memory_wire import check_name, check_question, check_seconds
from cluster.wire.status import Code, code_of, upstream_error

log = logging.getLogger(__name__)

AT_ONCE, MOST_AT_ONCE = 8, 32
TOKENS = 16
"""Default limit of new tokens per camera."""
DEADLINE_S, LONGEST_S = 60.0, 300.0
RETRY_S = 0.5
"""Pause before retrying a replica whose question queue is full."""
PROGRESS_S = 0.5
MOST_PATTERNS = 100
CLIPS, CLIPS_S = 1000, 2.0
"""Number of newest incidents searched for clips of moments, and the timeout of listing them."""

AskCamera = Callable[[memory_pb2.AskRequest, float], Awaitable[memory_pb2.AskResult]]
"""(question, timeout in seconds) -> the camera's result; raises ``SightlineError`` or gRPC errors."""
ListCameras = Callable[[], Awaitable[Sequence[CameraStatus]]]
ListIncidents = Callable[[incidents_pb2.ListIncidentsRequest], Awaitable[incidents_pb2.ListIncidentsResponse]]


class AskAll:
    """Asks the cameras that the caller may see, ``at_once`` at a time, shared by the replicas.

    ``incidents``: lists incidents, to find clips of moments; None: alerting is disabled. ``most``: concurrent
    questions; more are refused with ``CapacityError``.
    """

    def __init__(
        self, ask: AskCamera, cameras: ListCameras, incidents: ListIncidents | None = None, *, most: int = 4
    ) -> None:
        self._ask, self._cameras, self._incidents = ask, cameras, incidents
        self._places = ConcurrencyLimit(most, "questions to all cameras are being answered already; ask again later")

    async def answers(
        self, request: memory_pb2.AskAllRequest, remaining_s: float | None = None
    ) -> AsyncGenerator[memory_pb2.AskAllEvent, None]:
        """Yield the cameras' answers as they arrive, with progress in between; the last progress is ``finished``.

        Closing the generator cancels all calls. Raises ``ConfigError``: invalid question or limits; ``CapacityError``:
        too many such questions are running."""
        check_question(request.text)
        at_once = request.at_once or AT_ONCE
        deadline_s = check_seconds(request.deadline_s, "deadline_s") or DEADLINE_S
        check_seconds(request.since_s, "since_s")
        if at_once > MOST_AT_ONCE or deadline_s > LONGEST_S or len(request.cameras) > MOST_PATTERNS:
            raise ConfigError(
                f"at most {MOST_AT_ONCE} cameras at once, {LONGEST_S:g} s and {MOST_PATTERNS} camera patterns"
            )
        for pattern in request.cameras:
            check_name(pattern, "a camera's pattern")
        note_cameras(*(request.cameras or EVERY))
        with self._places.taken():
            ends_s = time.monotonic() + min(deadline_s, remaining_s or LONGEST_S)
            sees, asked = current_principal().sees, request.cameras
            statuses = [
                each for each in await self._cameras() if sees(each.name) and (not asked or in_scope(each.name, asked))
            ]
            clips = await self._clips(request, min(CLIPS_S, (ends_s - time.monotonic()) / 4))
            run = _Run(self._ask, request, statuses, clips, ends_s)
            async with contextlib.aclosing(run.events(at_once)) as events:
                async for event in events:
                    yield event

    async def _clips(
        self, request: memory_pb2.AskAllRequest, limit_s: float
    ) -> dict[str, list[incidents_pb2.Incident]]:
        found: dict[str, list[incidents_pb2.Incident]] = {}
        if self._incidents is None:
            return found
        scope = list(current_principal().cameras) or [""]
        with contextlib.suppress(SightlineError, grpc.aio.AioRpcError, TimeoutError):
            # Best effort: answers do not depend on alerting.
            asked = incidents_pb2.ListIncidentsRequest(limit=CLIPS, scope=scope, within_s=request.since_s)
            async with asyncio.timeout(limit_s):
                listed = await self._incidents(asked)
            for incident in listed.incidents:
                if incident.clip in ("whole", "part"):
                    found.setdefault(incident.camera, []).append(incident)
        return found


class _Run:
    """One running question, with the incidents with clips of each camera."""

    def __init__(
        self,
        ask: AskCamera,
        request: memory_pb2.AskAllRequest,
        cameras: Sequence[CameraStatus],
        clips: dict[str, list[incidents_pb2.Incident]],
        ends_s: float,
    ) -> None:
        self._ask, self._request, self._clips, self._ends_s = ask, request, clips, ends_s
        # By whether they have no memory, and replica.
        self._waiting: dict[tuple[bool, str], deque[str]] = {}
        for each in sorted(cameras, key=attrgetter("name")):
            self._waiting.setdefault((each.memory_frames == 0, each.replica), deque()).append(each.name)
        self._under_way: Counter[str] = Counter()
        self._progress = memory_pb2.AskAllProgress(cameras=len(cameras))

    async def events(self, at_once: int) -> AsyncGenerator[memory_pb2.AskAllEvent, None]:
        queue: asyncio.Queue[memory_pb2.CameraAnswer | None] = asyncio.Queue(at_once)
        workers = [asyncio.create_task(self._work(queue)) for _ in range(min(at_once, self._progress.cameras))]
        try:
            yield memory_pb2.AskAllEvent(progress=self._progress)
            left = len(workers)
            while left:
                try:
                    async with asyncio.timeout(PROGRESS_S):
                        answer = await queue.get()
                except TimeoutError:
                    yield memory_pb2.AskAllEvent(progress=self._progress)
                    continue
                if answer is None:
                    left -= 1
                else:
                    yield memory_pb2.AskAllEvent(answer=answer)
            self._progress.finished = True
            yield memory_pb2.AskAllEvent(progress=self._progress)
        finally:
            for worker in workers:
                worker.cancel()
            if workers:
                await asyncio.wait(workers, timeout=5.0)

    async def _work(self, queue: asyncio.Queue[memory_pb2.CameraAnswer | None]) -> None:
        while self._waiting and time.monotonic() < self._ends_s:
            # At the replica with the fewest questions under way: one that hangs must not get all of them. Among equals,
            # the one not asked for longest.
            group = min(self._waiting, key=lambda each: (each[0], self._under_way[each[1]]))
            names, replica = self._waiting.pop(group), group[1]
            camera = names.popleft()
            if names:
                self._waiting[group] = names
            self._under_way[replica] += 1
            answer = await self._answer(camera)
            self._under_way[replica] -= 1
            await queue.put(answer)
        await queue.put(None)

    async def _answer(self, camera: str) -> memory_pb2.CameraAnswer:
        request = memory_pb2.AskRequest(
            camera=camera,
            text=check_question(self._request.text),
            since_s=self._request.since_s,
            max_new_tokens=self._request.max_new_tokens or TOKENS,
            with_pictures=self._request.with_pictures,
        )
        # An explicit empty history, so that the replica keeps no conversation.
        request.history.SetInParent()
        while True:
            left_s = self._ends_s - time.monotonic()
            try:
                async with asyncio.timeout(left_s):
                    result = await self._ask(request, left_s)
            except (SightlineError, grpc.aio.AioRpcError, TimeoutError) as error:
                explained = _explained(error, camera)
                # By gRPC code: errors of a replica arrive as ``RefusedError``, whatever their original class.
                code = code_of(explained)
                if code is Code.RESOURCE_EXHAUSTED and left_s > 2 * RETRY_S:
                    await asyncio.sleep(RETRY_S)
                    continue
                empty = code is Code.FAILED_PRECONDITION
                self._progress.empty += empty
                self._progress.failed += not empty
                return memory_pb2.CameraAnswer(camera=camera, error=str(explained), empty=empty)
            except Exception:
                # A failure at one camera must not cost the others' answers.
                log.exception("camera %s: a question to all failed", camera)
                self._progress.failed += 1
                return memory_pb2.CameraAnswer(camera=camera, error="internal error of the gateway; see its log")
            self._progress.answered += 1
            self._progress.tokens += result.prompt_tokens + result.answer_tokens
            clips = [self._clip(camera, moment) for moment in result.moments]
            return memory_pb2.CameraAnswer(camera=camera, result=result, incidents=clips)

    def _clip(self, camera: str, moment: memory_pb2.Moment) -> str:
        """Id of an incident whose clip shows the moment; empty: none."""
        for incident in self._clips.get(camera, ()):
            shift = incident.memory_shift
            if incident.start + shift < moment.end and moment.start < incident.end + shift:
                return incident.id
        return ""


def _explained(error: BaseException, camera: str) -> BaseException:
    if isinstance(error, TimeoutError):
        return TimeoutError("no answer before the question's deadline")
    return (
        upstream_error(error, f"the replica of camera {camera!r}") if isinstance(error, grpc.aio.AioRpcError) else error
    )
