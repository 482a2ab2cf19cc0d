# SPDX-License-Identifier: Apache-2.0
"""From scores and strengths to the pages of every (layer, head) and the tokens in them.

Nothing here waits for the device: every size is known in advance, even where the number of
retained blocks is found on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from vllm_tgvkv.kernels.apportion import apportion
from vllm_tgvkv.kernels.select import (
    key_slices,
    page_offsets,
    ranking_keys,
    select_tokens,
    thresholds,
)
from vllm_tgvkv.policies import AllLayers, Depth, Policy, Prompt
from vllm_tgvkv.shared.budget import Guard

_TOKENS_AT_ONCE = 1 << 22
"""Kept tokens that are looked up at a time, to count vision tokens."""


@dataclass(frozen=True)
class Decision:
    """The pages of every (layer, head) and the tokens in them."""

    counts: Tensor
    """Pages, int64 `[L, H]`."""
    positions: Tensor
    """Kept positions, int32 `[pages, N]`, pages in (layer, head) order; where a guard chose
    fewer blocks, the pages after the last one dealt have no meaning."""
    num_token_blocks: Tensor
    """Blocks that hold pages of tokens, int64 scalar: as given, or fewer with a guard."""

    @cached_property
    def offsets(self) -> Tensor:
        """The first page of every (layer, head), and the end, int32 `[L * H + 1]`."""
        return page_offsets(self.counts)

    def count_vision(self, is_vision: Tensor) -> Tensor:
        """Return the vision tokens in all pages that hold tokens, int64; `is_vision` is `[P]`."""
        step = max(1, _TOKENS_AT_ONCE // self.positions.shape[1])
        count = torch.zeros((), dtype=torch.int64, device=is_vision.device)
        for first in range(0, len(self.positions), step):
            part = self.positions[first : first + step]
            # An index of int64 would take more memory than the positions.
            in_page = is_vision.index_select(0, part.flatten()).view_as(part).sum(1)
            page = torch.arange(first, first + len(part), device=is_vision.device)
            count += (in_page * (page < self.offsets[-1])).sum()
        return count


@dataclass(frozen=True)
class ScoredPrompt:
    """A prompt whose layers are all scored, from which a decision is made.

    Scores, strengths, masses and `num_heads` cover all heads of the model; among ranks whose heads
    do not compete, the rank's own. Where ranks hold `num_parts` equal parts of the heads, each part
    has k * L * H / num_parts pages, and no page moves to another part.
    """

    policy: Policy
    prompt: Prompt
    scores: Tensor
    """Pooled, float32 `[L, S, C]`."""
    strengths: Tensor
    """float `[L, S, F]`."""
    num_heads: int
    block_size: int
    floor_pages: int
    masses: Tensor | None = None
    """Observed attention of each token, float32 `[L, S, P]`; only with a guard."""
    unpooled: Tensor | None = None
    """The scores before pooling, float32 `[L, S, C]`; only for a trace of pooled scores."""
    present: Tensor | None = None
    """bool `[L, S, C]`, the candidates that earlier cuts left; None at the first cut."""
    num_parts: int = 1
    heads: slice = field(default_factory=lambda: slice(None))
    """The heads whose pages and tokens are returned."""
    agree: Callable[[Callable[[], Tensor]], Tensor] = lambda find: find()
    """Makes all ranks use the same number of blocks in a guarded decision."""
    depth: Depth = AllLayers.depth
    first_head: int = 0
    """Index of the first head among the model's."""

    def of_all_heads(self) -> ScoredPrompt:
        """Return it for the heads of all ranks, deciding without them."""
        return replace(self, heads=slice(None), agree=lambda find: find())

    @property
    def own_sets(self) -> slice:
        """The token sets of `heads`."""
        return self.heads if self.scores.shape[1] > 1 else slice(None)

    def decide(self, num_token_blocks: int, guard: Guard | None = None) -> Decision:
        """Deal `num_token_blocks` blocks, between 1 and the number of full blocks of the prompt.

        With a guard, deal the fewest blocks that hold its share of the masses. Sinks are kept
        first, then text. If even `num_token_blocks` blocks do not hold the share, all of them are
        dealt. The number is found by bisection. That is exact as long as more blocks hold more
        mass; an allocation whose counts change a lot with one more block may make it wrong by a
        block or two.
        """
        if guard is None:
            dealt = torch.full((), num_token_blocks, device=self.scores.device)
            least = num_token_blocks
        else:
            least = min(guard.least_blocks, num_token_blocks)
            dealt = self.agree(partial(self._fewest, least, num_token_blocks, guard.share))
            dealt = dealt.clamp(least, num_token_blocks)  # a rank that failed says 0
        counts = self._deal(dealt, least, guard is not None)[:, self.heads]
        return Decision(counts, self._fill(counts, num_token_blocks, guard is not None), dealt)

    def fill(self, counts: Tensor, num_token_blocks: int) -> Decision:
        """Return the tokens for given pages of every (layer, head), int64 `[L, H]`."""
        num_blocks = torch.full((), num_token_blocks, device=counts.device)
        return Decision(counts, self._fill(counts, num_token_blocks, guarded=False), num_blocks)

    def preference(self, counts: Tensor, guarded: bool) -> Tensor:
        """Return which candidates came before others, whatever their scores, for a trace.

        Args:
            counts: pages of all heads, int64 `[L, H]`.
            guarded: whether `decide` had a guard.

        Returns:
            uint8 `[C]`, or `[L, S, C]` where it depends on how many tokens are kept: 2 for
            text that a guard puts first, 1 for what the retention prefers, 0 for the rest.
        """
        num_kept = counts[:, : self.scores.shape[1]] * self.block_size
        tiers = self._all_tiers(num_kept, guarded).clone()
        tiers[..., : self.prompt.sinks] = 0
        by_guard = (tiers >= _TEXT_TIER) & guarded
        return torch.where(by_guard, 2, (tiers > 0).to(torch.uint8)).to(torch.uint8)

    def _fewest(self, least: int, most: int, share: float) -> Tensor:
        """Return the fewest blocks that hold `share` of the masses, int64 scalar."""
        masses = self.masses
        assert masses is not None, "a guard needs the masses"
        tail = masses[..., self.prompt.num_candidates :].double().sum()
        wanted = self._sum(lambda layers: masses[layers].double()) * share - tail
        low = torch.full((), least - 1, device=masses.device)
        high = torch.full((), most, device=masses.device)
        # Invariant: `high` blocks are enough or the upper bound; `low` blocks are not enough or
        # below the lower bound.
        for _ in range((most - least + 1).bit_length()):
            middle = (low + high).div(2, rounding_mode="floor").clamp(min=least)
            counts = self._deal(middle, least, guarded=True)
            enough = self._sum(partial(self._kept_masses, counts, masses)) >= wanted
            high, low = torch.where(enough, middle, high), torch.where(enough, low, middle)
        return high

    def _deal(self, num_token_blocks: Tensor, least: int, guarded: bool) -> Tensor:
        """Return the pages of every (layer, head), int64 `[L, H]`; they fill the blocks.

        The host knows that there are at least `least` blocks. At granularity `layer` all heads of a
        layer get the same number: units of H pages are dealt, the same for every part.
        """
        kept = num_token_blocks * self.block_size
        layers = AllLayers(
            prompt=self.prompt,
            scores=self.scores,
            strengths=self.strengths,
            tiers=_below_if_evicted(self._tiers(kept, guarded), self.present),
            num_kept=kept,
            depth=self.depth,
            first_head=self.first_head,
        )
        shares = self.policy.allocation.shares(layers)
        most = self.prompt.num_candidates // self.block_size
        num_layers, num_sets = shares.shape
        num_parts = self.num_parts if num_sets > 1 else 1

        def by_part(values: Tensor) -> Tensor:
            """Return values `[L, S]` as `[parts, L * S / parts]`."""
            return values.unflatten(1, (num_parts, -1)).transpose(0, 1).flatten(1)

        of_parts = by_part(shares)
        total, floor = num_token_blocks * of_parts.shape[1], min(self.floor_pages, least)
        if self.present is None:
            dealt = apportion(of_parts, total, floor, most)
        else:
            # A part's pages before this cut filled at least as many blocks, so its caps suffice.
            caps = by_part(self.present.sum(dim=-1) // self.block_size)
            dealt = apportion(of_parts, total, floor, caps, most)
        counts = dealt.unflatten(1, (num_layers, -1)).transpose(0, 1).flatten(1)
        return counts.expand(-1, self.num_heads).contiguous()

    def _tiers(self, num_kept: Tensor, guarded: bool) -> Tensor:
        """Return tiers, int32 `[C]` or `[*, C]` for `num_kept` `[*]`; a guard puts text first."""
        prompt = self.prompt
        tiers = self.policy.retention.tiers(prompt, num_kept)[..., : prompt.num_candidates]
        if not guarded:
            return tiers
        tiers = tiers + (~prompt.is_vision[: prompt.num_candidates]).to(tiers.dtype) * _TEXT_TIER
        tiers[..., : prompt.sinks] = _SINK_TIER
        return tiers

    def _all_tiers(self, num_kept: Tensor, guarded: bool) -> Tensor:
        """Return the tiers for `num_kept` `[L, S]`: `[C]`, or in bytes `[L, S, C]`."""
        of_first = self._tiers(num_kept[:1], guarded)
        if of_first.dim() == 1:
            return of_first  # the same for any number
        slices = key_slices(self.scores)
        tiers = [self._tiers(num_kept[part], guarded).to(torch.uint8) for part in slices]
        return torch.cat(tiers)

    def _sum(self, terms: Callable[[slice], Tensor]) -> Tensor:
        """Return the sum of `terms(layers)`, float64, over slices of the layers.

        Memory is bounded for any prompt. Prompts that need one slice only, up to some thousand
        tokens, get the bits of one sum over all layers.
        """
        sums = [terms(layers).sum() for layers in key_slices(self.scores)]
        return torch.stack(sums).sum()

    def _kept_masses(self, counts: Tensor, masses: Tensor, layers: slice) -> Tensor:
        """Return the masses of the kept candidates of some layers under a guard, 0 for others.

        float64 `[layers, S, C]`; `counts` are the pages of all layers.
        """
        num_kept = counts[layers, : self.scores.shape[1]] * self.block_size
        keys = ranking_keys(self.scores[layers], self._tiers(num_kept, guarded=True))
        kept = keys >= thresholds(keys, num_kept).unsqueeze(-1)
        return masses[layers, :, : self.prompt.num_candidates].double() * kept

    def _fill(self, counts: Tensor, num_token_blocks: int, guarded: bool) -> Tensor:
        """Return the kept positions of as many blocks; a guard may use fewer.

        `counts` has the pages of `heads` only.
        """
        sets = self.own_sets
        scores = self.scores[:, sets]
        present = None if self.present is None else self.present[:, sets]
        num_kept = counts[:, : scores.shape[1]] * self.block_size
        tiers = _below_if_evicted(self._all_tiers(num_kept, guarded), present)
        num_pages = num_token_blocks * counts.numel()
        return select_tokens(scores, tiers, counts, num_pages, self.block_size)


def _below_if_evicted(tiers: Tensor, present: Tensor | None) -> Tensor:
    """Return tiers in which candidates that an earlier cut evicted are below all others."""
    if present is None:
        return tiers
    raised = tiers.to(torch.uint8) + 1
    return raised.mul_(present) if raised.shape == present.shape else raised * present


_TEXT_TIER, _SINK_TIER = 4, 8
"""Above the tiers of all retentions, which are below 4."""
