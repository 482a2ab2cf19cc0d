# SPDX-License-Identifier: Apache-2.0
"""Every method from its definition: whole attention matrices, loops, float64.

No code is shared with the plugin. A method is a mix of four parts, each looked up by name:

    score     attention of one layer or head -> what each of its tokens is worth
    pooling   scores -> scores
    allocation all layers or heads -> what each of them is owed, dealt in whole pages
    retention which tokens come before all others, whatever they score

Notation: L layers, Q query heads, H KV heads, P prompt tokens, N tokens per page; C candidates, the
tokens in full pages (those behind are the tail, which always stays); k retained pages per (layer,
head) on average; b = k * N. At granularity "layer" there is one *voter* per layer, at "head" one
per KV head; a voter looks through all query heads of the layer, or through those of its head.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

LAYER = "layer"
HEAD = "head"

WINDOW = 32
"""Positions at the prompt's end that are snapkv's rows, and that `window` keeps."""


@dataclass(frozen=True)
class Pool:
    """How scores are pooled: kind "none", "sequence" or "grid", reduce "max" or "mean"."""

    kind: str = "none"
    kernel: int = 3
    reduce: str = "max"


@dataclass(frozen=True)
class Mix:
    """A method's parts by name, its own granularity and its own pooling."""

    score: str
    allocation: str
    retain: str
    granularity: str = LAYER
    pooling: Pool = Pool()
    merge: bool = False


SNAP = Pool("sequence", 7, "max")
METHODS = {
    "tgv": Mix("tgv", "tgv", "text_first"),
    "vlcache": Mix("vlcache", "vlcache", "recent_tenth"),
    "aircache": Mix("aircache", "aircache", "text_first"),
    "snapkv": Mix("snapkv", "uniform", "window", HEAD, SNAP),
    "pyramidkv": Mix("snapkv", "pyramid", "window", HEAD, SNAP),
    "adakv": Mix("snapkv", "adakv", "window", HEAD, SNAP),
    "h2o": Mix("h2o", "uniform", "recent_half", HEAD),
    "streaming": Mix("recency", "uniform", "by_score"),
    "prefixkv": Mix("text_rows", "prefixkv", "by_score"),
    "elastic": Mix("text_rows", "uniform", "by_score", merge=True),
    "random": Mix("random", "uniform", "by_score"),
}


@dataclass(frozen=True)
class Auto:
    """A budget that holds `share` of the attention; bounds are fractions of the prompt."""

    share: float
    least: float = 0.02
    most: float = 0.5


@dataclass(frozen=True)
class Image:
    """One run of vision positions, with its patch grid (rows, columns) where known."""

    start: int
    length: int
    grid: tuple[int, int] | None = None


@dataclass(frozen=True)
class Layout:
    """A prompt's positions: P, and where its images are, in order."""

    length: int
    images: tuple[Image, ...] = ()

    @cached_property
    def vision(self) -> list[bool]:
        """Return for each position whether it is vision."""
        return [
            any(image.start <= j < image.start + image.length for image in self.images)
            for j in range(self.length)
        ]


@dataclass(frozen=True)
class Settings:
    """What is asked of a method.

    Attributes:
        budget: a float is a fraction of the prompt, an int a number of tokens per head.
        block_size: N.
        sinks: leading positions that are kept before all others.
        window: at most so many text rows vote, the last ones.
        floor: least number of pages of every voter.
        granularity, pooling: instead of the method's own.
    """

    budget: float | int | Auto
    block_size: int = 32
    sinks: int = 4
    window: int = 512
    floor: int = 1
    granularity: str | None = None
    pooling: Pool | None = None


@dataclass(frozen=True)
class Selection:
    """What stays of a prompt.

    Attributes:
        kept: bool [L, H, P].
        pages: int [L, H], full pages per (layer, head) in the compressed region; empty of meaning
            (all equal to t0) when nothing is evicted.
        blocks: retained blocks k; t0 when nothing is evicted.
    """

    kept: Tensor
    pages: Tensor
    blocks: int

    @property
    def evicts(self) -> bool:
        """Return whether anything is evicted."""
        return not bool(self.kept.all())


@dataclass(frozen=True)
class Case:
    """A prompt and what is asked, as the parts see them."""

    layout: Layout
    sinks: int
    window: int
    block_size: int

    @property
    def candidates(self) -> int:
        """Return C."""
        return self.layout.length // self.block_size * self.block_size


@dataclass(frozen=True)
class Voter:
    """One layer or one KV head.

    Attributes:
        heads: float64 [n, P, P], A of each of its query heads.
        mean: float64 [P, P], their mean.
    """

    heads: Tensor
    mean: Tensor


# -- rows -------------------------------------------------------------------------------------


def rows(name: str, layout: Layout, window: int) -> list[int]:
    """Return the positions whose queries vote."""
    vision, last = layout.vision, layout.length - 1
    if name == "all":
        return list(range(layout.length))
    if name == "window":
        return list(range(max(0, layout.length - WINDOW), layout.length))
    if True not in vision:
        return list(range(layout.length))[-window:]
    where = vision.index(True) if name == "text" else last - vision[::-1].index(True)
    return [i for i in range(where, layout.length) if not vision[i]][-window:] or [last]


ROWS_OF_SCORE = {
    "tgv": "text",
    "text_rows": "text",
    "vlcache": "after_vision",
    "aircache": "after_vision",
    "snapkv": "window",
    "h2o": "all",
    "vv_tt": "all",
}


# -- scores -----------------------------------------------------------------------------------


def column_sums(attention: Tensor, rows: Sequence[int]) -> Tensor:
    """Return c [P], c[j] = sum of A[i, j] over the rows i.

    Args:
        attention: float64 [P, P], causal.
    """
    return attention[list(rows)].sum(0)


def tgv_scores(attention: Tensor, rows: Sequence[int], vision: Sequence[bool]) -> Tensor:
    """Return the scores [P]: text-weighted ranking for vision, column sums for text.

    Args:
        attention: float64 [P, P], causal.
        vision: bool [P].
    """
    sums = column_sums(attention, rows)
    weights = [float(sums[j]) / (len(rows) - rank + 1) for rank, j in enumerate(rows, start=1)]
    weighted = sum(w * attention[i] for w, i in zip(weights, rows, strict=True))
    return torch.where(torch.tensor(vision), weighted / sum(weights), sums)


def elite(voter: Voter, instruction: Sequence[int]) -> list[int]:
    """Return E: the instruction tokens that the last of them looks at nearly as much as at one."""
    seen = voter.heads[:, instruction[-1]][:, list(instruction)]  # [n, T']
    attention = (seen / seen.sum(1, keepdim=True)).mean(0).tolist()
    highest = max(attention)
    return [j for j, a in zip(instruction, attention, strict=True) if a >= 0.9 * highest]


def aircache_scores(voter: Voter, case: Case) -> Tensor:
    """Return vision scores by the elite's own softmax over vision and elite; text: the last row."""
    vision = case.layout.vision
    instruction = rows("after_vision", case.layout, case.window)
    experts = elite(voter, instruction)
    total = torch.zeros(case.layout.length, dtype=torch.float64)
    for i in experts:
        keys = [j for j in range(i + 1) if vision[j] or j in experts]
        for head in voter.heads:
            row = head[i, keys]
            total[keys] += row / row.sum() / len(voter.heads) / len(experts)
    plain = voter.mean[instruction[-1]]
    return torch.where(torch.tensor(vision), total, plain)


def vv_tt_scores(voter: Voter, case: Case) -> Tensor:
    """Return column sums over the rows of the token's own modality."""
    vision = torch.tensor(case.layout.vision)
    return torch.where(vision, voter.mean[vision].sum(0), voter.mean[~vision].sum(0))


def summed(name: str) -> Callable[[Voter, Case], Tensor]:
    """Return the score that is the column sum over the rows of that name."""
    return lambda voter, case: column_sums(voter.mean, rows(name, case.layout, case.window))


SCORES: dict[str, Callable[[Voter, Case], Tensor]] = {
    "tgv": lambda voter, case: tgv_scores(
        voter.mean, rows("text", case.layout, case.window), case.layout.vision
    ),
    "text_rows": summed("text"),
    "vlcache": summed("after_vision"),
    "snapkv": summed("window"),
    "h2o": summed("all"),
    "aircache": aircache_scores,
    "vv_tt": vv_tt_scores,
    "recency": lambda voter, case: torch.arange(case.layout.length, dtype=torch.float64),
}


def runs(layout: Layout) -> list[int]:
    """Return the number of the run each position is in: an image, or text between images."""
    number, result, vision = 0, [], layout.vision
    starts = {image.start for image in layout.images}
    for j in range(layout.length):
        if j in starts or (j > 0 and vision[j] != vision[j - 1]):
            number += 1
        result.append(number)
    return result


def neighbours(layout: Layout, pool: Pool) -> list[list[int]]:
    """Return the positions each position is pooled with, itself included."""
    reach, everything = pool.kernel // 2, range(layout.length)
    if pool.kind == "sequence":
        run = runs(layout)
        return [
            [i for i in range(j - reach, j + reach + 1) if i in everything and run[i] == run[j]]
            for j in everything
        ]
    near = [[j] for j in everything]
    if pool.kind == "grid":
        for image in layout.images:
            assert image.grid is not None
            patches = [divmod(n, image.grid[1]) for n in range(image.length)]
            for n, (row, column) in enumerate(patches):
                near[image.start + n] = [
                    image.start + m
                    for m, (r, c) in enumerate(patches)
                    if abs(r - row) <= reach and abs(c - column) <= reach
                ]
    return near


def pooled(scores: Tensor, layout: Layout, pool: Pool) -> Tensor:
    """Return the scores [P] after pooling."""
    groups = [[float(scores[i]) for i in near] for near in neighbours(layout, pool)]
    return torch.tensor(
        [max(group) if pool.reduce == "max" else sum(group) / len(group) for group in groups],
        dtype=torch.float64,
    )


# -- retention --------------------------------------------------------------------------------


def tiers(retain: str, case: Case, count: int, text_above: bool = False) -> list[int]:
    """Return the tier of every position, higher first, for a voter that keeps `count` candidates.

    Args:
        retain: name of the retention.
        text_above: whether text comes before all but sinks, whatever the retention says.
    """
    length, vision = case.layout.length, case.layout.vision
    tail = length - case.candidates
    recent = {
        "window": WINDOW,
        "recent_half": (count + tail) // 2,
        "recent_tenth": (count + tail) // 10,
    }
    is_preferred: dict[str, Callable[[int], bool]] = {
        "text_first": lambda j: not vision[j],
        "vision_first": lambda j: vision[j],
        "by_score": lambda j: False,
        "window": lambda j: j >= length - recent["window"],
        "recent_half": lambda j: j >= length - recent["recent_half"],
        "recent_tenth": lambda j: j >= length - recent["recent_tenth"],
    }
    prefers = is_preferred[retain]
    return [
        9 if j < case.sinks else prefers(j) + (2 if text_above and not vision[j] else 0)
        for j in range(length)
    ]


def order(scores: Tensor, tiers: Sequence[int], candidates: int) -> list[int]:
    """Return the candidates, best first: higher tier, then higher score, then lower position."""
    values = scores.tolist()
    return sorted(range(candidates), key=lambda j: (-tiers[j], -values[j], j))


def retained_positions(
    scores: Tensor, vision: Tensor, candidates: int, count: int, sinks: int
) -> list[int]:
    """Return the `count` best of the first `candidates` positions, text first.

    Sinks come first, then text, then vision; then the higher score, then the lower position.

    Args:
        scores: float64 [P].
        vision: bool [P].
    """
    kinds = [2 if j < sinks else 0 if vision[j] else 1 for j in range(len(vision))]
    return order(scores, kinds, candidates)[:count]


# -- allocations -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Votes:
    """What allocations look at: voters of all layers, [L][V], and what they found.

    Attributes:
        raw, scores: scores [P] before and after pooling, [L][V].
        tiers: of the retention where every voter keeps b candidates.
        blocks: k.
        noise: relative change of shares that are real numbers, see `is_stable`.
        depth: the first of these layers among the model's, and how many the model has; None if
            they are all.
    """

    voters: list[list[Voter]]
    raw: list[list[Tensor]]
    scores: list[list[Tensor]]
    tiers: list[int]
    case: Case
    blocks: int
    noise: float = 0.0
    depth: tuple[int, int] | None = None

    def of_stages(self, stages: Sequence[int]) -> list[Votes]:
        """Return the votes of pipeline stages with so many layers each, which share nothing."""
        ends = list(itertools.accumulate(stages))
        parts = [slice(end - size, end) for end, size in zip(ends, stages, strict=True)]
        return [
            replace(
                self,
                voters=self.voters[part],
                raw=self.raw[part],
                scores=self.scores[part],
                depth=(part.start, ends[-1]),
            )
            for part in parts
        ]

    @property
    def budget(self) -> int:
        """Return b."""
        return self.blocks * self.case.block_size

    def each(self, strength: Callable[[Voter], float]) -> list[float]:
        """Return the strength of each voter, in order."""
        return [strength(voter) for layer in self.voters for voter in layer]


def block_of(rows_name: str, columns_are_vision: bool) -> Callable[[Votes], list[float]]:
    """Return the allocation that sums A over some rows and one modality's columns."""

    def shares(votes: Votes) -> list[float]:
        layout = votes.case.layout
        columns = [j for j, v in enumerate(layout.vision) if v == columns_are_vision]
        if rows_name == "vision":
            picked = [i for i, v in enumerate(layout.vision) if v]
        else:
            picked = rows(rows_name, layout, votes.case.window)
        return votes.each(lambda voter: float(voter.mean[picked][:, columns].sum()))

    return shares


def vlcache_shares(votes: Votes) -> list[float]:
    """Return layer shares by how few entries of the rows are negligible."""
    observed = rows("after_vision", votes.case.layout, votes.case.window)

    def density(voter: Voter) -> float:
        densities = []
        for head in voter.heads:
            seen = [head[i, : i + 1].tolist() for i in observed]
            negligible = 0
            for row in seen:
                least = 0.01 * max(row)
                negligible += sum(a < least for a in row)
            densities.append(1 - negligible / sum(map(len, seen)))
        return sum(densities) / len(densities)

    dense = votes.each(density)
    fraction = votes.budget / votes.case.candidates
    return [min(max(d / sum(dense) * fraction * len(dense), 0.01), 1.0) for d in dense]


def skewness(values: Sequence[float]) -> float:
    """Return the population skewness, 0 for equal values."""
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
    if deviation <= 1e-12 * abs(mean):
        return 0.0
    return sum(((v - mean) / deviation) ** 3 for v in values) / len(values)


def aircache_shares(votes: Votes) -> list[float]:
    """Return the text and a share of what is left of the budget, by strength and skewness."""
    case = votes.case
    vision = [j for j, v in enumerate(case.layout.vision) if v]
    text = case.candidates - sum(1 for j in vision if j < case.candidates)
    values = [[float(s) for s in raw[vision]] for layer in votes.raw for raw in layer]
    strength = [sum(v) for v in values]
    skew = [max(0.0, skewness(v)) if v else 0.0 for v in values]

    def normalised(numbers: list[float]) -> list[float]:
        total = sum(numbers)
        return [n / total if total > 0 else 1 / len(numbers) for n in numbers]

    of_vision = normalised(strength)
    if sum(skew) > 0:
        of_vision = [(s + k) / 2 for s, k in zip(of_vision, normalised(skew), strict=True)]
    left = max(votes.budget - text, 0)
    return [text + v * len(values) * left for v in of_vision]


def pyramid_shares(votes: Votes) -> list[float]:
    """Return shares that fall linearly with depth, from 2 - 1/20 to 1/20."""
    first, layers = votes.depth or (0, len(votes.voters))
    high, low = 2 - 1 / 20, 1 / 20
    return [
        high - (high - low) * layer / (layers - 1) if layers > 1 else 1.0
        for layer, voters in enumerate(votes.voters, first)
        for _ in voters
    ]


def adakv_shares(votes: Votes) -> list[float]:
    """Return how many tokens of each head are among the best of all heads of its layer."""
    certain = math.floor(0.2 * votes.budget)
    result: list[float] = []
    for scores in votes.scores:
        ranks = []
        for head, values in enumerate(scores):
            best = order(values, votes.tiers, votes.case.candidates)
            for place, j in enumerate(best):
                ranks.append((place >= certain, -votes.tiers[j], -float(values[j]), j, head))
        ranks.sort()
        counts = [0] * len(scores)
        for *_, head in ranks[: votes.budget * len(scores)]:
            counts[head] += 1
        result += counts
    return result


def prefixkv_shares(votes: Votes) -> list[float]:
    """Return how many tokens each voter needs for the one share of its scores that all get.

    A voter needs its (m+1)-th token as soon as the share exceeds what m tokens hold; so the
    b * M first steps of all M voters are taken. Tokens that score 0 are never needed.
    """
    steps = []
    candidates = votes.case.candidates
    voters = list(itertools.chain(*votes.scores))
    for number, scores in enumerate(voters):
        values = scores[:candidates].sort(descending=True).values
        held = (values / values.sum()).cumsum(0).tolist()
        needed = int((values > 0).sum())
        steps += [(before, number) for before in [0.0, *held][:needed]]
    steps.sort()
    counts = [0.0] * len(voters)
    for _, number in steps[: votes.budget * len(voters)]:
        counts[number] += 1
    return counts


def entropy_shares(votes: Votes) -> list[float]:
    """Return e to the mean entropy of the text rows: how many tokens a head really looks at."""
    observed = rows("text", votes.case.layout, votes.case.window)

    def entropy(probabilities: Tensor) -> float:
        return float(torch.special.entr(probabilities).sum())

    def spread(voter: Voter) -> float:
        entropies = [entropy(head[i]) for head in voter.heads for i in observed]
        return math.exp(sum(entropies) / len(entropies))

    return votes.each(spread)


ALLOCATIONS: dict[str, Callable[[Votes], list[float]]] = {
    "uniform": lambda votes: votes.each(lambda voter: 1.0),
    "tgv": block_of("text", True),
    "vv": block_of("vision", True),
    "tt": block_of("text", False),
    "vlcache": vlcache_shares,
    "aircache": aircache_shares,
    "pyramid": pyramid_shares,
    "adakv": adakv_shares,
    "prefixkv": prefixkv_shares,
    "entropy": entropy_shares,
}


EXACT_ALLOCATIONS = {"uniform", "pyramid", "adakv", "prefixkv"}
"""Their shares are equal or whole numbers, or come from no attention at all."""


def retained_blocks(prompt_tokens: int, block_size: int, budget: float | int) -> int:
    """Return k, the blocks that fit the budget beside the tail, at least 1 and at most t0."""
    full_blocks = prompt_tokens // block_size
    tail = prompt_tokens - full_blocks * block_size
    tokens = budget if isinstance(budget, int) else budget * prompt_tokens
    return min(max(1, math.floor((tokens - tail) / block_size)), full_blocks)


def water_fill(shares: Sequence[float], total: int, floor: int, cap: int) -> list[float]:
    """Return x with x[p] = clip(level * shares[p], floor, cap) that sums to `total`.

    Places of share 0 stay at the floor unless all others are full; what is then left is spread
    evenly over them.
    """

    def at(level: float) -> list[float]:
        return [min(max(level * share, floor), cap) for share in shares]

    positive = [p for p, share in enumerate(shares) if share > 0]
    zero = [p for p, share in enumerate(shares) if share <= 0]
    if len(positive) * cap + len(zero) * floor <= total:
        rest = total - len(positive) * cap
        return [float(cap) if share > 0 else rest / len(zero) for share in shares]
    low, high = 0.0, cap / min(shares[p] for p in positive)
    for _ in range(200):
        level = (low + high) / 2
        if level in (low, high):
            break
        low, high = (level, high) if sum(at(level)) < total else (low, level)
    return at(high)


def deal(shares: Sequence[float], total: int, floor: int, cap: int) -> list[int]:
    """Return whole units for the shares: water filling, then largest remainders.

    Ties go to the lower index, remainders within 2^-32 being ties; the units sum to `total`.
    """
    grid = 2.0**32
    real = [round(x * grid) / grid for x in water_fill(shares, total, floor, cap)]
    units = [math.floor(x) for x in real]
    by_remainder = sorted(range(len(real)), key=lambda p: (units[p] - real[p], p))
    while sum(units) < total:
        for p in by_remainder:
            if sum(units) < total and units[p] < cap:
                units[p] += 1
    return units


# -- a method ---------------------------------------------------------------------------------


def mix_of(method: str | Mix, settings: Settings) -> Mix:
    """Return the method's parts, with the settings' granularity and pooling."""
    mix = METHODS[method] if isinstance(method, str) else method
    return replace(
        mix,
        granularity=settings.granularity or mix.granularity,
        pooling=settings.pooling or mix.pooling,
    )


def voters_of(attention: Tensor, kv_heads: int, granularity: str) -> list[list[Voter]]:
    """Return the voters [L][1 or H].

    Args:
        attention: float64 [L, Q, P, P]; query head q belongs to KV head q // (Q / H).
    """
    number = 1 if granularity == LAYER else kv_heads
    return [
        [Voter(heads, heads.mean(0)) for heads in layer.chunk(number)]
        for layer in attention.double()
    ]


def select(
    method: str | Mix,
    attention: Tensor,
    layout: Layout,
    kv_heads: int,
    settings: Settings,
    scores: Tensor | None = None,
    stages: Sequence[int] | None = None,
) -> Selection:
    """Return what a method keeps of a prompt.

    Args:
        attention: float64 [L, Q, P, P], softmax over all keys.
        kv_heads: H; query head q belongs to KV head q // (Q / H).
        scores: [L, 1 or H, P], unpooled, instead of the method's own; for `random`, whose
            definition does not say which numbers are drawn.
        stages: layers of each pipeline stage, where there are several. Each deals by itself; the
            blocks are the most that one of them retains.
    """
    mix = mix_of(method, settings)
    votes = look(mix, attention, layout, kv_heads, settings, scores)
    parts = [
        choose(mix, part, kv_heads, settings)
        for part in votes.of_stages(stages or [len(attention)])
    ]
    return Selection(
        torch.cat([part.kept for part in parts]),
        torch.cat([part.pages for part in parts]),
        max(part.blocks for part in parts),
    )


def look(
    mix: Mix,
    attention: Tensor,
    layout: Layout,
    kv_heads: int,
    settings: Settings,
    scores: Tensor | None = None,
) -> Votes:
    """Return what all voters find, for any budget; arguments as in `select`."""
    case = Case(layout, settings.sinks, settings.window, settings.block_size)
    voters = voters_of(attention, kv_heads, mix.granularity)
    if scores is None:
        raw = [[SCORES[mix.score](voter, case) for voter in layer] for layer in voters]
    else:
        raw = [list(layer) for layer in scores]
    found = [[pooled(values, layout, mix.pooling) for values in layer] for layer in raw]
    return Votes(voters, raw, found, [], case, 0)


def choose(mix: Mix, votes: Votes, kv_heads: int, settings: Settings) -> Selection:
    """Return what is kept under the settings' budget."""
    length, size = votes.case.layout.length, settings.block_size
    shape = (len(votes.voters), kv_heads)
    kept = torch.ones(*shape, length, dtype=torch.bool)
    everything = Selection(kept, torch.full(shape, length // size), length // size)
    if length < size:
        return everything
    if isinstance(settings.budget, Auto):
        chosen = smallest(mix, votes, settings, settings.budget)
    else:
        blocks = retained_blocks(length, size, settings.budget)
        if blocks >= length // size:
            return everything
        chosen = fill(mix, votes, settings, blocks, text_above=False)
    repeats = kv_heads // chosen.pages.shape[1]
    return Selection(
        chosen.kept.repeat_interleave(repeats, dim=1),
        chosen.pages.repeat_interleave(repeats, dim=1),
        chosen.blocks,
    )


def fill(mix: Mix, votes: Votes, settings: Settings, blocks: int, text_above: bool) -> Selection:
    """Return what each voter keeps with `blocks` retained blocks, [L, V, P]."""
    case = votes.case
    kinds = tiers(mix.retain, case, blocks * case.block_size, text_above)
    shares = ALLOCATIONS[mix.allocation](replace(votes, tiers=kinds, blocks=blocks))
    if votes.noise and mix.allocation not in EXACT_ALLOCATIONS:
        shares = shaken(torch.tensor(shares, dtype=torch.float64), votes.noise).tolist()
    units = deal(
        equal_if_hopeless(shares),
        blocks * len(shares),
        floor=min(settings.floor, blocks),
        cap=case.candidates // case.block_size,
    )
    pages = torch.tensor(units).view(len(votes.voters), -1)
    kept = torch.ones(*pages.shape, case.layout.length, dtype=torch.bool)
    kept[..., : case.candidates] = False
    for layer, voter in itertools.product(*map(range, pages.shape)):
        count = int(pages[layer, voter]) * case.block_size
        kinds = tiers(mix.retain, case, count, text_above)
        best = order(votes.scores[layer][voter], kinds, case.candidates)[:count]
        kept[layer, voter, best] = True
    return Selection(kept, pages, blocks)


def masses(mix: Mix, votes: Votes) -> Tensor:
    """Return the attention [L, V, P] that each token got from the score's own rows."""
    case = votes.case
    observed = rows(ROWS_OF_SCORE[mix.score], case.layout, case.window)
    return torch.stack(
        [torch.stack([column_sums(v.mean, observed) for v in layer]) for layer in votes.voters]
    )


def smallest(mix: Mix, votes: Votes, settings: Settings, auto: Auto) -> Selection:
    """Return what is kept with the fewest blocks that hold the share of the attention, and text."""
    length, size = votes.case.layout.length, settings.block_size
    mass = masses(mix, votes)
    vision = votes.case.layout.vision
    text = sum(1 for j in range(votes.case.candidates) if j < settings.sinks or not vision[j])
    most = retained_blocks(length, size, auto.most)
    for blocks in range(retained_blocks(length, size, auto.least), most + 1):
        selection = fill(mix, votes, settings, blocks, True)
        enough = float((mass * selection.kept).sum()) >= auto.share * float(mass.sum())
        if blocks == most or (enough and blocks * size >= text):
            return selection
    raise AssertionError("bounds out of order")


def causal_attention(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Return A of one layer, float64 [Q, P, P], from queries [P, H, G, D] and keys [P, H, D]."""
    logits = torch.einsum("ihgd,jhd->hgij", queries.double(), keys.double()) * scale
    future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(future, -math.inf).softmax(-1).flatten(0, 1)


def equal_if_hopeless(shares: list[float]) -> list[float]:
    """Return equal shares where none is positive or one is no number."""
    hopeless = not all(map(math.isfinite, shares)) or max(shares) <= 0
    return [1.0] * len(shares) if hopeless else shares


def merge_targets(kept: Sequence[bool], candidates: int) -> list[int]:
    """Return the kept candidate each candidate ends up in; a kept one is its own.

    An evicted one goes to the nearest by position, to the lower of two.
    """
    places = [j for j in range(candidates) if kept[j]]
    return [min(places, key=lambda p: (abs(p - j), p)) for j in range(candidates)]


def merged(states: Tensor, kept: Sequence[bool], candidates: int) -> Tensor:
    """Return keys or values [P, D] of one head, kept ones being means over what they took in."""
    result = states.clone()
    # A head that keeps no candidate has nothing to merge into.
    targets = merge_targets(kept, candidates) if any(kept[:candidates]) else []
    for place in set(targets):
        result[place] = states[[j for j, t in enumerate(targets) if t == place]].mean(0)
    return result


def shaken(values: Tensor, noise: float) -> Tensor:
    """Return values with a relative change of at most `noise`, each its own."""
    return values * (1 + noise * (2 * torch.rand(values.shape, dtype=torch.float64) - 1))


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
) -> bool:
    """Return whether rounding cannot change what is kept, under any of the budgets.

    Thresholds, ranks and remainders are decided by comparisons; those that noise far above the
    rounding of float32 turns over say nothing about an implementation. Shares get noise of their
    own: those that come from counts would be the same under any in the attention.
    """
    mix = mix_of(method, settings)
    wanted: list[Tensor] = []
    for trial in range(1 + trials):
        factor = shaken(torch.ones_like(attention[:, :, :1]), noise)  # one for a key's column
        noisy = attention * factor if trial else attention
        votes = look(mix, noisy, layout, kv_heads, settings)
        votes = replace(votes, noise=noise if trial else 0.0)
        kept = [
            choose(mix, part, kv_heads, replace(settings, budget=b)).kept
            for b in budgets
            for part in votes.of_stages(stages or [len(attention)])
        ]
        wanted = wanted or kept
        if not all(map(torch.equal, kept, wanted)):
            return False
    return True
