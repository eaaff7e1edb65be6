"""KV reuse on vLLM: prompts whose prefix is loaded from the KV of the last window.

The order is ``[system | reused | refreshed, new | question]`` (:mod:`cluster.engine.vllm.connector`), as vLLM loads
only prefixes. The stream's refresh policy selects the tokens to recompute, as in the native engine; policies that
narrow from layer to layer recompute their initial selection instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from cluster.engine.vllm.connector.prompt_order import Piece, PromptOrder, WindowFrame, order_prompt
from cluster.engine.vllm.connector.store import BlockFolder, KVShape, SharedFolder
from cluster.engine.vllm.connector.tier_writer import BlockWriter, TierLike
from cluster.engine.vllm.connector.transfer import transfer_config
from cluster.engine.vllm.connector.window_checkpoint import unpack
from cluster.engine.vllm.core import PromptReply, PromptRequest
from cluster.engine.vllm.prompt_items import WindowItem, without_content
from cluster.engine.vllm.prompt_layout import PromptWindow, TimeOrderLayout, WindowCounts, embeds_digest
from cluster.engine.vllm.served_model import ServedModel
from cluster.engine.window.export import fingerprint
from cluster.engine.window.planner import IntArray
from cluster.engine.window.refresh.context import choose_refreshed
from cluster.engine.window.stream import StreamFrame, encoded_tokens
from cluster.models.base import VisionLanguageModel
from cluster.types import mask_digest

# Longest wait of a stream's first window for blocks from the tier.
RESUME_S = 5.0
# Key of the system prompt's block; a store's fingerprint tells models apart.
SYSTEM = "system"


def make_reuse_layout(
    model: VisionLanguageModel, served: ServedModel, *, tier: TierLike | None = None, shards: int = 1
) -> tuple[ReuseLayout, dict[str, Any]]:
    """Create the layout and the engine arguments it needs.

    Args:
        tier: where windows are written through, so that they outlive this host; None keeps them local.
        shards: vLLM's workers (``tensor_parallel_size``), each with its part of the heads.
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
class _FrameKV:
    """KV of one frame. ``computed [3, t]``, ``first``: as of :class:`StreamFrame`."""

    frame: StreamFrame | None
    content: str
    key: str
    first: int
    computed: IntArray


@dataclass(slots=True, eq=False)
class _StreamKV:
    """``held`` by pts; token numbers as of :class:`~cluster.engine.window.stream.Stream`.

    ``begun``: the system prompt's block was written to the tier.
    """

    held: dict[int, _FrameKV] = field(default_factory=dict)
    next_token: int = 0
    first_token: int = 0
    begun: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """``overlap``: visual tokens of the window with KV."""

    order: PromptOrder
    frames: tuple[WindowFrame, ...]
    overlap: int


class ReuseLayout(TimeOrderLayout):
    """Prompts over a folder of blocks, which survive the engine core and are loaded by the next one."""

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
        # Written by the window that finds it missing, which is then computed in full.
        self._system = WindowFrame(SYSTEM, len(self.system_ids), SYSTEM)
        self._cameras: dict[str, _StreamKV] = {}
        self._plans: dict[str, _Plan] = {}

    def make_prompts(self, window: PromptWindow) -> list[PromptRequest]:
        """See :class:`TimeOrderLayout`. The first question's request saves the computed blocks."""
        return self._asks(window, loads=True)

    def retry_prompts(self, window: PromptWindow) -> list[PromptRequest]:
        """See :class:`TimeOrderLayout`: the window computed in full, in time order."""
        return self._asks(window, loads=False)

    def record_replies(self, window: PromptWindow, replies: Sequence[PromptReply]) -> WindowCounts:
        plan = self._plans.pop(window.stream.spec.stream)
        self._commit(window, plan)
        reused = plan.order.reused
        return WindowCounts.of(reused, plan.overlap - reused, window.visual - plan.overlap, replies)

    def drop_stream(self, stream: str, *, everywhere: bool = False) -> None:
        self._plans.pop(stream, None)
        camera = self._cameras.pop(stream, None)
        if camera is not None:
            self.blocks.drop_blocks([held.key for held in camera.held.values()])
        super().drop_stream(stream, everywhere=everywhere)

    def describe_kv(self, stream: str) -> Mapping[str, Any]:
        """See :class:`TimeOrderLayout`: frames with KV, and the keys of their blocks."""
        camera = self._cameras.get(stream)
        return {} if camera is None else _to_json(camera)

    def on_core_lost(self) -> None:
        """See :class:`TimeOrderLayout`: blocks in the folder stay."""
        self._plans.clear()

    def close(self) -> None:
        """Stop writing to the tier and remove the folder."""
        super().close()
        self._folder.close()

    # -- planning ---------------------------------------------------------------------------------
    def _asks(self, window: PromptWindow, *, loads: bool) -> list[PromptRequest]:
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
            asks.append(
                PromptRequest(without_content(prompt, bare), len(self.question_ids(question.text)), longest, extra)
            )
        return asks

    def _plan(self, window: PromptWindow, *, loads: bool) -> _Plan:
        stream = window.stream.spec.stream
        camera = self._cameras.get(stream)
        if camera is None:
            camera = self._cameras[stream] = self._restore_stream(window)
        self._drop_left_frames(camera, window)
        frames, masks, overlap = [], [], 0
        as_held = [self._with_reuse_state(frame, camera) for frame in window.frames]
        layers, first = len(self.model.layers), camera.first_token
        _, selection = choose_refreshed(
            window.stream, window.request.window, as_held, self._system.tokens, layers, first_token=first
        )
        for frame in window.frames:
            held, tokens = camera.held.get(frame.pts), len(encoded_tokens(frame))
            frames.append(WindowFrame(_frame_digest(frame), tokens, None if held is None else held.key))
            if held is None:
                masks.append(np.ones(tokens, dtype=bool))
            else:
                masks.append(selection.mask[overlap : overlap + tokens])
                overlap += tokens
        system = torch.arange(self._system.tokens).expand(3, -1)
        positions = torch.cat([system, *(part.cpu() for part in window.positions.frames)], dim=1).numpy()
        order = order_prompt(
            stream,
            self._system,
            frames,
            np.concatenate([*masks, np.zeros(0, dtype=bool)]),
            positions,
            lambda key, tokens: loads and self.blocks.tokens(key) == tokens,
        )
        return _Plan(order, tuple(frames), overlap)

    def _with_reuse_state(self, frame: StreamFrame, camera: _StreamKV) -> StreamFrame:
        held = camera.held.get(frame.pts)
        return (
            replace(frame, computed=None) if held is None else replace(frame, first=held.first, computed=held.computed)
        )

    def _reordered_items(self, window: PromptWindow, plan: _Plan) -> list[WindowItem]:
        pieces, hidden = plan.order.pieces, self.served.hidden
        items = []
        for number, piece in enumerate(pieces):
            count = plan.frames[piece.frame].tokens if piece.rows is None else len(piece.rows)
            if piece.start < plan.order.transfer.loaded:
                embeds = torch.zeros(1, hidden, dtype=self.model.dtype).expand(count, hidden)
            else:
                embeds = self.pad_embeds(_rows_of(encoded_tokens(window.frames[piece.frame]).embeds, piece))
            at = torch.from_numpy(plan.order.positions[:, piece.start : piece.start + count].copy())
            after = window.positions.next if number == len(pieces) - 1 else None
            content = f"{plan.frames[piece.frame].content}:{piece.rows}"
            items.append(WindowItem.of(embeds, at, content, after=after))
        return items

    # -- stored KV --------------------------------------------------------------------------------
    def _commit(self, window: PromptWindow, plan: _Plan) -> None:
        """Record a computed window's blocks."""
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
                held = _FrameKV(frame, shown.content, key, camera.next_token, np.zeros((3, shown.tokens), np.int64))
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
            writer.queue_blocks(stream, kept if camera.begun else [*kept, SYSTEM])
            camera.begun = True

    def _drop(self, window: PromptWindow, keys: Sequence[str]) -> None:
        """Delete a window's blocks here and in the tier."""
        writer = self._writer_of(window)
        if writer is None:
            self.blocks.drop_blocks(keys)
        else:
            writer.drop_blocks(window.stream.spec.stream, keys)

    def _drop_left_frames(self, camera: _StreamKV, window: PromptWindow) -> None:
        """Delete blocks of frames that left the window."""
        alive = {frame.pts: frame for frame in window.frames}
        gone = [pts for pts, held in camera.held.items() if alive.get(pts) is not held.frame]
        self._drop(window, [camera.held.pop(pts).key for pts in gone])
        if not camera.held:
            camera.first_token = camera.next_token

    def _writer_of(self, window: PromptWindow) -> BlockWriter | None:
        """The writer; None for a stream without a memory, which is never written to the tiers."""
        return None if window.stream.spec.memory is None else self.writer

    def _restore_stream(self, window: PromptWindow) -> _StreamKV:
        """Restore a stream's blocks of the window's frames from the tier; empty if there are none."""
        stream = window.stream.spec.stream
        writer = self._writer_of(window)
        kept = None if writer is None else unpack(writer.read_manifest(stream))
        camera = None if kept is None else _from_json(kept.held)
        if camera is None or writer is None:
            return _StreamKV()
        for frame in window.frames:
            held = camera.held.get(frame.pts)
            if held is not None and len(encoded_tokens(frame)) and held.content == _frame_digest(frame):
                held.frame = frame
        shown = [held for held in camera.held.values() if held.frame is not None]
        wanted = [(held.key, held.computed.shape[1]) for held in shown]
        there = writer.restore_blocks(stream, [(SYSTEM, self._system.tokens), *wanted], RESUME_S)
        found = {pts: held for pts, held in camera.held.items() if held.frame is not None and held.key in there}
        # The other blocks are unreachable.
        writer.drop_blocks(stream, [held.key for pts, held in camera.held.items() if pts not in found])
        camera.held = found
        return camera


def _frame_digest(frame: StreamFrame) -> str:
    """Digest of mask and embeddings; the mask's alone is equal for the first frames of two recordings."""
    shown = embeds_digest(frame) if len(encoded_tokens(frame)) else ""
    return f"{mask_digest(frame.mask, frame.index, frame.pts)}.{shown}"


def _rows_of(embeds: torch.Tensor, piece: Piece) -> torch.Tensor:
    return embeds if piece.rows is None else embeds[torch.tensor(piece.rows, device=embeds.device)]


def _to_json(camera: _StreamKV) -> dict[str, Any]:
    held = [
        {"pts": pts, "content": h.content, "key": h.key, "first": h.first, "computed": h.computed.tolist()}
        for pts, h in camera.held.items()
    ]
    return {"next_token": camera.next_token, "first_token": camera.first_token, "frames": held}


def _from_json(described: Mapping[str, Any]) -> _StreamKV | None:
    """Inverse of :func:`_to_json`, without frames; None if invalid."""
    try:
        held = {
            int(each["pts"]): _FrameKV(
                None, str(each["content"]), str(each["key"]), int(each["first"]), np.array(each["computed"], np.int64)
            )
            for each in described["frames"]
        }
        return _StreamKV(held, next_token=int(described["next_token"]), first_token=int(described["first_token"]))
    except (ValueError, KeyError, TypeError):
        return None
