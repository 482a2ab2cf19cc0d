# SPDX-License-Identifier: Apache-2.0
"""What eviction exports to Prometheus, and how it travels there.

The scheduler counts in the engine's process, vLLM's Prometheus logger lives in the API server's,
and vLLM's statistics have no field of ours. What happened since the last step is written as numbers
by name into a field that takes any names, `SchedulerStats.waiting_lora_adapters`, and taken out
again before anything else looks at it (`patches.py` says where). A process that knows nothing of
this package ignores it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Literal

_PREFIX = "kv_eviction"
_SEPARATOR = "\x1f"
"""Between the parts of a name; no name of a method or a reason has it."""


@dataclass(frozen=True)
class Metric:
    """One metric; `vllm:kv_eviction_` comes before its name."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    documentation: str
    labels: tuple[str, ...] = ()
    """Beside `model_name` and `engine`, which all of vLLM's have."""
    buckets: tuple[float, ...] = ()
    unit: float = 1.0
    """What one of the whole numbers that travel stands for."""


METRICS = {
    metric.name: metric
    for metric in (
        Metric("requests", "counter", "Requests whose prompt was evicted.", ("policy",)),
        Metric(
            "skipped_requests",
            "counter",
            "Requests that were not evicted, by reason.",
            ("policy", "reason"),
        ),
        Metric(
            "prompt_tokens",
            "counter",
            "Prompt tokens of evicted requests, by modality.",
            ("policy", "modality"),
        ),
        Metric(
            "kept_tokens",
            "counter",
            "Prompt tokens kept, mean over layers and KV heads, by modality.",
            ("policy", "modality"),
        ),
        Metric(
            "blocks_given_back",
            "counter",
            "KV blocks that evictions gave back to the pool, what they retained deducted.",
            ("policy",),
        ),
        Metric(
            "deferred_requests",
            "counter",
            "Requests whose eviction had to wait because blocks to copy into were not free.",
            ("policy",),
        ),
        Metric("compressed_requests", "gauge", "Running requests that are compressed."),
        Metric("blocks_held", "gauge", "KV blocks held by compressed requests."),
        Metric(
            "kept_fraction",
            "histogram",
            "Part of a prompt's cache that was kept.",
            ("policy",),
            buckets=(0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0),
            unit=1e-4,
        ),
        Metric(
            "seconds",
            "histogram",
            "Time on the device of an eviction, by part: statistics, selection, copy.",
            ("policy", "part"),
            buckets=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0),
            unit=1e-6,
        ),
    )
}


class Observations:
    """What happened since the statistics were last made."""

    def __init__(self) -> None:
        self._numbers: Counter[str] = Counter()
        self._gauges: dict[str, int] = {}

    def count(self, name: str, *labels: str, by: int = 1) -> None:
        """Add to a counter."""
        self._numbers[_SEPARATOR.join((_PREFIX, name, *labels))] += by

    def set(self, name: str, value: int) -> None:
        """Set a gauge. What travels is by how much it changed.

        With several API servers an engine's statistics reach one now and another one later, and
        which of them is late nobody knows: changes add up to the same in any order.
        """
        change = value - self._gauges.get(name, 0)
        self._gauges[name] = value
        if change:
            self.count(name, by=change)

    def observe(self, name: str, *labels: str, value: float) -> None:
        """Add one value to a histogram."""
        units = round(value / METRICS[name].unit)
        self.count(name, *labels, str(units))

    def move_to(self, field: MutableMapping[str, int]) -> None:
        """Write everything into a field of the statistics that travel, and begin anew."""
        field.update(self._numbers)
        self._numbers.clear()


def take_observations(
    field: MutableMapping[str, int],
) -> Iterator[tuple[Metric, tuple[str, ...], int]]:
    """Take out of a field what `Observations.move_to` wrote into it.

    Yields:
        Metric, labels and number. The last label of a histogram is the value in its unit; the
        number of a gauge is by how much it changed.
    """
    for key in [key for key in field if key.startswith(_PREFIX + _SEPARATOR)]:
        _, name, *labels = key.split(_SEPARATOR)
        yield METRICS[name], tuple(labels), field.pop(key)
