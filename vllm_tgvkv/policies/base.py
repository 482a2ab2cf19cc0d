# SPDX-License-Identifier: Apache-2.0
"""The three parts of a policy - score, budget, retention - and what they look at.

The parts take tensors and return tensors. They know nothing of pages, and the cache knows nothing
of methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from vllm_tgvkv.policies.pooling import ImageSpan, Pooling, pool

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
    rows: Tensor
    """int64 ``[O]``, ascending positions of the observation rows."""
    sinks: int
    """This many first tokens are kept before all others."""
    images: tuple[ImageSpan, ...] = ()
    """The contiguous runs of vision positions, in order."""


class Attention(Protocol):
    """Attention statistics of one layer, see :class:`~vllm_tgvkv.kernels.statistics`.

    H is the number of KV heads, or 1 after ``mean_over_heads``.
    """

    @property
    def column_sums(self) -> Tensor:
        """float32 ``[H, P]``, sum over the rows of A[h]."""

    def weighted_column_sums(self, weights: Tensor) -> Tensor:
        """float ``[H or 1, O]`` -> float32 ``[H, P]``, weighted sum over the rows of A[h]."""

    def mean_over_heads(self) -> Attention:
        """The statistics of the mean over all query heads of the layer."""


def at_granularity(attention: Attention, granularity: Granularity) -> Attention:
    """A[l, h] for ``head``, A[l] for ``layer``."""
    return attention.mean_over_heads() if granularity == "layer" else attention


class Score(ABC):
    """What a token is worth to a layer or head."""

    @abstractmethod
    def __call__(self, attention: Attention, prompt: Prompt, granularity: Granularity) -> Tensor:
        """float32 ``[H, P]``, or ``[1, P]`` at granularity ``layer``; higher is better."""


class Budget(ABC):
    """How the pages are shared out among the layers, or among the layers and heads."""

    @abstractmethod
    def strength(self, attention: Attention, prompt: Prompt, granularity: Granularity) -> Tensor:
        """What one layer brings to the sharing: float32 ``[H]``, or ``[1]`` at ``layer``."""

    @abstractmethod
    def shares(self, strengths: Tensor) -> Tensor:
        """All layers' strengths, ``[L, H or 1]`` -> non-negative shares of the same shape.

        Only their ratios count. All zero, or any of them not finite, means equal shares.
        """


class Retention(ABC):
    """Which kinds of tokens are kept before any score is looked at."""

    @abstractmethod
    def tiers(self, prompt: Prompt) -> Tensor:
        """int32 ``[P]``, small non-negative numbers; a higher tier is kept first."""


@dataclass(frozen=True)
class Policy:
    """A method: the three parts, the granularity they work at, and pooling of the scores."""

    name: str
    score: Score
    budget: Budget
    retention: Retention
    granularity: Granularity = "layer"
    pooling: Pooling = field(default_factory=Pooling)

    def look(self, attention: Attention, prompt: Prompt) -> tuple[Tensor, Tensor]:
        """Scores and strength of one layer.

        Returns:
            float32 ``[H, P]`` and ``[H]``; H is 1 at granularity ``layer``, where every head of
            the layer shares the token set and gets the same number of pages.

        Raises:
            ValueError: if pooling over the patch grid meets an image whose grid is not known.
        """
        scores = self.score(attention, prompt, self.granularity)
        scores = pool(scores, prompt.is_vision, prompt.images, self.pooling)
        return scores, self.budget.strength(attention, prompt, self.granularity)
