# SPDX-License-Identifier: Apache-2.0
"""Every method from its definition: whole attention matrices, loops, float64.

A method is a mix of four parts, each with a name:

    score       attention of one layer or head -> value of each token
    pooling     scores -> scores
    allocation  scores and attention of all layers or heads -> their shares of the pages
    retention   tokens that are kept before all others, whatever their scores

Notation: L layers, Q query heads, H KV heads, P prompt tokens, N tokens per page; C candidates, the
tokens in full pages (the tokens after them are the tail, which is always kept); k retained pages
per (layer, head) on average; b = k * N. S token sets per layer: one at granularity "layer", whose
attention is that of all query heads; one per KV head at "head".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from oracle import decoding
from oracle.kernels import apportion, ranking

LAYER = "layer"
HEAD = "head"

WINDOW = 32
"""Positions at the end of the prompt: SnapKV's rows, and the tokens that `window` keeps."""


@dataclass(frozen=True)
class Pool:
    """Pooling of scores: kind "none", "sequence" or "grid", reduce "max" or "mean".

    Over the `kernel` nearest; or, with `forward` or `back`, position j over positions
    j - forward .. j + back of its run, where text is pooled by "sequence" alone. `forward_share`
    bounds `forward` by a share of the tokens that a head keeps on average. With `halve`, a score
    weighs half for every `halve` positions that it counts forward.
    """

    kind: str = "none"
    kernel: int = 3
    reduce: str = "max"
    forward: int | None = None
    back: int | None = None
    forward_share: float | None = None
    halve: int | None = None

    @property
    def has_direction(self) -> bool:
        return self.forward is not None or self.back is not None

    def within(self, count: int) -> Pool:
        """Return the pooling of a cut that keeps `count` tokens per head."""
        if self.forward_share is None:
            return self
        assert self.forward is not None
        bound = math.floor(self.forward_share * count)
        return replace(self, forward=min(self.forward, bound), forward_share=None)


@dataclass(frozen=True)
class Mix:
    """A method: names of its parts, granularity and pooling.

    `rows` replaces the row set of the score; `reduce` is "mean" or "max", over the rows.
    """

    score: str
    allocation: str
    retain: str
    granularity: str = LAYER
    pooling: Pool = Pool()
    merge: bool = False
    rows: str | None = None
    reduce: str = "mean"


SNAP = Pool("sequence", 7, "max")
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
class Image:
    """A run of vision positions, with its patch grid (rows, columns) if known."""

    start: int
    length: int
    grid: tuple[int, int] | None = None


@dataclass(frozen=True)
class Layout:
    """Positions of a prompt: its length P, and its images in order.

    `answer` counts the last of the P positions that are no prompt: the answer's first tokens, where
    eviction waits for some.
    """

    length: int
    images: tuple[Image, ...] = ()
    answer: int = 0

    @property
    def prompt(self) -> int:
        """Number of tokens of the prompt itself."""
        return self.length - self.answer

    @cached_property
    def vision(self) -> list[bool]:
        """Whether each position is vision."""
        return [
            any(image.start <= j < image.start + image.length for image in self.images)
            for j in range(self.length)
        ]


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
    """

    kept: Tensor
    pages: Tensor
    blocks: int

    @property
    def evicts(self) -> bool:
        """Whether any token is evicted."""
        return not bool(self.kept.all())


@dataclass(frozen=True)
class Earlier:
    """State that earlier cuts leave for a cut while decoding.

    Attributes:
        kept: bool [L, H, P], the keys that each head still has; P counts the answer.
        voters: positions of the rows that vote, whatever row sets the method names.
    """

    kept: Tensor
    voters: tuple[int, ...]


@dataclass(frozen=True)
class States:
    """Queries and keys, for scores that need more than attention.

    Attributes:
        queries: [L, Q, P, D], rotated.
        keys: [L, H, P, D], rotated.
        scale: factor of the products.
        values: [L, H, P, D], for scores that look at values.
        gates: outputs of the gates, float64 [L, H, P].
    """

    queries: Tensor
    keys: Tensor
    scale: float
    values: Tensor | None = None
    gates: Tensor | None = None

    def of_head(self, layer: int, head: int) -> HeadStates:
        """Return the states of one KV head and of the query heads of its group."""
        group = self.queries.shape[1] // self.keys.shape[1]
        queries = self.queries[layer, head * group : (head + 1) * group]
        values = None if self.values is None else self.values[layer, head]
        gates = None if self.gates is None else self.gates[layer, head]
        queries = queries.transpose(0, 1)
        return HeadStates(queries, self.keys[layer, head], self.scale, values, gates)

    def noisy(self, noise: float) -> States:
        """Return states with random relative changes of at most `noise`."""
        queries, keys = self.queries.double(), self.keys.double()
        values = None if self.values is None else perturbed(self.values.double(), noise)
        gates = None if self.gates is None else perturbed(self.gates, noise)
        return States(perturbed(queries, noise), perturbed(keys, noise), self.scale, values, gates)


@dataclass(frozen=True)
class HeadStates:
    """Queries [P, G, D] of a KV head's group, its keys and values [P, D], the factor of the
    products of queries and keys, and what the gate said of each token [P]."""

    queries: Tensor
    keys: Tensor
    scale: float
    values: Tensor | None = None
    gates: Tensor | None = None


@dataclass(frozen=True)
class Case:
    """A prompt and the options of its eviction, as the parts see them.

    `score_rows` and `reduce` are those of the mix. `only` are the rows that vote in a cut while
    decoding, whatever row set is named.
    """

    layout: Layout
    sinks: int
    observation_window: int
    block_size: int
    score_rows: str | None = None
    reduce: str = "mean"
    only: tuple[int, ...] | None = None
    head_scores: Tensor | None = None
    lookahead: int = 2
    age_offset: int = 0

    @property
    def candidates(self) -> int:
        """C."""
        return self.layout.prompt // self.block_size * self.block_size

    def voters(self, name: str) -> list[int]:
        """Return the rows of a score whose own row set is `name`."""
        return self.rows(self.score_rows or name)

    def rows(self, name: str) -> list[int]:
        """Return the positions of the row set `name`."""
        if self.only is not None:
            return list(self.only)
        return rows(name, self.layout, self.observation_window)


@dataclass(frozen=True)
class TokenSet:
    """A layer or a KV head.

    Attributes:
        heads: float64 [n, P, P], A of each of its query heads.
        mean: float64 [P, P], their mean.
        alive: bool [P], the keys that earlier cuts left; None if there was no cut.
        states: of a KV head, where they are given.
    """

    heads: Tensor
    mean: Tensor
    alive: Tensor | None = None
    states: HeadStates | None = None

    def has(self, j: int) -> bool:
        """Return whether the key at position j was not evicted before."""
        return self.alive is None or bool(self.alive[j])

    def first(self, scores: Tensor, kinds: Sequence[int], candidates: int) -> list[int]:
        """Return the candidates that are left, best first."""
        return [j for j in ranking(scores, kinds, candidates) if self.has(j)]

    def pages(self, case: Case) -> int:
        """Return the number of pages that the candidates which are left fill."""
        return sum(self.has(j) for j in range(case.candidates)) // case.block_size


# -- rows -------------------------------------------------------------------------------------


def rows(name: str, layout: Layout, observation_window: int) -> list[int]:
    """Return the positions of the row set `name`; the answer's tokens are in each of them."""
    everything, answer = list(range(layout.prompt)), list(range(layout.prompt, layout.length))
    vision, last = layout.vision[: layout.prompt], layout.prompt - 1
    if name == "answer":
        return answer
    if name == "all":
        return everything + answer
    if name == "latest" and answer:
        return answer
    if name in ("window", "latest"):
        return everything[-WINDOW:] + answer
    if True not in vision:
        return everything[-observation_window:] + answer
    where = vision.index(True) if name == "text" else last - vision[::-1].index(True)
    text = [i for i in everything[where:] if not vision[i]]
    return (text[-observation_window:] or [last]) + answer


ROWS_OF_SCORE = {
    "tgv": "text",
    "text_rows": "text",
    "vlcache": "after_vision",
    "aircache": "after_vision",
    "snapkv": "window",
    "rkv": "window",
    "mixkv": "window",
    "h2o": "all",
    "vv_tt": "all",
    "retentive_rows": "text",
    "retentive_spread": "text",
    "trimkv_votes": "text",
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


def elite(token_set: TokenSet, instruction: Sequence[int]) -> list[int]:
    """Return E: the instruction tokens that get nearly the most attention of the last one."""
    seen = token_set.heads[:, instruction[-1]][:, list(instruction)]  # [n, T']
    attention = (seen / seen.sum(1, keepdim=True)).mean(0).tolist()
    highest = max(attention)
    return [j for j, a in zip(instruction, attention, strict=True) if a >= 0.9 * highest]


def aircache_scores(token_set: TokenSet, case: Case) -> Tensor:
    """Return the elite's softmax over vision and elite for vision, the last row for text."""
    vision = case.layout.vision
    instruction = case.voters("after_vision")
    experts = elite(token_set, instruction)
    total = torch.zeros(case.layout.length, dtype=torch.float64)
    for i in experts:
        keys = [j for j in range(i + 1) if vision[j] or j in experts]
        for head in token_set.heads:
            row = head[i, keys]
            total[keys] += row / row.sum() / len(token_set.heads) / len(experts)
    plain = token_set.mean[instruction[-1]]
    return torch.where(torch.tensor(vision), total, plain)


def vv_tt_scores(token_set: TokenSet, case: Case) -> Tensor:
    """Return column sums over the rows of the token's own modality."""
    vision = torch.tensor(case.layout.vision)
    return torch.where(vision, token_set.mean[vision].sum(0), token_set.mean[~vision].sum(0))


def voted(name: str) -> Callable[[TokenSet, Case], Tensor]:
    """Return the score that sums each column over a row set, or takes its maximum."""

    def scores(token_set: TokenSet, case: Case) -> Tensor:
        observed = token_set.mean[case.voters(name)]
        if case.reduce == "mean":
            return observed.sum(0)
        return torch.stack([max(column) for column in observed.T])

    return scores


def rkv_scores(token_set: TokenSet, case: Case) -> Tensor:
    """Return R-KV's scores of the keys that are left; importance of the window itself is 0.

    The window are the last 8 rows that vote, or fewer.
    """
    states = token_set.states
    if states is None:
        raise ValueError(
            "R-KV needs the queries and keys of each KV head: granularity head, states"
        )
    window = case.voters("window")[-decoding.WINDOW :]
    left = [j for j in range(case.layout.length) if token_set.has(j)]
    if left[-len(window) :] != window:
        raise ValueError(f"the window {window} are not the last keys {left[-len(window) :]}")
    keys = states.keys[left]
    found = -(1 - decoding.MIX) * decoding.redundancy(keys)
    past = len(left) - len(window)
    if past > 0:
        important = decoding.importance(states.queries[window], keys, states.scale)
        found[:past] += decoding.MIX * important
    scores = torch.zeros(case.layout.length, dtype=torch.float64)
    scores[left] = found
    return scores


def mixkv_scores(token_set: TokenSet, case: Case) -> Tensor:
    """Return MixKV's scores of the keys that are left.

    Importance is the attention of the window, pooled as in SnapKV, and the norm of the value;
    diversity is the mean cosine to all other keys, with its sign changed. The last two are mapped
    to 0 .. 1 and brought to the mean of the first, by the keys before the window. The weight of
    diversity is the mean cosine of all pairs of keys.
    """
    states = token_set.states
    if states is None or states.values is None:
        raise ValueError("MixKV needs the keys and values of each KV head: granularity head")
    window = case.voters("window")
    left = [j for j in range(case.layout.length) if token_set.has(j)]
    past = [j for j in left if j < window[0]]
    sums = column_sums(token_set.mean, window)
    if token_set.alive is not None:
        sums = sums.masked_fill(~token_set.alive, math.nan)
    attention = pooled(sums, case.layout, SNAP).tolist()
    cosines = dict(zip(left, mean_cosines(states.keys[left]), strict=True))
    norms = {j: math.sqrt(sum(x * x for x in states.values[j].tolist())) for j in left}
    weight = max(0.0, sum(cosines.values()) / len(left))
    unlike = {j: -c for j, c in cosines.items()}
    mean = sum(attention[j] for j in past) / max(1, len(past))
    of_value, of_key = scaled(norms, past, mean), scaled(unlike, past, mean)
    scores = torch.zeros(case.layout.length, dtype=torch.float64)
    for j in left:
        scores[j] = (1 - weight) * (attention[j] + of_value[j]) + weight * of_key[j]
    return scores


def mean_cosines(keys: Tensor) -> list[float]:
    """Return each key's mean cosine to all other keys, of [n, D]; 0 for a single key."""
    directions = keys.double() / keys.double().norm(dim=-1, keepdim=True)
    means = []
    for j, row in enumerate(directions @ directions.T):
        others = [c for i, c in enumerate(row.tolist()) if i != j]
        means.append(sum(others) / len(others) if others else 0.0)
    return means


def scaled(values: dict[int, float], past: Sequence[int], mean: float) -> dict[int, float]:
    """Return values mapped to 0 .. 1, and then to the given mean, by those of the past.

    Other values are bounded by the results 0 and 1 of the first step. Zero if all are equal.
    """
    of_past = [values[j] for j in past]
    if not of_past or max(of_past) == min(of_past):
        return dict.fromkeys(values, 0.0)
    low, high = min(of_past), max(of_past)
    unit = {j: min(max((v - low) / (high - low), 0.0), 1.0) for j, v in values.items()}
    factor = mean / (sum(unit[j] for j in past) / len(past))
    return {j: v * factor for j, v in unit.items()}


def gates_of(token_set: TokenSet) -> list[float]:
    """Return what the gate of a KV head said of each token."""
    if token_set.states is None or token_set.states.gates is None:
        raise ValueError("the method needs the outputs of gates: granularity head, states")
    return token_set.states.gates.tolist()


def trimkv_scores(token_set: TokenSet, case: Case) -> Tensor:
    """Return the logarithm of the mean of beta ** age over the next n tokens, of each token."""
    scores = []
    for j, log_beta in enumerate(gates_of(token_set)):
        age = case.layout.length - j + case.age_offset
        to_come = [log_beta * (age + m) for m in range(case.lookahead)]
        mean = torch.tensor(to_come, dtype=torch.float64).logsumexp(0) - math.log(len(to_come))
        scores.append(float(mean))
    return torch.tensor(scores, dtype=torch.float64)


def trimkv_votes(token_set: TokenSet, case: Case) -> Tensor:
    """Return TrimKV's scores plus the logarithm of the mean attention of the text rows."""
    observed = token_set.mean[case.voters("text")]
    attended = observed.mean(0) if case.reduce == "mean" else observed.amax(0)
    return trimkv_scores(token_set, case) + (attended + 1e-6).log()


def retentive_scores(entropies: Callable[[TokenSet, Sequence[int]], list[float]]) -> ScoreFunction:
    """Return the score that mixes the text rows' attention with an entropy of each token."""

    def scores(token_set: TokenSet, case: Case) -> Tensor:
        voters = case.voters("text")
        sums = column_sums(token_set.mean, voters).tolist()
        highest = max(sums[case.sinks :] or sums)
        of_tokens = entropies(token_set, voters)
        mixed = [
            0.5 * min(total / highest, 1.0) + 0.5 * entropy
            for total, entropy in zip(sums, of_tokens, strict=True)
        ]
        return torch.tensor(mixed, dtype=torch.float64)

    return scores


def row_entropies(token_set: TokenSet, voters: Sequence[int]) -> list[float]:
    """Return, for each token, the mean entropy of the rows that look at it.

    A row's entropy is that of the mean query head, as a part of what it would be if the row looked
    at all its keys alike; a row counts by its attention to the token.
    """
    weights = []
    for i in voters:
        alive = token_set.alive
        seen = i + 1 if alive is None else int(alive[: i + 1].sum())
        entropy = torch.special.entr(token_set.heads[:, i]).sum(1).mean()
        weights.append(float(entropy) / math.log(seen) if seen > 1 else 0.0)
    observed = token_set.mean[list(voters)]
    weighted = torch.tensor(weights, dtype=torch.float64) @ observed
    return [
        float(w / total) if total > 0 else 0.0
        for w, total in zip(weighted, observed.sum(0), strict=True)
    ]


def spreads(token_set: TokenSet, voters: Sequence[int]) -> list[float]:
    """Return, for each token, how evenly rows look at it: -log of the greatest row's part."""
    whole = math.log(max(len(voters), 2))
    return [
        -math.log(float(column.max() / column.sum())) / whole if column.sum() > 0 else 0.0
        for column in token_set.mean[list(voters)].T
    ]


ScoreFunction = Callable[[TokenSet, Case], Tensor]

SCORES: dict[str, ScoreFunction] = {
    "tgv": lambda token_set, case: tgv_scores(
        token_set.mean, case.voters("text"), case.layout.vision
    ),
    "text_rows": voted("text"),
    "vlcache": voted("after_vision"),
    "snapkv": voted("window"),
    "rkv": rkv_scores,
    "mixkv": mixkv_scores,
    "retentive_rows": retentive_scores(row_entropies),
    "retentive_spread": retentive_scores(spreads),
    "h2o": voted("all"),
    "aircache": aircache_scores,
    "vv_tt": vv_tt_scores,
    "trimkv": trimkv_scores,
    "trimkv_votes": trimkv_votes,
    "kvzap": lambda token_set, case: torch.tensor(gates_of(token_set), dtype=torch.float64),
    "recency": lambda token_set, case: torch.arange(case.layout.length, dtype=torch.float64),
}


def runs(layout: Layout) -> list[int]:
    """Return the index of each position's run: an image, or text between images."""
    number, result, vision = 0, [], layout.vision
    starts = {image.start for image in layout.images}
    for j in range(layout.length):
        if j in starts or (j > 0 and vision[j] != vision[j - 1]):
            number += 1
        result.append(number)
    return result


def neighbours(layout: Layout, pool: Pool, sinks: int = 0) -> list[list[int]]:
    """Return for each position the positions it is pooled with, including itself.

    With a direction, the first `sinks` positions are a run of their own.
    """
    reach, everything = pool.kernel // 2, range(layout.length)
    if pool.has_direction:
        first, last = pool.forward or 0, pool.back or 0
        part = [(number, j < sinks) for j, number in enumerate(runs(layout))]
        return [
            [i for i in everything if part[i] == part[j] and j - first <= i <= j + last]
            if pool.kind == "sequence" or layout.vision[j]
            else [j]
            for j in everything
        ]
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


def pooled(scores: Tensor, layout: Layout, pool: Pool, sinks: int = 0) -> Tensor:
    """Return the scores [P] after pooling; NaN stands for no score, and is in no other's pool."""
    result = []
    values = scores.tolist()
    for j, (own, near) in enumerate(zip(values, neighbours(layout, pool, sinks), strict=True)):
        weights = [2 ** (-max(j - i, 0) / pool.halve) if pool.halve else 1 for i in near]
        group = [
            weight * values[i]
            for i, weight in zip(near, weights, strict=True)
            if not math.isnan(values[i])
        ]
        if math.isnan(own):
            result.append(own)
        else:
            result.append(max(group) if pool.reduce == "max" else sum(group) / len(group))
    return torch.tensor(result, dtype=torch.float64)


# -- retention --------------------------------------------------------------------------------


def tiers(retain: str, case: Case, count: int, text_above: bool = False) -> list[int]:
    """Return the tier of every position, for a token set that keeps `count` candidates.

    Positions of a higher tier are kept first.

    Args:
        retain: name of the retention.
        text_above: whether text precedes everything but sinks, as guarded budgets require.
    """
    length, vision = case.layout.length, case.layout.vision
    tail = length - case.candidates
    recent = {
        "window": WINDOW,
        "recent_8": decoding.WINDOW,
        "recent_half": (count + tail) // 2,
        "recent_tenth": (count + tail) // 10,
    }
    is_preferred: dict[str, Callable[[int], bool]] = {
        "text_first": lambda j: not vision[j],
        "vision_first": lambda j: vision[j],
        "by_score": lambda j: False,
        "window": lambda j: j >= length - recent["window"],
        "recent_8": lambda j: j >= length - recent["recent_8"],
        "recent_half": lambda j: j >= length - recent["recent_half"],
        "recent_tenth": lambda j: j >= length - recent["recent_tenth"],
    }
    prefers = is_preferred[retain]
    return [
        9 if j < case.sinks else prefers(j) + (2 if text_above and not vision[j] else 0)
        for j in range(length)
    ]


# -- allocations -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """Inputs of an allocation: token sets [L][S] of all layers, and their scores.

    Attributes:
        raw, scores: scores [P] before and after pooling, [L][S].
        tiers: of the retention, if every token set keeps b candidates.
        blocks: k.
        noise: relative change of real-valued shares, see `is_stable`.
        depth: index of the first layer in the model, and the model's number of layers; None if
            these are all its layers.
        pool: the pooling of `scores`.
    """

    token_sets: list[list[TokenSet]]
    raw: list[list[Tensor]]
    scores: list[list[Tensor]]
    tiers: list[int]
    case: Case
    blocks: int
    noise: float = 0.0
    depth: tuple[int, int] | None = None
    pool: Pool = Pool()

    def of_stages(self, stages: Sequence[int]) -> list[Evidence]:
        """Return the evidence of each pipeline stage, which has that many layers."""
        ends = list(itertools.accumulate(stages))
        parts = [slice(end - size, end) for end, size in zip(ends, stages, strict=True)]
        return [
            replace(
                self,
                token_sets=self.token_sets[part],
                raw=self.raw[part],
                scores=self.scores[part],
                depth=(part.start, ends[-1]),
            )
            for part in parts
        ]

    @property
    def budget(self) -> int:
        """b."""
        return self.blocks * self.case.block_size

    def each(self, strength: Callable[[TokenSet], float]) -> list[float]:
        """Return the strength of each token set, in order."""
        return [strength(token_set) for layer in self.token_sets for token_set in layer]


def block_of(rows_name: str, columns_are_vision: bool) -> Callable[[Evidence], list[float]]:
    """Return the allocation by the sum of A over a row set and one modality's columns."""

    def shares(evidence: Evidence) -> list[float]:
        layout = evidence.case.layout
        columns = [j for j, v in enumerate(layout.vision) if v == columns_are_vision]
        if rows_name == "vision":
            picked = [i for i, v in enumerate(layout.vision) if v]
        else:
            picked = evidence.case.rows(rows_name)
        return evidence.each(lambda token_set: float(token_set.mean[picked][:, columns].sum()))

    return shares


def vlcache_shares(evidence: Evidence) -> list[float]:
    """Return the fractions of non-negligible entries of the rows."""
    observed = evidence.case.rows("after_vision")

    def density(token_set: TokenSet) -> float:
        densities = []
        for head in token_set.heads:
            seen = [
                [a for j, a in enumerate(head[i, : i + 1].tolist()) if token_set.has(j)]
                for i in observed
            ]
            negligible = 0
            for row in seen:
                least = 0.01 * max(row)
                negligible += sum(a < least for a in row)
            densities.append(1 - negligible / sum(map(len, seen)))
        return sum(densities) / len(densities)

    dense = evidence.each(density)
    fraction = evidence.budget / evidence.case.candidates
    return [min(max(d / sum(dense) * fraction * len(dense), 0.01), 1.0) for d in dense]


def skewness(values: Sequence[float]) -> float:
    """Return the population skewness; 0 for equal values."""
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
    if deviation <= 1e-12 * abs(mean):
        return 0.0
    return sum(((v - mean) / deviation) ** 3 for v in values) / len(values)


def aircache_shares(evidence: Evidence) -> list[float]:
    """Return all text, and a share of the remaining budget by strength and skewness."""
    case = evidence.case
    vision = [j for j, v in enumerate(case.layout.vision) if v]
    # All text, also what earlier cuts evicted.
    text = case.candidates - sum(1 for j in vision if j < case.candidates)
    scores = [[float(s) for s in raw[vision]] for layer in evidence.raw for raw in layer]
    values = [[s for s in row if not math.isnan(s)] for row in scores]
    strength = [sum(v) for v in values]
    skew = [max(0.0, skewness(v)) if v else 0.0 for v in values]

    def normalised(numbers: list[float]) -> list[float]:
        total = sum(numbers)
        return [n / total if total > 0 else 1 / len(numbers) for n in numbers]

    of_vision = normalised(strength)
    if sum(skew) > 0:
        of_vision = [(s + k) / 2 for s, k in zip(of_vision, normalised(skew), strict=True)]
    left = max(evidence.budget - text, 0)
    return [text + v * len(values) * left for v in of_vision]


def pyramid_shares(evidence: Evidence) -> list[float]:
    """Return shares that fall linearly with depth, from 2 - 1/20 to 1/20."""
    first, layers = evidence.depth or (0, len(evidence.token_sets))
    high, low = 2 - 1 / 20, 1 / 20
    return [
        high - (high - low) * layer / (layers - 1) if layers > 1 else 1.0
        for layer, token_sets in enumerate(evidence.token_sets, first)
        for _ in token_sets
    ]


def adakv_shares(evidence: Evidence) -> list[float]:
    """Return how many tokens of each head are among the best of all heads of its layer."""
    guaranteed = math.floor(0.2 * evidence.budget)
    result: list[float] = []
    for scores, token_sets in zip(evidence.scores, evidence.token_sets, strict=True):
        ranks = []
        for head, (values, token_set) in enumerate(zip(scores, token_sets, strict=True)):
            best = token_set.first(values, evidence.tiers, evidence.case.candidates)
            for place, j in enumerate(best):
                ranks.append((place >= guaranteed, -evidence.tiers[j], -float(values[j]), j, head))
        ranks.sort()
        counts = [0] * len(scores)
        for *_, head in ranks[: evidence.budget * len(scores)]:
            counts[head] += 1
        result += counts
    return result


def global_shares(evidence: Evidence) -> list[float]:
    """Return how many tokens of each token set are among the best of all sets.

    Of tokens that are equal in tier, score and position, all count or none.
    """
    ranks: list[tuple[int, float, int, int]] = []
    number = 0
    for layer, token_sets in zip(evidence.scores, evidence.token_sets, strict=True):
        for values, token_set in zip(layer, token_sets, strict=True):
            best = token_set.first(values, evidence.tiers, evidence.case.candidates)
            ranks += [(-evidence.tiers[j], -float(values[j]), j, number) for j in best]
            number += 1
    counts = [0.0] * number
    wanted = evidence.budget * number
    last = sorted(ranks)[wanted - 1][:3] if wanted else ()
    for *rank, owner in ranks:
        counts[owner] += tuple(rank) <= last
    return counts


def sparsemm_shares(evidence: Evidence) -> list[float]:
    """Return the tokens of each head: its window, its equal part, its part by head scores."""
    case, rho = evidence.case, 0.1
    if case.head_scores is None:
        raise ValueError("SparseMM needs head scores")
    first, _ = evidence.depth or (0, len(evidence.token_sets))
    scores = []
    for number, token_sets in enumerate(evidence.token_sets, first):
        heads = case.head_scores[number].tolist()
        group = len(heads) // len(token_sets)
        scores += [sum(heads[i * group : (i + 1) * group]) for i in range(len(token_sets))]
    in_window = [j for j in range(case.layout.length) if j >= case.layout.length - WINDOW]
    window = min(evidence.budget, sum(j < case.candidates for j in in_window))
    left = evidence.budget - window
    by_score = [s / sum(scores) if sum(scores) > 0 else 1 / len(scores) for s in scores]
    return [window + rho * left + (1 - rho) * left * len(scores) * part for part in by_score]


def prefixkv_shares(evidence: Evidence) -> list[float]:
    """Return how many tokens each token set needs to hold the same fraction of its scores.

    A set needs its (m+1)-th token as soon as the fraction exceeds that of its m best. So the first
    b * M of these steps of all M sets are taken. Tokens that score 0 are never needed.
    """
    steps = []
    candidates = evidence.case.candidates
    token_sets = list(itertools.chain(*evidence.scores))
    for number, scores in enumerate(token_sets):
        values = scores[:candidates].nan_to_num(0).sort(descending=True).values
        held = (values / values.sum()).cumsum(0).tolist()
        needed = int((values > 0).sum())
        steps += [(before, number) for before in [0.0, *held][:needed]]
    steps.sort()
    counts = [0.0] * len(token_sets)
    for _, number in steps[: evidence.budget * len(token_sets)]:
        counts[number] += 1
    return counts


def entropy_shares(evidence: Evidence) -> list[float]:
    """Return exp of the mean entropy of the text rows, their effective number of tokens."""
    observed = evidence.case.rows("text")

    def entropy(probabilities: Tensor) -> float:
        return float(torch.special.entr(probabilities).sum())

    def spread(token_set: TokenSet) -> float:
        entropies = [entropy(head[i]) for head in token_set.heads for i in observed]
        return math.exp(sum(entropies) / len(entropies))

    return evidence.each(spread)


ALLOCATIONS: dict[str, Callable[[Evidence], list[float]]] = {
    "uniform": lambda evidence: evidence.each(lambda token_set: 1.0),
    "tgv": block_of("text", True),
    "vv": block_of("vision", True),
    "tt": block_of("text", False),
    "vlcache": vlcache_shares,
    "aircache": aircache_shares,
    "pyramid": pyramid_shares,
    "adakv": adakv_shares,
    "global": global_shares,
    "sparsemm": sparsemm_shares,
    "prefixkv": prefixkv_shares,
    "entropy": entropy_shares,
}


EXACT_ALLOCATIONS = {"uniform", "pyramid", "adakv", "global", "prefixkv", "sparsemm"}
"""Allocations whose shares are equal, integers, or independent of attention."""


def retained_blocks(prompt_tokens: int, block_size: int, budget: float | int) -> int:
    """Return k, the blocks that fit the budget with the tail, at least 1 and at most t0."""
    full_blocks = prompt_tokens // block_size
    tail = prompt_tokens - full_blocks * block_size
    tokens = budget if isinstance(budget, int) else budget * prompt_tokens
    return min(max(1, math.floor((tokens - tail) / block_size)), full_blocks)


# -- a method ---------------------------------------------------------------------------------


def mix_of(method: str | Mix, settings: Settings) -> Mix:
    """Return the method with the granularity and pooling of the settings."""
    mix = METHODS[method] if isinstance(method, str) else method
    return replace(
        mix,
        granularity=settings.granularity or mix.granularity,
        pooling=settings.pooling or mix.pooling,
    )


def token_sets_of(
    attention: Tensor, kv_heads: int, granularity: str, states: States | None = None
) -> list[list[TokenSet]]:
    """Return the token sets [L][S].

    Args:
        attention: float64 [L, Q, P, P]; query head q belongs to KV head q // (Q / H).
        states: what it comes from, if a score needs them.
    """
    if granularity == LAYER:
        return [[TokenSet(heads, heads.mean(0))] for heads in attention.double()]
    return [
        [
            TokenSet(heads, heads.mean(0), None, states.of_head(layer, head) if states else None)
            for head, heads in enumerate(of_layer.chunk(kv_heads))
        ]
        for layer, of_layer in enumerate(attention.double())
    ]


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
        token_sets = [
            [
                left(token_set, earlier.kept[layer, head * kv_heads // len(sets)], earlier.voters)
                for head, token_set in enumerate(sets)
            ]
            for layer, sets in enumerate(token_sets)
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
    return with_pooling(Evidence(token_sets, raw, raw, [], case, 0), pool_of(mix, case, settings))


def pool_of(mix: Mix, case: Case, settings: Settings) -> Pool:
    """Return the pooling under the settings' budget; under `auto`, for the most it may keep."""
    budget, size = settings.budget, case.block_size
    most = budget.most if isinstance(budget, Auto) else budget
    return mix.pooling.within(retained_blocks(case.layout.prompt, size, most) * size)


def with_pooling(evidence: Evidence, pool: Pool) -> Evidence:
    """Return the evidence with scores that are pooled so."""
    case = evidence.case
    scores = [
        [pooled(values, case.layout, pool, case.sinks) for values in layer]
        for layer in evidence.raw
    ]
    return replace(evidence, scores=scores, pool=pool)


def left(token_set: TokenSet, alive: Tensor, voters: Sequence[int]) -> TokenSet:
    """Return the token set whose voters' softmax is over the keys that are left.

    The other rows are zero.
    """
    heads = torch.zeros_like(token_set.heads)
    for number, head in enumerate(token_set.heads):
        for i in voters:
            seen = torch.where(alive, head[i], 0)
            heads[number, i] = seen / seen.sum()
    return TokenSet(heads, heads.mean(0), alive, token_set.states)


def choose(mix: Mix, evidence: Evidence, kv_heads: int, settings: Settings) -> Selection:
    """Return the part that is kept under the settings' budget."""
    length, size = evidence.case.layout.prompt, settings.block_size
    pool = pool_of(mix, evidence.case, settings)
    if pool != evidence.pool:
        evidence = with_pooling(evidence, pool)
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


def perturbed(values: Tensor, noise: float) -> Tensor:
    """Return values with random relative changes of at most `noise`."""
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
