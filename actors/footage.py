"""Snapshots and clips in the alerting actor: the store beside the alerts, and the way to the decoders."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

from actors.remote import ask, controller
from cluster.alerts.clips.collector import FootageCollector, News
from cluster.alerts.clips.store import FootageStore
from cluster.alerts.service import AlertService
from cluster.config import SightlineConfig
from cluster.decoder.footage.reach import shortages
from cluster.decoder.footage.service import DecoderRecorder
from cluster.errors import UnavailableError
from cluster.wire.channel import ChannelPool

log = logging.getLogger(__name__)

FOLDER, KNOWN = "clips", "clips-cameras.json"
AGAIN_S = 600.0
"""Clips of incidents this young are made again by a process that was restarted, of what can still be had."""
REACH_S = 30.0
"""A clip may show so much more of the time before it was begun than its length: an answer comes late, and a clip begins
with a keyframe."""


def footage_collector(
    config: SightlineConfig, folder: Path, run_id: str, channels: ChannelPool, service: AlertService
) -> FootageCollector | None:
    """None where the folder cannot be used: alerts go on without clips, and the log says why.

    Args:
        folder: of the alerts.
        run_id: of this cluster.
    """
    clips = config.clips
    for sentence in shortages(config):
        log.warning("%s", sentence)
    try:
        store = FootageStore(
            Path(clips.folder) if clips.folder is not None else folder / FOLDER,
            max_bytes=clips.max_bytes,
            retention_s=clips.retention,
            keep_free=clips.keep_free,
            reach_s=clips.longest_s + REACH_S,
        )
    except OSError as error:
        log.error("no snapshots and clips are kept: %s", error)
        return None

    async def tell(news: News) -> None:
        await service.settle_clip(news.incident, news.clip, news.note)

    return FootageCollector(
        clips,
        store,
        DecoderRecorder(_decoder_of, channels),
        tell,
        known=folder / KNOWN,
        run=run_id,
        erase=service.forget,
    )


async def start_footage(collector: FootageCollector, service: AlertService, enabled: bool) -> None:
    """Once the service knows its incidents. Not ``enabled``: those that were promised a clip get none."""
    waiting = await service.waiting_clips(time.time() - AGAIN_S if enabled else math.inf)
    collector.start(waiting)


async def _decoder_of(camera: str) -> str:
    route = await ask(controller().where.remote(camera))
    if route.decoder_address is None:
        raise UnavailableError(f"no decoder is ready for camera {camera!r} yet")
    return str(route.decoder_address)
