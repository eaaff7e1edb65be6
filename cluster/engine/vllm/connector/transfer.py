"""Transfer of one request: which blocks to load as the prompt's prefix, and which computed tokens to save as blocks.

A prompt is ``[system | reused | refreshed, new | question]``. The reused part is a list of blocks in prompt order, one
per frame (and one for the system prompt), each with all or some of its rows. Positions are the model's, whatever the
order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.errors import ConfigError

IntArray = npt.NDArray[np.int64]

VERSION = 1
FIELD = "sightline"
"""Where the transfer lies in a request's ``SamplingParams.extra_args["kv_transfer_params"]``, and the report in the
``RequestOutput.kv_transfer_params`` that comes back."""


@dataclass(frozen=True, slots=True)
class Load:
    """Contiguous rows of a block in the prompt: all ``tokens``, or those in ``rows`` (ascending)."""

    key: str
    tokens: int
    rows: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return self.tokens if self.rows is None else len(self.rows)


@dataclass(frozen=True, slots=True)
class Save:
    """A block of ``tokens`` to save: its ``rows`` (all, if None) are the prompt's tokens from ``start`` on.

    Rows that were not computed are copied from the block ``base``.
    """

    key: str
    tokens: int
    start: int
    rows: tuple[int, ...] | None = None
    base: str | None = None

    def __len__(self) -> int:
        return self.tokens if self.rows is None else len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """A request's loads and saves.

    * ``positions`` ``[a, n]`` int64: of the prompt's first ``n`` tokens, with at least all that is loaded or saved;
      one axis, or three for M-RoPE
    """

    loads: tuple[Load, ...]
    saves: tuple[Save, ...]
    positions: IntArray

    def __post_init__(self) -> None:
        reach = max([self.loaded, *(save.start + len(save) for save in self.saves)])
        if self.positions.ndim != 2 or self.positions.shape[0] not in (1, 3) or self.positions.shape[1] < reach:
            raise ConfigError(
                f"a transfer needs positions [1 or 3, {reach} or more], not {list(self.positions.shape)}; give the "
                "position of every token that is loaded or saved"
            )
        parts: list[Load | Save] = [*self.loads, *self.saves]
        for part in parts:
            _check_rows(part)
        for save in self.saves:
            if save.start < self.loaded:
                raise ConfigError(
                    f"block {save.key!r} is to be saved from token {save.start} on, but the first {self.loaded} tokens "
                    "are loaded; save only what is computed"
                )

    @property
    def loaded(self) -> int:
        """Number of loaded tokens at the start of the prompt."""
        return sum(map(len, self.loads))

    @property
    def save_end(self) -> int:
        """Number of prompt tokens that must be computed before everything can be saved."""
        return max((save.start + len(save) for save in self.saves), default=0)

    def to_params(self) -> dict[str, Any]:
        """Plain data for ``SamplingParams.extra_args["kv_transfer_params"]``."""
        return {
            FIELD: {
                "version": VERSION,
                "loads": [[load.key, load.tokens, _listed(load.rows)] for load in self.loads],
                "saves": [[save.key, save.tokens, save.start, _listed(save.rows), save.base] for save in self.saves],
                "axes": self.positions.shape[0],
                "positions": np.ascontiguousarray(self.positions, dtype=np.int32).tobytes(),
            }
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None) -> Transfer | None:
        """Inverse of :meth:`to_params`; None if the request has no transfer.

        Raises:
            ConfigError: invalid parameters.
        """
        body = (params or {}).get(FIELD)
        if body is None:
            return None
        try:
            if body["version"] != VERSION:
                raise ConfigError(
                    f"the request's transfer has version {body['version']}, this connector reads {VERSION}"
                )
            positions = np.frombuffer(body["positions"], dtype=np.int32).astype(np.int64)
            return cls(
                loads=tuple(Load(str(key), int(tokens), _rows(rows)) for key, tokens, rows in body["loads"]),
                saves=tuple(
                    Save(str(key), int(tokens), int(start), _rows(rows), base)
                    for key, tokens, start, rows, base in body["saves"]
                ),
                positions=positions.reshape(int(body["axes"]), -1),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the request's transfer cannot be read: {error!r}") from None


def transfer_config(folder: str | Path, *, cap_bytes: int, fingerprint: str, shards: int = 1) -> dict[str, Any]:
    """Build vLLM's ``kv_transfer_config`` engine argument.

    A failed load ends its request with an error, and the request is repeated without loads. vLLM's
    ``kv_load_failure_policy: recompute`` is unusable for prompts with embeddings: vLLM 0.32 sends workers the items
    under a loaded prefix without their content (``strip_covered_mm_data``), so recomputing that prefix after a failure
    crashes the worker. It would also let a window's other questions read blocks that are recomputed only in a later
    step.

    Args:
        folder: of the blocks; one per engine, on a memory file system (``/dev/shm/...``).
        cap_bytes: of all workers together.
        fingerprint: of the model; blocks of another are never used.
        shards: workers, vLLM's ``tensor_parallel_size``, each with its part of the heads.

    Raises:
        ConfigError: no fingerprint.
    """
    if not fingerprint:
        raise ConfigError("blocks of KV need the fingerprint of the model they belong to")
    return {
        "kv_connector": "SightlineConnector",
        "kv_connector_module_path": "cluster.engine.vllm.connector.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "folder": str(folder),
            "cap_bytes": cap_bytes,
            "fingerprint": fingerprint,
            "shards": shards,
        },
    }


def _check_rows(part: Load | Save) -> None:
    rows = part.rows
    if part.tokens < 1 or (rows is not None and not rows):
        raise ConfigError(f"block {part.key!r} of {part.tokens} tokens stands for none; leave it out")
    if rows is not None and (rows[0] < 0 or rows[-1] >= part.tokens or any(a >= b for a, b in zip(rows, rows[1:]))):  # noqa: B905, RUF007
        raise ConfigError(f"rows of block {part.key!r} must ascend within its {part.tokens} tokens")
    if isinstance(part, Save):
        if part.start < 0:
            raise ConfigError(f"block {part.key!r} cannot begin before the prompt, at token {part.start}")
        if (rows is None) != (part.base is None):
            raise ConfigError(f"block {part.key!r} needs a base for the rows that are not computed, and only then")


def _listed(rows: Sequence[int] | None) -> list[int] | None:
    return None if rows is None else list(rows)


def _rows(rows: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if rows is None else tuple(int(row) for row in rows)
