# SPDX-License-Identifier: Apache-2.0
"""Seconds of one step of an engine: from a data sheet, or from a file of measured costs.

A step runs the linear layers on all its tokens, attention of prompts over their own keys, attention
of answers over cached keys, and the vision tower on new images. These follow each other, so their
times add up. Linear layers take the longer of reading the weights and computing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from vllm_tgvkv.fleet.gpus import Gpu
from vllm_tgvkv.fleet.model import Model
from vllm_tgvkv.shared.errors import EvictionConfigError, quoted


@dataclass(frozen=True)
class Step:
    """The work of a step; means need not be whole."""

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
        computed = self.token * step.tokens
        is_reading = computed <= self.weights
        return {
            "prompts": (0 if is_reading else computed) + self.pair * step.pairs,
            "weights": self.weights if is_reading else 0.0,
            "cache": self.read * step.read,
            "images": self.visual * step.visual,
            "host": self.host + self.row * step.rows,
        }

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
    known = ", ".join(field.name for field in fields(StepCosts))
    try:
        found = json.loads(Path(name).read_text(encoding="utf-8"))
        costs = StepCosts(**{"source": f"measured, {name}", **found})
        seconds = [value for key, value in vars(costs).items() if key != "source"]
        if not all(0 <= value < float("inf") for value in seconds) or not any(seconds):
            raise ValueError("seconds have to be 0 or more, and not all 0")
    except (OSError, TypeError, ValueError) as error:
        raise EvictionConfigError(
            f"--step-costs is {quoted(name)}, which cannot be used ({error}): give a JSON file "
            f"with {known}, as python -m benchmarks.step_costs writes it"
        ) from error
    return costs
