# SPDX-License-Identifier: Apache-2.0
"""The allocations by their definitions: shares of the pages of all token sets.

Notation as in `oracle.token_sets`; k retained pages per token set on average, b = k * N.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from oracle.pooling import NO_POOLING, Pool
from oracle.token_sets import WINDOW, Case, TokenSet


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
    pool: Pool = NO_POOLING

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


def aircache_shares(evidence: Evidence, by: str = "strength and skewness") -> list[float]:
    """Return all text, and a share of the remaining budget by what is named."""
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

    of_vision = normalised(skew if by == "skewness" else strength)
    if by == "strength and skewness" and sum(skew) > 0:
        of_vision = [(s + k) / 2 for s, k in zip(of_vision, normalised(skew), strict=True)]
    left = max(evidence.budget - text, 0)
    return [text + v * len(values) * left for v in of_vision]


def pyramid_tokens(evidence: Evidence) -> list[Fraction]:
    """Return the tokens that a head of each layer keeps: the window, and a part linear in depth."""
    case = evidence.case
    first, layers = evidence.depth or (0, len(evidence.token_sets))
    window = min(evidence.budget, window_candidates(case))
    mean = evidence.budget - window
    most = min(mean * Fraction(39, 20), Fraction(case.candidates - window))
    least = 2 * mean - most
    if layers == 1:
        return [Fraction(evidence.budget)]
    step = (most - least) / (layers - 1)
    numbers = range(first, first + len(evidence.token_sets))
    return [window + most - step * layer for layer in numbers]


def window_candidates(case: Case) -> int:
    """Return w, the candidates among the last positions of the prompt and its answer."""
    return len(range(max(0, case.layout.length - WINDOW), case.candidates))


def pyramid_shares(evidence: Evidence) -> list[float]:
    """Return PyramidKV's budget of each layer for each of its token sets."""
    budgets = zip(pyramid_tokens(evidence), evidence.token_sets, strict=True)
    return [float(budget) for budget, token_sets in budgets for _ in token_sets]


def adakv_shares(evidence: Evidence, budgets: Sequence[int] | None = None) -> list[float]:
    """Return how many tokens of each head are among the best of all heads of its layer.

    A head keeps `budgets` tokens of each layer on average, by default b.
    """
    budgets = budgets or [evidence.budget] * len(evidence.scores)
    result: list[float] = []
    for budget, scores, token_sets in zip(
        budgets, evidence.scores, evidence.token_sets, strict=True
    ):
        guaranteed = budget // 5
        ranks = []
        for head, (values, token_set) in enumerate(zip(scores, token_sets, strict=True)):
            best = token_set.first(values, evidence.tiers, evidence.case.candidates)
            for place, j in enumerate(best):
                ranks.append((place >= guaranteed, -evidence.tiers[j], -float(values[j]), j, head))
        ranks.sort()
        counts = [0] * len(scores)
        for *_, head in ranks[: budget * len(scores)]:
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
    window = min(evidence.budget, window_candidates(case))
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
    "aircache_strength": lambda evidence: aircache_shares(evidence, "strength"),
    "aircache_skewness": lambda evidence: aircache_shares(evidence, "skewness"),
    "pyramid": pyramid_shares,
    "adakv": adakv_shares,
    "ada_pyramid": lambda evidence: adakv_shares(
        evidence, list(map(int, pyramid_tokens(evidence)))
    ),
    "global": global_shares,
    "sparsemm": sparsemm_shares,
    "prefixkv": prefixkv_shares,
    "entropy": entropy_shares,
}


EXACT_ALLOCATIONS = {
    "uniform",
    "pyramid",
    "adakv",
    "ada_pyramid",
    "global",
    "prefixkv",
    "sparsemm",
}
"""Allocations whose shares are equal, integers, or independent of attention."""
