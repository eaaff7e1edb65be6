"""From what the demo saw and measured to its report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from actors.cli.demo.live import LiveRun
from actors.cli.demo.measuring import Measured
from actors.cli.demo.plan import CAMERAS
from actors.cli.demo.truth import LoopedTruth
from cluster.config import SightlineConfig, camera_settings
from cluster.lab.bench.harness import machine
from cluster.lab.report import CameraRecord, ComparedWindow, EventInterval, LiveWindow, Report
from cluster.types import MICROSECONDS, Answer, CameraStatus, Question


def make_report(
    config: SightlineConfig, run: LiveRun, measured: Measured, truths: Mapping[str, LoopedTruth], command: str
) -> Report:
    """Everything in one typed report."""
    cameras = []
    for camera in CAMERAS:
        settings = camera_settings(config, camera.name)
        status = run.statuses.get(camera.name, CameraStatus(camera.name))
        clip = measured.clips[camera.name]
        push = run.pushes.get(camera.name)
        truth = truths[camera.name]
        questions = tuple(question.question() for question in settings.questions)
        live = live_windows(run.answers.get(camera.name, []), truth)
        cameras.append(
            CameraRecord(
                name=camera.name,
                description=camera.about,
                fed_by=camera.fed_by,
                codec=clip.codec,
                width=clip.width,
                height=clip.height,
                cue=status.cue or clip.cue,
                state=status.state,
                reason=status.reason,
                questions=questions,
                live=live,
                compared=clip.compared,
                frames=clip.frames,
                windows_dropped=status.windows_dropped,
                windows_lost=status.windows_lost,
                packets_dropped=push.dropped + push.cluster_dropped if push else 0,
                decode_errors=status.decode_errors,
                gaps=status.gaps,
                live_events=_events(truth, live, questions),
                compared_events=_events(truth, clip.compared, questions),
            )
        )
    window, sampling = config.window, config.sampling
    return Report(
        created=time.strftime("%Y-%m-%d %H:%M"),
        command=command,
        model=config.model.name,
        random_weights=measured.random_weights,
        live_seconds=run.seconds,
        settings={
            "parameters": f"{measured.parameters / 1e6:.1f} million",
            "window": f"{window.length_s:g} s every {window.stride_s:g} s",
            "sampling": f"{sampling.fps:g} frames per second, an anchor every {sampling.anchor_interval_s:g} s",
            "pruning": config.pruning.policy,
            "refresh": window.refresh,
            "processes": f"gateway, controller, {config.cluster.decoders} decoders, {config.cluster.replicas} replica",
        },
        machine=machine(),
        cameras=tuple(cameras),
    )


def live_windows(answers: Sequence[Answer], truth: LoopedTruth) -> tuple[LiveWindow, ...]:
    """Answers of one camera, put together window by window. Its clip begins at 0, and so do their times."""
    found: dict[int, LiveWindow] = {}
    for answer in answers:
        known = found.get(answer.window)
        start_s, end_s = answer.start / MICROSECONDS, answer.end / MICROSECONDS
        found[answer.window] = LiveWindow(
            start_s=start_s,
            end_s=end_s,
            scores={**(known.scores if known else {}), answer.question: answer.score},
            gated=answer.gated,
            full=answer.tokens.full,
            kept=answer.tokens.kept,
            computed=0 if answer.gated else answer.tokens.computed,
            latency_s=answer.timing.latency_s,
            truth={**(known.truth if known else {}), answer.question: truth.label(answer.question, start_s, end_s)},
        )
    return tuple(found[window] for window in sorted(found))


def _events(
    truth: LoopedTruth, windows: Sequence[LiveWindow] | Sequence[ComparedWindow], questions: Sequence[Question]
) -> tuple[EventInterval, ...]:
    """What happened during these windows of what is asked for."""
    if not windows:
        return ()
    return truth.intervals([question.id for question in questions], windows[0].start_s, windows[-1].end_s)
