"""Decoder-side receiver of pushed packets (``QueueSink``)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from sightline.v1 import ingest_pb2

from cluster import metrics
from cluster.codec.push import PushSource
from cluster.codec.source import StreamHeader
from cluster.errors import NotReadyError, UnavailableError
from cluster.wire.convert import packet_from_proto
from cluster.wire.ingest import PushProgress

if TYPE_CHECKING:
    from cluster.decoder.running_camera import RunningCamera

POLL_S = 0.02


class QueueSink:
    """One push camera: converts packets and offers them to its :class:`PushSource`.

    Lives as long as the camera. Its source keeps the session for a pusher that reconnects; packets are buffered only in
    the source's bounded queue. ``camera``: restarted, which gives it another source, where a session opens after its
    last one has ended.
    """

    def __init__(self, source: PushSource, *, max_credit: int = 256, camera: RunningCamera | None = None) -> None:
        self.source = source
        self._camera = camera
        self._max_credit = min(max_credit, source.max_packets)
        self._codec = ""
        self._ended = ""
        self._retired = False
        self._told = PushProgress(0, 0)
        self._taken = asyncio.Event()

    def retire(self) -> None:
        """Refuse further packets, as the camera was moved or removed. Any thread."""
        self._retired = True

    async def open(self, header: StreamHeader, session: str) -> PushProgress:
        """Open a session, which starts at 0 and replaces the old one; an ended session may only be ended again.

        Raises:
            UnavailableError: the camera no longer runs here.
            NotReadyError: the session has ended.
        """
        if session != self._ended:
            self._check_running()
            if self._camera is not None and self._camera.ended:
                if session == self.source.session:
                    raise NotReadyError(f"session {session!r} has ended; open a new one with another session id")
                self._camera.restart()
            self.source.begin_session(header, session)
            self._codec = header.codec
            self._ended = ""
        self._told = self._now()
        return self._told

    async def offer(self, batch: ingest_pb2.PacketBatch) -> None:
        """See :class:`PacketSink`.

        Raises:
            UnavailableError: the camera no longer runs here; nothing of the batch was accepted.
        """
        self._check_running()
        if self._ended:
            raise NotReadyError(f"session {self._ended!r} has ended; open a new one with another session id")
        # A packet that does not fit is dropped and counted by the source; the next reply tells the pusher.
        dropped = self.source.offer([packet_from_proto(message, self._codec) for message in batch.packets])
        metrics.ingest_dropped.labels("queue_full").inc(dropped)
        self._taken.set()

    async def progress(self) -> PushProgress:
        """Report progress; polls while credit is short, as the consuming thread sends no notifications."""
        while True:
            now = self._now()
            if self._is_news(now):
                self._told = now
                return now
            self._taken.clear()
            restored = now.credit >= self._max_credit
            try:
                await asyncio.wait_for(self._taken.wait(), None if restored else POLL_S)
            except TimeoutError:
                continue

    async def end(self) -> PushProgress:
        if not self._ended:
            self._ended = self.source.session or ""
            self.source.end_session()
        return self._now()

    async def close(self) -> None:
        """Nothing to release: the session stays."""

    def _check_running(self) -> None:
        if self._retired:
            raise UnavailableError("the camera no longer runs here")

    def _now(self) -> PushProgress:
        source = self.source
        return PushProgress(source.next_sequence, min(source.credit(), self._max_credit), source.dropped)

    def _is_news(self, now: PushProgress) -> bool:
        told = self._told
        if now.next_sequence != told.next_sequence or now.dropped != told.dropped:
            return True
        # A little more credit is worth a message only if the pusher may be waiting for it.
        worth = 1 if told.credit == 0 else max(1, self._max_credit // 8)
        return now.credit - told.credit >= worth
