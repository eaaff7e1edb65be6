"""A vLLM engine with our connector, and windows of synthetic cameras computed on it and by the oracle."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from dense_oracle import DenseOracle, tokens_of

from cluster.engine.vllm.connector.prompt_order import Order, WindowFrame, reordered
from cluster.engine.vllm.connector.store import BlockFolder
from cluster.engine.vllm.connector.transfer import FIELD, Save, Transfer, transfer_config
from cluster.lab.bench.soak import SyntheticCamera
from cluster.models.base import FrameSpan, FrameTokens, VisionLanguageModel
from cluster.types import MICROSECONDS, FrameSample

T = TypeVar("T")
QUESTIONS = ("Is anyone climbing the fence?", "Is there a fire or smoke?", "Did a vehicle stop on the road?")
DEADLINE_S = 60.0
BLOCK = 32


def system_transfer(key: str, tokens: int, axes: int) -> Transfer:
    """What the request asks for that computes the system prompt once, so that windows can begin with it."""
    return Transfer((), (Save(key, tokens, 0),), np.broadcast_to(np.arange(tokens), (axes, tokens)))


@dataclass
class Result:
    """One question: log-probabilities of the rig's ids, the connector's report, tokens that vLLM did not compute.

    None of it where the request ended with an error.
    """

    logprobs: Tensor
    report: dict[str, Any]
    cached: int

    @property
    def failed(self) -> bool:
        return not len(self.logprobs)


@dataclass
class Window:
    order: Order
    results: list[Result]


class Rig:
    """One engine; calls are made from the test's thread and run in the engine's own event loop."""

    def __init__(self, model: VisionLanguageModel, config: Path, blocks: Path, **arguments: Any) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from cluster.engine.vllm.served_model import serve_folder

        self.model, self.blocks = model, blocks
        config.mkdir()
        served = serve_folder(model, config, [32, 64])
        self.hidden = served.hidden
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randperm(model.text_config.vocab_size, generator=generator)[:24]
        self.folder = BlockFolder(blocks)
        self.system = WindowFrame("system", len(model.system_ids()), "system")
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, daemon=True).start()
        settings = {
            "dtype": "float32",
            "max_model_len": 2048,
            "max_num_batched_tokens": 2048,
            "block_size": BLOCK,
            "kv_transfer_config": transfer_config(blocks, cap_bytes=2**26, fingerprint="tests"),
            **arguments,
        }

        async def start() -> AsyncLLM:
            return AsyncLLM.from_engine_args(
                AsyncEngineArgs(
                    model=served.weights,
                    hf_config_path=str(served.config),
                    skip_tokenizer_init=True,
                    enforce_eager=True,
                    generation_config="vllm",
                    mm_processor_cache_gb=0,
                    skip_mm_profiling=True,
                    **settings,
                )
            )

        self.engine = self.run(start(), 120.0)

    def run(self, work: Coroutine[Any, Any, T], deadline_s: float = DEADLINE_S) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(deadline_s)

    def close(self) -> None:
        self.engine.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)

    # -- requests ---------------------------------------------------------------------------------
    async def ask(
        self, items: Sequence[Any], question: str, transfer: Transfer | None, salt: str, tokens: int
    ) -> Result:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from cluster.engine.vllm.prompt_items import window_prompt, without_content

        prompt = window_prompt(
            self.model.system_ids(), items, self.model.question_ids(question), placeholder=0, salt=salt
        )
        without_content(prompt, sum(load.key != self.system.block for load in transfer.loads) if transfer else 0)
        extra = {} if transfer is None else {"kv_transfer_params": transfer.to_params()}
        parameters = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            logprob_token_ids=self.ids.tolist(),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=extra,
        )
        output: Any = None
        async for each in self.engine.generate(prompt, parameters, f"r{next(self._numbers)}"):
            output = each
        if output.outputs[0].finish_reason == "error":
            return Result(torch.zeros(0), {}, 0)
        found = output.outputs[0].logprobs[0]
        report = (output.kv_transfer_params or {}).get(FIELD, {})
        return Result(torch.tensor([found[i].logprob for i in self.ids.tolist()]), report, output.num_cached_tokens)

    def prime(self) -> None:
        """Compute and keep the system prompt."""
        from vllm import SamplingParams

        ids = self.model.system_ids()
        transfer = system_transfer("system", len(ids), 3)

        async def go() -> None:
            parameters = SamplingParams(
                max_tokens=1, detokenize=False, extra_args={"kv_transfer_params": transfer.to_params()}
            )
            prompt = {"prompt_token_ids": [*ids, 0], "cache_salt": "system"}
            async for _ in self.engine.generate(prompt, parameters, f"r{next(self._numbers)}"):
                pass

        self.run(go())


def content_of(sample: FrameSample, tokens: FrameTokens) -> str:
    """A mask's digest alone would be the same for the first frames of two cameras."""
    from cluster.engine.vllm.prompt_items import content_digest

    return f"{sample.digest}.{content_digest(tokens.embeds)}"


@dataclass
class Camera:
    """One camera's windows on a rig, with the oracle that computes the same."""

    rig: Rig
    source: SyntheticCamera
    oracle: DenseOracle = field(init=False)
    tokens: dict[int, FrameTokens] = field(default_factory=dict)
    keys: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.oracle = DenseOracle(self.rig.model)

    def plan(
        self,
        first: int,
        last: int,
        refresh: Callable[[FrameSample, int], np.ndarray] | None = None,
        *,
        loads: bool = True,
    ) -> Order:
        """Frames ``[first, last)``; ``refresh``: (frame, tokens) -> rows of a held frame to compute; its anchors."""
        samples = self.samples(first, last)
        refresh = refresh or (lambda sample, tokens: np.full(tokens, sample.anchor))
        frames, masks, spans = [], [], []
        for sample in samples:
            tokens = self.tokens.setdefault(sample.index, tokens_of(self.rig.model, sample))
            key = self.keys.get(sample.index)
            frames.append(WindowFrame(content_of(sample, tokens), len(tokens), key))
            masks.append(np.ones(len(tokens), bool) if key is None else refresh(sample, len(tokens)))
            time = sample.pts - samples[0].pts
            spans.append(FrameSpan(time / MICROSECONDS, round(time / sample.duration), tokens.cells, tokens.grid))
        system = self.rig.system.tokens
        laid = self.rig.model.window_positions(system, spans)
        positions = torch.cat([torch.arange(system).expand(3, -1), *laid.frames], dim=1).numpy()
        self.after, self.frames = laid.next, samples
        holds = lambda key, tokens: loads and self.rig.folder.tokens(key) == tokens  # noqa: E731
        return reordered(self.source.stream, self.rig.system, frames, np.concatenate(masks), positions, holds)

    def samples(self, first: int, last: int) -> list[FrameSample]:
        return [self.source.sample(index) for index in range(first, last)]

    def ask(self, order: Order, questions: Sequence[str] = QUESTIONS[:1], *, tokens: int = 1) -> Window:
        """Compute a window on vLLM; its blocks are the camera's from then on, where they were kept."""
        return self.rig.run(self.asking(order, questions, tokens=tokens))

    async def asking(self, order: Order, questions: Sequence[str] = QUESTIONS[:1], *, tokens: int = 1) -> Window:
        """See :meth:`ask`."""
        from cluster.engine.vllm.prompt_items import WindowItem

        frames = self.frames
        items = []
        for number, piece in enumerate(order.pieces):
            sample = frames[piece.frame]
            embeds = self.tokens[sample.index].embeds
            embeds = embeds if piece.rows is None else embeds[list(piece.rows)]
            at = torch.from_numpy(order.positions[:, piece.start : piece.start + len(embeds)].copy())
            last = number == len(order.pieces) - 1
            wide = torch.nn.functional.pad(embeds, (0, self.rig.hidden - embeds.shape[1]))
            items.append(
                WindowItem.of(
                    wide,
                    at,
                    f"{content_of(sample, self.tokens[sample.index])}{piece.rows}",
                    after=self.after if last else None,
                )
            )
        transfers = [order.transfer, *[order.followers] * (len(questions) - 1)]
        results = await asyncio.gather(
            *[
                self.rig.ask(items, question, transfer, order.salt, tokens)
                for question, transfer in zip(questions, transfers, strict=True)
            ]
        )
        for sample, key in zip(frames, order.keys, strict=True):
            if key is not None and self.rig.folder.tokens(key) is not None:
                self.keys[sample.index] = key
            else:
                self.keys.pop(sample.index, None)
        return Window(order, list(results))

    def expected(self, order: Order, questions: Sequence[str] = QUESTIONS[:1]) -> list[Tensor]:
        """The oracle's log-probabilities of the rig's ids; it keeps its own KV of this camera."""
        logits = self.oracle.window(self.frames, order.computed, questions, reused_first=True)
        return [each.log_softmax(-1)[self.rig.ids] for each in logits]
