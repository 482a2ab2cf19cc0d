# SPDX-License-Identifier: Apache-2.0
"""The tier: where the keys and values of evicted prompts lie until they are recalled.

It is divided in blocks, as the pool is, and the scheduler knows whose each block is. A block has N
slots of every (layer, head); a slot holds the key of a token, followed by its value.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import cycle, pairwise

import numpy as np
import psutil
import torch
from torch import Tensor
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

from vllm_tgvkv.cache.pages import PagePool
from vllm_tgvkv.kernels.copy import as_integers
from vllm_tgvkv.kernels.exchange import Exchange, fetch_tokens, put_tokens
from vllm_tgvkv.shared.errors import UnsupportedByEvictionError

_WORKSPACE_BYTES = 16 << 20
"""Bound of what is copied at a time, or one block."""

_STAGES = 4
"""Buffers of a workspace on a GPU, whose contents are on their way to the tier."""

_MOST_QUEUED = 64
"""Writes of a workspace each that may wait."""


class TierError(RuntimeError):
    """The tier does not give back what was written to it."""


class Tier(ABC):
    """Memory or a file with slots of tokens."""

    def __init__(self, pool: PagePool, num_blocks: int) -> None:
        self._shape = shape = pool.shape
        self._keys, self._values = as_integers(pool.keys), as_integers(pool.values)
        self._slots = shape.num_pairs * shape.block_size
        """Slots of a block."""
        self._width = 2 * shape.head_size
        self._slot_bytes = self._width * self._keys.element_size()
        self.num_blocks = num_blocks
        self.num_bytes = num_blocks * self._slots * self._slot_bytes

    def write(self, pool_blocks: Tensor, blocks: np.ndarray) -> None:
        """Copy blocks of the pool, int64 `[t]`, to blocks of the tier, integers `[t]` on the host.

        The pool's blocks may be written again by what follows on the device.
        """
        step = blocks_at_once(self._slots * self._slot_bytes)
        for first in range(0, len(blocks), step):
            part = slice(first, first + step)
            self._store(pool_blocks[part], blocks[part])

    def _gather(self, pool_blocks: Tensor, out: Tensor) -> None:
        """Write the tokens of blocks of the pool to `out`, `[t, slots, 2 * D]`."""
        num_pairs, half = self._shape.num_pairs, self._width // 2
        pairs = torch.arange(num_pairs, device=pool_blocks.device)
        pages = (pool_blocks[:, None] * num_pairs + pairs).flatten()
        tokens = out.view(len(pages), self._shape.block_size, self._width)
        tokens[..., :half] = self._keys[pages]
        tokens[..., half:] = self._values[pages]

    @abstractmethod
    def exchange(self, exchange: Exchange, stored: Tensor) -> Callable[[], None]:
        """Start an exchange; return a function that waits for it and ends it.

        Args:
            stored: see `kernels.exchange.fetch_tokens`.

        Raises (by that function):
            TierError: if the tokens cannot be read; then none comes.
        """

    @abstractmethod
    def _store(self, pool_blocks: Tensor, blocks: np.ndarray) -> None:
        """Copy some blocks, see `write`."""


def blocks_at_once(block_bytes: int) -> int:
    """Return how many blocks are copied to the tier at a time."""
    return max(1, _WORKSPACE_BYTES // block_bytes)


def staging_bytes(block_bytes: int) -> int:
    """Return what the tier takes on a GPU: its buffers, and the keys or values of one of them."""
    return (2 * _STAGES + 1) * blocks_at_once(block_bytes) * block_bytes // 2


class MemoryTier(Tier):
    """The tier in the host's memory."""

    def __init__(self, pool: PagePool, num_blocks: int) -> None:
        """Allocate it.

        Raises:
            UnsupportedByEvictionError: if there is less memory.
        """
        super().__init__(pool, num_blocks)
        available = psutil.virtual_memory().available
        if self.num_bytes > available:
            raise UnsupportedByEvictionError(
                f"recall.gib asks for {self.num_bytes / 2**30:.1f} GiB for this worker's part of "
                f"the tier, and {available / 2**30:.1f} GiB of memory are free: give less, or "
                "recall.tier: file"
            )
        size = num_blocks, self._slots, self._width
        self._memory = torch.empty(size, dtype=self._keys.dtype)

    def exchange(self, exchange: Exchange, stored: Tensor) -> Callable[[], None]:
        # Nothing is gained by reading early: it takes as long as another copy of the tokens.
        return partial(fetch_tokens, self._memory, self._keys, self._values, stored, exchange)

    def _store(self, pool_blocks: Tensor, blocks: np.ndarray) -> None:
        tokens = self._memory.new_empty(len(blocks), *self._memory.shape[1:])
        self._gather(pool_blocks, tokens)
        self._memory[torch.from_numpy(blocks).long()] = tokens


class PinnedTier(MemoryTier):
    """The tier of a GPU in the host's memory, which the GPU reads itself.

    Nothing here makes the host wait. A part of a prompt is gathered into one of a few buffers on
    the device, which a stream of its own copies to the host's memory. Where all buffers are on
    their way, or tokens come back, the device waits for the copies.
    """

    def __init__(self, pool: PagePool, num_blocks: int) -> None:
        """Allocate and pin it.

        Raises:
            UnsupportedByEvictionError: if there is less memory, or it cannot be pinned.
        """
        super().__init__(pool, max(num_blocks, 1))  # no memory cannot be pinned
        self._pin()
        self._on_device = get_accelerator_view_from_cpu_tensor(self._memory)
        size = blocks_at_once(self._slots * self._slot_bytes), *self._memory.shape[1:]
        self._ring = cycle(
            [(self._keys.new_empty(size), torch.cuda.Event()) for _ in range(_STAGES)]
        )
        self._written = torch.cuda.Event()
        """The end of the last write."""
        self._stream = torch.cuda.Stream(self._keys.device)

    def _pin(self) -> None:
        # PyTorch's own pinned memory has sizes that are powers of two.
        address = self._memory.data_ptr()
        result = torch.cuda.cudart().cudaHostRegister(address, self.num_bytes, 0)
        if result.value or not self._memory.is_pinned():
            raise UnsupportedByEvictionError(
                f"recall.gib asks for {self.num_bytes / 2**30:.1f} GiB of pinned memory for this "
                f"worker's part of the tier, which the driver refuses ({result}): give less, raise "
                "the limit of locked memory (ulimit -l), or leave out recall"
            )
        free = torch.cuda.cudart().cudaHostUnregister
        weakref.finalize(self, free, address).atexit = False

    def exchange(self, exchange: Exchange, stored: Tensor) -> Callable[[], None]:
        torch.cuda.current_stream().wait_event(self._written)
        fetch_tokens(self._on_device, self._keys, self._values, stored, exchange)
        # What follows on the device finds the tokens in their slots.
        return lambda: None

    def _store(self, pool_blocks: Tensor, blocks: np.ndarray) -> None:
        staged, copied = next(self._ring)
        main = torch.cuda.current_stream()
        main.wait_event(copied)
        self._gather(pool_blocks, staged[: len(blocks)])
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            for first, end in _runs(blocks):
                start = int(blocks[first])
                part = self._memory[start : start + end - first]
                part.copy_(staged[first:end], non_blocking=True)
            copied.record()
            self._written.record()


class FileTier(Tier):
    """The tier in a file without a name, which a thread reads and writes in order."""

    def __init__(self, pool: PagePool, num_blocks: int, folder: str) -> None:
        """Make the file, with all of its room.

        Raises:
            UnsupportedByEvictionError: if the folder cannot be written, or lacks room.
        """
        super().__init__(pool, num_blocks)
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # as long as the tier
            os.posix_fallocate(self._file.fileno(), 0, max(self.num_bytes, 1))
        except OSError as error:
            raise UnsupportedByEvictionError(
                f"recall.folder {folder}: a file of {self.num_bytes / 2**30:.1f} GiB for this "
                f"worker's part of the tier cannot be made ({error}): give another folder, less "
                "recall.gib, or recall.tier: memory"
            ) from error
        self._thread = ThreadPoolExecutor(1, "kv-eviction-tier")
        self._failed: OSError | None = None
        self._queue: deque[Future[None]] = deque()
        """Writes that have not ended, apart from some that have."""

    def exchange(self, exchange: Exchange, stored: Tensor) -> Callable[[], None]:
        moves = exchange.moves()
        future = self._thread.submit(self._read, moves.sources)

        def end() -> None:
            try:
                tokens = future.result()
            except OSError as error:
                raise TierError(f"the tier's file: {error}") from error
            put_tokens(tokens, self._keys, self._values, stored, moves)

        return end

    def _store(self, pool_blocks: Tensor, blocks: np.ndarray) -> None:
        tokens = self._keys.new_empty(len(blocks), self._slots, self._width)
        self._gather(pool_blocks, tokens)
        self._queue.append(self._thread.submit(self._write, tokens, blocks.tolist()))
        # Copies that wait for a slow disk take memory: then the step waits, too.
        while len(self._queue) > _MOST_QUEUED:
            self._queue.popleft().result()

    def _write(self, tokens: Tensor, blocks: list[int]) -> None:
        """Write blocks, in the thread. After an error nothing is read any more."""
        data = tokens.view(torch.uint8).numpy()
        try:
            for block, part in zip(blocks, data, strict=True):
                view = memoryview(part.reshape(-1))
                start = block * len(view)
                while len(view):
                    written = os.pwrite(self._file.fileno(), view, start)
                    view, start = view[written:], start + written
        except OSError as error:
            self._failed = error

    def _read(self, slots: Tensor) -> Tensor:
        """Read slots, in the thread."""
        if self._failed is not None:
            raise self._failed
        size, numbers = self._slot_bytes, slots.numpy()
        tokens = torch.empty(len(numbers), self._width, dtype=self._keys.dtype)
        found = tokens.view(torch.uint8).numpy()
        # Tokens that follow each other do so in the file: one read for each run of them.
        for start, end in _runs(numbers):
            wanted, place = found[start:end], int(numbers[start]) * size
            if os.preadv(self._file.fileno(), [wanted.data], place) < wanted.nbytes:
                raise OSError("it is shorter than it was")
        return tokens


def _runs(numbers: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield `(start, end)` of each run of numbers that follow each other."""
    starts = np.flatnonzero(np.diff(numbers) != 1) + 1
    return pairwise(np.unique([0, *starts, len(numbers)]).tolist())
