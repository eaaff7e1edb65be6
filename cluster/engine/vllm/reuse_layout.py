"""Windows on vLLM that begin with KV of the last one: what is computed of them, what prompts load and what they keep.

The order is ``[system | reused | refreshed, new | question]`` (:mod:`cluster.engine.vllm.connector`): vLLM takes KV
from outside as a prefix only. A stream's refresh policy names the tokens to compute again, as in the native engine;
policies that narrow their choice from layer to layer cannot here and compute all that they begin with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from cluster.engine.vllm.connector.prompt_order import Order, Piece, WindowFrame, reordered
from cluster.engine.vllm.connector.store import BlockFolder, KVShape, SharedFolder
from cluster.engine.vllm.connector.tier_writer import BlockWriter, TierLike
from cluster.engine.vllm.connector.transfer import transfer_config
from cluster.engine.vllm.connector.window_checkpoint import unpack
from cluster.engine.vllm.core import Ask, Reply
from cluster.engine.vllm.prompt_items import WindowItem, without_content
from cluster.engine.vllm.prompt_layout import TimeOrderLayout, Window, WindowCounts, content_of
from cluster.engine.vllm.served_model import ServedModel
from cluster.engine.window.export import fingerprint
from cluster.engine.window.planner import IntArray
from cluster.engine.window.refresh.context import choose_refreshed
from cluster.engine.window.stream import StreamFrame, tokens_of
from cluster.models.base import VisionLanguageModel
from cluster.types import mask_digest

# Seconds that a stream's first window here may wait for what a tier has of the one before.
RESUME_S = 5.0
# Key of the system prompt's block; a store's fingerprint tells models apart.
SYSTEM = "system"


def reuse_layout(
    model: VisionLanguageModel, served: ServedModel, *, tier: TierLike | None = None, shards: int = 1
) -> tuple[ReuseLayout, dict[str, Any]]:
    """The layout, and the engine arguments it needs.

    Args:
        tier: where windows are written through, so that they outlive this host; None keeps them on it.
        shards: vLLM's workers (its ``tensor_parallel_size``), each with its part of the heads.
    """
    folder = SharedFolder()
    mark = fingerprint(model)
    blocks = BlockFolder(folder.path, shards=shards)
    writer = None
    if tier is not None:
        layers, heads = len(model.layers), model.text_config.num_key_value_heads
        size = served.kv_bytes // (2 * layers * heads * model.dtype.itemsize)
        shape = KVShape(layers, max(1, heads // shards), size, model.dtype)
        writer = BlockWriter(blocks, tier, shape=shape, fingerprint=mark, cap_bytes=folder.cap_bytes)
    arguments = transfer_config(folder.path, cap_bytes=folder.cap_bytes, fingerprint=mark, shards=shards)
    return ReuseLayout(model, served, folder, blocks, writer), {"kv_transfer_config": arguments}


@dataclass(slots=True, eq=False)
class _Held:
    """KV of one frame. ``computed [3, t]``, ``first``: as of :class:`StreamFrame`."""

    frame: StreamFrame | None
    content: str
    key: str
    first: int
    computed: IntArray


@dataclass(slots=True, eq=False)
class _Camera:
    """``held`` by pts; numbers of tokens as of :class:`~cluster.engine.window.stream.Stream`.

    ``begun``: the tier has been given what all its windows begin with.
    """

    held: dict[int, _Held] = field(default_factory=dict)
    next_token: int = 0
    first_token: int = 0
    begun: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """``overlap``: visual tokens of the window that had KV."""

    order: Order
    frames: tuple[WindowFrame, ...]
    overlap: int


class ReuseLayout(TimeOrderLayout):
    """Prompts over a folder of blocks. What dies with the engine core is nothing of this: blocks stay in the folder,
    and the next core loads them."""

    writer: BlockWriter | None

    def __init__(
        self,
        model: VisionLanguageModel,
        served: ServedModel,
        folder: SharedFolder,
        blocks: BlockFolder,
        writer: BlockWriter | None = None,
    ) -> None:
        super().__init__(model, served, writer)
        self.blocks = blocks
        self._folder = folder
        # Its block is written by whichever window finds it missing, which then is computed in full.
        self._system = WindowFrame(SYSTEM, len(self.system_ids), SYSTEM)
        self._cameras: dict[str, _Camera] = {}
        self._plans: dict[str, _Plan] = {}

    def asks(self, window: Window) -> list[Ask]:
        """See :class:`TimeOrderLayout`. The first question's request keeps what is computed."""
        return self._asks(window, loads=True)

    def again(self, window: Window) -> list[Ask]:
        """See :class:`TimeOrderLayout`: the window computed in full, in time order."""
        return self._asks(window, loads=False)

    def done(self, window: Window, replies: Sequence[Reply]) -> WindowCounts:
        plan = self._plans.pop(window.stream.spec.stream)
        self._commit(window, plan)
        reused = plan.order.reused
        return WindowCounts.of(reused, plan.overlap - reused, window.visual - plan.overlap, replies)

    def forget(self, stream: str, *, everywhere: bool = False) -> None:
        self._plans.pop(stream, None)
        camera = self._cameras.pop(stream, None)
        if camera is not None:
            self.blocks.drop([held.key for held in camera.held.values()])
        super().forget(stream, everywhere=everywhere)

    def held(self, stream: str) -> Mapping[str, Any]:
        """See :class:`TimeOrderLayout`: which frames have KV, and under which keys it lies."""
        camera = self._cameras.get(stream)
        return {} if camera is None else _described(camera)

    def lost(self) -> None:
        """See :class:`TimeOrderLayout`: what is in the folder stays."""
        self._plans.clear()

    def close(self) -> None:
        """Stop writing to the tier, and give the folder's memory back."""
        super().close()
        self._folder.close()

    # -- planning ---------------------------------------------------------------------------------
    def _asks(self, window: Window, *, loads: bool) -> list[Ask]:
        stream = window.stream.spec.stream
        plan = self._plans[stream] = self._plan(window, loads=loads)
        order = plan.order
        items = self._reordered_items(window, plan)
        bare = sum(piece.start < order.transfer.loaded for piece in order.pieces)
        asks = []
        for number, (question, longest) in enumerate(zip(window.questions, window.max_tokens, strict=True)):
            prompt = self.prompt(window, items, question, salt=order.salt)
            transfer = order.followers if number else order.transfer
            extra = {"kv_transfer_params": transfer.to_params()}
            asks.append(Ask(without_content(prompt, bare), len(self.question_ids(question.text)), longest, extra))
        return asks

    def _plan(self, window: Window, *, loads: bool) -> _Plan:
        stream = window.stream.spec.stream
        camera = self._cameras.get(stream)
        if camera is None:
            camera = self._cameras[stream] = self._resumed(window)
        self._let_go(camera, window)
        frames, masks, overlap = [], [], 0
        as_held = [self._as_held(frame, camera) for frame in window.frames]
        layers, first = len(self.model.layers), camera.first_token
        _, selection = choose_refreshed(
            window.stream, window.request.window, as_held, self._system.tokens, layers, first_token=first
        )
        for frame in window.frames:
            held, tokens = camera.held.get(frame.pts), len(tokens_of(frame))
            frames.append(WindowFrame(_content(frame), tokens, None if held is None else held.key))
            if held is None:
                masks.append(np.ones(tokens, dtype=bool))
            else:
                masks.append(selection.mask[overlap : overlap + tokens])
                overlap += tokens
        system = torch.arange(self._system.tokens).expand(3, -1)
        positions = torch.cat([system, *(part.cpu() for part in window.positions.frames)], dim=1).numpy()
        order = reordered(
            stream,
            self._system,
            frames,
            np.concatenate([*masks, np.zeros(0, dtype=bool)]),
            positions,
            lambda key, tokens: loads and self.blocks.tokens(key) == tokens,
        )
        return _Plan(order, tuple(frames), overlap)

    def _as_held(self, frame: StreamFrame, camera: _Camera) -> StreamFrame:
        held = camera.held.get(frame.pts)
        return (
            replace(frame, computed=None) if held is None else replace(frame, first=held.first, computed=held.computed)
        )

    def _reordered_items(self, window: Window, plan: _Plan) -> list[WindowItem]:
        pieces, hidden = plan.order.pieces, self.served.hidden
        items = []
        for number, piece in enumerate(pieces):
            count = plan.frames[piece.frame].tokens if piece.rows is None else len(piece.rows)
            if piece.start < plan.order.transfer.loaded:
                embeds = torch.zeros(1, hidden, dtype=self.model.dtype).expand(count, hidden)
            else:
                embeds = self.embeds(_rows_of(tokens_of(window.frames[piece.frame]).embeds, piece))
            at = torch.from_numpy(plan.order.positions[:, piece.start : piece.start + count].copy())
            after = window.positions.next if number == len(pieces) - 1 else None
            content = f"{plan.frames[piece.frame].content}:{piece.rows}"
            items.append(WindowItem.of(embeds, at, content, after=after))
        return items

    # -- what is held -----------------------------------------------------------------------------
    def _commit(self, window: Window, plan: _Plan) -> None:
        """After the window was computed: what is kept of it is the camera's."""
        stream = window.stream.spec.stream
        camera = self._cameras[stream]
        start = 0
        context: IntArray | None = None
        replaced: list[str] = []
        kept: list[str] = []
        for frame, shown, key in zip(window.frames, plan.frames, plan.order.keys, strict=True):
            through = plan.order.computed[start : start + shown.tokens]
            start += shown.tokens
            if key is None:
                continue
            held = camera.held.get(frame.pts)
            if held is not None and held.key != key:
                replaced.append(held.key)
            if self.blocks.tokens(key) != shown.tokens:
                camera.held.pop(frame.pts, None)
                continue
            if held is None:
                held = _Held(frame, shown.content, key, camera.next_token, np.zeros((3, shown.tokens), np.int64))
                camera.held[frame.pts] = held
                camera.next_token += shown.tokens
            if context is None:
                context = np.array([[window.request.window], [held.first], [frame.pts]])
            held.computed[:, through] = context
            if held.key != key or through.all():
                kept.append(key)
            held.key = key
        self._drop(window, replaced)
        writer = self._writer_of(window)
        if writer is not None:
            writer.keep(stream, kept if camera.begun else [*kept, SYSTEM])
            camera.begun = True

    def _drop(self, window: Window, keys: Sequence[str]) -> None:
        """Forget blocks of a window here, and in the tier where they may be there."""
        writer = self._writer_of(window)
        if writer is None:
            self.blocks.drop(keys)
        else:
            writer.drop(window.stream.spec.stream, keys)

    def _let_go(self, camera: _Camera, window: Window) -> None:
        """Forget blocks of frames that left the window."""
        alive = {frame.pts: frame for frame in window.frames}
        gone = [pts for pts, held in camera.held.items() if alive.get(pts) is not held.frame]
        self._drop(window, [camera.held.pop(pts).key for pts in gone])
        if not camera.held:
            camera.first_token = camera.next_token

    def _writer_of(self, window: Window) -> BlockWriter | None:
        """Nothing of a stream without a memory is written to the tiers."""
        return None if window.stream.spec.memory is None else self.writer

    def _resumed(self, window: Window) -> _Camera:
        """The camera as a tier knows it, of those frames that the window has; a new one where it knows nothing."""
        stream = window.stream.spec.stream
        writer = self._writer_of(window)
        kept = None if writer is None else unpack(writer.noted(stream))
        camera = None if kept is None else _camera_of(kept.held)
        if camera is None or writer is None:
            return _Camera()
        for frame in window.frames:
            held = camera.held.get(frame.pts)
            if held is not None and len(tokens_of(frame)) and held.content == _content(frame):
                held.frame = frame
        shown = [held for held in camera.held.values() if held.frame is not None]
        wanted = [(held.key, held.computed.shape[1]) for held in shown]
        there = writer.restore(stream, [(SYSTEM, self._system.tokens), *wanted], RESUME_S)
        found = {pts: held for pts, held in camera.held.items() if held.frame is not None and held.key in there}
        # Nobody else would ask for the others again.
        writer.drop(stream, [held.key for pts, held in camera.held.items() if pts not in found])
        camera.held = found
        return camera


def _content(frame: StreamFrame) -> str:
    """Of a frame's mask and embeddings: the mask's alone is the same for the first frames of two recordings."""
    shown = content_of(frame) if len(tokens_of(frame)) else ""
    return f"{mask_digest(frame.mask, frame.index, frame.pts)}.{shown}"


def _rows_of(embeds: torch.Tensor, piece: Piece) -> torch.Tensor:
    return embeds if piece.rows is None else embeds[torch.tensor(piece.rows, device=embeds.device)]


def _described(camera: _Camera) -> dict[str, Any]:
    held = [
        {"pts": pts, "content": h.content, "key": h.key, "first": h.first, "computed": h.computed.tolist()}
        for pts, h in camera.held.items()
    ]
    return {"next_token": camera.next_token, "first_token": camera.first_token, "frames": held}


def _camera_of(described: Mapping[str, Any]) -> _Camera | None:
    """The inverse of :func:`_described`, frames yet to be found; None where nothing was."""
    try:
        held = {
            int(each["pts"]): _Held(
                None, str(each["content"]), str(each["key"]), int(each["first"]), np.array(each["computed"], np.int64)
            )
            for each in described["frames"]
        }
        return _Camera(held, next_token=int(described["next_token"]), first_token=int(described["first_token"]))
    except (ValueError, KeyError, TypeError):
        return None
