"""KV of all streams in one pool of slots, one token per slot; each stream holds a slot table.

Keys are rotated *once*, at the token's position in its stream's own time: only relative positions matter, so a sliding
window leaves the KV it keeps unchanged (see :func:`~cluster.engine.window.stream.own_positions`). The slots of a window
need no order, so KV never moves within the pool.
"""

from collections.abc import Callable, Iterator
from math import prod
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from cluster.engine.window.host_copies import HostCopies, HostCopy
from cluster.engine.window.planner import IntArray
from cluster.errors import CapacityError, ConfigError
from cluster.hosts import host_memory_bytes
from cluster.models.base import VisionLanguageModel
from cluster.models.checkpoint import head_size
from cluster.models.upload import to_device, upload

Slots = TypeVar("Slots", IntArray, Tensor)

MOST_SLOTS = 1 << 20
"""Maximum slots of a pool: about 700 windows of 1,500 tokens."""
HOST_SHARE = 0.5
"""Share of host memory for a CPU pool, or for windows moved there from a GPU pool."""
HOST_BLOCK = 1 << 22
"""Bytes of keys, or of values, per host allocation; a power of two, to which torch rounds pinned allocations up."""
GPU_SHARE = 0.9
"""Share of a GPU's free memory for the pool, the embeddings of its tokens, and the activations of a pass."""
MEMORY_SHARE = 1 / 8
"""Share of the device's free memory for frames waiting to enter memories, reserved before the pool is sized."""


class KVPool:
    """Pool of KV slots: ``k, v [L, slots, Hkv, d]``; ``rotary``, ``key_bias``: the model's.

    * ``make_room``: called with the number of missing slots before a request is refused
    * ``copies``: between pool and host memory, in blocks of ``block_tokens``; ``host_used``: bytes of KV in host
      memory; together with moved embeddings, at most ``host_capacity``

    On a CPU, the operating system commits the memory page by page, on first use.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        nbytes: int | None = None,
        *,
        pass_rows: int = 0,
        host_bytes: int | None = None,
        beside: int = 0,
    ) -> None:
        """``nbytes``: of keys and values together; ``None``: ``HOST_SHARE`` of host memory on a CPU, on a GPU
        :func:`gpu_pool_bytes` for passes of ``pass_rows`` rows, leaving ``beside`` bytes free; at most ``MOST_SLOTS``
        slots. ``host_bytes``: host memory for windows moved there; ``None``: ``HOST_SHARE`` of it, 0 for a pool on the
        CPU. Raises ``ConfigError``: not a single token fits."""
        config = model.text_config
        size = head_size(config)
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        layers = len(model.layers)
        self.slot_bytes = 2 * layers * kv_heads * size * model.dtype.itemsize
        if nbytes is None:
            free = free_bytes(model)
            nbytes = (
                gpu_pool_bytes(model, free - beside, self.slot_bytes, pass_rows)
                if _on_gpu(model)
                else int(HOST_SHARE * free)
            )
        self.capacity = min(MOST_SLOTS, nbytes // self.slot_bytes)
        if self.capacity < 1:
            raise ConfigError(f"a KV pool of {nbytes} bytes holds no token; one takes {self.slot_bytes}")
        self.rotary, self.key_bias = model.rotary, model.key_bias
        self.device = model.device
        shape = (layers, self.capacity, kv_heads, size)
        self.k, self.v = (_zeros(shape, model.dtype, model.device) for _ in range(2))
        self.make_room: Callable[[int], None] = lambda _: None
        self.copies = HostCopies(model.device)
        if host_bytes is None:
            host_bytes = 0 if model.device.type == "cpu" else int(HOST_SHARE * host_memory_bytes())
        self.host_used, self.host_capacity = 0, host_bytes
        self.block_tokens = max(1, HOST_BLOCK // (self.slot_bytes // 2))
        # Slots from ``_fresh`` on were never used; the first ``_spare`` entries of the stack ``_free`` were given back.
        self._fresh = self._spare = 0
        self._free = np.empty(self.capacity, np.int64)

    @property
    def used(self) -> int:
        """Allocated slots."""
        return self._fresh - self._spare

    def allocate(self, count: int) -> IntArray:
        """Allocate ``count`` slots; returns them in ascending order. Raises ``CapacityError``: fewer are free."""
        if count > self.capacity - self.used:
            self.make_room(count - (self.capacity - self.used))
        again = min(count, self._spare)
        more = count - again
        if self._fresh + more > self.capacity:
            raise CapacityError(
                f"{count} tokens do not fit the KV pool: {self.used} of its {self.capacity} slots of "
                f"{self.slot_bytes} bytes are in use"
            )
        self._spare -= again
        self._fresh += more
        given = self._free[self._spare : self._spare + again], np.arange(self._fresh - more, self._fresh)
        return np.sort(np.concatenate(given))

    def free(self, slots: IntArray) -> None:
        """Free slots allocated by :meth:`allocate`."""
        self._free[self._spare : self._spare + len(slots)] = slots
        self._spare += len(slots)
        self.copies.mark_freed()

    def clear(self, slots: IntArray) -> None:
        """Zero slots that kernels read before they are written: masked values are multiplied by zero, which does not
        cancel a NaN or infinity that another stream may have left there."""
        index = self.index(slots)
        for part in (self.k, self.v):
            part.index_fill_(1, index, 0.0)

    def index(self, slots: IntArray) -> Tensor:
        """Slots, or rows of a pass, as an index tensor on the pool's device."""
        return to_device(torch.from_numpy(slots), self.device)


class StreamKV:
    """Slot table of one stream; without a ``pool`` (other engines), only the number of slots is meaningful.

    ``slots``: of its frames' tokens, oldest first, -1 while their KV is only in host memory; ``scratch``: slots of
    system prompt and questions, held during a step.
    """

    def __init__(self, pool: KVPool | None) -> None:
        self.pool = pool
        self.slots = self.scratch = np.zeros(0, np.int64)
        # Host copy: K, V [L, n, Hkv, d] of each block of tokens, and tokens dropped from its front since. The slots
        # hold the same KV until they are released.
        self._host: HostCopy | None = None
        self._dropped = 0
        self._released = False
        # Completion of the last load, until device work waits for it.
        self._arrival: HostCopy | None = None

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def nbytes(self) -> int:
        return 0 if self.pool is None else (len(self.slots) + len(self.scratch)) * self.pool.slot_bytes

    @property
    def on_host(self) -> bool:
        """Whether the KV is only in host memory."""
        return self._host is not None and self._released

    @property
    def copied(self) -> bool:
        """Whether the KV is, or is being, copied to host memory."""
        return self._host is not None

    def copy_to_host(self) -> None:
        """Start copying all KV to host memory; the slots stay allocated until :meth:`release`."""
        if self.pool is None or self._host is not None or not len(self.slots):
            return
        self._join()
        with self.pool.copies.outward():
            blocks = torch.split(self.pool.index(self.slots), self.pool.block_tokens)
            self._host = self.pool.copies.to_host(
                [part.index_select(1, index) for index in blocks for part in (self.pool.k, self.pool.v)]
            )
        self._dropped, self._released = 0, False
        self.pool.host_used += self._host.nbytes

    def release(self, *, wait: bool = False) -> None:
        """Free the slots once their copy to host memory is complete; ``wait``: free them now, and let device writes to
        them wait for the copy."""
        if self._host is None or self._released or not (wait or self._host.done):
            return
        self._host.join()
        self._released = True
        self._free_slots(self.slots)
        self.slots = np.full(len(self.slots), -1, np.int64)

    def load(self) -> bool:
        """Start moving the KV back into the pool and drop the host copy; returns whether the slots had been released.

        Raises:
            CapacityError: the pool is full; the KV stays in host memory.
            torch.OutOfMemoryError: the device is full; the KV stays in host memory.
        """
        if self.pool is None or self._host is None:
            return False
        if self._released:
            slots, copies = self.pool.allocate(len(self.slots)), self.pool.copies
            try:
                with copies.inward():
                    self._host.join()
                    for block, places, index in self._blocks(self.pool.index(slots)):
                        for number, part in enumerate((self.pool.k, self.pool.v)):
                            held = to_device(self._host[2 * block + number], self.pool.device)
                            part.index_copy_(1, index, held[:, places])
            except BaseException:
                # The slots' next owner must write after the copies started here.
                copies.arrival().join()
                self.pool.free(slots)
                raise
            self.slots, self._arrival = slots, copies.arrival()
        # Writes to the slots wait for their copy to the host.
        self._host.join()
        self._free_host()
        return self._released

    def resize(self, count: int) -> None:
        """Allocate slots up to ``count``, or free the newest; loads KV from host memory first. Raises
        ``CapacityError``: the pool is full."""
        self.load()
        self._join()
        self._free_slots(self.slots[count:])
        self.slots = self.slots[:count]
        self.slots = np.concatenate((self.slots, self._allocate(max(0, count - len(self.slots)))))

    def take_scratch(self, count: int) -> IntArray:
        """Allocate ``count`` scratch slots, replacing earlier ones. Raises ``CapacityError``: the pool is full."""
        self.release_scratch()
        self.scratch = self._allocate(count)
        return self.scratch

    def release_scratch(self) -> None:
        self._free_slots(self.scratch)
        self.scratch = self.scratch[:0]

    def drop_slots(self, count: int) -> None:
        """Drop the oldest ``count`` slots. Raises ``ValueError``: the stream has fewer."""
        if not 0 <= count <= len(self.slots):
            raise ValueError(f"{count} slots cannot be dropped of {len(self.slots)}")
        if not self.on_host:
            self._join()
            self._free_slots(self.slots[:count])
        self._dropped += count
        self.slots = self.slots[count:]
        if not len(self.slots):
            self._free_host()

    def clear(self) -> None:
        """Free all slots."""
        self.drop_slots(len(self.slots))
        self.release_scratch()

    def stored(self, first: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor]:
        """Copies ``K, V [L, Hkv, n, d]`` of the slots ``[first, stop)``, keys as stored (rotated)."""
        assert self.pool is not None
        if self._host is not None and self._released:
            held, blocks = self._host.tensors(), list(self._blocks(self.slots[first:stop], first))
            kept = (
                torch.cat(
                    [upload([held[2 * block + part][:, places]], self.pool.device) for block, places, _ in blocks], 1
                )
                for part in range(2)
            )
        else:
            self._join()
            index = self.pool.index(self.slots[first:stop])
            kept = (part.index_select(1, index) for part in (self.pool.k, self.pool.v))
        k, v = (part.transpose(1, 2).contiguous() for part in kept)
        return k, v

    def raw(
        self, positions: Tensor, first: int = 0, stop: int | None = None, *, bias: bool = True
    ) -> tuple[Tensor, Tensor]:
        """:meth:`stored` with keys before rotary, and without the projection's bias unless ``bias``; ``positions
        [3, n]``: those at which they were rotated."""
        assert self.pool is not None
        k, v = self.stored(first, stop)
        cos, sin = self.pool.rotary(positions)
        if bias or self.pool.key_bias is None:
            return unrotate(k, cos, sin), v
        return (unrotate(k.float(), cos, sin) - self.pool.key_bias).to(k.dtype), v

    def _blocks(self, slots: Slots, first: int = 0) -> Iterator[tuple[int, slice, Slots]]:
        """Host blocks that hold these slots' tokens, of which the first is number ``first``: block number, the tokens'
        range in the block, and their slots."""
        assert self.pool is not None
        size, at = self.pool.block_tokens, self._dropped + first
        stop = at + len(slots)
        for block in range(at // size, -(-stop // size)):
            begin, end = max(at, block * size), min(stop, (block + 1) * size)
            yield block, slice(begin - block * size, end - block * size), slots[begin - at : end - at]

    def _allocate(self, count: int) -> IntArray:
        return np.full(count, -1, np.int64) if self.pool is None else self.pool.allocate(count)

    def _join(self) -> None:
        """Make device work queued from now on wait for the last load."""
        if self._arrival is not None:
            self._arrival.join()
            self._arrival = None

    def _free_host(self) -> None:
        """Drop the host copy, which is freed only as a whole."""
        if self.pool is not None and self._host is not None:
            self.pool.host_used -= self._host.nbytes
        self._host = None

    def _free_slots(self, slots: IntArray) -> None:
        if self.pool is not None and len(slots):
            self.pool.free(slots)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x [..., n, d]`` by ``cos, sin [n, d]``, half-split layout.

    ``x * cos + rotate_half(x) * sin`` as in transformers, in three passes over memory without temporaries.
    """
    half = x.shape[-1] // 2
    out = torch.mul(x, cos)
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


def rotate_wide(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """:func:`rotate` in float32; the result has the dtype of ``x``."""
    return rotate(x.float(), cos, sin).to(x.dtype)


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse of :func:`rotate_wide`.

    Cosines and sines are divided by their squared norm, which is not exactly 1: they are rounded, and some checkpoints
    scale them.
    """
    norm = cos.square() + sin.square()
    return rotate_wide(x, cos / norm, -sin / norm)


def gpu_pool_bytes(model: VisionLanguageModel, free: int, slot_bytes: int, pass_rows: int) -> int:
    """Bytes for a pool on a GPU with ``free`` bytes: ``GPU_SHARE`` of them, less a layer's activations for
    ``pass_rows`` rows (gate, up and their product in the MLP, plus eight times the hidden size), split between the
    tokens' KV and their embeddings."""
    config = model.text_config
    activations = pass_rows * (3 * config.intermediate_size + 8 * config.hidden_size) * model.dtype.itemsize
    return max(0, int((GPU_SHARE * free - activations) * slot_bytes / (slot_bytes + embedding_bytes(model))))


def embedding_bytes(model: VisionLanguageModel) -> int:
    """Bytes of one token's embedding, including the DeepStack features added in early layers."""
    return int((1 + model.deepstack) * model.text_config.hidden_size * model.dtype.itemsize)


def free_bytes(model: VisionLanguageModel) -> int:
    """Bytes currently free on the model's GPU; on a CPU, the host's memory."""
    return int(torch.cuda.mem_get_info(model.device)[0]) if _on_gpu(model) else host_memory_bytes()


def _on_gpu(model: VisionLanguageModel) -> bool:
    return model.device.type == "cuda" and torch.cuda.is_available()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not uninitialised memory: a masked slot's score is -inf only if the score itself is finite."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros are pages that are not committed yet (calloc); torch writes its zeros.
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
