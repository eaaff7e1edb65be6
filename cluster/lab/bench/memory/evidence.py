"""Planted evidence: whether the tokens that a question about the past needs are still held under a cap, hours later.

A synthetic camera runs for hours; the scene says which token shows which object at which time. Every passage of an
object is one piece of evidence, found by a head that holds one of its tokens, as in ``eval memory``.
``evidence_recall`` is the share found over passages, layers and heads: a property of the memory, independent of a
model's answers. Frames pass through production's decoder, pruner, engine and memory.

Every organiser and retriever is also queried for each passage with the mean key of its tokens, the query of an ideal
model: recall is then the share of passages, layers and heads of which a token is read.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster.errors import ConfigError
from cluster.lab.bench.harness import BenchResult, print_progress
from cluster.lab.bench.memory.footage import Footage, IntArray, covered_cells
from cluster.lab.evaluation.memory.answer import filled_memory, load_head_tokens
from cluster.lab.evaluation.memory.long_scene import LongScene
from cluster.lab.evaluation.memory.recording import record
from cluster.lab.evaluation.memory.settings import ShareSetting, ours, thinning_compressors
from cluster.lab.evaluation.metrics import Floats, bootstrap_weights, estimate
from cluster.lab.evaluation.settings import WindowShape
from cluster.lab.scenes.actors import CameraSettings
from cluster.lab.scenes.encode import encode_missing_clips
from cluster.lab.scenes.render import SceneRenderer
from cluster.memory.head_memory import KVChunk
from cluster.memory.retrieve import Retriever
from cluster.memory.stream import StreamMemory
from cluster.models.base import VisionLanguageModel
from cluster.registry import organisers, retrievers
from cluster.types import MICROSECONDS

SHARES = (4, 8, 16, 64)
_NAMES = {8: "eighth", 64: "64th"}
CAMERA = CameraSettings(640, 360, 5.0, "h264", 4.0, 0, 27)
_CELLS = 2**20
"""Upper bound on the cells of a frame."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of part evidence to the parser."""
    parser.add_argument("--scenes", type=int, default=1, metavar="N", help="synthetic cameras in part evidence")
    parser.add_argument("--scene-seconds", type=float, default=3600.0, metavar="S", help="length of each")
    # No policy was tuned on seeds from 7000 on.
    parser.add_argument("--scene-seed", type=int, default=7000, metavar="N", help="seed of the first scene")


@dataclass(frozen=True, slots=True, eq=False)
class Watched:
    """Output of one synthetic camera.

    * ``chunks``: KV of its frames, in time order
    * ``passages``: per object, its sorted token numbers: index in ``chunks`` times 2^20, plus cell
    * ``queries``: rows of the standing question, see :func:`~cluster.lab.evaluation.memory.answer.filled_memory`
    """

    chunks: Sequence[KVChunk]
    passages: Sequence[Tensor]
    queries: Sequence[Tensor] = ()

    def token_numbers(self, memory: StreamMemory, frame: Tensor, cell: Tensor) -> Tensor:
        """Token numbers of tokens in a memory, given the memory's frame numbers and cells."""
        number_at = {chunk.pts: number for number, chunk in enumerate(self.chunks)}
        numbers = [number_at[memory.log.frame_time(each)] for each in frame.tolist()]
        return torch.tensor(numbers, dtype=torch.int64) * _CELLS + cell

    @property
    def tokens(self) -> int:
        """Tokens per layer and head."""
        return sum(chunk.tokens for chunk in self.chunks)


def measure(footage: Footage) -> BenchResult:
    """Figures ``evidence_recall_eighth``, ``_64th`` of production's defaults, and ``evidence_gain_eighth``, ``_64th``:
    their gain over the best other compressor. Raises ``ConfigError`` if no object appeared."""
    args = footage.args
    model = footage.model(args.model)
    scenes = [LongScene(args.scene_seconds, args.scene_seed + number, camera=CAMERA) for number in range(args.scenes)]
    watched = []
    for scene in scenes:
        watched.append(watch(model, scene, footage.directory, args.fps))
        print_progress(f"evidence: scene {scene.seed}, {len(watched[-1].passages)} objects")
    if not any(each.passages for each in watched):
        raise ConfigError(f"no object passed in {args.scene_seconds:g} s of a scene; increase --scene-seconds")
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {}
    weights = _weights(watched)
    for share in SHARES:
        found = {setting: _recall(watched, setting) for setting in _settings(share)}
        own, _ = found[ours(1 / share)]
        for setting, (recall, held) in found.items():
            row = {"compressor": setting.compressor, "organiser": setting.organiser, "cap": f"1/{share}", "held": held}
            row |= estimate(_mean(recall, weights)).row("recall")
            rows.append(row | estimate(_mean(own - recall, weights)).row("ours_more"))
        rows += _read_rows(watched, share)
        print_progress(f"evidence: 1/{share}")
        if name := _NAMES.get(share):
            others = [recall for setting, (recall, _) in found.items() if setting.compressor != ours(1.0).compressor]
            figures[f"evidence_recall_{name}"] = float(own.mean())
            figures[f"evidence_gain_{name}"] = float(own.mean() - max(each.mean() for each in others))
    objects, tokens = (sum(counts) for counts in zip(*((len(w.passages), w.tokens) for w in watched), strict=True))
    note = (
        f"model {args.model}, {len(scenes)} synthetic cameras of {args.scene_seconds:g} s, {objects} objects, {tokens} "
        "tokens per layer and head; caps are shares of their bytes, including the index; held, read: shares of the "
        "tokens; rows with a retriever: recall of queries with a passage's mean key; intervals are over cameras, from "
        "three on"
    )
    return BenchResult(figures, rows, [note])


def watch(model: VisionLanguageModel, scene: LongScene, folder: Path, fps: float) -> Watched:
    """Render, encode, decode and compute one camera, including its last window."""
    clip = scene.clip(folder)
    encode_missing_clips([clip], folder)
    recording = record(model, clip.path, WindowShape(fps=fps), [scene.seconds])
    chunks = recording.seen(0)
    renderer = SceneRenderer(scene.scene, CAMERA.width, CAMERA.height)
    samples = model.geometry.temporal
    shown: dict[int, list[int]] = {}
    for number, chunk in enumerate(chunks):
        for sample in range(samples):
            second = (chunk.pts - recording.begin) / MICROSECONDS + sample / fps
            for object_id, cells in shown_cells(renderer, second, chunk.rows, chunk.columns):
                kept = np.intersect1d(cells, chunk.cell.numpy())
                shown.setdefault(object_id, []).extend((number * _CELLS + kept).tolist())
    passages = [torch.tensor(sorted(set(tokens))) for tokens in shown.values() if tokens]
    return Watched(chunks, passages, recording.instants[0].queries)


def repeated(watched: Watched, chunks: Sequence[KVChunk]) -> Watched:
    """``watched`` repeated to match ``chunks``; a passage consists of all its repetitions."""
    length = len(watched.chunks)
    passages = []
    for passage in watched.passages:
        again = torch.cat([passage + first * _CELLS for first in range(0, len(chunks), length)])
        passages.append(again[again < len(chunks) * _CELLS])
    return Watched(chunks, passages)


def shown_cells(renderer: SceneRenderer, second: float, rows: int, columns: int) -> Iterator[tuple[int, IntArray]]:
    """Yield each object's id and the cells that its box covers at least half, or else the cell of its centre."""
    for each in renderer.objects(second):
        left, top, right, bottom = box = np.clip(each.box, 0, 1) * (columns, rows, columns, rows)
        cells = covered_cells(box, (rows, columns))
        row, column = min(int((top + bottom) / 2), rows - 1), min(int((left + right) / 2), columns - 1)
        yield each.id, cells if len(cells) else np.array([row * columns + column])


def found_passages(memory: StreamMemory, watched: Watched) -> Floats:
    """Share of layers and heads that hold a token of each passage ``[passages]``."""
    found = np.zeros(len(watched.passages))
    heads = list(memory.iter_heads())
    for layer, h, _ in heads:
        held = load_head_tokens(memory, layer, h)
        if held is not None:
            tokens = watched.token_numbers(memory, held.frame[0], held.cell[0])
            found += [bool(torch.isin(each, tokens).any()) for each in watched.passages]
    return found / max(1, len(heads))


def _settings(share: int) -> list[ShareSetting]:
    """Our setting, and every other compressor with our organiser."""
    own = ours(1 / share)
    others = (name for name in thinning_compressors() if name != own.compressor)
    return [own, *(ShareSetting(name, own.organiser, own.retriever, share=1 / share) for name in others)]


def _recall(watched: Sequence[Watched], setting: ShareSetting) -> tuple[Floats, float]:
    """Recall of every passage, and the share of tokens held."""
    found, held, total = [], 0, 0
    for each in watched:
        _, memory = filled_memory(each.chunks, setting, each.queries)
        found.append(found_passages(memory, each))
        held += memory.tokens
        total += each.tokens * sum(map(len, memory.heads))
        memory.tiers.close()
    return np.concatenate(found), held / total


def _read_rows(watched: Sequence[Watched], share: int) -> list[dict[str, Any]]:
    """Rows of our compressor with every organiser and retriever, against our setting."""
    own = ours(1 / share)
    found: dict[tuple[str, str], list[tuple[Floats, float]]] = {}
    for organiser in organisers.names():
        for each in watched:
            setting = ShareSetting(own.compressor, organiser, own.retriever, share=1 / share)
            _, memory = filled_memory(each.chunks, setting)
            for name in retrievers.names():
                found.setdefault((organiser, name), []).append(read_passages(memory, each, retrievers.get(name)()))
            memory.tiers.close()
    ours_found = np.concatenate([recall for recall, _ in found[own.organiser, own.retriever]])
    weights = _weights(watched)
    rows = []
    for (organiser, name), parts in found.items():
        recall = np.concatenate([each for each, _ in parts])
        row: dict[str, Any] = {"compressor": own.compressor, "organiser": organiser, "retriever": name}
        row |= {"cap": f"1/{share}", "read": sum(read for _, read in parts) / len(parts)}
        row |= estimate(_mean(recall, weights)).row("recall")
        rows.append(row | estimate(_mean(ours_found - recall, weights)).row("ours_more"))
    return rows


def read_passages(memory: StreamMemory, watched: Watched, retriever: Retriever) -> tuple[Floats, float]:
    """Query each passage with the mean key of its tokens; returns the share of layers and heads that read one of them
    ``[passages]``, and the read share of the held tokens."""
    token = torch.cat([number * _CELLS + chunk.cell.long() for number, chunk in enumerate(watched.chunks)])
    at = [torch.searchsorted(token, passage) for passage in watched.passages]
    found, read, held = np.zeros(len(watched.passages)), 0, 0
    for layer, row in enumerate(memory.heads):
        key = torch.cat([chunk.key[layer].float() for chunk in watched.chunks], dim=1)
        numbers = [watched.token_numbers(memory, head.frame, head.cell) for head in row]
        tables = [head.table for head in row]
        for index, (passage, rows) in enumerate(zip(watched.passages, at, strict=True)):
            chosen = retriever.select_layer(key[:, rows].mean(dim=1, keepdim=True), tables)
            for own, table, each in zip(numbers, tables, chosen, strict=True):
                taken = torch.isin(table.of_token, each)
                found[index] += bool(torch.isin(own[taken], passage).any())
                read, held = read + int(taken.sum()), held + len(own)
    return found / max(1, sum(map(len, memory.heads))), read / max(1, held)


def _weights(watched: Sequence[Watched]) -> Floats:
    """Bootstrap weights ``[b, passages]``, resampled by camera: passages of one camera are not independent."""
    counts = [len(each.passages) for each in watched]
    return bootstrap_weights(len(watched))[:, np.arange(len(watched)).repeat(counts)]


def _mean(values: Floats, weights: Floats) -> Floats:
    """Means ``[b]`` of ``values [n]`` weighted by ``weights [b, n]``."""
    mean: Floats = (weights @ values) / np.maximum(weights.sum(axis=1), 1e-12)
    return mean
