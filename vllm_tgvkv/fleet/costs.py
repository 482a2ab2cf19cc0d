# SPDX-License-Identifier: Apache-2.0
"""Seconds of one step of an engine: from a data sheet, or from a file of measured costs.

A step runs the linear layers on all its tokens, attention of prompts over their own keys, attention
of answers over cached keys, and the vision tower on new images. These follow each other, so their
times add up. Linear layers take the longer of reading the weights and computing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from vllm_tgvkv.fleet.gpus import Gpu
from vllm_tgvkv.fleet.model import Model
from vllm_tgvkv.shared.errors import EvictionConfigError, quoted


@dataclass(frozen=True)
class Step:
    """What a step computes; means need not be whole."""

    tokens: float = 0.0
    """Of prompts and answers."""
    pairs: float = 0.0
    """Pairs of a prompt's query and key in one layer, over all layers with attention."""
    read: float = 0.0
    """Cached bytes that answers read."""
    rows: float = 0.0
    """Requests in the step."""
    visual: float = 0.0
    """Visual tokens whose images the vision tower encodes."""


@dataclass(frozen=True)
class StepCosts:
    """Seconds per unit of a step, on all GPUs of a replica together."""

    host: float
    """Of any step."""
    weights: float
    """Least time of the linear layers: reading their weights once."""
    token: float
    """Linear layers, per token."""
    pair: float
    """Attention of a prompt, per query and key of one layer."""
    read: float
    """Attention of an answer, per cached byte."""
    row: float = 0.0
    """Host, per request."""
    visual: float = 0.0
    """Vision tower, per visual token."""
    source: str = "given"
    """Where the figures come from, in words."""

    def parts(self, step: Step) -> dict[str, float]:
        """Return seconds by what they are spent on."""
        linear, computing = max(self.weights, self.token * step.tokens), "prompts"
        if self.token * step.tokens <= self.weights:
            computing = "weights"
        found = dict.fromkeys(("prompts", "weights", "cache", "images", "host"), 0.0)
        found[computing] += linear
        found["prompts"] += self.pair * step.pairs
        found["cache"] += self.read * step.read
        found["images"] += self.visual * step.visual
        found["host"] += self.host + self.row * step.rows
        return found

    def seconds(self, step: Step) -> float:
        """Return the duration of a step."""
        return sum(self.parts(step).values())


def roofline(
    model: Model, gpu: Gpu, num_gpus: int, flops_share: float, read_share: float, host: float
) -> StepCosts:
    """Return costs from a data sheet.

    Args:
        num_gpus: of a replica, which divide weights and heads. What they exchange is not counted.
        flops_share: reached share of the peak of computing.
        read_share: reached share of the bandwidth.
        host: seconds of a step in which the GPU waits.
    """
    flops = gpu.teraflops * 1e12 * flops_share * num_gpus
    bandwidth = gpu.terabytes_per_second * 1e12 * read_share * num_gpus
    return StepCosts(
        host=host,
        weights=model.read_bytes / bandwidth,
        token=2 * model.active_values / flops,
        pair=4 * model.query_width / flops,
        read=1 / bandwidth,
        visual=2 * model.vision_values * model.patches_per_token / flops,
        source=(
            f"computed: {100 * flops_share:g} % of the data sheet's operations and "
            f"{100 * read_share:g} % of its bandwidth, {1000 * host:g} ms of host per step, "
            "all three assumed"
        ),
    )


def read_costs(name: str) -> StepCosts:
    """Read measured costs from a JSON file that has the fields of `StepCosts`.

    Raises:
        EvictionConfigError: if it cannot be read, or a field is missing, unknown or not a number.
    """
    known = {field.name: field.default for field in fields(StepCosts)}
    try:
        found = json.loads(Path(name).read_text(encoding="utf-8"))
        given = {key: value if key == "source" else float(value) for key, value in found.items()}
        costs = StepCosts(**{"source": f"measured: {name}", **given})
    except (OSError, TypeError, ValueError, AttributeError) as error:
        raise EvictionConfigError(
            f"--step-costs {quoted(name)} cannot be used ({error}): give a JSON file with seconds "
            f"for {', '.join(known)}, such as docs/fleet.md shows"
        ) from error
    numbers = {key: value for key, value in asdict(costs).items() if key != "source"}
    for key, value in numbers.items():
        if not 0 <= value < float("inf"):
            raise EvictionConfigError(
                f"--step-costs {name}: {key} is {value}: give seconds, 0 or more"
            )
    if not any(numbers.values()):
        raise EvictionConfigError(f"--step-costs {name}: all costs are 0: give those of a GPU")
    return costs
