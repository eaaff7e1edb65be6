"""Labelled video datasets: one reader per directory layout, registered in ``dataset_layouts``."""

import filecmp
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import av
from av.container import InputContainer
from av.video.stream import VideoStream

from cluster.errors import ConfigError
from cluster.lab.scenes.dataset import INDEX
from cluster.lab.scenes.questions import standing_question
from cluster.lab.scenes.truth import SceneTruth, truth_path
from cluster.lab.scenes.vocabulary import EVENT_KINDS
from cluster.registry import Registry

VIDEO_SUFFIXES = frozenset({".mp4", ".avi", ".mkv", ".mov", ".webm", ".m4v", ".ts"})

# Tolerance between a container's declared duration and the end of its last packet.
_END_SLACK_S = 1.0


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """``fps``: mean frame rate; ``seconds``: duration."""

    fps: float
    seconds: float


def probe_video(path: Path) -> VideoFacts:
    """Open the file, decode its first frame and find its end. Raises ``ConfigError``: missing, empty, not a video, no
    decodable frame, or truncated."""
    try:
        if path.stat().st_size == 0:
            raise ConfigError("empty file (0 bytes)")
        with av.open(str(path)) as container:
            return _probe(container)
    except (av.FFmpegError, OSError) as error:
        raise ConfigError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _probe(container: InputContainer) -> VideoFacts:
    if not container.streams.video:
        raise ConfigError("holds no video stream")
    stream = container.streams.video[0]
    first = next(container.decode(stream), None)
    if first is None:
        raise ConfigError("holds no picture")
    fps = float(stream.average_rate or stream.guessed_rate or 0)
    if fps <= 0:
        raise ConfigError("states no frame rate")
    start = first.time or 0.0
    stated: float | None = None
    if stream.duration is not None and stream.time_base is not None:
        stated = float(stream.duration * stream.time_base)
    elif container.duration is not None:
        stated = container.duration / av.time_base
    # Demux from the last keyframe only, if the duration is known.
    container.seek(0 if stated is None else int((start + stated) * av.time_base))
    end = _last_packet_s(container, stream) + 1 / fps
    if stated is not None and start + stated - end > _END_SLACK_S:
        raise ConfigError(f"truncated: ends after {end - start:.1f} of {stated:.1f} s")
    return VideoFacts(fps, end - start)


def _last_packet_s(container: InputContainer, stream: VideoStream) -> float:
    """Latest presentation time of the remaining packets, in seconds."""
    last = 0.0
    for packet in container.demux(stream):
        # AVI has no presentation times.
        stamp = packet.pts if packet.pts is not None else packet.dts
        if stamp is not None and packet.time_base is not None:
            last = max(last, float(stamp * packet.time_base))
    return last


@dataclass(frozen=True, slots=True)
class LabelledVideo:
    """One video and its ground truth.

    * ``events``: (kind, start, end), seconds from the first frame
    * ``kinds``: kinds of event that are labelled; one without an event is a negative
    * ``strata``: groups it is also reported in ("night", "noisy" …)
    * ``motion``: mean motion by the dataset's own measure, ``None`` to measure it
    * ``split``: of a synthetic scene, ``None`` for other videos
    """

    path: Path
    name: str
    events: tuple[tuple[str, float, float], ...]
    kinds: tuple[str, ...]
    strata: frozenset[str] = frozenset()
    motion: float | None = None
    split: str | None = None


@dataclass(frozen=True, slots=True)
class SkippedVideo:
    """A video excluded from the evaluation, and why."""

    path: Path
    reason: str


# Maximum reasons listed in an error; the rest are counted.
_MAX_REASONS = 3


@dataclass(frozen=True, slots=True)
class Dataset:
    """Labelled videos, skipped ones, and the question for each kind of event (``questions``: kind -> text)."""

    layout: str
    directory: Path
    videos: tuple[LabelledVideo, ...]
    questions: dict[str, str]
    skipped: tuple[SkippedVideo, ...] = field(default=())


DatasetReader = Callable[[Path, float], Dataset]
"""Reads ``(directory, min_seconds)``; raises ``ConfigError`` if the directory has another layout."""

dataset_layouts: Registry[DatasetReader] = Registry(
    "dataset layout",
    {
        "scenes": "cluster.lab.evaluation.datasets:read_scenes",
        "ucf-crime": "cluster.lab.evaluation.datasets.ucf_crime:read_ucf_crime",
    },
)


def load_dataset(directory: str | Path, layout: str = "scenes", *, min_seconds: float = 0.0) -> Dataset:
    """Read a directory of labelled videos in one of ``dataset_layouts``; videos shorter than ``min_seconds`` are
    skipped. Raises ``ConfigError``: unknown layout, no such directory, another layout, or no video left; the message
    gives the reasons of the first skipped ones."""
    read = dataset_layouts.get(layout)
    folder = check_directory(directory)
    dataset = read(folder, min_seconds)
    if not dataset.videos:
        raise ConfigError(f"no videos left in {folder}: {format_reasons(dataset.skipped)}")
    return dataset


def check_validation(validation: Dataset, judged: Sequence[LabelledVideo] = ()) -> None:
    """Guard against leakage between fitting and testing. Raises ``ConfigError``: a validation video is also among
    ``judged`` (by content, whatever its name), or is a scene of the test split."""
    sizes: dict[int, list[Path]] = {}
    for video in judged:
        sizes.setdefault(video.path.stat().st_size, []).append(video.path)
    for video in validation.videos:
        for other in sizes.get(video.path.stat().st_size, ()):
            if filecmp.cmp(video.path, other, shallow=False):
                raise ConfigError(
                    f"{video.path} is also a test video ({other}); choose settings and thresholds on other videos"
                )
    tests = [video.name for video in validation.videos if video.split == "test"]
    if tests:
        raise ConfigError(
            f"{validation.directory} holds scenes of the test split ({tests[0]}), on which nothing may be fitted; make "
            "validation scenes with `sightline scenes make --split validation`"
        )


def check_directory(directory: str | Path) -> Path:
    """The directory as a path; raises ``ConfigError`` if it is not one."""
    folder = Path(directory)
    if not folder.is_dir():
        what = "is not a directory" if folder.exists() else "does not exist"
        raise ConfigError(f"dataset directory {folder} {what}")
    return folder


class Skipped(list[SkippedVideo]):
    """Collects the videos that a dataset reader skips."""

    @contextmanager
    def instead(self, path: Path, where: str = "") -> Iterator[None]:
        """Suppress a ``ConfigError`` of the block and record ``path`` as skipped; ``where``: prefix of the reason."""
        try:
            yield
        except ConfigError as error:
            self.append(SkippedVideo(path, f"{where}{error}"))


def probe_min_length(path: Path, min_seconds: float) -> VideoFacts:
    """Like :func:`probe_video`, but also raises ``ConfigError`` for videos shorter than ``min_seconds``."""
    facts = probe_video(path)
    if facts.seconds < min_seconds:
        raise ConfigError(f"shorter than a window: {facts.seconds:.1f} of {min_seconds:g} s")
    return facts


def format_reasons(skipped: Sequence[SkippedVideo]) -> str:
    """The first few reasons in one line."""
    if not skipped:
        return "it holds no video of this layout"
    named = "; ".join(f"{each.path.name}: {each.reason}" for each in skipped[:_MAX_REASONS])
    more = len(skipped) - _MAX_REASONS
    return f"{named}; and {more} more" if more > 0 else named


def read_scenes(directory: Path, min_seconds: float) -> Dataset:
    """All clips in the directory, each judged on every kind of event: the ground truth is complete."""
    clips = {path.stem: path for path in directory.glob("*.mp4")}
    paths = [clips.get(name, directory / f"{name}.mp4") for name in sorted(clips.keys() | set(_indexed(directory)))]
    videos, skipped = [], Skipped()
    for path in paths:
        with skipped.instead(path):
            videos.append(_labelled(path, min_seconds))
    questions = {kind: standing_question(kind) for kind in EVENT_KINDS}
    return Dataset("scenes", directory, tuple(videos), questions, tuple(skipped))


def _indexed(directory: Path) -> list[str]:
    """Clip names in the index; empty without an index."""
    path = directory / INDEX
    if not path.exists():
        return []
    try:
        return [str(clip["name"]) for clip in json.loads(path.read_text(encoding="utf-8"))["clips"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is not an index of scenes; remove it to use all clips of the directory") from None


def _labelled(path: Path, min_seconds: float) -> LabelledVideo:
    if not path.exists():
        raise ConfigError("in the index, not on disk")
    if not truth_path(path).exists():
        raise ConfigError(f"its ground truth {truth_path(path).name} is missing")
    truth = SceneTruth.load(truth_path(path))
    probe_min_length(path, min_seconds)
    return LabelledVideo(
        path=path,
        name=truth.name,
        events=tuple((event.kind, event.start_s, event.end_s) for event in truth.events),
        kinds=EVENT_KINDS,
        strata=frozenset((*truth.strata, truth.camera.codec)),
        motion=truth.mean_motion,
        split=truth.split,
    )
