# SPDX-License-Identifier: Apache-2.0
"""The tier: where the keys and values of evicted prompts lie until they are recalled.

It is divided in blocks, as the pool is, and the scheduler knows whose each block is. A block has N
slots of every (layer, head); a slot holds the key of a token, followed by its value.
"""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import psutil
import torch
from torch import Tensor

from vllm_tgvkv.cache.pages import PagePool
from vllm_tgvkv.kernels.copy import as_integers
from vllm_tgvkv.shared.errors import UnsupportedByEvictionError

_WORKSPACE_BYTES = 16 << 20
"""Bound of what is copied at a time, or one block."""


_MOST_QUEUED = 64
"""Writes of a workspace each that may wait."""


class TierError(RuntimeError):
    """The tier does not give back what was written to it."""


class Tier(ABC):
    """Memory or a file with slots of tokens."""

    def __init__(self, pool: PagePool, num_blocks: int) -> None:
        self._shape = shape = pool.shape
        self._keys, self._values = as_integers(pool.keys), as_integers(pool.values)
        self._dtype = self._keys.dtype
        self._slots = shape.num_pairs * shape.block_size
        """Slots of a block."""
        self._width = 2 * shape.head_size
        self._slot_bytes = self._width * self._keys.element_size()
        self.num_bytes = num_blocks * self._slots * self._slot_bytes

    def slots(self, blocks: Tensor, pairs: Tensor, positions: Tensor) -> Tensor:
        """Return the slots of a prompt's tokens, int64 `[n]`.

        Args:
            blocks: the prompt's blocks of the tier, int64 `[t]`.
            pairs, positions: which (layer, head), and which token, int64 `[n]`.
        """
        size = self._shape.block_size
        return blocks[positions // size] * self._slots + pairs * size + positions % size

    def write(self, pool_blocks: Tensor, blocks: Tensor) -> None:
        """Copy blocks of the pool to blocks of the tier, both int64 `[t]`.

        The pool's blocks may be written again as soon as this returns.
        """
        size, num_pairs = self._shape.block_size, self._shape.num_pairs
        step = max(1, _WORKSPACE_BYTES // (self._slots * self._slot_bytes))
        pairs = torch.arange(num_pairs, device=pool_blocks.device)
        for first in range(0, len(blocks), step):
            part = slice(first, first + step)
            pages = (pool_blocks[part, None] * num_pairs + pairs).flatten()
            tokens = self._keys.new_empty(len(pages), size, self._width)
            tokens[..., : self._width // 2] = self._keys[pages]
            tokens[..., self._width // 2 :] = self._values[pages]
            self._store(tokens.view(-1, self._slots, self._width), blocks[part])

    def put(self, tokens: Tensor, slots: Tensor) -> None:
        """Write tokens `[n, 2 * D]` to slots of the pool, page * N + slot, int64 `[n]`."""
        size, width = self._shape.block_size, self._width // 2
        pages, slots = slots // size, slots % size
        self._keys[pages, slots] = tokens[:, :width]
        self._values[pages, slots] = tokens[:, width:]

    @abstractmethod
    def fetch(self, slots: Tensor) -> Callable[[], Tensor]:
        """Start to read slots, int64 `[n]`; return a function that waits and returns `[n, 2 * D]`.

        Raises (by that function):
            TierError: if they cannot be read.
        """

    @abstractmethod
    def _store(self, tokens: Tensor, blocks: Tensor) -> None:
        """Store the tokens of some blocks, `[t, slots, 2 * D]`."""


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
        self._memory = self._keys.new_empty(num_blocks, self._slots, self._width)

    def fetch(self, slots: Tensor) -> Callable[[], Tensor]:
        # Nothing is gained by reading early: it takes as long as another copy of the tokens.
        return lambda: self._memory.view(-1, self._width).index_select(0, slots)

    def _store(self, tokens: Tensor, blocks: Tensor) -> None:
        self._memory[blocks] = tokens


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

    def fetch(self, slots: Tensor) -> Callable[[], Tensor]:
        future = self._thread.submit(self._read, slots)

        def result() -> Tensor:
            try:
                return future.result()
            except OSError as error:
                raise TierError(f"the tier's file: {error}") from error

        return result

    def _store(self, tokens: Tensor, blocks: Tensor) -> None:
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
        found = np.empty((len(numbers), size), np.uint8)
        # Tokens that follow each other do so in the file: one read for each run of them.
        starts = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
        ends = np.append(starts[1:], len(numbers))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            wanted, place = found[start:end], int(numbers[start]) * size
            if os.preadv(self._file.fileno(), [wanted.data], place) < wanted.nbytes:
                raise OSError("it is shorter than it was")
        return torch.from_numpy(found).view(self._dtype)
