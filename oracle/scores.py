# SPDX-License-Identifier: Apache-2.0
"""The scores by their definitions: attention of one token set in, a value of each token out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from oracle import decoding
from oracle.pooling import SNAP, pooled
from oracle.token_sets import Case, TokenSet

ROWS_OF_SCORE = {
    "tgv": "text",
    "text_rows": "text",
    "vlcache": "after_vision",
    "aircache": "after_vision",
    "aircache_query_heads": "after_vision",
    "snapkv": "window",
    "rkv": "window",
    "mixkv": "window",
    "h2o": "all",
    "h2o_accumulated": "all",
    "fixed_place": "text",
    "vv_tt": "all",
    "retentive_rows": "text",
    "retentive_spread": "text",
    "trimkv_votes": "text",
}


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


def aircache_scores_of_heads(token_set: TokenSet, case: Case) -> Tensor:
    """Return the same with an elite for each query head, mean over the query heads."""
    alone = [TokenSet(head[None], head) for head in token_set.heads]
    return torch.stack([aircache_scores(each, case) for each in alone]).mean(0)


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
        return observed.amax(0)

    return scores


def accumulated_scores(token_set: TokenSet, case: Case) -> Tensor:
    """Return the column sums over the rows of this cut and of all cuts before."""
    sums = voted("all")(token_set, case)
    return sums if token_set.carried is None else sums + token_set.carried


def fixed_place_scores(token_set: TokenSet, case: Case) -> Tensor:
    """Return the column sums; at later cuts a ranking, the last 25 of what is left, then the first.

    It is 0 for what is gone.
    """
    if token_set.alive is None:
        return voted("text")(token_set, case)
    left = [j for j in range(case.layout.length) if token_set.has(j)]
    scores = torch.zeros(case.layout.length, dtype=torch.float64)
    for rank, j in enumerate([*left[-25:], *left[:-25]]):
        scores[j] = len(left) - rank
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
    cosines = (directions @ directions.T).fill_diagonal_(0)
    means: list[float] = (cosines.sum(1) / max(len(keys) - 1, 1)).tolist()
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


def gates_of(token_set: TokenSet) -> Tensor:
    """Return what the gate of a KV head said of each token, float64 [P]."""
    if token_set.states is None or token_set.states.gates is None:
        raise ValueError("the method needs the outputs of gates: granularity head, states")
    return token_set.states.gates.double()


def trimkv_scores(token_set: TokenSet, case: Case) -> Tensor:
    """Return the logarithm of the mean of beta ** age over the next n tokens, of each token."""
    age = case.layout.length - torch.arange(case.layout.length) + case.age_offset
    ages = age[:, None] + torch.arange(case.lookahead)
    to_come = gates_of(token_set)[:, None] * ages
    return to_come.logsumexp(1) - math.log(case.lookahead)


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
    "h2o_accumulated": accumulated_scores,
    "fixed_place": fixed_place_scores,
    "aircache": aircache_scores,
    "aircache_query_heads": aircache_scores_of_heads,
    "vv_tt": vv_tt_scores,
    "trimkv": trimkv_scores,
    "trimkv_next": lambda token_set, case: trimkv_scores(token_set, replace(case, lookahead=1)),
    "trimkv_votes": trimkv_votes,
    "kvzap": lambda token_set, case: gates_of(token_set),
    "recency": lambda token_set, case: torch.arange(case.layout.length, dtype=torch.float64),
}
