# SPDX-License-Identifier: Apache-2.0
"""TGV-KV on plain Hugging Face models: the independent oracle of the engine tests.

Nothing is evicted here. The whole cache is kept, and every query after the prefill is kept from
seeing the prompt keys that its (layer, KV head) would have lost. The method itself is written out
naively, with loops and in float64, from its definition; no code is shared with the plugin.

Shapes: L layers, Q query heads, H KV heads, P prompt tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

LAYER = "layer"
HEAD = "head"


@dataclass(frozen=True)
class Eviction:
    """What to evict.

    Attributes:
        budget: a float is a fraction of the prompt, an int a number of tokens per head.
        block_size: tokens per page, N.
        granularity: "layer", one token set for all heads of a layer, or "head".
        sinks: leading positions that are kept before all others.
        observation_window: at most so many text rows vote, the last ones.
        floor: least number of pages of every (layer, head).
    """

    budget: float | int
    block_size: int = 32
    granularity: str = LAYER
    sinks: int = 4
    observation_window: int = 512
    floor: int = 1


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model sees it.

    Attributes:
        inputs: keyword arguments for the model.
        token_ids: the P prompt tokens, image placeholders expanded.
        vision: bool [P], true at image placeholders.
    """

    inputs: dict[str, torch.Tensor]
    token_ids: list[int]
    vision: torch.Tensor


@dataclass(frozen=True)
class Selection:
    """What stays of a prompt.

    Attributes:
        kept: bool [L, H, P].
        pages: int [L, H], full pages per (layer, head) in the compressed region; empty of meaning
            (all equal to t0) when nothing is evicted.
        blocks: retained blocks k; t0 when nothing is evicted.
    """

    kept: torch.Tensor
    pages: torch.Tensor
    blocks: int

    @property
    def evicts(self) -> bool:
        """Return whether anything is evicted."""
        return not bool(self.kept.all())


def retained_blocks(prompt_tokens: int, block_size: int, budget: float | int) -> int:
    """Return k, the blocks that fit the budget beside the tail, at least 1 and at most t0."""
    full_blocks = prompt_tokens // block_size
    tail = prompt_tokens - full_blocks * block_size
    tokens = budget if isinstance(budget, int) else budget * prompt_tokens
    return min(max(1, math.floor((tokens - tail) / block_size)), full_blocks)


def observation_rows(vision: torch.Tensor, window: int) -> list[int]:
    """Return the last `window` text positions after the first vision token.

    Args:
        vision: bool [P].
    """
    first = int(vision.nonzero()[0])
    rows = [i for i in range(first, len(vision)) if not vision[i]]
    return rows[-window:]


def column_sums(attention: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return c [P], c[j] = sum of A[i, j] over the observation rows i.

    Args:
        attention: float64 [P, P], causal.
    """
    return attention[list(rows)].sum(0)


def token_scores(
    attention: torch.Tensor, rows: Sequence[int], vision: torch.Tensor
) -> torch.Tensor:
    """Return the scores [P]: text-weighted ranking for vision, column sums for text.

    Args:
        attention: float64 [P, P], causal.
        vision: bool [P].
    """
    sums = column_sums(attention, rows)
    weights = [float(sums[j]) / (len(rows) - rank + 1) for rank, j in enumerate(rows, start=1)]
    total = sum(weights)
    scores = sums.clone()
    for j in range(len(vision)):
        if vision[j]:
            weighted = sum(w * float(attention[i, j]) for w, i in zip(weights, rows, strict=True))
            scores[j] = weighted / total if total > 0 else 0.0
    return scores


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
        low, high = (level, high) if sum(at(level)) < total else (low, level)
    return at(high)


def deal(shares: Sequence[float], total: int, floor: int, cap: int) -> list[int]:
    """Return whole units for the shares: water filling, then largest remainders.

    Ties go to the lower index; the units sum to `total`.
    """
    real = water_fill(shares, total, floor, cap)
    units = [math.floor(x) for x in real]
    order = sorted(range(len(real)), key=lambda p: (units[p] - real[p], p))
    while sum(units) < total:
        for p in order:
            if sum(units) < total and units[p] < cap:
                units[p] += 1
    return units


def retained_positions(
    scores: torch.Tensor, vision: torch.Tensor, candidates: int, count: int, sinks: int
) -> list[int]:
    """Return the `count` best of the first `candidates` positions.

    Sinks come first, then text, then vision; then the higher score, then the lower position.

    Args:
        scores: float64 [P].
        vision: bool [P].
    """

    def rank(j: int) -> tuple[int, float, int]:
        kind = 0 if j < sinks else 2 if vision[j] else 1
        return kind, -float(scores[j]), j

    return sorted(range(candidates), key=rank)[:count]


def select(
    attention: torch.Tensor, vision: torch.Tensor, kv_heads: int, eviction: Eviction
) -> Selection:
    """Return what TGV-KV keeps of a prompt.

    Args:
        attention: float64 [L, Q, P, P], softmax over all keys.
        vision: bool [P].
        kv_heads: H; query head q belongs to KV head q // (Q / H).
    """
    layers, query_heads, length, _ = attention.shape
    full_blocks = length // eviction.block_size
    blocks = retained_blocks(length, eviction.block_size, eviction.budget)
    kept = torch.ones(layers, kv_heads, length, dtype=torch.bool)
    if blocks >= full_blocks or not vision.any():
        return Selection(kept, torch.full((layers, kv_heads), full_blocks), full_blocks)

    rows = observation_rows(vision, eviction.observation_window)
    groups = 1 if eviction.granularity == LAYER else kv_heads
    pooled = attention.view(layers, groups, query_heads // groups, length, length).mean(2)
    strengths = [
        float(column_sums(pooled[layer, group], rows)[vision].sum())
        for layer in range(layers)
        for group in range(groups)
    ]
    shares = [s / sum(strengths) if sum(strengths) > 0 else 1.0 for s in strengths]
    units = deal(shares, blocks * len(shares), floor=min(eviction.floor, blocks), cap=full_blocks)
    pages = torch.tensor(units).view(layers, groups).repeat(1, kv_heads // groups)

    candidates = full_blocks * eviction.block_size
    kept[:, :, :candidates] = False
    for layer in range(layers):
        for head in range(kv_heads):
            scores = token_scores(pooled[layer, head if groups > 1 else 0], rows, vision)
            count = int(pages[layer, head]) * eviction.block_size
            best = retained_positions(scores, vision, candidates, count, eviction.sinks)
            kept[layer, head, best] = True
    return Selection(kept, pages, blocks)


class Oracle:
    """A Hugging Face model that generates as if prompt keys were evicted."""

    def __init__(self, folder: Path | str, dtype: torch.dtype = torch.float32) -> None:
        """Load the model of `folder` with eager attention.

        Args:
            dtype: of weights and arithmetic.
        """
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        ).eval()
        text = self.model.config.get_text_config()
        self.layers: int = text.num_hidden_layers
        self.query_heads: int = text.num_attention_heads
        self.kv_heads: int = text.num_key_value_heads

    def prompt(self, text: str, images: Sequence[Image.Image] = ()) -> Prompt:
        """Return the prompt for `text`, which holds one placeholder text per image."""
        inputs = self.processor(text=text, images=list(images) or None, return_tensors="pt")
        ids = inputs["input_ids"][0]
        return Prompt(dict(inputs), ids.tolist(), ids == self.model.config.image_token_id)

    @torch.no_grad()
    def attention(self, prompt: Prompt) -> torch.Tensor:
        """Return the prefill's attention [L, Q, P, P] in float64."""
        output = self.model(**prompt.inputs, output_attentions=True, use_cache=False)
        return torch.cat(output.attentions).double()

    def select(self, prompt: Prompt, eviction: Eviction) -> Selection:
        """Return what TGV-KV keeps of `prompt`."""
        return select(self.attention(prompt), prompt.vision, self.kv_heads, eviction)

    @torch.no_grad()
    def generate(
        self, prompt: Prompt, max_tokens: int, kept: torch.Tensor | None = None
    ) -> list[int]:
        """Return `max_tokens` greedy tokens; the end-of-text token does not stop it.

        The first token comes from the full prompt. All later ones see of the prompt only what is
        kept, and of what was generated everything.

        Args:
            kept: bool [L, H, P], by default everything.
        """
        with self._masked(kept):
            output = self.model.generate(
                **prompt.inputs,
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=None,
            )
        return output[0, len(prompt.token_ids) :].tolist()

    @contextmanager
    def _masked(self, kept: torch.Tensor | None) -> Iterator[None]:
        """Hide the prompt keys that are not kept from every query after the prefill.

        Eager attention adds its mask [batch, 1, queries, keys] to the scores, and a mask with a
        head dimension of Q does as well; so it is enough to change the mask each layer is given.
        """
        if kept is None:
            yield
            return
        hidden = ~kept.repeat_interleave(self.query_heads // self.kv_heads, dim=1)  # [L, Q, P]
        length = kept.shape[-1]

        def hide(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
            if kwargs["past_key_values"].get_seq_length(module.layer_idx) < length:
                return args, kwargs  # the prefill
            mask = kwargs["attention_mask"]
            mask = mask.expand(-1, self.query_heads, -1, -1).clone()
            lowest = torch.finfo(mask.dtype).min
            mask[..., :length].masked_fill_(hidden[module.layer_idx][None, :, None], lowest)
            return args, {**kwargs, "attention_mask": mask}

        handles = [
            layer.self_attn.register_forward_pre_hook(hide, with_kwargs=True)
            for layer in self.model.model.language_model.layers
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def emulate(
    oracle: Oracle,
    text: str,
    images: Sequence[Image.Image],
    eviction: Eviction,
    max_tokens: int,
) -> tuple[list[int], Selection]:
    """Return the greedy tokens of a prompt under `eviction`, and what was kept of it."""
    prompt = oracle.prompt(text, images)
    selection = oracle.select(prompt, eviction)
    return oracle.generate(prompt, max_tokens, selection.kept), selection
