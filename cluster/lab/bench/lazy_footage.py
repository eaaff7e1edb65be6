"""Footage of mostly quiet cameras, encoded as cameras encode: what lazy decoding must see, spare and survive."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from av.video.frame import VideoFrame

from cluster.lab.scenes.actors import Actor, Keyframe
from cluster.lab.scenes.encode import VideoEncoding, write_video
from cluster.lab.scenes.events import SceneBuilder, passer_by, traffic
from cluster.lab.scenes.render import SceneRenderer
from cluster.lab.scenes.scene import Conditions, Scene, make_scene
from cluster.lab.scenes.vocabulary import Split

WIDTH, HEIGHT, FPS = 640, 360, 10
_DAY = Conditions("day", (1.0, 1.0, 0.98), 1.0, 0.0, 60.0, 1.2, 0.0, 0.0, False)
_NIGHT = replace(_DAY, light="night", level=0.45, noise=2.5, monochrome=True)


@dataclass(frozen=True, slots=True)
class Stratum:
    """``people``: passers-by in a minute. ``edge``: somebody steps into the picture's edge and back, twice a minute.
    ``contrast``, ``pace``: of its people. ``tree``: swaying branches in front.
    ``quiet``: counts for what is spared of quiet footage."""

    name: str
    conditions: Conditions
    quiet: bool = True
    people: int = 1
    edge: bool = False
    contrast: float = 1.0
    pace: float = 1.0
    cars: int = 0
    tree: bool = False


STRATA = (
    Stratum("still", _DAY, people=0),
    Stratum("day", _DAY),
    Stratum("night", _NIGHT),
    Stratum("noisy", replace(_NIGHT, level=0.5, noise=5.5, flicker=0.03)),
    Stratum("drift", replace(_DAY, drift=0.25, drift_s=40.0), people=0),
    Stratum("edge", _DAY, people=0, edge=True),
    Stratum("low_contrast", replace(_DAY, light="dusk", level=0.65), contrast=0.5),
    Stratum("slow", _DAY, pace=0.5),
    Stratum("foliage", _DAY, quiet=False, tree=True),
    Stratum("busy", _DAY, quiet=False, people=14, cars=6),
)


@dataclass(frozen=True, slots=True)
class Encoding:
    """``gop_s``: seconds between I-frames. Without ``crf`` the bit rate is constant, with a buffer of one second."""

    name: str
    codec: str
    gop_s: float
    bframes: int = 0
    crf: int | None = None
    bit_rate: int = 400_000

    def video(self) -> VideoEncoding:
        """As FFmpeg's encoders take it."""
        extra = "log-level=error:pools=none:frame-threads=1:open-gop=0:"
        encoder = "libx265" if self.codec == "hevc" else "libx264"
        options = {"preset": "ultrafast" if self.codec == "hevc" else "veryfast"}
        options["x265-params" if self.codec == "hevc" else "x264-params"] = (
            extra if self.codec == "hevc" else ""
        ) + "scenecut=0"
        if self.crf is not None:
            options["crf"] = str(self.crf)
        else:
            options |= {"b": str(self.bit_rate), "maxrate": str(self.bit_rate), "bufsize": str(self.bit_rate)}
        return VideoEncoding(encoder, options, WIDTH, HEIGHT, FPS, round(self.gop_s * FPS), self.bframes)


ENCODINGS = (
    Encoding("h264-crf24", "h264", 4.0, crf=24),
    Encoding("h264-crf32-b", "h264", 5.0, 2, crf=32),
    Encoding("h264-cbr", "h264", 4.0),
    Encoding("hevc-crf28", "hevc", 4.0, crf=28),
    Encoding("hevc-cbr", "hevc", 10.0),
)


def draw(stratum: Stratum, split: Split, index: int, seconds: float) -> list[VideoFrame]:
    """Pictures of a camera of this stratum, yuv420p."""
    scene = _scene(stratum, split, index, seconds)
    renderer = SceneRenderer(scene, WIDTH, HEIGHT)
    return [
        VideoFrame.from_ndarray(renderer.picture(number / FPS, number), format="rgb24").reformat(format="yuv420p")
        for number in range(round(seconds * FPS))
    ]


def encode_footage(
    folder: Path,
    strata: Sequence[Stratum],
    encodings: Sequence[Encoding],
    split: Split,
    seconds: float,
    *,
    index: int = 0,
) -> Iterator[tuple[Stratum, Encoding, Path]]:
    """Draw every stratum once and encode it in every way."""
    for place, stratum in enumerate(strata):
        frames = draw(stratum, split, index + place, seconds)
        for encoding in encodings:
            path = folder / f"{split}-{index + place}-{stratum.name}-{encoding.name}.mp4"
            write_video(path, encoding.video(), frames)
            yield stratum, encoding, path


def _scene(stratum: Stratum, split: Split, index: int, seconds: float) -> Scene:
    scene = make_scene(split, index, seconds=max(24.0, seconds), event=None)
    builder = SceneBuilder(scene.layout, seconds, np.random.default_rng([17, index]))
    builder.contrast, builder.pace = stratum.contrast, stratum.pace
    minutes = seconds / 60
    for _ in range(round(stratum.people * minutes)):
        passer_by(builder, builder.uniform(0.35 * seconds if stratum.quiet else 0.0, 0.85 * seconds))
    for _ in range(round(stratum.cars * minutes)):
        traffic(builder, builder.uniform(0.0, 0.9 * seconds))
    if stratum.edge:
        for visit in range(round(2 * minutes)):
            builder.actors.append(_edge_visit(len(builder.actors), (0.4 + 0.3 * visit / minutes) * seconds, builder))
    actors = tuple(_slowed(replace(actor, contrast=stratum.contrast), stratum.pace) for actor in builder.actors)
    return replace(scene, seconds=seconds, conditions=stratum.conditions, actors=actors, events=(), tree=stratum.tree)


def _edge_visit(number: int, at: float, builder: SceneBuilder) -> Actor:
    """Somebody steps half into the left edge, stands three seconds, and goes."""
    y = builder.pavement_y()
    far = -builder.layout.person_height(y)
    keys = (
        Keyframe(at, far, y, "walking"),
        Keyframe(at + 1.5, 0.0, y, "standing"),
        Keyframe(at + 4.5, 0.0, y, "walking"),
        Keyframe(at + 6.0, far, y, "walking"),
    )
    return Actor(number, "person", keys, "grey", seed=number)


def _slowed(actor: Actor, pace: float) -> Actor:
    first = actor.keys[0].t
    return replace(actor, keys=tuple(replace(key, t=first + (key.t - first) / pace) for key in actor.keys))
