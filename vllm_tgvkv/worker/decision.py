# SPDX-License-Identifier: Apache-2.0
"""From scores and strengths to the pages of every (layer, head) and the tokens in them.

Nothing here waits for the device: every size is known in advance, even where the number of
retained blocks is found on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from vllm_tgvkv.kernels.apportion import apportion
from vllm_tgvkv.kernels.select import key_slices, ranking_keys, select_tokens, thresholds
from vllm_tgvkv.policies import WHOLE_MODEL, AllLayers, Depth, Policy, Prompt
from vllm_tgvkv.shared.budget import Guard


@dataclass(frozen=True)
class Decision:
    """The pages of every (layer, head) and the tokens in them."""

    counts: Tensor
    """Pages, int64 ``[L, H]``."""
    positions: Tensor
    """Kept positions, int32 ``[k * L * H, N]``, pages in (layer, head) order; where a guard chose
    fewer blocks, the pages after the last one dealt have no meaning."""
    num_retained: Tensor
    """Blocks that hold pages, int64 scalar: the given number, or fewer with a guard."""


@dataclass(frozen=True)
class Decider:
    """Decides for one prompt, once all of its layers are scored.

    ``scores``, float32 ``[L, S, C]``, are pooled; ``strengths`` are float ``[L, S, F]``. Both, and
    ``num_heads``, cover all heads of the model. Where ranks hold ``num_parts`` equal parts of the
    heads, each part has k * L * H / num_parts pages, and no page moves to another part.
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
    """The heads whose pages and tokens are returned."""
    agree: Callable[[Callable[[], Tensor]], Tensor] = lambda find: find()
    """Makes all ranks use the same number of blocks in a guarded decision."""
    depth: Depth = WHOLE_MODEL
    present: Tensor | None = None
    """bool ``[L, S, C]``, the candidates that earlier cuts left; None at the first cut."""

    @property
    def own_sets(self) -> slice:
        """The token sets of :attr:`heads`."""
        return self.heads if self.scores.shape[1] > 1 else slice(None)

    def decide(self, num_retained: int) -> Decision:
        """Deal ``num_retained`` blocks, between 1 and the number of full blocks of the prompt."""
        retained = torch.full((), num_retained, device=self.scores.device)
        floor = min(self.floor_pages, num_retained)
        return self._decision(retained, num_retained, floor, guarded=False)

    def decide_guarded(self, num_retained: int, masses: Tensor, guard: Guard) -> Decision:
        """Deal the fewest blocks that hold the guarded share of ``masses``.

        Sinks are kept first, then text. If even ``num_retained`` blocks do not hold the share,
        all of them are dealt. The number is found by bisection. That is exact as long as more
        blocks hold more mass; an allocation whose counts change a lot with one more block may
        make it wrong by a block or two.

        Args:
            num_retained: the most blocks, as for :meth:`decide`.
            masses: float32 ``[L, S, P]``, the observed attention that each token got.
            guard: the share, and the fewest blocks.
        """
        least = min(guard.least_blocks, num_retained)
        floor = min(self.floor_pages, least)
        fewest = self.agree(lambda: self._fewest(least, num_retained, floor, masses, guard.share))
        return self._decision(fewest, num_retained, floor, guarded=True)

    def preference(self, counts: Tensor, guarded: bool) -> Tensor:
        """Return which candidates came before others, whatever their scores, for a trace.

        Args:
            counts: pages of all heads, int64 ``[L, H]``.
            guarded: whether :meth:`decide_guarded` dealt them.

        Returns:
            uint8 ``[C]``, or ``[L, S, C]`` where it depends on how many tokens are kept: 2 for
            text that a guard puts first, 1 for what the retention prefers, 0 for the rest.
        """
        num_kept = counts[:, : self.scores.shape[1]] * self.block_size
        tiers = self._all_tiers(num_kept, guarded).clone()
        tiers[..., : self.prompt.sinks] = 0
        by_guard = (tiers >= _TEXT_TIER) & guarded
        return torch.where(by_guard, 2, (tiers > 0).to(torch.uint8)).to(torch.uint8)

    def _decision(self, retained: Tensor, most: int, floor: int, guarded: bool) -> Decision:
        counts = self._deal(retained, floor, guarded)[:, self.heads]
        return Decision(counts, self._fill(counts, most, guarded), retained)

    def _fewest(self, least: int, most: int, floor: int, masses: Tensor, share: float) -> Tensor:
        """Return the fewest blocks that hold ``share`` of the masses, int64 scalar."""
        tail = masses[..., self.prompt.num_candidates :].double().sum()
        wanted = self._sum(lambda layers: masses[layers].double()) * share - tail
        low = torch.full((), least - 1, device=masses.device)
        high = torch.full((), most, device=masses.device)
        # Invariant: `high` blocks are enough or the upper bound; `low` blocks are not enough or
        # below the lower bound.
        for _ in range((most - least + 1).bit_length()):
            middle = (low + high).div(2, rounding_mode="floor").clamp(min=least)
            counts = self._deal(middle, floor, guarded=True)
            enough = self._sum(partial(self._kept_masses, counts, masses)) >= wanted
            high, low = torch.where(enough, middle, high), torch.where(enough, low, middle)
        return high

    def _deal(self, retained: Tensor, floor: int, guarded: bool) -> Tensor:
        """Return the pages of every (layer, head), int64 ``[L, H]``; they sum to k * L * H.

        At granularity `layer` all heads of a layer get the same number: k * L units of H pages are
        dealt, the same for every part.
        """
        kept = retained * self.block_size
        layers = AllLayers(
            prompt=self.prompt,
            scores=self.scores,
            strengths=self.strengths,
            tiers=_left(self._tiers(kept, guarded), self.present),
            num_kept=kept,
            depth=self.depth,
        )
        shares = self.policy.allocation.shares(layers)
        most = self.prompt.num_candidates // self.block_size
        num_layers, num_sets = shares.shape
        num_parts = self.num_parts if num_sets > 1 else 1

        def by_part(values: Tensor) -> Tensor:
            """Return values ``[L, S]`` as ``[parts, L * S / parts]``."""
            return values.unflatten(1, (num_parts, -1)).transpose(0, 1).flatten(1)

        of_parts = by_part(shares)
        total = retained * of_parts.shape[1]
        if self.present is None:
            dealt = apportion(of_parts, total, floor, most)
        else:
            # A part's pages before this cut filled at least as many blocks, so its caps suffice.
            caps = by_part(self.present.sum(dim=-1) // self.block_size)
            dealt = apportion(of_parts, total, floor, caps, most)
        counts = dealt.unflatten(1, (num_layers, -1)).transpose(0, 1).flatten(1)
        return counts.expand(-1, self.num_heads).contiguous()

    def _tiers(self, num_kept: Tensor, guarded: bool) -> Tensor:
        """Return the candidates' tiers, int32 ``[C]`` or ``[*, C]`` for ``num_kept`` ``[*]``.

        A guard puts text first.
        """
        prompt = self.prompt
        tiers = self.policy.retention.tiers(prompt, num_kept)[..., : prompt.num_candidates]
        if not guarded:
            return tiers
        tiers = tiers + (~prompt.is_vision[: prompt.num_candidates]).to(tiers.dtype) * _TEXT_TIER
        tiers[..., : prompt.sinks] = _SINK_TIER
        return tiers

    def _all_tiers(self, num_kept: Tensor, guarded: bool) -> Tensor:
        """Return the tiers for ``num_kept`` ``[L, S]``: ``[C]``, or in bytes ``[L, S, C]``."""
        of_first = self._tiers(num_kept[:1], guarded)
        if of_first.dim() == 1:
            return of_first  # the same for any number
        slices = key_slices(self.scores)
        tiers = [self._tiers(num_kept[part], guarded).to(torch.uint8) for part in slices]
        return torch.cat(tiers)

    def _sum(self, terms: Callable[[slice], Tensor]) -> Tensor:
        """Return the sum of ``terms(layers)``, float64, over slices of the layers.

        Memory is bounded for any prompt. Prompts that need one slice only, up to some thousand
        tokens, get the bits of one sum over all layers.
        """
        sums = [terms(layers).sum() for layers in key_slices(self.scores)]
        return torch.stack(sums).sum()

    def _kept_masses(self, counts: Tensor, masses: Tensor, layers: slice) -> Tensor:
        """Return the masses of the kept candidates of some layers under a guard, 0 for others.

        float64 ``[layers, S, C]``; ``counts`` are the pages of all layers.
        """
        num_kept = counts[layers, : self.scores.shape[1]] * self.block_size
        keys = ranking_keys(self.scores[layers], self._tiers(num_kept, guarded=True))
        kept = keys >= thresholds(keys, num_kept).unsqueeze(-1)
        return masses[layers, :, : self.prompt.num_candidates].double() * kept

    def _fill(self, counts: Tensor, num_retained: int, guarded: bool) -> Tensor:
        """Return the kept positions of ``num_retained`` blocks, of which a guard may use fewer.

        ``counts`` has the pages of :attr:`heads` only.
        """
        sets = self.own_sets
        scores = self.scores[:, sets]
        present = None if self.present is None else self.present[:, sets]
        num_kept = counts[:, : scores.shape[1]] * self.block_size
        tiers = _left(self._all_tiers(num_kept, guarded), present)
        num_pages = num_retained * counts.numel()
        return select_tokens(scores, tiers, counts, num_pages, self.block_size)


def _left(tiers: Tensor, present: Tensor | None) -> Tensor:
    """Put candidates that an earlier cut dropped below all others."""
    if present is None:
        return tiers
    return torch.where(present, tiers + 1, torch.zeros_like(tiers))


_TEXT_TIER, _SINK_TIER = 4, 8
"""Above the tiers of all retentions, which are below 4."""
