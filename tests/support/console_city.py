"""A made-up city of cameras for the console's bench and tests: states, answers and pictures that change every second.

Everything a gateway would ask its controller, replicas and decoders for is answered from here, by seeded arithmetic.
"""

from __future__ import annotations

import asyncio
import io
import math
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from camera_cluster import DeclaredCameras
from PIL import Image
from waiting import until_async

from cluster.config import CameraEntry, load_config, parse_camera
from cluster.control.cameras.managed import ManagedCamera
from cluster.control.directory import Directory
from cluster.errors import (
    CameraExistsError,
    ConfigError,
    NotFoundError,
    NotReadyError,
    UnavailableError,
    UnknownCameraError,
)
from cluster.lab.scenes.dataset import SceneSet
from cluster.lab.scenes.render import SceneRenderer
from cluster.replica.memory_service import ReplayRange
from cluster.types import (
    MICROSECONDS,
    Answer,
    AskResult,
    AskSpec,
    CameraStatus,
    DeletedMemory,
    LastAnswer,
    MemoryStatus,
    Moment,
    Timing,
    TokenCount,
)
from cluster.types.reports import ReplicaStatus

QUESTIONS = {
    "person-in-restricted-area": "critical",
    "fight": "critical",
    "left-object": "warning",
    "wrong-way": "warning",
}
"""Standing questions, with the severity of their incidents."""
TEXTS = {
    "person-in-restricted-area": "A person stands inside the marked area, near the fence.",
    "left-object": "A bag stands on the ground, and nobody is near it.",
    "fight": "Two people push each other.",
}
STRIDE_S = 8
SCENES = 8
WIDTH, HEIGHT = 448, 256
CELL = 16
_PLACES = ("gate", "yard", "platform", "loading dock", "car park", "corridor", "stairs", "lobby", "fence", "crossing")
_SIDES = ("north", "east", "south", "west")
_TOKENS = TokenCount(full=5120, kept=640, reused=420, refreshed=60, new=160, query=60, encoded=160)
_REASONS = {
    "error": "the source answers 401 Unauthorized; check the user name and password",
    "backoff": "the connection was refused",
    "connecting": "",
}


class City:
    """``cameras`` of them; :meth:`step` is one second. Serves as directory of cameras and replicas.

    Raises:
        ConfigError: fewer than one camera.
    """

    def __init__(self, cameras: int = 500, seed: int = 7) -> None:
        if cameras < 1:
            raise ConfigError(f"a city has at least one camera, not {cameras}")
        self._rng = random.Random(seed)
        self.replicas = [ReplicaStatus(f"replica-{number}", f"10.0.0.{number + 1}:7010") for number in range(4)]
        self.cameras: dict[str, CameraStatus] = {}
        self.hot: set[str] = set()
        """Cameras that answer yes to one of their questions, from second ``hot_since`` on."""
        self.hot_since = -60
        self.second = 0
        self.trouble = ""
        """Why the controller does not answer; empty while it does."""
        self.held: set[str] = set()
        """Cameras whose answers to free questions stop after a few words, until they are taken out."""
        self.table = DeclaredCameras(load_config(None, {}), Directory())
        """Cameras as they were written: those that were added, or whose settings somebody has asked for."""
        for number in range(cameras):
            self.put(self._made(number))
        self._fill_replicas()

    def put(self, status: CameraStatus) -> None:
        """Add a camera, or change it."""
        self.cameras[status.name] = status

    def change(self, name: str, **fields: Any) -> None:
        """Change some of a camera's fields."""
        self.put(replace(self.cameras[name], **fields))

    def step(self) -> list[Answer]:
        """A second later: counters go on, an eighth of the cameras answers."""
        self.second += 1
        answers: list[Answer] = []
        for number, status in enumerate(list(self.cameras.values())):
            if status.state != "running":
                continue
            due = number % STRIDE_S == self.second % STRIDE_S
            said = self._answers(number, status) if due else []
            answers += said
            last = tuple(LastAnswer(each.question, each.score, each.positive, each.end) for each in said)
            self.put(
                replace(
                    status,
                    frames_decoded=status.frames_decoded + 25,
                    frames_sampled=status.frames_sampled + 2,
                    last_frame_age_s=round(0.04 + 0.4 * self._rng.random(), 3),
                    windows_done=status.windows_done + due,
                    tokens_full=status.tokens_full + due * _TOKENS.full,
                    tokens_kept=status.tokens_kept + due * _TOKENS.kept,
                    tokens_computed=status.tokens_computed + due * _TOKENS.computed,
                    last_answers=last or status.last_answers,
                )
            )
        return answers

    def _made(self, number: int) -> CameraStatus:
        place, side = _PLACES[number % len(_PLACES)], _SIDES[number // len(_PLACES) % len(_SIDES)]
        name = f"{place.replace(' ', '-')}-{side}-{number + 1:03d}"
        draw = self._rng.random()
        state: Any = (
            "error" if draw < 0.002 else "backoff" if draw < 0.006 else "connecting" if draw < 0.01 else "running"
        )
        lowered = self._rng.random() < 0.08
        if self._rng.random() < 0.012 and state == "running":
            self.hot.add(name)
        return CameraStatus(
            name,
            source=f"rtsp://10.1.{number // 250}.{number % 250 + 2}/main",
            state=state,
            reason=_REASONS.get(state, ""),
            retry_in_s=12.0 if state == "backoff" else 0.0,
            codec="hevc" if number % 3 == 0 else "h264",
            width=1920,
            height=1080,
            cue="luma" if number % 3 == 0 else "vectors+luma",
            last_frame_age_s=0.2,
            decoder=f"decoder-{number % 6}",
            replica=self.replicas[number % 4].name,
            frames_decoded=90_000 + 25 * number,
            frames_sampled=7_200,
            windows_done=450 + number % 40,
            windows_gated=120 + number % 90,
            tokens_full=450 * _TOKENS.full,
            tokens_kept=450 * _TOKENS.kept,
            tokens_computed=450 * _TOKENS.computed,
            latency_s=round(0.3 + 0.5 * self._rng.random() + (1.5 if lowered else 0.0), 3),
            memory_bytes=(18 + number % 40) * 2**20,
            memory_frames=2_400 + number,
            memory_oldest_s=3_600.0 * (1 + number % 20),
            priority="high" if number % 25 == 0 else "normal",
            rung=("prune", "refresh", "stride")[number % 3] if lowered else "full",
            rung_reason="load is 0.97 of the replica's capacity" if lowered else "",
            windows_per_s=1 / STRIDE_S,
            expected_lag_s=0.6,
        )

    def past(self, windows: int) -> Iterator[tuple[float, Answer]]:
        """Answers of so many windows before now, oldest first, each with how many seconds ago it was."""
        now = self.second
        for window in range(windows, 0, -1):
            self.second = now - STRIDE_S * window
            for number, status in enumerate(self.cameras.values()):
                if status.state == "running":
                    yield from ((float(STRIDE_S * window), answer) for answer in self._answers(number, status))
        self.second = now

    def answers(self, name: str) -> list[Answer]:
        """What one camera answers now."""
        return self._answers(list(self.cameras).index(name), self.cameras[name])

    def _answers(self, number: int, status: CameraStatus) -> list[Answer]:
        end = (self.second + 3_600) * MICROSECONDS
        made = []
        for which, question in enumerate(list(QUESTIONS)[: 2 + number % 2]):
            wave = 0.09 + 0.07 * math.sin(self.second / (9 + number % 7) + number + 2 * which)
            wave += 0.05 * self._rng.random()
            hot = status.name in self.hot and which == number % 2 and self.second > self.hot_since
            score = round(min(0.99, wave + 0.78) if hot else wave, 4)
            text = TEXTS[question] if score >= 0.5 else ""
            timing = Timing(latency_s=status.latency_s)
            answer = Answer(
                stream=status.name,
                window=self.second,
                start=end - 40 * MICROSECONDS,
                end=end,
                question=question,
                score=score,
                positive=score >= 0.5,
                text=text,
                gated=score < 0.06,
                tokens=_TOKENS,
                timing=timing,
            )
            made.append(answer)
        return made

    def _fill_replicas(self) -> None:
        for number, replica in enumerate(self.replicas):
            mine = [status for status in self.cameras.values() if status.replica == replica.name]
            self.replicas[number] = replace(
                replica,
                cameras=len(mine),
                held=len(mine),
                lowered=sum(status.rung != "full" for status in mine),
                utilisation=(0.78, 0.83, 0.97, 0.71)[number],
                expected_lag_s=(0.5, 0.6, 1.4, 0.4)[number],
                backlog_s=(0.0, 0.1, 0.9, 0.0)[number],
            )

    # -- what a gateway asks the controller -----------------------------------------------------
    async def list_cameras(self) -> Sequence[CameraStatus]:
        if self.trouble:
            raise UnavailableError(self.trouble)
        return [*self.cameras.values()]

    async def get_camera(self, name: str) -> CameraStatus:
        if name not in self.cameras:
            raise UnknownCameraError(f"there is no camera {name!r}")
        return self.cameras[name]

    async def add_camera(self, managed: ManagedCamera, force: bool = False, takeover: bool = False) -> CameraStatus:
        name = managed.entry.name
        if name in self.cameras:
            raise CameraExistsError(f"there is a camera {name!r} already")
        self.table.add(managed, 0.0, force=force)
        self.put(self._written(managed.entry))
        return self.cameras[name]

    async def update_camera(self, managed: ManagedCamera, takeover: bool = False) -> CameraStatus:
        name = managed.entry.name
        await self.managed_cameras([name])
        managed = self.table.update(managed, 0.0, takeover=takeover)
        state: Any = "paused" if managed.entry.paused else "running"
        self.change(name, source=str(managed.entry.source), state=state, priority=managed.entry.priority)
        return self.cameras[name]

    async def remove_camera(self, name: str, manager: str, takeover: bool = False) -> None:
        await self.managed_cameras([name])
        self.table.remove(name)
        del self.cameras[name]
        self.hot.discard(name)

    async def managed_cameras(self, names: Sequence[str] = ()) -> Sequence[ManagedCamera]:
        known = {each.entry.name for each in self.table.managed()}
        for name in [each for each in names or self.cameras if each not in known]:
            status = await self.get_camera(name)
            questions = [{"id": each, "text": f"Is there {each}?"} for each in list(QUESTIONS)[:2]]
            self.table.add(ManagedCamera(entry=parse_camera(name, status.source, questions)), 0.0)
        return self.table.managed(names)

    def _written(self, entry: CameraEntry) -> CameraStatus:
        """The status of a camera that was added: it runs at once."""
        state: Any = "paused" if entry.paused else "running"
        made = replace(self._made(len(self.cameras)), name=entry.name, source=str(entry.source), state=state)
        return replace(made, priority=entry.priority, reason="", retry_in_s=0.0, rung="full", rung_reason="")

    async def list_replicas(self) -> Sequence[ReplicaStatus]:
        return self.replicas

    async def decoder_numbers(self) -> None:
        return None

    async def drain_replica(self, name: str, undo: bool = False) -> ReplicaStatus:
        for number, replica in enumerate(self.replicas):
            if replica.name == name:
                self.replicas[number] = replace(replica, draining=not undo)
                return self.replicas[number]
        raise NotFoundError(f"there is no replica {name!r}")

    # -- pictures -------------------------------------------------------------------------------
    @property
    def album(self) -> ThumbnailStore:
        """The same for all cities of a process."""
        return _album()

    def scene_of(self, camera: str) -> int:
        """Which scene a camera shows."""
        return sum(camera.encode()) % SCENES


def replayed_score(end: int) -> float:
    """P(yes) of a replayed window by its end, camera microseconds: high for one minute in five."""
    return 0.82 if end // MICROSECONDS % 300 < 60 else 0.11


class CityMemory:
    """What the city's replicas say of the past (as :class:`cluster.replica.memory.WorkerMemory`)."""

    def __init__(self, city: City) -> None:
        self._city = city

    async def ask(self, ask: AskSpec) -> AsyncIterator[str | AskResult]:
        status = await self._city.get_camera(ask.stream)
        if status.state != "running":
            raise NotReadyError(f"camera {ask.stream!r} has seen nothing yet")
        if ask.span is not None:
            await asyncio.sleep(0.01)
            yield AskResult(ask.stream, "", (), *ask.span, 0, 0, 0, 0.0, 0.0, yes=replayed_score(ask.span[1]))
            return
        newest = (self._city.second + 3_600) * MICROSECONDS
        words = f"Somebody in a dark jacket walked past the {ask.stream.split('-')[0]}, stopped, and left to the right."
        for number, word in enumerate(words.split(" ")):
            await asyncio.sleep(0.04)
            if number == 3:
                await until_async(lambda: ask.stream not in self._city.held)
            yield word + " "
        moments = tuple(
            Moment(newest - ago * MICROSECONDS, newest - (ago - 4) * MICROSECONDS, weight)
            for ago, weight in ((320, 0.46), (312, 0.21), (1_890, 0.12), (4, 0.05))
        )
        yes = self.yes(ask.stream)
        yield AskResult(ask.stream, words, moments, 0, newest, 2_457_600, 98_304, 41 * 2**20, 0.62, 1.9, yes=yes)

    def yes(self, camera: str) -> float:
        """P(yes) of any question."""
        return sum(camera.encode()) % 97 / 96

    async def delete_memory(self, camera: str, ago_s: float | None, *, only_here: bool = False) -> DeletedMemory:
        status = await self._city.get_camera(camera)
        return DeletedMemory(status.memory_frames, status.memory_bytes)

    async def describe(self, camera: str) -> MemoryStatus:
        status = await self._city.get_camera(camera)
        held = status.memory_bytes
        tiers = {"recent": held // 8, "host": held // 2, "redis": held - held // 8 - held // 2}
        newest = (self._city.second + 3_600) * MICROSECONDS
        return MemoryStatus(
            camera,
            status.memory_frames,
            2_457_600,
            newest - round(status.memory_oldest_s) * MICROSECONDS,
            newest,
            64 * 2**20,
            tiers,
            "novelty",
            "resv",
            "wicsum",
            tier_states=dict.fromkeys(tiers, ""),
        )

    async def replay_range(self, camera: str) -> ReplayRange:
        status = await self.describe(camera)
        return ReplayRange(status.oldest, status.newest, 40.0, float(STRIDE_S))

    async def pictures(self, camera: str, moments: Sequence[Moment]) -> list[bytes]:
        scene = self._city.scene_of(camera)
        return [self._city.album.jpeg(scene, number, kept=False, width=224) for number in range(len(moments))]


class ThumbnailStore:
    """JPEGs of :data:`SCENES` scenes at four moments each; drawn when first asked for, and kept."""

    def __init__(self) -> None:
        self._scenes = SceneSet("train", SCENES, seed=11)
        self._renderers: dict[int, SceneRenderer] = {}
        self._drawn: dict[tuple[int, int], np.ndarray] = {}
        self._jpegs: dict[tuple[int, int, bool, int], bytes] = {}

    def renderer(self, scene: int) -> SceneRenderer:
        """Draws the scene at any second."""
        if scene not in self._renderers:
            self._renderers[scene] = SceneRenderer(self._scenes.scene(scene), WIDTH, HEIGHT)
        return self._renderers[scene]

    def picture(self, scene: int, moment: int) -> np.ndarray:
        """``[HEIGHT, WIDTH, 3]`` uint8."""
        key = (scene, moment % 4)
        if key not in self._drawn:
            renderer = self.renderer(scene)
            self._drawn |= {(scene, each): renderer.picture(16.0 + 1.5 * each, each) for each in range(4)}
        return self._drawn[key]

    def jpeg(self, scene: int, moment: int, *, kept: bool, width: int) -> bytes:
        """``kept``: cells that differ from the moment before are lit, the rest is dark and grey."""
        key = (scene, moment % 4, kept, width)
        if key not in self._jpegs:
            picture = self.picture(scene, moment)
            if kept:
                picture = self._lit(picture, self.picture(scene, moment - 1))
            image = Image.fromarray(picture)
            if 0 < width < WIDTH:
                image = image.resize((width, width * HEIGHT // WIDTH))
            data = io.BytesIO()
            image.save(data, "JPEG", quality=80)
            self._jpegs[key] = data.getvalue()
        return self._jpegs[key]

    @staticmethod
    def _lit(picture: np.ndarray, before: np.ndarray) -> np.ndarray:
        difference = np.abs(picture.astype(np.int16) - before).mean(axis=2)
        cells = difference.reshape(HEIGHT // CELL, CELL, WIDTH // CELL, CELL).mean(axis=(1, 3)) > 6
        grey = np.repeat(picture.mean(axis=2, keepdims=True), 3, axis=2) * 0.42
        mask = cells.repeat(CELL, 0).repeat(CELL, 1)[..., None]
        return np.where(mask, picture, grey).astype(np.uint8)


@cache
def _album() -> ThumbnailStore:
    return ThumbnailStore()
