# SPDX-License-Identifier: Apache-2.0
"""What the parts of a method see: a prompt's layout, rows that vote, and attention by token set.

Notation: L layers, Q query heads, H KV heads, P prompt tokens, N tokens per page; C candidates, the
tokens in full pages (the tokens after them are the tail, which is always kept). S token sets per
layer: one at granularity "layer", with the attention of all query heads; one per KV head at "head".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from oracle.kernels import ranking

LAYER = "layer"


HEAD = "head"


WINDOW = 32
"""Positions at the end of the prompt: SnapKV's rows, and the tokens that `window` keeps."""


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
class Earlier:
    """State that earlier cuts leave for a cut while decoding.

    Attributes:
        kept: bool [L, H, P], the keys that each head still has; P counts the answer.
        voters: positions of the rows that vote, whatever row sets the method names.
        scores: [L, S, P'], of the cut before, of the P' tokens that there were.
    """

    kept: Tensor
    voters: tuple[int, ...]
    scores: Tensor | None = None


@dataclass(frozen=True)
class States:
    """Queries and keys, for scores that need more than attention.

    Attributes:
        queries: [L, Q, P, D], rotated.
        keys: [L, H, P, D], rotated.
        scale: factor of the products.
        values: [L, H, P, D], for scores that look at values.
        gates: outputs of the gates, float64 [L, H, P].
        sinks: [L, Q], the logit of one more key of each query head, whose value is zero.
    """

    queries: Tensor
    keys: Tensor
    scale: float
    values: Tensor | None = None
    gates: Tensor | None = None
    sinks: Tensor | None = None

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
        queries, keys = perturbed(queries, noise), perturbed(keys, noise)
        return States(queries, keys, self.scale, values, gates, self.sinks)


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
        carried: [P], scores of the cut before, 0 for what came after it; None at the first cut.
    """

    heads: Tensor
    mean: Tensor
    alive: Tensor | None = None
    states: HeadStates | None = None
    carried: Tensor | None = None

    def has(self, j: int) -> bool:
        """Return whether the key at position j was not evicted before."""
        return self.is_left is None or self.is_left[j]

    @cached_property
    def is_left(self) -> list[bool] | None:
        """`alive` as a list."""
        is_left: list[bool] | None = None if self.alive is None else self.alive.tolist()
        return is_left

    def first(self, scores: Tensor, kinds: Sequence[int], candidates: int) -> list[int]:
        """Return the candidates that are left, best first."""
        return [j for j in ranking(scores, kinds, candidates) if self.has(j)]

    def pages(self, case: Case) -> int:
        """Return the number of pages that the candidates which are left fill."""
        return sum(self.has(j) for j in range(case.candidates)) // case.block_size


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
    if name == "all_text" and True in vision:
        text = [i for i in everything if not vision[i]]
        return (text[-observation_window:] or [last]) + answer
    if True not in vision:
        return everything[-observation_window:] + answer
    where = vision.index(True) if name == "text" else last - vision[::-1].index(True)
    text = [i for i in everything[where:] if not vision[i]]
    return (text[-observation_window:] or [last]) + answer


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


def left(
    token_set: TokenSet, alive: Tensor, voters: Sequence[int], has_sinks: bool = False
) -> TokenSet:
    """Return the token set whose voters' softmax is over the keys that are left.

    The other rows are zero. A sink, which has the part of a row that no key has, is never evicted.
    """
    heads = torch.zeros_like(token_set.heads)
    for number, head in enumerate(token_set.heads):
        for i in voters:
            seen = torch.where(alive, head[i], 0)
            of_sink = (1 - head[i].sum()).clamp(min=0) if has_sinks else 0
            heads[number, i] = seen / (seen.sum() + of_sink)
    return TokenSet(heads, heads.mean(0), alive, token_set.states)


def perturbed(values: Tensor, noise: float) -> Tensor:
    """Return values with random relative changes of at most `noise`."""
    return values * (1 + noise * (2 * torch.rand(values.shape, dtype=torch.float64) - 1))
