"""From what the demo saw and measured to its report."""

from __future__ import annotations

import time
from collections.abc import Sequence

from actors.cli.demo.live import LiveRun
from actors.cli.demo.measuring import Measured
from actors.cli.demo.plan import CAMERAS
from cluster.bench.harness import machine
from cluster.clips import CLIP_KINDS
from cluster.config import SightlineConfig, camera_settings
from cluster.report import CameraRecord, LiveWindow, Report
from cluster.types import MICROSECONDS, Answer, CameraStatus


def make_report(config: SightlineConfig, run: LiveRun, measured: Measured, command: str) -> Report:
    """Everything in one typed report."""
    cameras = []
    for camera in CAMERAS:
        settings = camera_settings(config, camera.name)
        status = run.statuses.get(camera.name, CameraStatus(camera.name))
        clip = measured.clips[camera.name]
        push = run.pushes.get(camera.name)
        about = CLIP_KINDS[camera.name].about
        cameras.append(
            CameraRecord(
                name=camera.name,
                description=about[0].upper() + about[1:],
                fed_by=camera.fed_by,
                codec=clip.codec,
                width=clip.width,
                height=clip.height,
                cue=status.cue or clip.cue,
                state=status.state,
                reason=status.reason,
                questions=tuple(question.question() for question in settings.questions),
                live=live_windows(run.answers.get(camera.name, [])),
                compared=clip.compared,
                frames=clip.frames,
                windows_dropped=status.windows_dropped,
                windows_lost=status.windows_lost,
                packets_dropped=push.dropped + push.cluster_dropped if push else 0,
                decode_errors=status.decode_errors,
                gaps=status.gaps,
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


def live_windows(answers: Sequence[Answer]) -> tuple[LiveWindow, ...]:
    """Answers of one camera, put together window by window."""
    if not answers:
        return ()
    origin = min(answer.start for answer in answers)
    found: dict[int, LiveWindow] = {}
    for answer in answers:
        known = found.get(answer.window)
        scores = {**(known.scores if known else {}), answer.question: answer.score}
        found[answer.window] = LiveWindow(
            start_s=(answer.start - origin) / MICROSECONDS,
            end_s=(answer.end - origin) / MICROSECONDS,
            scores=scores,
            gated=answer.gated,
            full=answer.tokens.full,
            kept=answer.tokens.kept,
            computed=0 if answer.gated else answer.tokens.computed,
            latency_s=answer.timing.latency_s,
        )
    return tuple(found[window] for window in sorted(found))
