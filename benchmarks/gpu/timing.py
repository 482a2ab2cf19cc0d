# SPDX-License-Identifier: Apache-2.0
"""Seconds of work on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_HEAD_START_CYCLES = 50_000_000
"""The device waits about 30 ms, so that the host launches ahead of it."""


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_per_call(
    function: Callable[[], Any], device: torch.device, calls: int = 20, rounds: int = 3
) -> float:
    """Return the seconds of one call on the device, the median of several rounds.

    Launches are queued while the device is busy, so they count only if the device waits for them.
    Inputs are cold only if they are larger than the device's cache.
    """
    for _ in range(3):
        function()
    synchronize(device)
    return statistics.median(_round(function, device, calls) for _ in range(rounds))


def _round(function: Callable[[], Any], device: torch.device, calls: int) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - begin) / calls
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_HEAD_START_CYCLES)
    first.record()
    for _ in range(calls):
        function()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / calls


def launches(call: Callable[[], Any], device: torch.device) -> int:
    """Return how many kernels and copies of the device a call starts; on a CPU, operators."""
    on_cuda = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU
    kind = DeviceType.CUDA if on_cuda else DeviceType.CPU
    with profile(activities=[activity]) as found:
        call()
        synchronize(device)
    return sum(event.device_type == kind for event in found.events() or ())


class DeviceStopwatch:
    """Device time of wrapped functions, including waits for launches."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spans: list[tuple[Any, Any]] = []

    def wrap(self, owner: Any, name: str) -> None:
        """Replace the function `owner.name` by a timed version."""
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self._now()
            try:
                return function(*args, **kwargs)
            finally:
                self._spans.append((begin, self._now()))

        setattr(owner, name, timed)

    def take(self) -> float:
        """Wait for the device, and return the seconds since the last call."""
        synchronize(self.device)
        spans, self._spans = self._spans, []
        if self.device.type != "cuda":
            return sum(end - begin for begin, end in spans)
        return sum(begin.elapsed_time(end) for begin, end in spans) / 1e3

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
