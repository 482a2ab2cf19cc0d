# SPDX-License-Identifier: Apache-2.0
"""Scores, layer budgets and sketches of no method's, to compare the methods' own parts with.

Importing this module registers scores and budgets, for engines of this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from vllm_tgvkv.kernels.statistics import Scratch
from vllm_tgvkv.policies.aircache import EliteScore
from vllm_tgvkv.policies.base import Allocation, LayerView, Score
from vllm_tgvkv.policies.pooling import Pooling
from vllm_tgvkv.policies.registry import ALLOCATIONS, POOLINGS, SCORES
from vllm_tgvkv.policies.tgv import mass
from vllm_tgvkv.policies.trimkv import RetentionScore


@SCORES.register("vv_tt")
class OwnModalityScore(Score):
    """Column sums over the rows of a token's own modality: vision over vision, text over text."""

    rows = "all"
    other_rows = ()
    statistics = frozenset({"modality_sums"})
    cuts_again = False

    def __call__(self, view: LayerView) -> Tensor:
        attention = view.attention
        return torch.where(
            view.prompt.is_vision, attention.vision_column_sums, attention.text_column_sums
        )


@SCORES.register("window_16")
class ShortWindowScore(Score):
    """Column sums over the last 16 rows."""

    rows = "window"
    cuts_again = False

    def __call__(self, view: LayerView) -> Tensor:
        rows = view.attention.row_positions
        weights = (rows >= view.prompt.num_tokens - 16).float()
        everything = torch.ones_like(view.prompt.is_vision)
        return view.attention.renormalised_column_sums(everything[None], weights[None])


for _percent in (60, 80, 99):
    # AirCache's score with another elite.
    _threshold = {"threshold": _percent / 100}
    SCORES.register(f"elite_{_percent}")(type("ThresholdScore", (EliteScore,), _threshold))


@SCORES.register("trimkv_five")
class LongRetentionScore(RetentionScore):
    """The score `trimkv` with n = 5."""

    lookahead = 5


@ALLOCATIONS.register("vv")
class VisionVisionAllocation(Allocation):
    """Share: sum of A over vision rows and vision columns."""

    rows = "all"
    statistics = frozenset({"modality_sums"})
    needs_vision = True
    cuts_again = False

    def strength(self, view: LayerView, scores: Tensor) -> Tensor:
        return mass(view.attention.vision_column_sums, view.prompt.is_vision)


@ALLOCATIONS.register("tt")
class TextTextAllocation(Allocation):
    """Share: sum of A over the observation rows and text columns."""

    rows = "text"

    def strength(self, view: LayerView, scores: Tensor) -> Tensor:
        return mass(view.attention.column_sums, ~view.prompt.is_vision)


@ALLOCATIONS.register("entropy")
class EntropyAllocation(Allocation):
    """Share: exp of the observation rows' mean entropy, their effective number of keys."""

    rows = "text"
    statistics = frozenset({"row_entropies"})

    def strength(self, view: LayerView, scores: Tensor) -> Tensor:
        return view.attention.row_entropies.mean(dim=-1, keepdim=True).exp()


for _forward in (16, 40):
    POOLINGS.add(f"sequence_forward{_forward}", Pooling("sequence", forward=_forward, back=1))
    POOLINGS.add(f"grid_forward{_forward}", Pooling("grid", forward=_forward, back=1))


# -- sketches -------------------------------------------------------------------------------

BOUNDS = "bounds"
"""Quest's bounds in place of a sketch of 2 bits, in the room of its codes."""
_PAGE = 16


@contextmanager
def page_bounds() -> Iterator[None]:
    """Give engines of this process Quest's bounds while the context lasts.

    Of every 16 tokens they have the least and the largest number of each channel, as float16. The
    logit of all 16 is the largest product that a key between them could have with a query (Tang et
    al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", 2024).
    """
    pages = "vllm_tgvkv.recall.sketches"
    with (
        patch(f"{pages}.sketch_keys", _bounds_of),
        patch(f"{pages}.sketch_logits", _largest_logits),
    ):
        yield


def _bounds_of(keys: Tensor, bits: int) -> Tensor:
    """Return the bounds of keys `[M, C, D]`, uint8 `[M, C * D / 4]`."""
    pages = keys.unflatten(1, (-1, _PAGE))
    bounds = torch.stack((pages.amin(dim=2), pages.amax(dim=2)), dim=1)
    return bounds.half().flatten(1).view(torch.uint8)


def _largest_logits(
    bounds: Tensor, bits: int, queries: Tensor, num_tokens: int, out: Tensor, scratch: Scratch
) -> None:
    """Take the place of `kernels.sketch.sketch_logits`."""
    head_size = queries.shape[2]
    numbers = bounds[:, : num_tokens * head_size // 4].contiguous().view(torch.float16).float()
    least, largest = numbers.view(len(bounds), 2, -1, head_size).transpose(2, 3).unbind(1)
    logits = queries.clamp(min=0) @ largest + queries.clamp(max=0) @ least
    out[..., :num_tokens] = logits.repeat_interleave(_PAGE, dim=2)
