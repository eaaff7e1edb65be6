"""Directories of encoded scenes with an index, created in parallel and resumable; and contact sheets."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
from PIL import Image, ImageDraw

from cluster.errors import ConfigError
from cluster.files import replacing, writing
from cluster.lab.scenes.actors import Scene
from cluster.lab.scenes.encode import SceneClip, encode_missing_clips
from cluster.lab.scenes.scene import make_scene
from cluster.lab.scenes.truth import SAMPLES_PER_S, SceneTruth, truth_path
from cluster.lab.scenes.vocabulary import EVENT_KINDS, Split

ROWS = 24
_COLUMNS = 4
_WIDTH, _CAPTION, _GAP = 256, 16, 4
_BACKGROUND, _INK, _MARK = (24, 26, 30), (222, 224, 228), (255, 72, 60)


def contact_sheet(clips: Sequence[Path], path: str | Path, *, rows: int = ROWS) -> int:
    """Draw a PNG with one row of frames per clip, for at most ``rows`` evenly chosen clips. Returns the number of rows.

    Clips with events are shown from shortly before the first event to its end, others over their whole length. Raises
    ``ConfigError``: a clip without ground truth; ``OSError``: the sheet cannot be written, or a clip cannot be read.
    """
    shown = [clips[number * len(clips) // min(rows, len(clips))] for number in range(min(rows, len(clips)))]
    strips = [_strip(clip) for clip in shown]
    sheet = Image.new("RGB", (strips[0].width, sum(strip.height for strip in strips)), _BACKGROUND)
    top = 0
    for strip in strips:
        sheet.paste(strip, (0, top))
        top += strip.height
    sheet.save(path, "PNG", optimize=True)
    return len(shown)


def _strip(clip: Path) -> Image.Image:
    truth = SceneTruth.load(truth_path(clip))
    height = round(_WIDTH * truth.height / truth.width)
    strip = Image.new("RGB", (_COLUMNS * (_WIDTH + _GAP), _CAPTION + height + _GAP), _BACKGROUND)
    draw = ImageDraw.Draw(strip)
    draw.text((2, 1), _caption(truth), fill=_INK)
    times = _times(truth)
    for column, (second, image) in enumerate(zip(times, _pictures(clip, times), strict=True)):
        left = column * (_WIDTH + _GAP)
        small = image.resize((_WIDTH, height), Image.Resampling.LANCZOS)
        _mark(small, truth, second)
        strip.paste(small, (left, _CAPTION))
        draw.text((left + 3, _CAPTION + height - 12), f"{second:.1f} s", fill=_INK)
    return strip


def _caption(truth: SceneTruth) -> str:
    happened = ", ".join(f"{each.kind} {each.start_s:.1f}-{each.end_s:.1f} s" for each in truth.events) or "no event"
    hard = f" ({', '.join(truth.strata)})" if truth.strata else ""
    camera = f"{truth.camera.codec} {truth.width}x{truth.height} {truth.fps:g} fps"
    return f"{truth.name}: {happened}{hard}; {truth.layout}, {truth.light}, {camera}"


def _times(truth: SceneTruth) -> list[float]:
    """Times to show, ascending, as multiples of the ground truth's sample interval."""
    begin, end = 0.0, truth.seconds
    if truth.events:
        begin, end = max(0.0, truth.events[0].start_s - 1.5), min(truth.events[0].end_s, truth.seconds)
    steps = [begin + (end - begin) * (column + 0.5) / _COLUMNS for column in range(_COLUMNS)]
    return [round(second * SAMPLES_PER_S) / SAMPLES_PER_S for second in steps]


def _pictures(clip: Path, times: Sequence[float]) -> list[Image.Image]:
    """Frames shown at ``times`` (ascending, in seconds)."""
    found: list[Image.Image] = []
    last: Image.Image | None = None
    with av.open(str(clip)) as container:
        for frame in container.decode(video=0):
            while len(found) < len(times) and last is not None and (frame.time or 0.0) > times[len(found)] + 1e-6:
                found.append(last.copy())
            if len(found) == len(times):
                break
            last = Image.fromarray(frame.to_ndarray(format="rgb24"))
    if last is None:
        raise OSError(f"{clip} holds no picture")
    return found + [last.copy() for _ in range(len(times) - len(found))]


def _mark(image: Image.Image, truth: SceneTruth, second: float) -> None:
    draw = ImageDraw.Draw(image)
    across, down = image.width / truth.width, image.height / truth.height
    for event in truth.events:
        for at, (left, top, right, bottom) in event.boxes:
            if at == second:
                draw.rectangle((left * across, top * down, right * across, bottom * down), outline=_MARK, width=2)
                draw.text((left * across + 3, max(0, top * down - 12)), event.kind, fill=_MARK)


INDEX = "scenes.json"
# Number of scene indices reserved for each seed.
PER_SEED = 100_000


@dataclass(frozen=True, slots=True)
class SceneSet:
    """``count`` scenes of a split, ``seconds`` long; their indices start at ``seed * PER_SEED``.

    ``events``: arguments for ``make_scene``, used cyclically: ``any``, ``none`` (distractors only) or a kind. Raises
    ``ConfigError``: an invalid count, seed, split or event.
    """

    split: Split
    count: int
    seed: int = 0
    seconds: float = 40.0
    events: tuple[str, ...] = ("any",)

    def __post_init__(self) -> None:
        if not 1 <= self.count <= PER_SEED:
            raise ConfigError(f"the number of scenes must be between 1 and {PER_SEED}, not {self.count}")
        if self.seed < 0:
            raise ConfigError(f"a seed must be at least 0, not {self.seed}")
        known = ("any", "none", *EVENT_KINDS)
        for event in self.events:
            if event not in known:
                raise ConfigError(f"unknown event {event!r}; there are: {', '.join(known)}")
        if not self.events:
            raise ConfigError(f"no event given; there are: {', '.join(known)}")
        # Rejects an unknown split and too short scenes.
        self.scene(0)

    def event(self, number: int) -> str | None:
        """``event`` argument of scene ``number``."""
        event = self.events[number % len(self.events)]
        return None if event == "none" else event

    def scene(self, number: int) -> Scene:
        """Scene ``number`` of the set, from 0."""
        index = self.seed * PER_SEED + number
        return make_scene(self.split, index, seconds=self.seconds, event=self.event(number))

    def settings(self) -> dict[str, Any]:
        """Settings that all runs writing to one directory must share."""
        return {"split": self.split, "seed": self.seed, "seconds": self.seconds, "events": list(self.events)}


@dataclass(frozen=True, slots=True)
class MadeScenes:
    """``clips`` in the order of the set; ``made``: number of clips encoded by this call."""

    clips: tuple[Path, ...]
    made: int


def make_scenes(
    directory: str | Path, wanted: SceneSet, *, jobs: int = 1, on_clip: Callable[[Path], None] | None = None
) -> MadeScenes:
    """Encode a set of scenes as ``directory/<name>.mp4`` with ground truth in ``<name>.json``, and write the index.

    Complete clips are kept, so an interrupted call can be resumed. ``jobs``: number of processes. ``on_clip``: called
    with the path of every finished clip, immediately for existing ones. Raises ``ConfigError``: the directory holds
    scenes made with other settings, or ``jobs`` is below 1; ``SightlineError``: a clip cannot be written, or a process
    died.
    """
    if jobs < 1:
        raise ConfigError(f"the number of processes must be at least 1, not {jobs}")
    folder = Path(directory)
    _check_index(folder, wanted)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _write_index(folder, wanted)
    clips = []
    for number in range(wanted.count):
        scene = wanted.scene(number)
        clips.append(SceneClip(scene, wanted.event(number), folder / f"{scene.name}.mp4"))
    try:
        made = encode_missing_clips(clips, folder, jobs=jobs, on_clip=on_clip or (lambda _: None))
    finally:
        if folder.is_dir():
            _write_index(folder, wanted)
    return MadeScenes(tuple(clip.path for clip in clips), made)


def _check_index(folder: Path, wanted: SceneSet) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is not a directory")
    path = folder / INDEX
    if not path.exists():
        return
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        settings = {key: held[key] for key in wanted.settings()}
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is not an index of scenes; choose another directory or remove it") from None
    differ = [f"{key} {settings[key]}" for key, value in wanted.settings().items() if settings[key] != value]
    if differ:
        raise ConfigError(f"{folder} holds scenes made with {', '.join(differ)}; choose another directory")


def _write_index(folder: Path, wanted: SceneSet) -> None:
    """Index of all complete clips in the directory."""
    clips = []
    for path in sorted(folder.glob("*.mp4")):
        try:
            truth = SceneTruth.load(truth_path(path))
        except ConfigError:
            continue
        kinds = [event.kind for event in truth.events]
        strata = list(truth.strata)
        clips.append({"name": truth.name, "events": kinds, "strata": strata, "mean_motion": truth.mean_motion})
    body = {**wanted.settings(), "clips": clips}
    with replacing(folder / INDEX) as part:
        part.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
