"""KV of all streams in one pool of slots, one token a slot; a stream holds a table of slots.

Keys are stored *rotated once*, at the place a token has in its stream's own time: only relative positions matter, so
that a sliding window changes nothing of what it keeps (see :func:`~cluster.engine.window.stream.own_positions`). Slots
of a window need no order, so nothing is ever moved, and a stream that leaves gives its slots back.
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
"""Slots of a pool at most: about 700 windows of 1,500 tokens."""
HOST_SHARE = 0.5
"""Share of the host's memory that a pool may fill, or that windows moved there from a GPU's pool may."""
HOST_BLOCK = 1 << 22
"""Bytes of keys, or of values, that are moved to host memory in one allocation: torch makes a power of two of each."""
GPU_SHARE = 0.9
"""Share of a GPU's free memory for a pool, embeddings of the tokens it holds, and the activations of a pass."""
MEMORY_SHARE = 1 / 8
"""Share of it for waiting frames of cameras' memories, before the pool's."""


class KVPool:
    """``k, v [L, slots, Hkv, d]``; ``rotary`` of their model.

    * ``make_room``: called with how many slots are missing before a request is refused
    * ``copies``: between the pool and host memory, in blocks of ``block_tokens``; ``host_used``: bytes of KV there,
      which are at most ``host_capacity`` with those of windows' embeddings

    On a CPU the memory is taken from the operating system slot by slot, as it is first used.
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
        """``nbytes``: of keys and values together; ``None``: ``HOST_SHARE`` of the host's memory, or
        :func:`gpu_pool_bytes` for passes of ``pass_rows`` rows, with ``beside`` bytes left for others; at most
        ``MOST_SLOTS`` slots. ``host_bytes``: of host memory for windows that are moved there; ``None``: ``HOST_SHARE``
        of it, and nothing for a pool that is there. Raises ``ConfigError``: not one token fits."""
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
        self.rotary = model.rotary
        self.device = model.device
        shape = (layers, self.capacity, kv_heads, size)
        self.k, self.v = (_zeros(shape, model.dtype, model.device) for _ in range(2))
        self.make_room: Callable[[int], None] = lambda _: None
        self.copies = HostCopies(model.device)
        if host_bytes is None:
            host_bytes = 0 if model.device.type == "cpu" else int(HOST_SHARE * host_memory_bytes())
        self.host_used, self.host_capacity = 0, host_bytes
        self.block_tokens = max(1, HOST_BLOCK // (self.slot_bytes // 2))
        # Slots from here on were never used; of those before, so many are free again, the first of this stack.
        self._fresh = self._spare = 0
        self._free = np.empty(self.capacity, np.int64)

    @property
    def used(self) -> int:
        """Slots that streams hold."""
        return self._fresh - self._spare

    def take(self, count: int) -> IntArray:
        """``count`` free slots, ascending. Raises ``CapacityError``: fewer are free."""
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

    def give_back(self, slots: IntArray) -> None:
        """The counterpart of :meth:`take`."""
        self._free[self._spare : self._spare + len(slots)] = slots
        self._spare += len(slots)
        self.copies.mark_freed()

    def clear(self, slots: IntArray) -> None:
        """Write zeros to slots that are visited before they are written: kernels multiply what they hide by nothing,
        which makes nothing of numbers alone, and another camera may have left none."""
        index = self.index(slots)
        for part in (self.k, self.v):
            part.index_fill_(1, index, 0.0)

    def index(self, slots: IntArray) -> Tensor:
        """Slots, or rows of a pass, as an index on the pool's device."""
        return to_device(torch.from_numpy(slots), self.device)


class StreamKV:
    """The slots of one stream in ``pool``; without one (other engines), only their number is known.

    ``slots``: of the tokens of its frames, oldest first, -1 while their KV is in host memory alone; ``scratch``: of the
    system prompt and questions, during a step.
    """

    def __init__(self, pool: KVPool | None) -> None:
        self.pool = pool
        self.slots = self.scratch = np.zeros(0, np.int64)
        # K, V [L, n, Hkv, d] of each block of tokens in host memory; tokens at its front that were dropped since. Until
        # they are released, the slots hold the same.
        self._host: HostCopy | None = None
        self._dropped = 0
        self._released = False
        # Of the last load, until something was started behind it.
        self._arrival: HostCopy | None = None

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def nbytes(self) -> int:
        return 0 if self.pool is None else (len(self.slots) + len(self.scratch)) * self.pool.slot_bytes

    @property
    def on_host(self) -> bool:
        """Whether host memory alone has it."""
        return self._host is not None and self._released

    @property
    def copied(self) -> bool:
        """Whether host memory has it, or will soon."""
        return self._host is not None

    def copy_to_host(self) -> None:
        """Begin the copy of all KV to host memory; the slots stay until :meth:`release`."""
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
        """Give the slots back whose copy in host memory is done; ``wait``: let what is written to them wait for it."""
        if self._host is None or self._released or not (wait or self._host.done):
            return
        self._host.join()
        self._released = True
        self._give_back(self.slots)
        self.slots = np.full(len(self.slots), -1, np.int64)

    def load(self) -> bool:
        """Begin the move back into the pool; returns whether the slots were given back before. From here on, the copy
        in host memory is no longer of use.

        Raises:
            CapacityError: the pool is full; the KV stays in host memory.
            torch.OutOfMemoryError: the device is full; likewise.
        """
        if self.pool is None or self._host is None:
            return False
        if self._released:
            slots, copies = self.pool.take(len(self.slots)), self.pool.copies
            try:
                with copies.inward():
                    self._host.join()
                    for block, places, index in self._blocks(self.pool.index(slots)):
                        for number, part in enumerate((self.pool.k, self.pool.v)):
                            held = to_device(self._host[2 * block + number], self.pool.device)
                            part.index_copy_(1, index, held[:, places])
            except BaseException:
                # Whoever takes the slots next writes to them after what was begun here.
                copies.arrival().join()
                self.pool.give_back(slots)
                raise
            self.slots, self._arrival = slots, copies.arrival()
        # What is written to the slots waits for their copy.
        self._host.join()
        self._free_host()
        return self._released

    def resize(self, count: int) -> None:
        """Take slots until there are ``count``, or give the newest back. All KV is in the pool then. Raises
        ``CapacityError``: the pool is full."""
        self.load()
        self._join()
        self._give_back(self.slots[count:])
        self.slots = self.slots[:count]
        self.slots = np.concatenate((self.slots, self._take(max(0, count - len(self.slots)))))

    def take_scratch(self, count: int) -> IntArray:
        """Take ``count`` scratch slots, until :meth:`release_scratch`. Raises ``CapacityError``: the pool is full."""
        self.release_scratch()
        self.scratch = self._take(count)
        return self.scratch

    def release_scratch(self) -> None:
        self._give_back(self.scratch)
        self.scratch = self.scratch[:0]

    def drop_slots(self, count: int) -> None:
        """Drop the oldest ``count`` slots. Raises ``ValueError``: there are fewer."""
        if not 0 <= count <= len(self.slots):
            raise ValueError(f"{count} slots cannot be dropped of {len(self.slots)}")
        if not self.on_host:
            self._join()
            self._give_back(self.slots[:count])
        self._dropped += count
        self.slots = self.slots[count:]
        if not len(self.slots):
            self._free_host()

    def clear(self) -> None:
        """Give all slots back."""
        self.drop_slots(len(self.slots))
        self.release_scratch()

    def stored(self, first: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor]:
        """``K, V [L, Hkv, n, d]`` of the slots ``[first, stop)``, keys as they are stored; copies."""
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

    def raw(self, positions: Tensor, first: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor]:
        """:meth:`stored` with keys before rotary; ``positions [3, n]`` at which they were rotated."""
        assert self.pool is not None
        k, v = self.stored(first, stop)
        cos, sin = self.pool.rotary(positions)
        return unrotate(k, cos, sin), v

    def _blocks(self, slots: Slots, first: int = 0) -> Iterator[tuple[int, slice, Slots]]:
        """Blocks of host memory that hold the tokens of these slots, ``first`` the first of them; their places in each,
        and their slots."""
        assert self.pool is not None
        size, at = self.pool.block_tokens, self._dropped + first
        stop = at + len(slots)
        for block in range(at // size, -(-stop // size)):
            begin, end = max(at, block * size), min(stop, (block + 1) * size)
            yield block, slice(begin - block * size, end - block * size), slots[begin - at : end - at]

    def _take(self, count: int) -> IntArray:
        return np.full(count, -1, np.int64) if self.pool is None else self.pool.take(count)

    def _join(self) -> None:
        """What is started on the device from here on waits for the last load."""
        if self._arrival is not None:
            self._arrival.join()
            self._arrival = None

    def _free_host(self) -> None:
        """Host memory is there as a whole until all of it is dropped, or back in the pool."""
        if self.pool is not None and self._host is not None:
            self.pool.host_used -= self._host.nbytes
        self._host = None

    def _give_back(self, slots: IntArray) -> None:
        if self.pool is not None and len(slots):
            self.pool.give_back(slots)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x [..., n, d]`` by ``cos, sin [n, d]``, half-split layout.

    ``x * cos + rotate_half(x) * sin`` as in transformers, in three passes over memory and without temporaries.
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

    Cosines and sines are divided by their squared length: rounded ones are not quite of length one, and some
    checkpoints scale theirs.
    """
    norm = cos.square() + sin.square()
    return rotate_wide(x, cos / norm, -sin / norm)


def gpu_pool_bytes(model: VisionLanguageModel, free: int, slot_bytes: int, pass_rows: int) -> int:
    """What a pool may fill of ``free`` bytes of a GPU: ``GPU_SHARE`` of them, less what a layer's activations take for
    ``pass_rows`` rows (the MLP's halves and their product, and eight rows of the hidden size), divided between a
    token's KV and its embedding."""
    config = model.text_config
    activations = pass_rows * (3 * config.intermediate_size + 8 * config.hidden_size) * model.dtype.itemsize
    return max(0, int((GPU_SHARE * free - activations) * slot_bytes / (slot_bytes + embedding_bytes(model))))


def embedding_bytes(model: VisionLanguageModel) -> int:
    """Of one token, with what early layers add."""
    return int((1 + model.deepstack) * model.text_config.hidden_size * model.dtype.itemsize)


def free_bytes(model: VisionLanguageModel) -> int:
    """What a model's GPU has free now; on a CPU the memory of the host."""
    return int(torch.cuda.mem_get_info(model.device)[0]) if _on_gpu(model) else host_memory_bytes()


def _on_gpu(model: VisionLanguageModel) -> bool:
    return model.device.type == "cuda" and torch.cuda.is_available()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not empty: a masked slot's score is -inf only if the score itself is finite."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros are pages that the operating system has not given yet; torch's are written.
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
