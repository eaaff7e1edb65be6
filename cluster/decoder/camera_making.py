"""What a running camera is made of, from its configuration: source, pipeline, footage, and what replicas are told."""

from __future__ import annotations

from dataclasses import replace

from cluster.codec import Backoff, Source, open_source
from cluster.config import CameraConfig, SightlineConfig
from cluster.control.ladder import Rung
from cluster.decoder.footage.camera import CameraFootage, reach_s
from cluster.decoder.footage.ring import PacketRing, RingBudget
from cluster.decoder.pipeline import PipelineSettings
from cluster.types import StreamSpec


def camera_footage(settings: CameraConfig, config: SightlineConfig, rings: RingBudget | None) -> CameraFootage:
    """What is held of a camera for people to see; no packets without ``rings``, or where no clips are kept."""
    ring = None
    if rings is not None and config.clips.enabled and config.alerts.enabled:
        ring = PacketRing(reach_s(settings, config), config.clips.ring_camera_bytes, rings)
    return CameraFootage(ring, settings.privacy_masks)


def spec_at(spec: StreamSpec, rung: Rung) -> StreamSpec:
    """What a replica must know of a camera that runs at ``rung``."""
    budget = spec.refresh_budget
    if rung.refresh_budget is not None:
        budget = rung.refresh_budget if budget is None else min(budget, rung.refresh_budget)
    # Windows that do not touch would leave out what lies between them.
    stride_s = min(spec.stride_s * rung.stride, max(spec.stride_s, spec.window_s))
    return replace(spec, stride_s=stride_s, refresh_budget=budget)


def make_source(settings: CameraConfig, config: SightlineConfig) -> Source:
    """The camera's source, nothing opened yet."""
    options, cluster = settings.source_options, config.cluster
    if settings.is_pushed:
        return open_source("", max_packets=cluster.packet_queue, max_bytes=cluster.packet_queue_bytes)
    if settings.is_file:
        return open_source(settings.source, loop=options.loop, realtime=options.realtime, speed=options.speed)
    return open_source(
        settings.source, connect_timeout_s=options.connect_timeout_s, frozen_timeout_s=options.frozen_timeout_s
    )


def pipeline_settings(settings: CameraConfig) -> PipelineSettings:
    """A camera's configuration as its pipeline takes it."""
    backoff = settings.source_options.backoff
    return PipelineSettings(
        fps=settings.sampling.fps,
        anchor_interval_s=settings.sampling.anchor_interval_s,
        pruner=settings.pruning.policy,
        pruner_options=settings.pruning.options,
        backoff=Backoff(first_s=backoff.initial_s, longest_s=backoff.max_s, jitter=backoff.jitter),
        masks=tuple(settings.privacy_masks),
        decoded_bytes=settings.source_options.decoded_bytes,
    )


def sender_queue(config: SightlineConfig) -> int:
    """Frames of a camera that may wait in the decoder; as many again may be under way."""
    return max(8, config.cluster.frame_queue // 2)
