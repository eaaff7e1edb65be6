"""A contact sheet of encoded scenes for people to look at: pictures as decoded, events with their boxes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import av
from PIL import Image, ImageDraw

from cluster.lab.scenes.truth import SAMPLES_PER_S, SceneTruth, truth_path

ROWS = 24
_COLUMNS = 4
_WIDTH, _CAPTION, _GAP = 256, 16, 4
_BACKGROUND, _INK, _MARK = (24, 26, 30), (222, 224, 228), (255, 72, 60)


def contact_sheet(clips: Sequence[Path], path: str | Path, *, rows: int = ROWS) -> int:
    """Draw a PNG with one row of pictures per clip; of more than ``rows`` clips an even choice. Returns how many.

    A clip with events is shown from shortly before to the end of its first; one without, over its whole length.

    Raises:
        ConfigError: a clip without its truth.
        OSError: the sheet cannot be written, or a clip not be read.
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
    """Ascending, on the truth's samples."""
    begin, end = 0.0, truth.seconds
    if truth.events:
        begin, end = max(0.0, truth.events[0].start_s - 1.5), min(truth.events[0].end_s, truth.seconds)
    steps = [begin + (end - begin) * (column + 0.5) / _COLUMNS for column in range(_COLUMNS)]
    return [round(second * SAMPLES_PER_S) / SAMPLES_PER_S for second in steps]


def _pictures(clip: Path, times: Sequence[float]) -> list[Image.Image]:
    """The picture shown at each of ``times`` (ascending; seconds)."""
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
    """Boxes and names of the events of an instant, over a picture of any size."""
    draw = ImageDraw.Draw(image)
    across, down = image.width / truth.width, image.height / truth.height
    for event in truth.events:
        for at, (left, top, right, bottom) in event.boxes:
            if at == second:
                draw.rectangle((left * across, top * down, right * across, bottom * down), outline=_MARK, width=2)
                draw.text((left * across + 3, max(0, top * down - 12)), event.kind, fill=_MARK)
