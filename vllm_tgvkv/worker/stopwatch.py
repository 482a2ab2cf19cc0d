# SPDX-License-Identifier: Apache-2.0
"""Time that the parts of an eviction take on the device, measured without waiting for it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PARTS = ("statistics", "selection", "copy")


class Stopwatch:
    """Adds up the time of every part over all its stretches."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._stretches: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]]
        self._stretches = defaultdict(list)
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Time the work that the block submits to the device."""
        if self._on_cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._stretches[part].append((begin, end))
        else:
            start = time.perf_counter()
            yield
            self._seconds[part] += time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        """Return seconds by part. Call it once the device is done."""
        for part, stretches in self._stretches.items():
            self._seconds[part] = sum(begin.elapsed_time(end) for begin, end in stretches) / 1e3
        return dict(self._seconds)
