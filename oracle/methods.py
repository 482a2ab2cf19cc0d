# SPDX-License-Identifier: Apache-2.0
"""Every method from its definition: whole attention matrices, loops, float64.

A method is a mix of four parts, each with a name:

    score       attention of one layer or head -> value of each token
    pooling     scores -> scores
    allocation  scores and attention of all layers or heads -> their shares of the pages
    retention   tokens that are kept before all others, whatever their scores

The parts are in `oracle.scores`, `oracle.pooling`, `oracle.allocations` and `oracle.retention`, and
the notation in `oracle.token_sets`; this module names the methods and puts the parts together.
Names that callers need besides are imported here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from oracle.allocations import ALLOCATIONS, EXACT_ALLOCATIONS, Evidence
from oracle.kernels import apportion
from oracle.pooling import NO_POOLING, SNAP, Pool, pooled
from oracle.retention import tiers
from oracle.scores import ROWS_OF_SCORE, SCORES, column_sums
from oracle.token_sets import HEAD, LAYER, Case, Earlier, Layout, States, left, perturbed
from oracle.token_sets import Image as Image
from oracle.token_sets import TokenSet as TokenSet
from oracle.token_sets import rows as rows
from oracle.token_sets import token_sets_of as token_sets_of


@dataclass(frozen=True)
class Mix:
    """A method: names of its parts, granularity and pooling.

    `rows` replaces the row set of the score; `reduce` is "mean" or "max", over the rows.
    """

    score: str
    allocation: str
    retain: str
    granularity: str = LAYER
    pooling: Pool = NO_POOLING
    merge: bool = False
    rows: str | None = None
    reduce: str = "mean"


METHODS = {
    "tgv": Mix("tgv", "tgv", "text_first"),
    "vlcache": Mix("vlcache", "vlcache", "recent_tenth"),
    "aircache": Mix("aircache", "aircache", "text_first"),
    "snapkv": Mix("snapkv", "uniform", "window", HEAD, SNAP),
    "pyramidkv": Mix("snapkv", "pyramid", "window", HEAD, SNAP),
    "adakv": Mix("snapkv", "adakv", "window", HEAD, SNAP),
    "sparsemm": Mix("snapkv", "sparsemm", "window", HEAD, SNAP),
    "reach": Mix(
        "snapkv",
        "uniform",
        "window",
        HEAD,
        Pool("sequence", forward=256, back=1, halve=64),
        rows="latest",
        reduce="max",
    ),
    "rkv": Mix("rkv", "uniform", "recent_8", HEAD),
    "mixkv": Mix("mixkv", "uniform", "window", HEAD),
    "h2o": Mix("h2o", "uniform", "recent_half", HEAD),
    "streaming": Mix("recency", "uniform", "by_score"),
    "prefixkv": Mix("text_rows", "prefixkv", "by_score"),
    "elastic": Mix("text_rows", "uniform", "by_score", merge=True),
    "retentivekv": Mix("retentive_rows", "uniform", "window", HEAD),
    "trimkv": Mix("trimkv", "uniform", "by_score", HEAD),
    "dbtrimkv": Mix("trimkv", "global", "by_score", HEAD),
    "kvzap": Mix("kvzap", "global", "window", HEAD),
    "random": Mix("random", "uniform", "by_score"),
}


@dataclass(frozen=True)
class Auto:
    """Smallest budget that holds `share` of the attention; bounds are fractions of the prompt."""

    share: float
    least: float = 0.02
    most: float = 0.5


@dataclass(frozen=True)
class Settings:
    """Budget and options of an eviction.

    Attributes:
        budget: a float is a fraction of the prompt, an int a number of tokens per head.
        block_size: N.
        granularity, pooling: replace those of the method.
        sinks: number of first positions that are kept before all others.
        observation_window: greatest number of text rows that vote, the last ones.
        floor: least number of pages of every token set.
        ranks: equal parts of the KV heads, in order. Each part has the same number of pages in
            total: none moves to another part. Shares are those of all heads.
        head_scores: [L, Q], for SparseMM.
        lookahead: n, next tokens over which TrimKV averages the retention of a token.
        age_offset: what TrimKV adds to the age of a token, which is 1 for the newest.
    """

    budget: float | int | Auto
    block_size: int = 32
    granularity: str | None = None
    sinks: int = 4
    observation_window: int = 512
    floor: int = 1
    pooling: Pool | None = None
    ranks: int = 1
    head_scores: Tensor | None = None
    lookahead: int = 2
    age_offset: int = 0


@dataclass(frozen=True)
class Selection:
    """Kept part of a prompt with t0 full blocks.

    Attributes:
        kept: bool [L, H, P].
        pages: int [L, H], full pages per (layer, head); t0 if nothing is evicted.
        blocks: retained blocks k; t0 if nothing is evicted.
        scores: float64 [L, S, P], unpooled; NaN for what was evicted before.
    """

    kept: Tensor
    pages: Tensor
    blocks: int
    scores: Tensor | None = None

    @property
    def evicts(self) -> bool:
        """Whether any token is evicted."""
        return not bool(self.kept.all())


def retained_blocks(prompt_tokens: int, block_size: int, budget: float | int) -> int:
    """Return k, the blocks that fit the budget with the tail, at least 1 and at most t0."""
    full_blocks = prompt_tokens // block_size
    tail = prompt_tokens - full_blocks * block_size
    tokens = budget if isinstance(budget, int) else budget * prompt_tokens
    return min(max(1, math.floor((tokens - tail) / block_size)), full_blocks)


def mix_of(method: str | Mix, settings: Settings) -> Mix:
    """Return the method with the granularity and pooling of the settings."""
    mix = METHODS[method] if isinstance(method, str) else method
    return replace(
        mix,
        granularity=settings.granularity or mix.granularity,
        pooling=settings.pooling or mix.pooling,
    )


def select(
    method: str | Mix,
    attention: Tensor,
    layout: Layout,
    kv_heads: int,
    settings: Settings,
    scores: Tensor | None = None,
    stages: Sequence[int] | None = None,
    earlier: Earlier | None = None,
    states: States | None = None,
) -> Selection:
    """Return the part of a prompt that a method keeps.

    Args:
        attention: float64 [L, Q, P, P], softmax over all keys.
        kv_heads: H; query head q belongs to KV head q // (Q / H).
        scores: [L, S, P], unpooled, replacing the method's; for `random`, whose definition does not
            say which numbers are drawn.
        stages: number of layers of each pipeline stage. Each stage shares out its own pages; the
            result has the most blocks of any stage.
        earlier: what a cut while decoding finds; None for the first cut.
        states: queries and keys of all P tokens, for scores that need them.
    """
    mix = mix_of(method, settings)
    evidence = observe(mix, attention, layout, kv_heads, settings, scores, earlier, states)
    parts = [
        choose(mix, part, kv_heads, settings)
        for part in evidence.of_stages(stages or [len(attention)])
    ]
    return Selection(
        torch.cat([part.kept for part in parts]),
        torch.cat([part.pages for part in parts]),
        max(part.blocks for part in parts),
        torch.stack([torch.stack(layer).double() for layer in evidence.raw]),
    )


def observe(
    mix: Mix,
    attention: Tensor,
    layout: Layout,
    kv_heads: int,
    settings: Settings,
    scores: Tensor | None = None,
    earlier: Earlier | None = None,
    states: States | None = None,
) -> Evidence:
    """Return the evidence of all token sets, for any budget; arguments as in `select`."""
    case = Case(
        layout,
        settings.sinks,
        settings.observation_window,
        settings.block_size,
        mix.rows,
        mix.reduce,
        head_scores=settings.head_scores,
        lookahead=settings.lookahead,
        age_offset=settings.age_offset,
    )
    token_sets = token_sets_of(attention, kv_heads, mix.granularity, states)
    if earlier is not None:
        if mix.score == "vv_tt" or mix.allocation == "vv":
            raise ValueError(f"{mix} needs rows of vision, and an answer has none")
        case = replace(case, only=earlier.voters)
        has_sinks = states is not None and states.sinks is not None
        token_sets = [
            [
                left(
                    token_set,
                    earlier.kept[layer, head * kv_heads // len(sets)],
                    earlier.voters,
                    has_sinks,
                )
                for head, token_set in enumerate(sets)
            ]
            for layer, sets in enumerate(token_sets)
        ]
        if earlier.scores is not None:
            num_new = layout.length - earlier.scores.shape[-1]
            carried = functional.pad(earlier.scores.nan_to_num(), (0, num_new))
            token_sets = [
                [
                    replace(token_set, carried=of_set)
                    for token_set, of_set in zip(*sets, strict=True)
                ]
                for sets in zip(token_sets, carried, strict=True)
            ]
    if scores is None:
        raw = [[SCORES[mix.score](token_set, case) for token_set in layer] for layer in token_sets]
    else:
        raw = [list(layer) for layer in scores]
    raw = [
        [
            values if s.alive is None else values.double().masked_fill(~s.alive, math.nan)
            for values, s in zip(layer, sets, strict=True)
        ]
        for layer, sets in zip(raw, token_sets, strict=True)
    ]
    return with_pooling(Evidence(token_sets, raw, raw, [], case, 0), mix.pooling)


def with_pooling(evidence: Evidence, pool: Pool) -> Evidence:
    """Return the evidence with scores that are pooled so."""
    case = evidence.case
    scores = [
        [pooled(values, case.layout, pool, case.sinks) for values in layer]
        for layer in evidence.raw
    ]
    return replace(evidence, scores=scores, pool=pool)


def choose(mix: Mix, evidence: Evidence, kv_heads: int, settings: Settings) -> Selection:
    """Return the part that is kept under the settings' budget."""
    length, size = evidence.case.layout.prompt, settings.block_size
    if mix.pooling != evidence.pool:
        evidence = with_pooling(evidence, mix.pooling)
    if length < size:
        chosen = everything(evidence)
    elif isinstance(settings.budget, Auto):
        chosen = smallest(mix, evidence, settings, settings.budget)
    else:
        blocks = retained_blocks(length, size, settings.budget)
        chosen = everything(evidence)
        if blocks < chosen.blocks:
            chosen = fill(mix, evidence, settings, blocks, text_above=False)
    repeats = kv_heads // chosen.pages.shape[1]
    return Selection(
        chosen.kept.repeat_interleave(repeats, dim=1),
        chosen.pages.repeat_interleave(repeats, dim=1),
        chosen.blocks,
    )


def everything(evidence: Evidence) -> Selection:
    """Return all that earlier cuts left, [L, S, P]."""
    pages = [[s.pages(evidence.case) for s in layer] for layer in evidence.token_sets]
    everywhere = torch.ones(evidence.case.layout.length, dtype=torch.bool)
    kept = [
        torch.stack([everywhere if s.alive is None else s.alive for s in layer])
        for layer in evidence.token_sets
    ]
    counts = torch.tensor(pages)
    return Selection(torch.stack(kept), counts, int(counts.sum()) // counts.numel())


def fill(
    mix: Mix, evidence: Evidence, settings: Settings, blocks: int, text_above: bool
) -> Selection:
    """Return the part that each token set keeps with `blocks` retained blocks, [L, S, P]."""
    case = evidence.case
    kinds = tiers(mix.retain, case, blocks * case.block_size, text_above)
    shares = ALLOCATIONS[mix.allocation](replace(evidence, tiers=kinds, blocks=blocks))
    if evidence.noise and mix.allocation not in EXACT_ALLOCATIONS:
        shares = perturbed(torch.tensor(shares, dtype=torch.float64), evidence.noise).tolist()
    caps = everything(evidence).pages
    pages = torch.zeros_like(caps)
    of_layer = caps.shape[1]
    per_rank = of_layer // settings.ranks if of_layer > 1 else 1
    for first in range(0, of_layer, per_rank):
        heads = slice(first, first + per_rank)
        of_rank = [s for i, s in enumerate(shares) if first <= i % of_layer < first + per_rank]
        counts = apportion(
            of_rank,
            blocks * len(of_rank),
            floor=min(settings.floor, blocks),
            cap=caps[:, heads].flatten().tolist(),
        )
        pages[:, heads] = torch.tensor(counts).view(len(caps), -1)
    kept = everything(evidence).kept
    kept[..., : case.candidates] = False
    for layer, token_set in itertools.product(*map(range, pages.shape)):
        count = int(pages[layer, token_set]) * case.block_size
        kinds = tiers(mix.retain, case, count, text_above)
        scores = evidence.scores[layer][token_set]
        best = evidence.token_sets[layer][token_set].first(scores, kinds, case.candidates)
        kept[layer, token_set, best[:count]] = True
    return Selection(kept, pages, blocks)


def masses(mix: Mix, evidence: Evidence) -> Tensor:
    """Return the attention [L, S, P] that each token gets from the score's rows."""
    case = evidence.case
    observed = case.voters(ROWS_OF_SCORE[mix.score])
    return torch.stack(
        [
            torch.stack([column_sums(v.mean, observed) for v in layer])
            for layer in evidence.token_sets
        ]
    )


def smallest(mix: Mix, evidence: Evidence, settings: Settings, auto: Auto) -> Selection:
    """Return the selection with the fewest blocks that hold the share of attention and all text."""
    length, size = evidence.case.layout.prompt, settings.block_size
    mass = masses(mix, evidence)
    vision = evidence.case.layout.vision
    text = sum(1 for j in range(evidence.case.candidates) if j < settings.sinks or not vision[j])
    most = retained_blocks(length, size, auto.most)
    for blocks in range(retained_blocks(length, size, auto.least), most + 1):
        selection = fill(mix, evidence, settings, blocks, True)
        enough = float((mass * selection.kept).sum()) >= auto.share * float(mass.sum())
        if blocks == most or (enough and blocks * size >= text):
            return selection
    raise AssertionError("bounds out of order")


def is_stable(
    method: str | Mix,
    attention: Tensor,
    layout: Layout,
    kv_heads: int,
    settings: Settings,
    budgets: Sequence[float | int | Auto],
    noise: float = 1e-5,
    trials: int = 6,
    stages: Sequence[int] | None = None,
    earlier: Earlier | None = None,
    states: States | None = None,
) -> bool:
    """Return whether the kept tokens are independent of rounding, for all of the budgets.

    Thresholds, ranks and remainders depend on comparisons. If noise far above the rounding of
    float32 reverses one, the result says nothing about an implementation. Shares get separate
    noise, since noise in the attention does not change shares that come from counts; so do states.
    """
    mix = mix_of(method, settings)
    wanted: list[Tensor] = []
    for trial in range(1 + trials):
        factor = perturbed(torch.ones_like(attention[:, :, :1]), noise)  # one per key
        # A row with one key gives it exactly 1 in any arithmetic, so that heads tie there.
        noisy = attention.where(attention == 1, attention * factor) if trial else attention
        of_trial = states.noisy(noise) if states and trial else states
        evidence = observe(mix, noisy, layout, kv_heads, settings, earlier=earlier, states=of_trial)
        evidence = replace(evidence, noise=noise if trial else 0.0)
        kept = [
            choose(mix, part, kv_heads, replace(settings, budget=b)).kept
            for b in budgets
            for part in evidence.of_stages(stages or [len(attention)])
        ]
        wanted = wanted or kept
        if not all(map(torch.equal, kept, wanted)):
            return False
    return True
