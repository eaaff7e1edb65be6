"""Attention over packed sequences; sequences of equal length run as one batch.

transformers calls SDPA once per sequence, but an attention window of Qwen's tower has at most 64 patches, a pruned one
often 4, where a call costs more than its arithmetic. In half precision on a GPU, one variable-length call handles all
sequences. The registered name contains *flash*, which makes transformers pass packed sequences unsplit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from cluster.models.upload import to_device

PACKED = "sightline_packed_flash"


@dataclass(frozen=True, slots=True)
class SequencePacking:
    """Boundaries and lengths of packed sequences, computed once for all layers.

    * ``cu_seqlens`` ``[sequences + 1]`` int32
    * ``longest``: tokens of the longest sequence
    * ``batches``: per distinct length, token indices ``[b, length]`` int64; empty if a varlen call is used
    """

    cu_seqlens: Tensor
    longest: int
    batches: tuple[Tensor, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> Self:
        """Packing of sequences with these lengths, none of them 0."""
        size = torch.tensor(lengths, dtype=torch.int64)
        ends = size.cumsum(0)
        starts = ends - size
        cu_seqlens = to_device(F.pad(ends, (1, 0)).to(torch.int32), device)
        if device.type != "cpu" and dtype != torch.float32:
            return cls(cu_seqlens, int(size.max()), ())
        batches = tuple(
            (starts[size == length][:, None] + torch.arange(int(length))).to(device) for length in torch.unique(size)
        )
        return cls(cu_seqlens, int(size.max()), batches)


def packed_attention(
    module: nn.Module,  # noqa: ARG001 the signature is transformers'
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: SequencePacking | None,
    *,
    packing: SequencePacking | None = None,
    scaling: float,
    **kwargs: Any,  # noqa: ARG001
) -> tuple[Tensor, None]:
    """``query, key, value [1, h, n, d]`` -> ``[1, n, h, d]``; on a GPU one launch for all sequences.

    The packing separates sequences, so no mask is needed; some towers pass on nothing else, and get it as the mask.
    """
    packing = packing or attention_mask
    assert packing is not None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(packing, q, k, v, scaling)[None], None


def attend(packing: SequencePacking, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """``[n, h, d]`` each -> ``[n, h, d]``."""
    if not packing.batches:
        ends, longest = packing.cu_seqlens, packing.longest
        attended: Tensor = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling)  # type: ignore[assignment]
        return attended
    if len(packing.batches) == 1:
        shape = (*packing.batches[0].shape, *q.shape[1:])
        return _attend(q.reshape(shape), k.reshape(shape), v.reshape(shape), scaling).reshape(q.shape)
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for index in packing.batches:
        output[index] = _attend(q[index], k[index], v[index], scaling)
    return output


def _attend(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """``[b, n, h, d]`` each -> ``[b, n, h, d]``."""
    attended = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=scaling)
    return attended.transpose(1, 2)


def prepend_token(rows: Tensor, token: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Insert ``token [D]`` before each frame's rows, ``counts`` of ``rows [n, D]`` each; also returns the new indices
    ``[n]`` of the rows."""
    # On the rows' device, as indices are as many as patches. Without output_size, the host would wait for the length.
    device, repeats = rows.device, to_device(torch.tensor(counts), rows.device)
    frame = torch.repeat_interleave(torch.arange(1, len(counts) + 1, device=device), repeats, output_size=len(rows))
    places = torch.arange(len(rows), device=device) + frame
    packed = token.repeat(len(rows) + len(counts), 1)
    packed[places] = rows
    return packed, places


AttentionInterface.register(PACKED, packed_attention)


def row_numbers(keys: Tensor) -> Tensor:
    """Sort keys ``[n]`` for the lexicographic order of the rows of ``keys [n, k]`` (non-negative)."""
    flat = keys[:, 0]
    for column in keys.T[1:]:
        flat = flat * (column.max() + 1) + column
    return flat
