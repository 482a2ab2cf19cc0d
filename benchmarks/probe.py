# SPDX-License-Identifier: Apache-2.0
"""Looking into a running engine from outside: timed functions and memory of a call."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.profiler import ProfilerActivity, profile


class Stopwatches:
    """Wall-clock seconds and calls of functions, by name, nested calls counted in both."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    def watch(self, owner: Any, attribute: str, name: str | None = None) -> None:
        """Replace `owner.attribute` by a timed version of itself."""
        function = getattr(owner, attribute)
        name = name or attribute

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start
                self.calls[name] += 1

        setattr(owner, attribute, timed)

    def reset(self) -> None:
        self.seconds.clear()
        self.calls.clear()


class CallMemory:
    """Bytes of tensors that a function allocates, as torch's allocator sees them.

    `peak` is the most it held at once in any call, with what earlier calls left behind.
    """

    def __init__(self) -> None:
        self.held = 0
        self.peak = 0

    @contextmanager
    def watching(self, owner: Any, attribute: str) -> Iterator[None]:
        """Measure every call of `owner.attribute` within the block."""
        function: Callable[..., Any] = getattr(owner, attribute)

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                result = function(*args, **kwargs)
            self._add(profiler)
            return result

        setattr(owner, attribute, measured)
        try:
            yield
        finally:
            setattr(owner, attribute, function)

    def _add(self, profiler: profile) -> None:
        # `profile.events()` books most allocations to operators; the raw records keep them apart.
        recorded: Any = profiler.profiler
        events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
        for event in sorted(events, key=lambda event: event.start_ns()):
            self.held += event.nbytes()
            self.peak = max(self.peak, self.held)
