"""The work file: one line per video and setting that is done, so that an interrupted evaluation goes on from there."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO

import cluster
from cluster.engine.native.engine import NativeEngine
from cluster.errors import SightlineError
from cluster.lab.evaluation.results import VideoRun

# What decides an answer besides model and setting; results of other code are not taken for this code's.
_CODE = ("codec", "vision", "engine", "models")
_CHUNK = 1 << 20


class WorkFile:
    """Results by (digest of the video, digest of the model and its questions, setting). A context manager.

    Opened on a path it reads what is there and appends to it; on ``None`` it keeps nothing.

    Raises:
        SightlineError: the file cannot be read or written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._done: dict[tuple[str, str, str], VideoRun] = {}
        self._file: IO[str] | None = None

    def __enter__(self) -> WorkFile:
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("a+", encoding="utf-8")
                self._file.seek(0)
                self._read(self._file)
            except OSError as error:
                raise self._unusable(error) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def get(self, video: str, model: str, setting: str) -> VideoRun | None:
        """The run, if it was done."""
        return self._done.get((video, model, setting))

    def add(self, video: str, model: str, setting: str, run: VideoRun) -> None:
        """Keep a run; on disk when this returns.

        Raises:
            SightlineError: the disk is full.
        """
        self._done[video, model, setting] = run
        if self._file is None:
            return
        line = json.dumps(
            {"video": video, "model": model, "setting": setting, "run": run.to_json()}, separators=(",", ":")
        )
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            raise self._unusable(error) from None

    def _read(self, file: IO[str]) -> None:
        text = file.read()
        broken = 0
        for line in text.splitlines():
            try:
                body = json.loads(line)
                key = (str(body["video"]), str(body["model"]), str(body["setting"]))
                self._done[key] = VideoRun.from_json(body["run"])
            except (ValueError, KeyError, TypeError):
                broken += 1
        if broken:
            # The line that was being written when the evaluation was interrupted.
            logging.getLogger(__name__).info("%s: %d broken lines are computed again", self.path, broken)
        if text and not text.endswith("\n"):
            file.write("\n")

    def _unusable(self, error: OSError) -> SightlineError:
        return SightlineError(f"work file {self.path} cannot be used: {error.strerror or error}; choose another place")


def video_digest(path: Path) -> str:
    """Of the file's bytes.

    Raises:
        OSError: it cannot be read.
    """
    hasher = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()


def model_digest(engine: NativeEngine, questions: Mapping[str, str]) -> str:
    """Of everything but video and setting that a score depends on: weights, prompts, calibration, pixels, and code."""
    model = engine.model
    parts = [
        engine.fingerprint,
        f"{model.settings.score_temperature} {model.settings.score_bias}",
        str(model.geometry),
        str(model.system_ids()),
        *(f"{kind}:{model.question_ids(text)}" for kind, text in sorted(questions.items())),
        _code_digest(),
    ]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


@functools.cache
def _code_digest() -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for folder in cluster.__path__:
        for package in _CODE:
            for path in sorted(Path(folder, package).rglob("*.py")):
                hasher.update(os.fsencode(path.relative_to(folder)) + path.read_bytes())
    return hasher.hexdigest()
