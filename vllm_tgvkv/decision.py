# SPDX-License-Identifier: Apache-2.0
"""What a policy's scores and strengths come to: pages of every (layer, head), kept tokens.

Nothing here waits for the device: every size is known beforehand, also where the number of
retained blocks is found on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_tgvkv.budget import Guard
from vllm_tgvkv.kernels.apportion import apportion
from vllm_tgvkv.kernels.select import ranking_keys, select_tokens, thresholds
from vllm_tgvkv.policies import WHOLE_MODEL, AllLayers, Depth, Policy, Prompt


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

    ``scores`` float32 ``[L, S, C]`` are pooled, ``strengths`` float ``[L, S, F]``. Both, and
    ``num_heads``, are of all heads of the model. Where ranks hold ``num_parts`` equal parts of
    them, each part has its own pages, k * L * H / num_parts, and none moves to another part.
    """

    policy: Policy
    prompt: Prompt
    scores: Tensor
    strengths: Tensor
    num_heads: int
    block_size: int
    floor_pages: int
    num_parts: int = 1
    heads: slice = field(default_factory=lambda: slice(None))
    """The heads whose pages and tokens are wanted."""
    agree: Callable[[Callable[[], Tensor]], Tensor] = lambda find: find()
    """Finds the number of a guarded decision that all ranks go by."""
    depth: Depth = WHOLE_MODEL

    def decide(self, num_retained: int) -> Decision:
        """Deal ``num_retained`` blocks, which is between 1 and the full blocks of the prompt."""
        retained = torch.full((), num_retained, device=self.scores.device)
        counts = self._deal(retained, min(self.floor_pages, num_retained), guarded=False)
        counts = counts[:, self.heads]
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
        found = self.agree(lambda: self._fewest(least, num_retained, floor, masses, guard.share))
        counts = self._deal(found, floor, guarded=True)[:, self.heads]
        return Decision(counts, self._fill(counts, num_retained, guarded=True), found)

    def _fewest(self, least: int, most: int, floor: int, masses: Tensor, share: float) -> Tensor:
        """The fewest blocks that hold ``share`` of the masses, int64 scalar."""
        num_candidates = self.prompt.num_candidates
        tail = masses[..., num_candidates:].double().sum()
        wanted = masses.double().sum() * share - tail
        candidates = masses[..., :num_candidates].double()
        low = torch.full((), least - 1, device=masses.device)
        high = torch.full((), most, device=masses.device)
        # What `high` deals is enough, or the bound; what `low` deals is not, or below the bound.
        for _ in range((most - least + 1).bit_length()):
            middle = (low + high).div(2, rounding_mode="floor").clamp(min=least)
            kept = self._kept(self._deal(middle, floor, guarded=True))
            enough = (candidates * kept).sum() >= wanted
            high, low = torch.where(enough, middle, high), torch.where(enough, low, middle)
        return high

    def _deal(self, retained: Tensor, floor: int, guarded: bool) -> Tensor:
        """Pages of every (layer, head), int64 ``[L, H]``, that sum to k * L * H.

        At granularity `layer` a layer gets the same number for each of its heads, so what is dealt
        is k * L units of H pages, and every part gets as many.
        """
        kept = retained * self.block_size
        layers = AllLayers(
            prompt=self.prompt,
            scores=self.scores,
            strengths=self.strengths,
            tiers=self._tiers(kept.expand(self.scores.shape[:2]), guarded),
            num_kept=kept,
            depth=self.depth,
        )
        shares = self.policy.allocation.shares(layers)
        cap = self.prompt.num_candidates // self.block_size
        num_layers, num_sets = shares.shape
        num_parts = self.num_parts if num_sets > 1 else 1
        # [parts, L * S / parts]
        of_parts = shares.unflatten(1, (num_parts, -1)).transpose(0, 1).flatten(1)
        dealt = apportion(of_parts, retained * of_parts.shape[1], floor, cap)
        counts = dealt.unflatten(1, (num_layers, -1)).transpose(0, 1).flatten(1)
        return counts.expand(-1, self.num_heads).contiguous()

    def _tiers(self, num_kept: Tensor, guarded: bool) -> Tensor:
        """Tiers of the candidates, int ``[C]`` or ``[L, S, C]``; guarded ones put text first."""
        prompt = self.prompt
        tiers = self.policy.retention.tiers(prompt, num_kept)[..., : prompt.num_candidates]
        if not guarded:
            return tiers
        tiers = tiers + ~prompt.is_vision[: prompt.num_candidates] * _TEXT_TIER
        tiers[..., : prompt.sinks] = _SINK_TIER
        return tiers

    def _kept(self, counts: Tensor) -> Tensor:
        """Whether each candidate is kept under a guard, bool ``[L, S, C]``."""
        num_kept = counts[:, : self.scores.shape[1]] * self.block_size
        keys = ranking_keys(self.scores, self._tiers(num_kept, guarded=True))
        return keys >= thresholds(keys, num_kept).unsqueeze(-1)

    def _fill(self, counts: Tensor, num_retained: int, guarded: bool) -> Tensor:
        """Kept positions of ``num_retained`` blocks, some of them perhaps not dealt.

        ``counts`` are those of the wanted heads.
        """
        scores = self.scores if self.scores.shape[1] == 1 else self.scores[:, self.heads]
        num_kept = counts[:, : scores.shape[1]] * self.block_size
        tiers = self._tiers(num_kept, guarded)
        num_pages = num_retained * counts.numel()
        return select_tokens(scores, tiers, counts, num_pages, self.block_size)


_TEXT_TIER, _SINK_TIER = 4, 8
"""Above the tiers of every retention, which are below 4."""
