"""What the connector's two sides tell each other, step by step; plain data that vLLM carries between its processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from cluster.engine.vllm.connector.transfer import Load, Save


@dataclass(slots=True)
class LoadJob:
    """The prompt's tokens ``[start, stop)`` of a request come from ``loads``, which begin at its first token.

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
    """After this step all tokens of ``saves`` have KV in the request's ``blocks``."""

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
        """Of two workers: a block is kept where both keep it."""
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
