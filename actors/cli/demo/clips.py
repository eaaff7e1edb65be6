"""The demo's videos: each camera's scene, encoded as that camera would, several at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from actors.cli.demo.plan import CAMERAS, DemoCamera
from cluster.errors import ConfigError, SightlineError
from cluster.scenes.encode import encode_scene, partial_path
from cluster.scenes.truth import SceneTruth, truth_path


def make_clips(folder: Path, on_clip: Callable[[], None] = lambda: None) -> dict[str, Path]:
    """``folder/<camera>.mp4`` of every camera, with its truth beside it; whole ones are left as they are.

    Args:
        folder: made if need be.
        on_clip: called as each one is done.

    Raises:
        SightlineError: they cannot be written, or a process died.
    """
    paths = {camera.name: folder / f"{camera.name}.mp4" for camera in CAMERAS}
    missing = [camera for camera in CAMERAS if not _is_there(camera, paths[camera.name])]
    for _ in range(len(CAMERAS) - len(missing)):
        on_clip()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if missing:
            _make(missing, paths, on_clip)
    except BrokenProcessPool:
        raise SightlineError("a process that made clips died, perhaps for want of memory; try again") from None
    except OSError as error:
        # FFmpeg's errors are OSErrors as well.
        raise SightlineError(f"cannot write clips to {folder}: {error.strerror or error}") from None
    finally:
        for path in paths.values():
            partial_path(path).unlink(missing_ok=True)
    return paths


def _make(cameras: list[DemoCamera], paths: dict[str, Path], on_clip: Callable[[], None]) -> None:
    before = set(multiprocessing.active_children())
    jobs = min(len(cameras), os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_die_of_interrupts) as pool:
        try:
            futures = [
                pool.submit(encode_scene, camera.scene(), paths[camera.name], event=camera.event) for camera in cameras
            ]
            for future in as_completed(futures):
                future.result()
                on_clip()
        except BaseException:
            # Nobody wants to wait for the clips under way after Ctrl-C or an error.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - before:
                process.terminate()
            raise


def _is_there(camera: DemoCamera, path: Path) -> bool:
    """Whether the clip is whole and shows this very scene, and not what an older version drew under its name."""
    if not path.is_file():
        return False
    try:
        truth = SceneTruth.load(truth_path(path))
    except ConfigError:
        return False
    scene = camera.scene()
    wanted = (scene.seed, camera.event, scene.seconds, scene.camera, scene.events)
    return wanted == (truth.seed, truth.event, truth.seconds, truth.camera, truth.scene_events)


def _die_of_interrupts() -> None:
    """Ctrl-C reaches every process of the terminal; the parent alone says so."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
