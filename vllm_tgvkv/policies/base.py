# SPDX-License-Identifier: Apache-2.0
"""The parts of a policy - score, allocation, retention - and their inputs.

A fourth one, what becomes of evicted tokens, is in `summaries.py`.

The parts take tensors and return tensors. They know nothing about pages, and the cache knows
nothing about methods. L is the number of layers, H of KV heads, P of prompt tokens; S is the number
of token sets in a layer: H at granularity `head`, 1 at granularity `layer`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vllm_tgvkv.gates.folder import GateKind, Gates
from vllm_tgvkv.kernels.statistics import Attention, Statistic
from vllm_tgvkv.policies.head_scores import HeadScores
from vllm_tgvkv.policies.pooling import Pooler, Pooling
from vllm_tgvkv.shared.prompt import RowSet, VisionSpan
from vllm_tgvkv.summaries.options import Summaries

Granularity = Literal["layer", "head"]

Reduction = Literal["mean", "max"]
"""How a score turns the rows' attention to a token into one number; `mean` ranks as the sum."""

FEW_ROWS: tuple[RowSet, ...] = (
    "text",
    "all_text",
    "after_vision",
    "window",
    "answer",
    "latest",
)
"""Row sets whose attention is recomputed row by row."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as the parts of a policy see it. Tensors are on the attention's device."""

    num_tokens: int
    """P."""
    num_candidates: int
    """C, the tokens in full blocks. The tokens after them, the tail, are never evicted."""
    is_vision: Tensor
    """bool `[P]`, true for image and video embeddings; all other positions are text."""
    sinks: int
    """Number of first tokens that are kept before all others."""
    images: tuple[VisionSpan, ...] = ()
    """Contiguous runs of vision positions, in order."""
    was_cut: bool = False
    """Whether an earlier cut evicted some of these tokens."""
    _poolers: dict[Pooling, Pooler] = field(default_factory=dict, init=False, compare=False)

    def pooler(self, pooling: Pooling) -> Pooler:
        """Return the pooling of this prompt's scores; all layers share one.

        Raises:
            ValueError: if pooling over the patch grid meets an image whose grid is unknown.
        """
        if pooling not in self._poolers:
            device = self.is_vision.device
            self._poolers[pooling] = Pooler(
                pooling, self.num_tokens, self.images, device, self.sinks
            )
        return self._poolers[pooling]


class _NoAttention(Attention):
    """No statistics; all of them raise."""


NO_ATTENTION: Attention = _NoAttention()
"""Attention of the row set `none`."""


@dataclass(frozen=True)
class LayerView:
    """One layer of a prompt, as a score or allocation sees it."""

    layer: int
    """Index among the model's layers."""
    num_sets: int
    """S."""
    prompt: Prompt
    attention: Attention
    """Attention of the row set that the score or allocation names."""
    first_set: int = 0
    """Index of the first token set among the model's; not 0 where other ranks hold earlier sets."""
    reduction: Reduction = "mean"
    """The policy's, in the view of a score."""
    gate_outputs: Tensor | None = None
    """The gate's output for each token, float32 `[S, P]`; for scores that name a kind of
    gates."""
    carried: Tensor | None = None
    """The scores of the cut before, float32 `[S, P]`, 0 for tokens that came after it; None at the
    first cut. For scores that accumulate."""

    @property
    def gates(self) -> Tensor:
        """float32 `[S, P]`, the outputs of the gates; 0 for tokens that are evicted."""
        assert self.gate_outputs is not None, "the score names no kind of gates"
        return self.gate_outputs

    @property
    def votes(self) -> Tensor:
        """float32 `[S, P]`, the sum of A over the rows, or with `max` the maximum over them."""
        if self.reduction == "max":
            return self.attention.column_maxima
        return self.attention.column_sums


@dataclass(frozen=True)
class Depth:
    """Position in the model of the layers that share their pages; by default, all layers."""

    first_layer: int = 0
    num_layers: int | None = None
    """Number of layers in the model."""


@dataclass(frozen=True)
class AllLayers:
    """Inputs of an allocation from all layers, or from the layers of this pipeline stage."""

    prompt: Prompt
    scores: Tensor
    """float32 `[L, S, C]`, pooled."""
    strengths: Tensor
    """float `[L, S, F]`, the results of `Allocation.strength`."""
    tiers: Tensor
    """int32 `[C]`, from the retention, for equal shares."""
    num_kept: Tensor
    """int64 scalar, b: candidates that a head keeps on average."""
    depth: Depth = Depth()
    first_head: int = 0
    """Index among the model's heads of the first one with a token set here."""


class Score(ABC):
    """Value of each token to a layer or head."""

    rows: RowSet = "text"
    """Row set whose attention the score reads; a mix may replace it."""
    other_rows: ClassVar[tuple[RowSet, ...]] = FEW_ROWS
    """Row sets that may replace it."""
    reductions: ClassVar[tuple[Reduction, ...]] = ("mean",)
    """Reductions with which the score is defined; with `max` it reads `LayerView.votes`."""
    statistics: ClassVar[frozenset[Statistic]] = frozenset()
    """Statistics the score reads in addition to column sums."""
    granularities: ClassVar[tuple[Granularity, ...]] = ("layer", "head")
    """Granularities at which the score is defined."""
    is_signed: ClassVar[bool] = False
    """Whether scores may be negative, so that their sums mean nothing."""
    cuts_again: ClassVar[bool] = True
    """Whether it is defined on what an earlier eviction left, with rows of the answer only."""
    cuts_by_place: ClassVar[bool] = False
    """Whether later cuts go by the places of tokens alone, and merge nothing."""
    accumulates: ClassVar[bool] = False
    """Whether a later cut adds to the scores of the cut before, `LayerView.carried`; at
    granularity `head` only."""
    by_query_head: ClassVar[bool] = False
    """Whether it looks at query heads one by one, which takes memory for each."""
    gates: ClassVar[GateKind | None] = None
    """Kind of gates whose outputs the score reads as `LayerView.gates`; None for no gates."""

    def __init__(self, rows: RowSet | None = None, gates_in_use: Gates | None = None) -> None:
        """Take the rows of a mix, and the served model's gates if the score names a kind."""
        self.rows = rows or self.rows
        self.gates_in_use = gates_in_use

    @abstractmethod
    def __call__(self, view: LayerView) -> Tensor:
        """Return the scores, float32 `[S, P]`; higher is better."""


class VoteScore(Score):
    """`s[j]` = sum of A[i, j] over the rows, or with `reduce: max` its maximum over them.

    A is the mean over the query heads of a token set, so the maximum is of this mean.
    """

    other_rows = (*FEW_ROWS, "all")
    reductions = ("mean", "max")

    def __call__(self, view: LayerView) -> Tensor:
        return view.votes


class Allocation:
    """Division of the pages among layers, or among layers and heads."""

    rows: ClassVar[RowSet] = "none"
    """Row set whose attention the allocation reads."""
    statistics: ClassVar[frozenset[Statistic]] = frozenset()
    """Statistics the allocation reads in addition to column sums."""
    cuts_again: ClassVar[bool] = True
    """Whether it is defined on what an earlier eviction left, with rows of the answer only."""
    granularities: ClassVar[tuple[Granularity, ...]] = ("layer", "head")
    """Granularities at which the allocation is defined."""
    adds_scores: ClassVar[bool] = False
    """Whether the shares come from sums of scores."""
    needs_vision: ClassVar[bool] = False
    """Whether the shares are undefined for a prompt without an image or video."""
    bytes_per_score: ClassVar[int] = 0
    """Memory that `shares` takes for each score of the prompt, in bytes."""
    needs_head_scores: ClassVar[bool] = False
    """Whether the shares come from a file of head scores."""
    needs_all_heads: ClassVar[bool] = True
    """Whether heads compete: the shares of some depend on scores or strengths of others. If not,
    `AllLayers` may have the heads of one tensor-parallel rank only."""

    def __init__(self, head_scores: HeadScores | None = None) -> None:
        """Take the served model's head scores, if the allocation needs some."""
        self.head_scores = head_scores

    def strength(self, view: LayerView, scores: Tensor) -> Tensor:
        """Return F numbers per token set that `shares` needs from one layer.

        Args:
            scores: the policy's scores before pooling, float32 `[S, P]`.

        Returns:
            float `[S, F]`; by default, F is 0.
        """
        return scores.new_empty(view.num_sets, 0)

    def shares(self, layers: AllLayers) -> Tensor:
        """Return the shares, float `[L, S]`, not negative; by default, the first strength.

        Only their ratios count. Shares that are all zero, or not all finite, count as equal.
        """
        return layers.strengths[..., 0]


class Retention(ABC):
    """Priority of tokens that takes precedence over their scores."""

    preferred: ClassVar[str] = "preferred"
    """The tokens that come before others, sinks apart, in one word: a reason in traces."""
    is_by_number: ClassVar[bool] = True
    """Whether tiers may depend on `num_kept`. A server then sets aside memory for the tiers of all
    heads."""

    @abstractmethod
    def tiers(self, prompt: Prompt, num_kept: Tensor) -> Tensor:
        """Return the tier of each token, small and not negative; higher tiers are kept first.

        Args:
            num_kept: int64 `[*]`, number of candidates that are kept.

        Returns:
            int32 `[P]`, or `[*, P]` where tiers depend on `num_kept`.
        """


@dataclass(frozen=True)
class Policy:
    """A method: its parts, their granularity, and the pooling of scores."""

    name: str
    score: Score
    allocation: Allocation
    retention: Retention
    granularity: Granularity = "layer"
    pooling: Pooling = field(default_factory=Pooling)
    merge: bool = False
    """Whether evicted tokens are merged into kept ones, see `merge`."""
    reduction: Reduction = "mean"
    summaries: Summaries | None = None
    """How evicted tokens are summarised; None if they are dropped."""

    @property
    def row_sets(self) -> tuple[RowSet, ...]:
        """Row sets whose attention the policy reads, each once."""
        sets: dict[RowSet, None] = {self.score.rows: None, self.allocation.rows: None}
        return tuple(kind for kind in sets if kind != "none")

    @property
    def needs_answer(self) -> bool:
        """Whether rows of the answer alone vote, so that eviction has to wait for some."""
        return "answer" in self.row_sets

    @property
    def cuts_again(self) -> bool:
        """Whether it can evict from what an earlier eviction left."""
        merges_again = self.merge and not self.score.cuts_by_place
        return not merges_again and self.score.cuts_again and self.allocation.cuts_again

    def statistics(self, rows: RowSet) -> frozenset[Statistic]:
        """Return the statistics that the parts with this row set read."""
        parts: tuple[Score | Allocation, ...] = (self.score, self.allocation)
        found = frozenset[Statistic]().union(*(p.statistics for p in parts if p.rows == rows))
        if self.reduction == "max" and rows == self.score.rows:
            found |= {"column_maxima"}
        return found

    @property
    def scores_layers_together(self) -> bool:
        """Whether one call can score several layers; one of places alone depends on its layer."""
        return self.score.rows != "none" or self.score.gates is not None

    def scoring_bytes(self, num_rows: int, query_heads: int) -> int:
        """Return a bound of what scoring and pooling take for each token of a token set.

        On a GPU, with `num_rows` observation rows and `query_heads` in the set; head averages that
        are kept are a buffer of their own.
        """
        return max(64, 4 * num_rows) + 16 * query_heads * self.score.by_query_head

    def scores(self, view: LayerView) -> Tensor:
        """Return the scores of one layer before pooling, float32 `[S, P]`."""
        return self.score(replace(view, reduction=self.reduction))

    def pooled(self, scores: Tensor, prompt: Prompt, present: Tensor | None = None) -> Tensor:
        """Return the scores `[S, P]` after pooling.

        Args:
            present: bool `[S, P]`, false for tokens that an earlier eviction dropped: they count
                for no other token. None if there was none.

        Raises:
            ValueError: if pooling over the patch grid meets an image whose grid is unknown.
        """
        pool = prompt.pooler(self.pooling)
        if present is None:
            return pool(scores)
        if self.pooling.reduce == "max":
            return pool(scores.masked_fill(~present, float("-inf")))
        shares = pool(present.to(scores.dtype)).clamp(min=torch.finfo(scores.dtype).tiny)
        return pool(scores.masked_fill(~present, 0)) / shares
