# SPDX-License-Identifier: Apache-2.0
"""The three parts of a policy - score, budget, retention - and what they look at.

The parts take tensors and return tensors. They know nothing of pages, and the cache knows nothing
of methods. L is the number of layers, H of KV heads, P of prompt tokens; S is the number of token
sets a layer has: H at granularity ``head``, 1 at granularity ``layer``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from vllm_tgvkv.kernels.statistics import Attention, Statistic
from vllm_tgvkv.policies.pooling import Pooling, pool
from vllm_tgvkv.prompt import RowSet, VisionSpan

Granularity = Literal["layer", "head"]


@dataclass(frozen=True)
class Prompt:
    """One prompt, as the parts of a policy see it. Tensors are on the attention's device."""

    num_tokens: int
    """P."""
    num_candidates: int
    """C, the tokens in full blocks; those behind are the tail, which is never evicted."""
    is_vision: Tensor
    """bool ``[P]``, positions of image and video embeddings (V); the others are text (T)."""
    sinks: int
    """This many first tokens are kept before all others."""
    images: tuple[VisionSpan, ...] = ()
    """The contiguous runs of vision positions, in order."""


class _NoAttention(Attention):
    """No statistics: all of them raise."""


NO_ATTENTION: Attention = _NoAttention()
"""The attention of the row set ``none``."""


@dataclass(frozen=True)
class LayerView:
    """One layer of one prompt, as a score or budget sees it."""

    layer: int
    """Of the model's layers."""
    num_sets: int
    """S."""
    prompt: Prompt
    attention: Attention
    """Of the rows that the score or budget asked for."""
    first_set: int = 0
    """Which of the model's token sets the first one is, where ranks have others."""


@dataclass(frozen=True)
class Depth:
    """Where in the model the layers are that share their pages; by default they are all of them."""

    first_layer: int = 0
    num_layers: int | None = None
    """Of the model."""


WHOLE_MODEL = Depth()


@dataclass(frozen=True)
class AllLayers:
    """What all layers showed, for the sharing of the pages; of a pipeline stage its own layers."""

    prompt: Prompt
    scores: Tensor
    """float32 ``[L, S, C]``, pooled."""
    strengths: Tensor
    """float ``[L, S, F]``, what :meth:`Allocation.strength` returned."""
    tiers: Tensor
    """int32 ``[C]`` or ``[L, S, C]``, of the retention, where all get the same."""
    num_kept: Tensor
    """int64 scalar, b: candidates that a head keeps on average."""
    depth: Depth = WHOLE_MODEL


class Score(ABC):
    """What a token is worth to a layer or head."""

    rows: ClassVar[RowSet] = "text"
    statistics: ClassVar[frozenset[Statistic]] = frozenset()
    """What is asked of the attention beside its column sums."""

    @abstractmethod
    def __call__(self, view: LayerView) -> Tensor:
        """float32 ``[S, P]``; higher is better."""


class Allocation:
    """How the pages are shared out among the layers, or among the layers and heads."""

    rows: ClassVar[RowSet] = "none"
    statistics: ClassVar[frozenset[Statistic]] = frozenset()
    granularities: ClassVar[tuple[Granularity, ...]] = ("layer", "head")
    needs_vision: ClassVar[bool] = False
    """Whether a prompt without image or video leaves nothing to go by."""

    def strength(self, view: LayerView, scores: Tensor) -> Tensor:
        """What one layer brings to the sharing: float ``[S, F]``, F numbers of any meaning.

        ``scores`` are the policy's, float32 ``[S, P]``, before pooling.
        """
        return scores.new_empty(view.num_sets, 0)

    def shares(self, layers: AllLayers) -> Tensor:
        """float ``[L, S]``, not negative; if not overridden, the first number of each strength.

        Only their ratios count. All zero, or any of them not finite, means equal shares.
        """
        return layers.strengths[..., 0]


class Retention(ABC):
    """Which tokens are kept before any score is looked at."""

    @abstractmethod
    def tiers(self, prompt: Prompt, num_kept: Tensor) -> Tensor:
        """int32 ``[P]`` or ``[*, P]``: small non-negative numbers; a higher tier is kept first.

        ``num_kept`` is int64 ``[*]``, the candidates that are kept, where that matters.
        """


@dataclass(frozen=True)
class Policy:
    """A method: the three parts, the granularity they work at, and pooling of the scores."""

    name: str
    score: Score
    allocation: Allocation
    retention: Retention
    granularity: Granularity = "layer"
    pooling: Pooling = field(default_factory=Pooling)
    merge: bool = False
    """Whether evicted tokens are merged into kept ones, see :mod:`~vllm_tgvkv.kernels.merge`."""

    @property
    def row_sets(self) -> tuple[RowSet, ...]:
        """The row sets whose attention is looked at, each once."""
        sets: dict[RowSet, None] = {self.score.rows: None, self.allocation.rows: None}
        return tuple(kind for kind in sets if kind != "none")

    def statistics(self, rows: RowSet) -> frozenset[Statistic]:
        """What the parts that look at ``rows`` ask of their attention."""
        parts: tuple[Score | Allocation, ...] = (self.score, self.allocation)
        return frozenset[Statistic]().union(*(p.statistics for p in parts if p.rows == rows))

    def pooled(self, scores: Tensor, prompt: Prompt) -> Tensor:
        """Scores ``[S, P]`` after pooling.

        Raises:
            ValueError: if pooling over the patch grid meets an image whose grid is not known.
        """
        return pool(scores, prompt.is_vision, prompt.images, self.pooling)
