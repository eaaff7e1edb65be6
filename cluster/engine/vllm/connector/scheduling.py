"""Scheduler side of the connector: how many prompt tokens to load, and when computed blocks can be saved.

The per-step messages between the two sides are plain data carried by vLLM.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from cluster.engine.vllm.connector.transfer import FIELD, Load, Save, Transfer
from cluster.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LoadJob:
    """Load the prompt's tokens ``[start, stop)`` from ``loads``, which begin at the prompt's first token.

    ``blocks``: the request's block ids; ``positions``: int32 bytes ``[axes, ...]`` of the prompt; ``refused``: why
    there is nothing to load.
    """

    request: str
    start: int
    stop: int
    blocks: list[int]
    loads: tuple[Load, ...]
    axes: int
    positions: bytes
    refused: str = ""


@dataclass(slots=True)
class SaveJob:
    """Save ``saves``, whose tokens all have KV in the request's ``blocks`` after this step."""

    request: str
    blocks: list[int]
    saves: tuple[Save, ...]
    axes: int
    positions: bytes


@dataclass(slots=True)
class StepJobs(KVConnectorMetadata):
    """From the scheduler to the workers, for one step."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)


@dataclass(slots=True)
class StepReport(KVConnectorWorkerMetadata):
    """From the workers to the scheduler, of one step.

    * ``failed``: request -> why its load delivered less than was promised
    * ``saved``: request -> blocks kept by every worker; ``lost``: request -> blocks that some worker could not keep
    """

    failed: dict[str, str] = field(default_factory=dict)
    saved: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        """Merge two workers' reports: a block is saved if both saved it."""
        assert isinstance(other, StepReport)
        return StepReport(
            failed={**other.failed, **self.failed},
            saved={
                request: min(self.saved.get(request, 0), other.saved.get(request, 0))
                for request in {**self.saved, **other.saved}
            },
            lost={
                request: max(self.lost.get(request, 0), other.lost.get(request, 0))
                for request in {**self.lost, **other.lost}
            },
        )


@dataclass(slots=True)
class _RequestState:
    """State of one request. Tokens ``[local, local + loaded)`` come from blocks; the first ``local`` are in vLLM's own
    cache.

    With ``transfer`` None, ``refused`` says why its parameters are invalid.
    """

    transfer: Transfer | None
    refused: str = ""
    local: int = 0
    loaded: int = 0
    saving: bool = False


class SchedulerSide:
    """Scheduler side in one engine core. Never raises for bad requests or missing blocks, which would end the core.

    Loads are promised without a look into the store; workers find missing blocks before the step, and vLLM then ends
    the request (policy ``fail``). A request is computed from exactly what it asked for or not at all, and the core
    never waits for the store.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._asked: dict[str, _RequestState] = {}
        self._jobs: list[LoadJob] = []

    # -- loads ------------------------------------------------------------------------------------
    def match_request(self, request: Any, local: int) -> int:
        """Number of tokens to load beyond the ``local`` ones in vLLM's own cache."""
        asked = self._of(request)
        # At least one token must be computed, or there is nothing to predict the answer from.
        wanted = most = int(request.num_tokens) - 1
        if not asked.refused:
            wanted = 0 if asked.transfer is None else min(asked.transfer.loaded, most)
        asked.local = local
        return max(0, wanted - local)

    def on_allocated(self, request: Any, blocks: list[int], external: int) -> None:
        """vLLM allocated the request's blocks and expects ``external`` tokens to be loaded."""
        asked = self._of(request)
        asked.saving = asked.transfer is not None and bool(asked.transfer.saves)
        if not external:
            return
        asked.loaded = external
        start, stop = asked.local, asked.local + external
        if asked.transfer is None:
            # Nothing to load it from: the worker reports that, and the request ends with an error.
            self._jobs.append(LoadJob(request.request_id, start, stop, blocks, (), 1, b"", asked.refused))
            return
        self.counts["loads"] += 1
        self.counts["loaded_tokens"] += external
        self._jobs.append(
            LoadJob(request.request_id, start, stop, blocks, asked.transfer.loads, *_packed(asked.transfer))
        )

    # -- a step -----------------------------------------------------------------------------------
    def make_jobs(self, computed: Mapping[str, int], blocks_of: Callable[[str], list[int]]) -> StepJobs:
        """Jobs of a step after which ``computed`` tokens of each request have KV."""
        jobs = StepJobs(loads=self._jobs)
        self._jobs = []
        for name, tokens in computed.items():
            asked = self._asked.get(name)
            if asked is None or not asked.saving or asked.transfer is None or tokens < asked.transfer.save_end:
                continue
            asked.saving = False
            jobs.saves.append(SaveJob(name, blocks_of(name), asked.transfer.saves, *_packed(asked.transfer)))
        return jobs

    def apply_report(self, report: StepReport) -> None:
        """Count the workers' results."""
        for name, reason in report.failed.items():
            self.counts["failed_loads"] += 1
            log.warning("request %s ends without an answer: its prefix cannot be loaded: %s", name, reason)
        self.counts["saved_blocks"] += sum(report.saved.values())
        self.counts["lost_blocks"] += sum(report.lost.values())

    def on_finished(self, request: Any) -> dict[str, Any] | None:
        """Statistics returned with a finished request; None if it had no transfer.

        ``listed``: tokens it asked to load; ``loaded``: from blocks; ``local``: from vLLM's own cache.
        """
        asked = self._asked.pop(request.request_id, None)
        if asked is None or asked.transfer is None:
            return None
        listed = asked.transfer.loaded
        return {FIELD: {"listed": listed, "loaded": asked.loaded, "local": min(asked.local, listed)}}

    def pop_counts(self) -> dict[str, int]:
        """Counters since the last call."""
        counts, self.counts = self.counts, Counter()
        return {name: count for name, count in counts.items() if count}

    # -- requests ---------------------------------------------------------------------------------
    def _of(self, request: Any) -> _RequestState:
        asked = self._asked.get(request.request_id)
        if asked is None:
            try:
                asked = _RequestState(_transfer_of(request))
            except ConfigError as error:
                self.counts["refused_requests"] += 1
                asked = _RequestState(None, refused=str(error))
            self._asked[request.request_id] = asked
        return asked


def _transfer_of(request: Any) -> Transfer | None:
    transfer = Transfer.from_params(request.kv_transfer_params)
    if transfer is not None and getattr(request, "cache_salt", None) is None:
        raise ConfigError("a request with a transfer needs a cache_salt of its window")
    if transfer is not None and transfer.save_end > request.num_prompt_tokens:
        raise ConfigError(
            f"blocks up to token {transfer.save_end} are to be saved of a prompt of {request.num_prompt_tokens}"
        )
    return transfer


def _packed(transfer: Transfer) -> tuple[int, bytes]:
    positions = np.ascontiguousarray(transfer.positions, dtype=np.int32)
    return positions.shape[0], positions.tobytes()
