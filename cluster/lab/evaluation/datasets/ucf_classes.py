"""UCF-Crime's classes, and the question CodecSight asks for each."""

from __future__ import annotations

import re

# CodecSight, section 2.1, gives the query for abuse; the other classes differ in the noun alone.
PROMPT = "Describe the frames and determine if they show any {what}. Start your response with ‘Yes’ or ‘No’"

# Folder name as published -> what the prompt calls it.
ANOMALY_CLASSES: dict[str, str] = {
    "Abuse": "abuse",
    "Arrest": "arrest",
    "Arson": "arson",
    "Assault": "assault",
    "Burglary": "burglary",
    "Explosion": "explosion",
    "Fighting": "fighting",
    "RoadAccidents": "road accident",
    "Robbery": "robbery",
    "Shooting": "shooting",
    "Shoplifting": "shoplifting",
    "Stealing": "stealing",
    "Vandalism": "vandalism",
}

NORMAL = "Normal"

_LETTERS = re.compile(r"[^a-z]")
_KNOWN = {name.casefold(): name for name in ANOMALY_CLASSES}
# Training_Normal_Videos_Anomaly, Testing_Normal_Videos_Anomaly, Normal_Videos_event, z_Normal_Videos_event,
# Training-Normal-Videos-Part-1, Normal_Videos_for_Event_Recognition: archives differ in where and how they spell it.
_NORMAL_FOLDER = "normalvideos"


def class_of(name: str) -> str | None:
    """The class a folder's or an annotation's name stands for; ``NORMAL`` for normal videos, ``None`` if unknown."""
    letters = _LETTERS.sub("", name.casefold())
    if letters == NORMAL.casefold() or _NORMAL_FOLDER in letters:
        return NORMAL
    return _KNOWN.get(letters)


def prompt(kind: str) -> str:
    """The question for one of ``ANOMALY_CLASSES``."""
    return PROMPT.format(what=ANOMALY_CLASSES[kind])
