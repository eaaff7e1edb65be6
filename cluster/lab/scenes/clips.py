"""Encodes many scenes, several at a time; those that are there already are left as they are."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ConfigError, SightlineError
from cluster.lab.scenes.encode import encode_scene, partial_path
from cluster.lab.scenes.scene import Scene
from cluster.lab.scenes.truth import SceneTruth, truth_path


@dataclass(frozen=True, slots=True)
class Clip:
    """A scene and where its video lies. ``event``: what ``make_scene`` was asked for."""

    scene: Scene
    event: str | None
    path: Path

    def is_there(self) -> bool:
        """Whether the video is whole and shows this very scene, and not what an older version drew under its name."""
        if not self.path.is_file():
            return False
        try:
            truth = SceneTruth.load(truth_path(self.path))
        except ConfigError:
            return False
        scene = self.scene
        same = (truth.seed, truth.event, truth.seconds, truth.camera) == (
            scene.seed,
            self.event,
            scene.seconds,
            scene.camera,
        )
        return same and truth.scene_events == scene.events

    def make(self) -> Path:
        """Encode it."""
        encode_scene(self.scene, self.path, event=self.event)
        return self.path


def make_clips(
    clips: Sequence[Clip], folder: Path, *, jobs: int = 1, on_clip: Callable[[Path], None] = lambda _: None
) -> int:
    """Encode what is missing of ``clips``, which lie in ``folder`` (made if need be); how many those were.

    Args:
        clips: what must be there.
        folder: for the messages as well.
        jobs: how many processes draw and encode.
        on_clip: called with the path of every clip as it is done, at once for those that were.

    Raises:
        SightlineError: a clip cannot be written, or a process died.
    """
    missing = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for clip in clips:
            if clip.is_there():
                on_clip(clip.path)
            else:
                missing.append(clip)
        with closing(_made(missing, jobs)) as finished:
            for path in finished:
                on_clip(path)
    except BrokenProcessPool:
        raise SightlineError(
            "a process that made clips died, perhaps for want of memory; run it again to go on"
        ) from None
    except OSError as error:
        # FFmpeg's errors are OSErrors as well.
        raise SightlineError(f"cannot write scenes to {folder}: {error.strerror or error}") from None
    finally:
        for clip in clips:
            partial_path(clip.path).unlink(missing_ok=True)
    return len(missing)


def _made(clips: Sequence[Clip], jobs: int) -> Generator[Path, None, None]:
    """Paths of clips as they get done, in any order."""
    if jobs == 1 or len(clips) < 2:
        yield from (clip.make() for clip in clips)
        return
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(clips)), context, initializer=_die_of_interrupts) as pool:
        futures = [pool.submit(clip.make) for clip in clips]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            # Nobody wants to wait for the clips under way after Ctrl-C or an error. The pool notices and clears up.
            for process in set(multiprocessing.active_children()) - before:
                process.terminate()
            raise


def _die_of_interrupts() -> None:
    """Ctrl-C reaches every process of the terminal; the parent alone says so."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
