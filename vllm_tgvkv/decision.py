# SPDX-License-Identifier: Apache-2.0
"""What a policy's scores and strengths come to: pages of every (layer, head), kept tokens.

Nothing here waits for the device: every size is known beforehand, also where the number of
retained blocks is found on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_tgvkv.kernels.apportion import apportion
from vllm_tgvkv.kernels.select import ranking_keys, select_tokens, thresholds
from vllm_tgvkv.policies import Looks, Policy, Prompt


@dataclass(frozen=True)
class Guard:
    """The promise of a budget ``auto:share``."""

    share: float
    """Part of the attention mass that the kept keys must hold."""
    least_blocks: int
    """Fewer are never retained: the budget's lower bound, and what holds the text."""


@dataclass(frozen=True)
class Decision:
    """The pages of every (layer, head) and the tokens in them."""

    counts: Tensor
    """Pages, int64 ``[L, H]``."""
    positions: Tensor
    """Kept positions, int32 ``[k * L * H, N]``, pages in (layer, head) order; where a guard chose
    fewer blocks, those behind the last page that was dealt have no meaning."""
    num_retained: Tensor | None
    """int64 scalar, where a guard chose; else it is what was given."""


@dataclass(frozen=True)
class Decider:
    """Decides for one prompt whose layers have all been looked at.

    ``scores`` float32 ``[L, S, C]`` are pooled, ``strengths`` float ``[L, S, F]``.
    """

    policy: Policy
    prompt: Prompt
    scores: Tensor
    strengths: Tensor
    num_heads: int
    block_size: int
    floor_pages: int

    def decide(self, num_retained: int) -> Decision:
        """Deal ``num_retained`` blocks, which is between 1 and the full blocks of the prompt."""
        retained = torch.full((), num_retained, device=self.scores.device)
        counts = self._deal(retained, min(self.floor_pages, num_retained), guarded=False)
        return Decision(counts, self._fill(counts, num_retained, guarded=False), None)

    def decide_guarded(self, num_retained: int, masses: Tensor, guard: Guard) -> Decision:
        """Deal as few blocks as hold the guarded share of ``masses``, at most ``num_retained``.

        Text is kept before all but sinks. If even ``num_retained`` blocks do not hold the share,
        they are what is dealt. Found by bisection, which is exact as long as more blocks hold more;
        a budget that deals quite differently with one block more may break that by a block or two.

        ``masses`` is float32 ``[L, S, P]``, the observed attention that each token got.
        """
        least = min(guard.least_blocks, num_retained)
        floor = min(self.floor_pages, least)
        num_candidates = self.prompt.num_candidates
        tail = masses[..., num_candidates:].double().sum()
        wanted = masses.double().sum() * guard.share - tail
        candidates = masses[..., :num_candidates].double()
        low = torch.full((), least - 1, device=masses.device)
        high = torch.full((), num_retained, device=masses.device)
        # What `high` deals is enough, or the bound; what `low` deals is not, or below the bound.
        for _ in range((num_retained - least + 1).bit_length()):
            middle = (low + high).div(2, rounding_mode="floor").clamp(min=least)
            kept = self._kept(self._deal(middle, floor, guarded=True))
            enough = (candidates * kept).sum() >= wanted
            high, low = torch.where(enough, middle, high), torch.where(enough, low, middle)
        counts = self._deal(high, floor, guarded=True)
        return Decision(counts, self._fill(counts, num_retained, guarded=True), high)

    def _deal(self, retained: Tensor, floor: int, guarded: bool) -> Tensor:
        """Pages of every (layer, head), int64 ``[L, H]``, that sum to k * L * H.

        At granularity `layer` a layer gets the same number for each of its heads, so what is dealt
        is k * L units of H pages.
        """
        kept = retained * self.block_size
        looks = Looks(
            prompt=self.prompt,
            scores=self.scores,
            strengths=self.strengths,
            tiers=self._tiers(kept.expand(self.scores.shape[:2]), guarded),
            num_kept=kept,
        )
        shares = self.policy.budget.shares(looks)
        cap = self.prompt.num_candidates // self.block_size
        counts = apportion(shares.flatten(), retained * shares.numel(), floor, cap)
        return counts.view_as(shares).expand(-1, self.num_heads).contiguous()

    def _tiers(self, num_kept: Tensor, guarded: bool) -> Tensor:
        """Tiers of the candidates, int ``[C]`` or ``[L, S, C]``; guarded ones put text first."""
        prompt = self.prompt
        tiers = self.policy.retention.tiers(prompt, num_kept)[..., : prompt.num_candidates]
        if not guarded:
            return tiers
        tiers = tiers + ~prompt.is_vision[: prompt.num_candidates] * _TEXT_TIER
        tiers[..., : prompt.sinks] = _SINK_TIER
        return tiers

    def _num_kept(self, counts: Tensor) -> Tensor:
        """Candidates that each token set keeps, int64 ``[L, S]``."""
        return counts[:, : self.scores.shape[1]] * self.block_size

    def _kept(self, counts: Tensor) -> Tensor:
        """Whether each candidate is kept under a guard, bool ``[L, S, C]``."""
        num_kept = self._num_kept(counts)
        keys = ranking_keys(self.scores, self._tiers(num_kept, guarded=True))
        return keys >= thresholds(keys, num_kept).unsqueeze(-1)

    def _fill(self, counts: Tensor, num_retained: int, guarded: bool) -> Tensor:
        """Kept positions of ``num_retained`` blocks, some of them perhaps not dealt."""
        tiers = self._tiers(self._num_kept(counts), guarded)
        num_pages = num_retained * counts.numel()
        return select_tokens(self.scores, tiers, counts, num_pages, self.block_size)


_TEXT_TIER, _SINK_TIER = 4, 8
"""Above the tiers of every retention, which are below 4."""
