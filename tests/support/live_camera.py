"""A camera whose pictures say when they were taken, for how old a picture is in a browser that shows it live."""

from __future__ import annotations

import threading
import time
from fractions import Fraction
from typing import Any

import av
import numpy as np

from cluster.codec.source import StreamHeader
from cluster.decoder.footage.ring import PacketRing
from cluster.types import EncodedPacket

FPS = 15
CELL = 16
BITS = 32
"""Milliseconds modulo 2**32 as 32 black or white squares in one row, most significant first."""
WIDTH, HEIGHT = CELL * BITS, 96

READ = """
async ([selector, count]) => {
  const video = document.querySelector(selector);
  const canvas = new OffscreenCanvas(video.videoWidth, video.videoHeight);
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const found = [];
  while (found.length < count) {
    const shown = await new Promise((done) => video.requestVideoFrameCallback((now, about) => done(about)));
    const at = performance.timeOrigin + performance.now();
    pen.drawImage(video, 0, 0);
    const row = pen.getImageData(0, 48, canvas.width, 1).data;
    let taken = 0;
    for (let bit = 0; bit < 32; bit += 1) taken = taken * 2 + (row[4 * (bit * 16 + 8)] > 127 ? 1 : 0);
    found.push((Math.round(at) % 2 ** 32 - taken) / 1000);
  }
  return found;
}
"""
"""In a page: seconds from a picture's packet to the frame that shows it, of so many frames."""


class LiveCamera:
    """Puts H.264 or HEVC packets into ``ring`` in real time from a thread of its own; a context manager.

    A picture carries the moment just before it is encoded, so that encoding counts as delay too. ``gop``: pictures.
    """

    def __init__(self, ring: PacketRing, *, gop: int = 2 * FPS, codec: str = "h264") -> None:
        self._ring = ring
        self._gop = gop
        self._codec = codec
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> LiveCamera:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        library = {"h264": "x264", "hevc": "x265"}[self._codec]
        codec: Any = av.CodecContext.create(f"lib{library}", "w")
        codec.width, codec.height, codec.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        codec.time_base, codec.framerate, codec.gop_size = Fraction(1, FPS), Fraction(FPS, 1), self._gop
        codec.thread_count, codec.max_b_frames = 1, 0
        codec.options = {
            "preset": "ultrafast",
            "tune": "zerolatency",
            f"{library}-params": "repeat-headers=1:scenecut=0",
        }
        self._ring.open(StreamHeader(self._codec, WIDTH, HEIGHT, b""))
        began_s = time.monotonic()
        number = 0
        while not self._end.wait(max(0.0, began_s + number / FPS - time.monotonic())):
            taken = round(time.time() * 1000) % 2**BITS
            bits = np.array([taken >> (BITS - 1 - bit) & 1 for bit in range(BITS)], np.uint8)
            picture = np.full((HEIGHT * 3 // 2, WIDTH), 128, np.uint8)
            picture[:HEIGHT] = np.repeat(16 + 219 * bits, CELL)
            frame = av.VideoFrame.from_ndarray(picture, "yuv420p")
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            for packet in codec.encode(frame):
                pts = int(packet.pts * 1_000_000 / FPS)
                self._ring.add_packet(EncodedPacket(self._codec, bytes(packet), pts, pts, packet.is_keyframe, number))
            number += 1
