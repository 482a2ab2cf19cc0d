# SPDX-License-Identifier: Apache-2.0
"""Checks for methods of other packages: `check_method("mine")` in one of their tests.

Prompts, keys and queries are random and small, so that a definition in plain loops can be compared
with. Nothing here starts an engine or needs a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_tgvkv.kernels.row_sums import RowSums
from vllm_tgvkv.kernels.select import page_offsets
from vllm_tgvkv.kernels.statistics import observe
from vllm_tgvkv.policies import (
    NO_ATTENTION,
    Attention,
    Granularity,
    LayerView,
    Mix,
    Policy,
    Prompt,
    build_policy,
)
from vllm_tgvkv.shared.prompt import PromptMap, RowSet, VisionSpan, voters
from vllm_tgvkv.worker.decision import Decision, ScoredPrompt

_LAYERS, _HEADS, _GROUP, _HEAD_SIZE, _BLOCK_SIZE, _WINDOW = 3, 2, 3, 8, 4, 10
_SCALE = _HEAD_SIZE**-0.5

_PROMPTS: dict[str, tuple[tuple[tuple[int, int, int], ...], int]] = {
    "one image": (((6, 3, 4),), 29),
    "three images": (((5, 2, 3), (13, 2, 2), (20, 3, 3)), 34),
    "two images side by side": (((4, 2, 3), (10, 3, 2)), 23),
    "image first": (((0, 3, 3),), 16),
    "image last": (((7, 2, 2), (15, 3, 4)), 27),
    "long question": (((2, 3, 4),), 72),
    "no image": ((), 50),
}
"""Start, rows and columns of each image, and the prompt's length."""

_ANSWER = 3
"""Tokens of the answer that vote where nothing else does."""

Reference = Callable[[Tensor, Tensor, Prompt], Tensor]
"""The definition of a score, for one token set.

It gets A, float64 `[P, P]`, causal and averaged over the query heads of the set; the positions of
the rows that vote, int64 `[O]`; and the prompt. It returns the scores before pooling, `[P]`.
"""


class MethodError(AssertionError):
    """A method breaks a rule of docs/new_method.md; the message names the rule and the case."""


def check_method(
    name: str, reference: Reference | None = None, seed: int | None = None
) -> list[str]:
    """Run a method on prompts with one image, several and none, at every granularity it has.

    It checks shapes and dtypes; that scores and strengths are finite, and the same however the rows
    come in chunks; that every page is dealt, within the bounds of each head; that tokens
    are kept by tier, then by score; and that nothing waits for the device.

    Args:
        name: a method, of this package or of an installed one, or one that was registered.
        reference: the definition of its score, which the scores are compared with.
        seed: of the random inputs; by default a new one, which a failure prints.

    Returns:
        The cases that were run, as text.

    Raises:
        MethodError: for the first rule that is broken.
        ValueError: for an unknown method.
    """
    recipe = build_policy(name)
    if seed is None:
        seed = torch.seed() % 2**31
    torch.manual_seed(seed)
    done = []
    granularities: tuple[Granularity, ...] = ("layer", "head")
    for granularity in granularities:
        if any(granularity not in part.granularities for part in (recipe.score, recipe.allocation)):
            continue
        policy = build_policy(Mix(name, granularity=granularity), name)
        for title in _PROMPTS:
            case = _Case(policy, title, f"{name}, {granularity}, {title}, seed {seed}")
            if policy.allocation.needs_vision and not case.prompt.images:
                continue
            case.check(reference)
            done.append(f"{granularity}, {title}")
    return done


@dataclass
class _Case:
    """One method at one granularity on one prompt."""

    policy: Policy
    title: str
    label: str

    def __post_init__(self) -> None:
        images, length = _PROMPTS[self.title]
        # Methods for which only rows of the answer vote see some of it.
        self.num_answer = _ANSWER if self.policy.needs_answer else 0
        self.length = length + self.num_answer
        spans = tuple(VisionSpan(start, r * c, (r, c)) for start, r, c in images)
        self.rows = voters(PromptMap(length, spans), self.policy.row_sets, _WINDOW, self.num_answer)
        is_vision = torch.zeros(self.length, dtype=torch.bool)
        for span in spans:
            is_vision[span.start : span.start + span.length] = True
        num_candidates = length // _BLOCK_SIZE * _BLOCK_SIZE
        self.prompt = Prompt(self.length, num_candidates, is_vision, sinks=2, images=spans)
        self.num_sets = _HEADS if self.policy.granularity == "head" else 1
        self.queries = 2 * torch.randn(_LAYERS, self.length, _HEADS, _GROUP, _HEAD_SIZE)
        self.keys = torch.randn(_LAYERS, self.length, _HEADS, _HEAD_SIZE)

    def require(self, holds: bool, rule: str) -> None:
        if not holds:
            raise MethodError(f"{self.label}: {rule}")

    def check(self, reference: Reference | None) -> None:
        raw, strengths = self.look("cpu", self.prompt)
        self.require(raw.dtype == torch.float32, f"scores are float32, not {raw.dtype}")
        shape = (_LAYERS, self.num_sets, self.length)
        self.require(raw.shape == shape, f"scores of all layers are {shape}, not {raw.shape}")
        self.require(bool(raw.isfinite().all()), "scores are finite")
        if not self.policy.score.is_signed:
            self.require(bool((raw >= 0).all()), "scores are not negative unless is_signed says so")
        self.require(
            strengths.shape[:2] == shape[:2],
            f"strengths are [S, F], not {tuple(strengths.shape[1:])}",
        )
        self.require(bool(strengths.isfinite().all()), "strengths are finite")
        if reference is not None:
            self.compare(raw, reference)
        again, again_strengths = self.look("cpu", self.prompt)
        same = torch.allclose(raw, again, rtol=1e-4, atol=1e-6)
        self.require(same, "scores are the same in other chunks and at another time")
        same = torch.allclose(strengths, again_strengths, rtol=1e-4, atol=1e-6, equal_nan=True)
        self.require(same, "strengths are the same in other chunks and at another time")
        num_full = self.prompt.num_candidates // _BLOCK_SIZE
        for blocks, floor in itertools.product(sorted({1, 2, num_full // 2, num_full - 1}), (0, 1)):
            if 1 <= blocks < num_full:
                self.check_decision(self.pooled(raw, self.prompt), strengths, blocks, floor)
        self.check_waits()

    def pooled(self, raw: Tensor, prompt: Prompt) -> Tensor:
        """Return the candidates' scores after pooling, `[L, S, C]`, from `[L, S, P]`."""
        pooled = [self.policy.pooled(scores, prompt) for scores in raw]
        return torch.stack(pooled)[..., : prompt.num_candidates].contiguous()

    def look(self, device: str, prompt: Prompt) -> tuple[Tensor, Tensor]:
        """Return scores before pooling, `[L, S, P]`, and strengths, `[L, S, F]`."""
        raw, strengths = [], []
        for layer in range(_LAYERS):
            seen = {
                kind: self.attention(kind, layer, device, prompt) for kind in self.policy.row_sets
            }
            first = seen.get(self.policy.score.rows, NO_ATTENTION)
            score = self.policy.scores(LayerView(layer, self.num_sets, prompt, first))
            other = seen.get(self.policy.allocation.rows, NO_ATTENTION)
            view = LayerView(layer, self.num_sets, prompt, other)
            strengths.append(self.policy.allocation.strength(view, score))
            raw.append(score)
        return torch.stack(raw), torch.stack(strengths)

    def attention(self, kind: RowSet, layer: int, device: str, prompt: Prompt) -> Attention:
        """Return one layer's attention of a row set; summed rows come in two random chunks."""
        per_head = self.policy.granularity == "head"
        num_blocks = -(-self.length // _BLOCK_SIZE)
        pages = torch.full((num_blocks, _HEADS, _BLOCK_SIZE, _HEAD_SIZE), torch.nan)
        for position, keys in enumerate(self.keys[layer]):
            pages[position // _BLOCK_SIZE, :, position % _BLOCK_SIZE] = keys
        pages, queries = pages.to(device), self.queries[layer].to(device)

        def observed(rows: Tensor, end: int) -> Any:
            ids = torch.arange(-(-end // _BLOCK_SIZE), device=device)
            statistics = self.policy.statistics(kind)
            chosen = queries.index_select(0, rows.to(device))
            return observe(chosen, pages, ids, rows.to(device), end, _SCALE, per_head, statistics)

        if kind != "all":
            of_few: Attention = observed(torch.as_tensor(self.rows.sets[kind]), self.length)
            return of_few
        by_modality = "modality_sums" in self.policy.statistics(kind)
        sums = RowSums(self.num_sets, self.length, torch.device(device), by_modality)
        middle = int(torch.randint(1, self.length, ()))
        for start, end in ((0, middle), (middle, self.length)):
            chunk = torch.arange(start, end)
            sums.add(observed(chunk, end), prompt.is_vision[start:end])
        return sums

    def compare(self, raw: Tensor, reference: Reference) -> None:
        """Compare scores with their definition, in float64 over the whole attention matrix."""
        kind = self.policy.score.rows
        rows = torch.arange(self.length)
        if kind == "none":
            rows = rows[:0]
        elif kind != "all":
            rows = torch.as_tensor(self.rows.sets[kind])
        future = torch.ones(self.length, self.length, dtype=torch.bool).triu(1)
        for layer in range(_LAYERS):
            queries, keys = self.queries[layer].double(), self.keys[layer].double()
            products = torch.einsum("ihgd,jhd->hgij", queries, keys) * _SCALE
            heads = products.masked_fill(future, -torch.inf).softmax(-1).mean(1)
            sets = heads if self.num_sets > 1 else heads.mean(0, keepdim=True)
            for of_set, scores in zip(sets, raw[layer], strict=True):
                wanted = reference(of_set, rows, self.prompt).double()
                close = torch.allclose(scores.double(), wanted, rtol=1e-4, atol=1e-6)
                self.require(close, f"scores of layer {layer} differ from the reference")

    def check_decision(self, pooled: Tensor, strengths: Tensor, blocks: int, floor: int) -> None:
        of_prompt = (self.policy, self.prompt, pooled, strengths)
        scored = ScoredPrompt(*of_prompt, _HEADS, _BLOCK_SIZE, floor)
        decision = scored.decide(blocks)
        counts, pairs = decision.counts, _LAYERS * _HEADS
        what = f"with {blocks} blocks and floor_pages {floor}"
        self.require(int(counts.sum()) == blocks * pairs, f"{what} every page is dealt")
        most = self.prompt.num_candidates // _BLOCK_SIZE
        within = bool((counts >= min(floor, blocks)).all() and (counts <= most).all())
        self.require(within, f"{what} every head gets a number of pages within its bounds")
        self.check_order(decision, pooled, what)

    def check_order(self, decision: Decision, pooled: Tensor, what: str) -> None:
        """Check that no token was dropped for one of a lower tier, or a lower score in its tier."""
        num_candidates = self.prompt.num_candidates
        offsets = page_offsets(decision.counts).tolist()
        for pair, (start, end) in enumerate(itertools.pairwise(offsets)):
            layer, head = divmod(pair, _HEADS)
            kept = torch.zeros(num_candidates, dtype=torch.bool)
            kept[decision.positions[start:end].flatten().long()] = True
            num_kept = torch.tensor([(end - start) * _BLOCK_SIZE])
            self.require(int(kept.sum()) == int(num_kept), f"{what} a head keeps no token twice")
            tiers = self.policy.retention.tiers(self.prompt, num_kept)[..., :num_candidates]
            scores = pooled[layer, head if self.num_sets > 1 else 0]
            ranks = list(zip(tiers.flatten().tolist(), scores.tolist(), strict=True))
            worst = min((r for r, here in zip(ranks, kept, strict=True) if here), default=None)
            best = max((r for r, here in zip(ranks, kept, strict=True) if not here), default=None)
            ordered = worst is None or best is None or worst >= best
            self.require(ordered, f"{what} tokens are kept by tier, then by score")

    def check_waits(self) -> None:
        """Run all parts on tensors that have no values, with all operations refused that wait."""
        on_meta = dataclasses.replace(self.prompt, is_vision=self.prompt.is_vision.to("meta"))
        try:
            with _NoWaiting():
                raw, strengths = self.look("meta", on_meta)
                pooled = self.pooled(raw, on_meta)
                of_prompt = (self.policy, on_meta, pooled, strengths)
                ScoredPrompt(*of_prompt, _HEADS, _BLOCK_SIZE, 1).decide(1)
        except (MethodError, NotImplementedError, RuntimeError) as error:
            raise MethodError(f"{self.label}: it never waits for the device ({error})") from error


SYNCHRONISING = frozenset(
    (
        "_local_scalar_dense",
        "item",
        "nonzero",
        "masked_select",
        "is_nonzero",
        "equal",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "argwhere",
        "bincount",
    )
)
"""Operations of torch that wait for a device, or whose result has a shape of its values."""


class _NoWaiting(TorchDispatchMode):
    """Raises on operations that wait for a device or whose result has a shape of its values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in SYNCHRONISING and any(
            tensor.device.type == "meta" for tensor in args if isinstance(tensor, Tensor)
        ):
            raise MethodError(f"{name} waits")
        return func(*args, **(kwargs or {}))
