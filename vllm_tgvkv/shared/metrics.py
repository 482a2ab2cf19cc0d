# SPDX-License-Identifier: Apache-2.0
"""Metrics for Prometheus, and their way from the engine's process to the API server's.

The scheduler counts in the engine's process; vLLM's Prometheus logger runs in the API server's, and
vLLM's statistics have no field for our metrics. So changes since the last step are written as
numbers by name into a field that accepts any name, `SchedulerStats.waiting_lora_adapters`, and
removed again before anything else reads it (see `patches.py`). A process without this package
ignores them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Literal

_PREFIX = "kv_eviction"
LAYERS = ("evicted", "window", "state", "draft")
"""Values of the label `layers`: eviction reaches the first only."""

TIER_FAULTS = ("full", "failed")
"""Values of the label `fault`: why what a request lacks does not come back any more."""

STATES = ("whole", "shrunk", "restored")
"""Values of the label `state`."""

HANDOVERS = ("sent", "received", "answered", "refused", "failed")
"""Values of the label `outcome` of a prompt that goes to another server, or comes from one: its
blocks wait to be read; they were read; its answer was complete; the message does not fit; the
blocks were not read or are not those that were sent. The last two are computed again."""

_SEPARATOR = "\x1f"
"""Separates the parts of a name; occurs in no method or skip reason."""


@dataclass(frozen=True)
class Metric:
    """A metric; Prometheus sees its name with the prefix `vllm:kv_eviction_`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    documentation: str
    labels: tuple[str, ...] = ()
    """In addition to `model_name` and `engine`, which all metrics of vLLM have."""
    buckets: tuple[float, ...] = ()
    unit: float = 1.0
    """Value of one unit of the whole numbers that are sent."""


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
            "cuts",
            "counter",
            "Evictions by cause: first, later, pressure. A request may have several.",
            ("policy", "cause"),
        ),
        Metric(
            "restored_requests",
            "counter",
            "Times that a request got its whole prompt back, because there was room again.",
            ("policy",),
        ),
        Metric(
            "whole_requests",
            "counter",
            "Requests that ended with their whole cache, because memory was never short.",
            ("policy",),
        ),
        Metric(
            "blocks_given_back",
            "counter",
            "KV blocks that evictions gave back to the pool, what they retained deducted.",
            ("policy",),
        ),
        Metric(
            "choices",
            "counter",
            "Times that the tokens of a request were chosen again out of its whole prompt.",
            ("policy",),
        ),
        Metric(
            "recalled_tokens",
            "histogram",
            "Evicted tokens that a choice brought back, mean over layers and heads.",
            ("policy",),
            buckets=(0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0),
            unit=1e-2,
        ),
        Metric(
            "recalls_lost",
            "counter",
            "Requests whose evicted tokens can not come back any more: the tier was full or "
            "failed.",
            ("policy", "fault"),
        ),
        Metric(
            "tier_blocks_held",
            "gauge",
            "Blocks of the tier that hold evicted prompts.",
        ),
        Metric(
            "handovers",
            "counter",
            "Prompts that go to another server or come from one, by outcome: sent, received, "
            "answered; refused or failed, which are computed again.",
            ("policy", "outcome"),
        ),
        Metric(
            "handover_bytes",
            "counter",
            "Bytes of prompts that go to another server, as they are sent and as whole prompts.",
            ("policy", "cache"),
        ),
        Metric(
            "running_blocks",
            "gauge",
            "KV blocks that running requests hold.",
        ),
        Metric(
            "running_tokens",
            "gauge",
            "Tokens of running requests whose keys were computed, evicted ones included.",
        ),
        Metric(
            "deferred_requests",
            "counter",
            "Requests whose eviction had to wait because blocks to copy into were not free.",
            ("policy",),
        ),
        Metric(
            "requests_by_state",
            "gauge",
            "Unfinished requests that are or may be evicted, by their cache: whole, shrunk, or "
            "restored, which is whole after it was shrunk.",
            ("state",),
        ),
        Metric(
            "blocks_held",
            "gauge",
            "KV blocks held by shrunk requests, by layers: those that are evicted, and those "
            "with a window or a state or of a draft model, which eviction does not reach.",
            ("layers",),
        ),
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


class MetricsBuffer:
    """Changes of the metrics since vLLM last made its statistics."""

    def __init__(self) -> None:
        self._numbers: Counter[str] = Counter()
        self._gauges: dict[tuple[str, ...], int] = {}

    def count(self, name: str, *labels: str, by: int = 1) -> None:
        """Add to a counter."""
        self._numbers[_SEPARATOR.join((_PREFIX, name, *labels))] += by

    def set(self, name: str, value: int, *labels: str) -> None:
        """Set a gauge; only the change is sent.

        With several API servers, any of them may receive an engine's statistics, in any order.
        Changes add up to the same value in every order.
        """
        change = value - self._gauges.get((name, *labels), 0)
        self._gauges[name, *labels] = value
        if change:
            self.count(name, *labels, by=change)

    def observe(self, name: str, *labels: str, value: float) -> None:
        """Add one value to a histogram."""
        units = round(value / METRICS[name].unit)
        self.count(name, *labels, str(units))

    def move_to(self, field: MutableMapping[str, int]) -> None:
        """Move all changes into a field of vLLM's statistics."""
        field.update(self._numbers)
        self._numbers.clear()


def take_metrics(field: MutableMapping[str, int]) -> Iterator[tuple[Metric, tuple[str, ...], int]]:
    """Remove from a field what `MetricsBuffer.move_to` wrote into it.

    Yields:
        Metric, labels and number. The last label of a histogram is the value in its unit; the
        number of a gauge is its change.
    """
    for key in [key for key in field if key.startswith(_PREFIX + _SEPARATOR)]:
        _, name, *labels = key.split(_SEPARATOR)
        yield METRICS[name], tuple(labels), field.pop(key)
