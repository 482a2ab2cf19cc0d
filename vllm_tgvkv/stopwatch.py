# SPDX-License-Identifier: Apache-2.0
"""Time that the parts of an eviction take on the device, without waiting for it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PARTS = ("statistics", "selection", "copy")


class Stopwatch:
    """Adds up, for each part, the time of all stretches of it."""

    def __init__(self, device: torch.device, enabled: bool = True) -> None:
        self._enabled = enabled
        self._on_cuda = device.type == "cuda"
        self._stretches: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]]
        self._stretches = defaultdict(list)
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Time what the device does with the work that is submitted inside."""
        if not self._enabled:
            yield
        elif self._on_cuda:
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
        """Seconds by part; to be asked for when the device is known to be done."""
        for part, stretches in self._stretches.items():
            self._seconds[part] = sum(begin.elapsed_time(end) for begin, end in stretches) / 1e3
        return dict(self._seconds)
