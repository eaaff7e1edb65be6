"""A report with every feature in it: gated windows, drops, a camera without answers, text that needs escaping; and one
whose truth is known."""

import dataclasses
import io
import math

import pytest
from PIL import Image, ImageDraw

from cluster.lab.report.records import (
    CameraRecord,
    ComparedWindow,
    Cost,
    EventInterval,
    LiveWindow,
    Report,
    SampleFrame,
)
from cluster.types import Question

QUESTIONS = (
    Question("person", "Is there a person in the scene?"),
    Question("vehicle", "Is a vehicle moving <fast> & loud?", threshold=0.6),
)


def picture(shift):
    image = Image.new("RGB", (320, 180), (70, 84, 96))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 110, 320, 180), fill=(52, 54, 58))
    draw.rectangle((40 + shift, 100, 100 + shift, 140), fill=(180, 60, 50))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=80)
    return out.getvalue()


def live(count, *, quiet=False):
    windows = []
    for index in range(count):
        gated = quiet and index > 1
        scores = {"person": 0.5 + 0.3 * math.sin(index), "vehicle": 0.4 + 0.04 * index}
        computed = 0 if gated else (900 if index == 0 else 240)
        windows.append(
            LiveWindow(4.0 * index, 16.0 + 4 * index, scores, gated, 4096, 900, computed, 0.2 + 0.05 * index)
        )
    return tuple(windows)


def compared(count, *, quiet=False):
    return tuple(
        ComparedWindow(
            start_s=4.0 * index,
            end_s=16.0 + 4 * index,
            full=Cost(4130, 1.25, 2.0e11),
            ours=Cost(0, 0.0, 0.0) if quiet else Cost(260, 0.125, 1.0e10),
            gated=quiet,
            full_scores={"person": 0.55, "vehicle": 0.41},
            our_scores={"person": 0.56 if index else 0.45, "vehicle": 0.40},
        )
        for index in range(count)
    )


def camera(name, **changes):
    settings = {
        "name": name,
        "description": "A quiet street with a few movers",
        "fed_by": "file (pull)",
        "codec": "h264",
        "width": 640,
        "height": 360,
        "cue": "vectors+luma",
        "state": "running",
        "reason": "",
        "questions": QUESTIONS,
        "live": live(7),
        "compared": compared(3),
        "frames": tuple(SampleFrame(i * 4.0, 1.0 if i == 0 else 0.06 * i, i == 0, picture(40 * i)) for i in range(4)),
    }
    return CameraRecord(**(settings | changes))


@pytest.fixture(scope="session")
def report():
    return Report(
        created="2026-11-20 11:20",
        command="sightline demo --seconds 40",
        model="demo-qwen2_5_vl",
        random_weights=True,
        live_seconds=42.0,
        settings={
            "window": "16 s every 4 s",
            "sampling": "2 frames per second",
            "pruning": "replenish",
            "refresh": "anchors",
        },
        machine={"cpu": "A processor", "cores": 2, "gpu": None, "torch": "2.13.0"},
        cameras=(
            camera("street"),
            camera("noisy-street", fed_by="gRPC push", windows_dropped=2, packets_dropped=14, gaps=1),
            camera("depot", codec="hevc", cue="luma", fed_by="gRPC push"),
            camera("night", description="Nothing moves", live=live(7, quiet=True), compared=compared(3, quiet=True)),
            camera(
                "broken",
                live=(),
                compared=(),
                frames=(),
                state="error",
                reason="no <such> file",
                codec="",
                width=0,
                height=0,
                cue="",
            ),
        ),
        notes=("A note <of> the run.",),
    )


# Of the street: yes to person in five windows of seven, nobody can tell in one; never yes to vehicle.
TRUTH = [False, None, True, True, True, True, True]
# Positive from 0.5 on: right, open, wrong, right, right, wrong, right.
PERSON = [0.1, 0.9, 0.2, 0.8, 0.7, 0.3, 0.6]


@pytest.fixture(scope="session")
def told(report):
    """A trained model's report; the truth of one camera is known."""
    street = report.cameras[0]
    live = tuple(
        dataclasses.replace(window, scores={"person": score, "vehicle": 0.2}, truth={"person": truth, "vehicle": False})
        for window, score, truth in zip(street.live, PERSON, TRUTH, strict=True)
    )
    both = tuple(
        dataclasses.replace(window, truth={"person": index > 0, "vehicle": False})
        for index, window in enumerate(street.compared)
    )
    events = (EventInterval("person", 20.0, 40.0),)
    street = dataclasses.replace(street, live=live, compared=both, live_events=events, compared_events=events)
    return dataclasses.replace(report, random_weights=False, cameras=(street, *report.cameras[1:]))
