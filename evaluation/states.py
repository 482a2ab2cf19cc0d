# SPDX-License-Identifier: Apache-2.0
"""RetentiveKV's states as they are printed, emulated on the page model in transformers.

`S' = H S + A k v^T` absorbs what is evicted, and attention is `Attn + O_S` with `O_S = q S`: one
state of vision and one of text for each layer and KV head. Source: Liu, "RetentiveKV: State-Space
Memory for Uncertainty-Aware Multimodal KV Cache Eviction", Findings of ACL 2026, arXiv 2605.04075.
What it does not print is an option of `State`. The engine serves summaries in their place:
docs/methods.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from evaluation.answers import Answer
from evaluation.arms import FULL, Arm, identity
from evaluation.eager import EagerModel
from evaluation.engine import SPARE_TOKENS, Settings, turns
from measure.text_tasks import TextExample
from reader.layout import GRID
from reader.tasks import PageQuestion
from vllm_tgvkv.shared.budget import Budget
from vllm_tgvkv.shared.prompt import WINDOW

SINKS = 4
ROWS = 128
"""Rows that vote, the last of the text after the first page; as the plugin's default."""
ROOTS = 15
"""Of an image, as many as a summary has rows."""


@dataclass(frozen=True)
class State:
    """How tokens are scored, absorbed and read: the options of an arm."""

    mix: float = 0.5
    """lambda of the score: weight of the attention, the rest is the entropy's."""
    entropy: Literal["vision", "all"] = "vision"
    """Keys over which a text row's entropy is taken; the served score has all that it sees."""
    fade: float = 1.0
    """Exponent of the entropy H by which a state fades with each further token; 0: it does not."""
    decay: float = 0.9
    """Factor of A for each step of a vision token to its root on the patch grid."""
    absorb: float = 1.0
    """Exponent of the mean attention in A; 0: all tokens count alike."""
    weight: float = 1.0
    """Factor of A; 0 drops what is evicted."""
    read: Literal["sum", "normalised"] = "sum"
    """`sum`: `Attn + q S`, as printed. `normalised`: phi(q) S shares the softmax's denominator,
    with phi = elu + 1."""
    gate: float = -1.0
    """A query reads a state if its cosine with the sum of the absorbed keys is above this."""
    dual: bool = True
    """A state of vision and one of text. False: one of both, without `decay`."""


@dataclass(frozen=True)
class Seen:
    """Attention of the text rows of a prompt, of all layers and KV heads, float32 `[L, H, P]`."""

    attention: Tensor
    """Mean over the rows."""
    entropies: dict[str, Tensor]
    """H by the keys over which it is taken, between 0 and 1."""

    def scores(self, state: State) -> Tensor:
        """Return `lambda c / max c + (1 - lambda) H`, the maximum behind the sinks."""
        most = self.attention[..., SINKS:].amax(-1, keepdim=True)
        alpha = (self.attention / most).clamp(max=1)
        return state.mix * alpha + (1 - state.mix) * self.entropies[state.entropy]


def seen_by(rows: Tensor, voters: Tensor, is_vision: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean attention and the entropies of one layer, each `[H, P]`; see `Seen`.

    Args:
        rows: A of the rows that vote, float32 `[H, G, O, P]`.
        voters: positions of these rows, int64 `[O]`.
        is_vision: bool `[P]`, true twice at least.
    """
    visible = rows[..., is_vision]
    visible = visible / visible.sum(-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    of_rows = {
        "vision": torch.special.entr(visible).sum(-1) / math.log(int(is_vision.sum())),
        "all": torch.special.entr(rows).sum(-1) / (voters + 1).clamp(min=2).log(),
    }
    mean = rows.mean(1)
    sums = mean.sum(1)
    weighted = {name: (each.mean(1).unsqueeze(1) @ mean)[:, 0] for name, each in of_rows.items()}
    entropies = {
        name: torch.where(sums > 0, x / sums, 0).clamp(0, 1) for name, x in weighted.items()
    }
    return mean.mean(1), entropies


def kept_tokens(scores: Tensor, number: int, candidates: int) -> Tensor:
    """Return which tokens each head keeps, bool `[L, H, P]`: sinks, window and the best scores.

    Args:
        scores: `[L, H, P]`, at most 1.
        number: of the first `candidates` tokens; all others stay.
    """
    length = scores.shape[-1]
    ranks = scores[..., :candidates].clone()
    ranks[..., max(length - WINDOW, 0) :] += 2
    ranks[..., :SINKS] += 4
    kept = torch.ones_like(scores, dtype=torch.bool)
    kept[..., :candidates] = False
    return kept.scatter_(-1, ranks.topk(number, dim=-1).indices, True)


def steps_to_roots(scores: Tensor, evicted: Tensor, start: int) -> Tensor:
    """Return the steps of each token of a page to the nearest root, float32 `[L, H, P]`.

    0 outside of the page. Roots are its evicted tokens with the best scores.

    Args:
        start: first token of the page, which has GRID x GRID.
    """
    page = slice(start, start + GRID * GRID)
    best = scores[..., page].masked_fill(~evicted[..., page], -1).topk(ROOTS, dim=-1).indices
    places = torch.arange(GRID * GRID)
    row, column = places // GRID, places % GRID
    steps = (row[:, None] - row[best].unsqueeze(-2)).abs()
    steps += (column[:, None] - column[best].unsqueeze(-2)).abs()
    result = torch.zeros_like(scores)
    result[..., page] = steps.amin(-1).to(scores.dtype)
    return result


def factors(
    attention: Tensor, entropies: Tensor, evicted: Tensor, steps: Tensor, state: State
) -> Tensor:
    """Return what is left of each token in the state after the last one, `[L, H, P]`.

    That is its A times the product of H of all later evicted tokens.

    Args:
        evicted: bool `[L, H, P]`, tokens that the state absorbs.
        steps: see `steps_to_roots`.
    """
    # An H of 0 forgets everything before it.
    fading = torch.where(evicted, state.fade * entropies.clamp(min=1e-30).log(), 0).double()
    later = fading.flip(-1).cumsum(-1).flip(-1) - fading
    absorbed = state.weight * attention**state.absorb * state.decay**steps
    return (absorbed * evicted * later.exp()).to(attention.dtype)


@dataclass(frozen=True)
class Cut:
    """Positions that are left of a prompt, and its states."""

    state: State
    kept: Tensor
    """bool `[L, H, P]`."""
    matrices: Tensor
    """S, `[2, L, H, D, D]`, of vision and of text; a first size of 1 without `State.dual`."""
    keys: Tensor
    """Sums of the absorbed keys, behind phi where the read is normalised, `[2, L, H, D]`."""

    @classmethod
    def of(
        cls,
        state: State,
        seen: Seen,
        keys: Tensor,
        values: Tensor,
        starts: Sequence[int],
        kept: int,
        candidates: int,
    ) -> Cut:
        """Evict all but some blocks' tokens of each head, and absorb them.

        Args:
            keys, values: `[L, H, P, D]`.
            starts: first token of each page.
            kept: tokens that each head keeps of the first `candidates`; all others stay.
        """
        scores, length = seen.scores(state), keys.shape[2]
        is_kept = kept_tokens(scores, kept, candidates)
        is_vision = torch.zeros(length, dtype=torch.bool)
        steps = torch.zeros_like(scores)
        for start in starts:
            is_vision[start : start + GRID * GRID] = True
            if state.dual:
                steps += steps_to_roots(scores, ~is_kept, start)
        if state.read == "normalised":
            keys = _phi(keys)
        found = []
        everything = torch.ones_like(is_vision)
        for kind in (is_vision, ~is_vision) if state.dual else (everything,):
            left = factors(
                seen.attention, seen.entropies[state.entropy], ~is_kept & kind, steps, state
            ).unsqueeze(-1)
            weighted = left * keys
            found.append((weighted.transpose(2, 3) @ values, weighted.sum(2)))
        matrices, sums = (torch.stack(each) for each in zip(*found, strict=True))
        return cls(state, is_kept, matrices, sums)

    def read(self, layer: int, query: Tensor, output: Tensor, mass: Tensor, scale: float) -> Tensor:
        """Return the attention with what queries read of both states.

        Args:
            query, output: `[H, G, n, D]`, and attention over the kept keys.
            mass: logarithm of its denominator, `[H, G, n, 1]`.
        """
        matrices, sums = self.matrices[:, layer].unsqueeze(2), self.keys[:, layer].unsqueeze(2)
        is_sum = self.state.read == "sum"
        read = query if is_sum else _phi(query)
        cosines = torch.cosine_similarity(read.unsqueeze(0), sums.unsqueeze(3), dim=-1)
        is_read = (cosines > self.state.gate).unsqueeze(-1)
        if is_sum:
            return output + (scale * read @ matrices * is_read).sum(0)
        # In units of the kept keys' denominator.
        read = read * (-mass).exp()
        shares = (read @ sums.unsqueeze(4)) * is_read
        return (output + (read @ matrices * is_read).sum(0)) / (1 + shares.sum(0))


def _phi(x: Tensor) -> Tensor:
    return torch.nn.functional.elu(x) + 1


@dataclass(frozen=True)
class Prefill:
    """A question whose prompt has been read."""

    asked: TextExample
    length: int
    logits: Tensor
    """Of the answer's first token, `[V]`."""
    cache: DynamicCache
    starts: Sequence[int]
    """First token of each page."""
    seen: Seen


class StateEngine(EagerModel):
    """The page model in transformers, which answers for arms of `State` and the full cache."""

    def __init__(self, settings: Settings, arms: Sequence[Arm]) -> None:
        """Load the model; it is written on the first call.

        Raises:
            WeightsMissingError: if the package with the language model is not installed.
        """
        super().__init__()
        self.block_size = settings.block_size
        self._prefill = lru_cache(maxsize=16)(self._read)  # the full cache is asked by itself
        self._drafts: dict[PageQuestion, list[int]] = {}
        self._recorded: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._voters: Tensor | None = None
        self._is_vision = torch.empty(0)
        self._cut: Cut | None = None

    def close(self) -> None:
        """Forget the prompts."""
        self._prefill.cache_clear()

    @torch.inference_mode()
    def answers(self, work: Sequence[tuple[PageQuestion, Arm]]) -> Iterator[Answer]:
        """Yield the answers in order."""
        with self.attending():
            for question, arm in work:
                yield self._answer(question, arm)

    def _answer(self, question: PageQuestion, arm: Arm) -> Answer:
        prefill, size = self._prefill(question), self.block_size
        length, asked = prefill.length, prefill.asked
        full, tail = divmod(length, size)
        left, before = full, -(-length // size)
        after, self._cut = before, None
        if arm != FULL:
            state = State(**dict(arm.options))
            left = Budget(fraction=float(arm.budget or 1)).retained_blocks(length, size)
            keys, values = (
                torch.cat([getattr(layer, name) for layer in prefill.cache.layers])
                for name in ("keys", "values")
            )
            given = (state, prefill.seen, keys, values, prefill.starts)
            self._cut = Cut.of(*given, left * size, full * size)
            # States of D x D numbers are beside the budget: two are as large as D / N blocks.
            numbers = keys.shape[-1] * (1 + state.dual)
            after -= full - left - (-(-numbers // (2 * size)) if state.weight else 0)
        right = self.tokenizer.encode(asked.answer, add_special_tokens=False)
        said = self._decode(prefill, self._drafts.get(question, right), len(right) + SPARE_TOKENS)
        if arm == FULL:
            self._drafts[question] = said
        text = self.tokenizer.decode(said, skip_special_tokens=True)
        return Answer(
            task=question.task.name,
            number=question.number,
            arm=identity(arm),
            text=text,
            hits=asked.hits(text, [self.tokenizer.decode([i]) for i in right]),
            prompt_tokens=length,
            kept_tokens=left * size + tail,
            blocks_before=before,
            blocks_after=after,
            right_tokens=len(right) + 1,
            cuts=((0, before, after),) if arm != FULL else (),
        )

    def _decode(self, prefill: Prefill, draft: Sequence[int], most: int) -> list[int]:
        """Return a greedy answer, up to its number's end.

        A draft is read in one pass as far as it is right, and the rest token by token.
        """
        said, cache = [int(prefill.logits.argmax())], prefill.cache
        while len(said) < most and said[-1] != self.tokenizer.eos_token_id:
            if re.search(r"\d\D", self.tokenizer.decode(said)):
                break
            known = cache.get_seq_length() - prefill.length
            more = list(draft[len(said) :]) if said == list(draft[: len(said)]) else []
            given = torch.tensor([[*said[known:], *more]])
            best = self.model(input_ids=given, past_key_values=cache).logits[0].argmax(-1).tolist()
            best = best[len(said) - known - 1 :]
            num_right = next((n for n, i in enumerate(more) if best[n] != i), len(more))
            said += best[: num_right + 1]
            if extra := len(more) - num_right:
                cache.crop(-extra)
        cache.crop(prefill.length - cache.get_seq_length())
        return said

    def _read(self, question: PageQuestion) -> Prefill:
        example = question.example(self.vocabulary)
        text = turns(self.tokenizer, example.messages()) + example.asked.start
        inputs = self.processor(text=text, images=list(example.pages), return_tensors="pt")
        ids = inputs["input_ids"][0]
        self._is_vision = ids == self.model.config.image_token_id
        places = self._is_vision.nonzero().flatten()
        is_asking = ~self._is_vision & (torch.arange(len(ids)) > places[0])
        self._cut, self._voters = None, is_asking.nonzero().flatten()[-ROWS:]
        self._recorded, cache = [], DynamicCache()
        logits = self.model(**inputs, past_key_values=cache, logits_to_keep=1).logits[0, 0]
        self._voters = None
        means, entropies = zip(*self._recorded, strict=True)
        of_layers = {name: torch.stack([each[name] for each in entropies]) for name in entropies[0]}
        starts = places[:: GRID * GRID].tolist()
        seen = Seen(torch.stack(means), of_layers)
        return Prefill(example.asked, len(ids), logits, cache, starts, seen)

    def attend(
        self, layer: int, query: Tensor, logits: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Attend to what the cut leaves; in a prefill, record what the rows that vote see."""
        if self._cut is not None:
            kept = self._cut.kept[layer]
            logits[..., : kept.shape[-1]].masked_fill_(~kept[:, None, None], -math.inf)
        weights = logits.softmax(-1)
        output = weights @ value
        if self._voters is not None:
            rows = weights[:, :, self._voters]
            self._recorded.append(seen_by(rows, self._voters, self._is_vision))
        if self._cut is not None and self._cut.state.weight:
            mass = logits.logsumexp(-1, keepdim=True)
            output = self._cut.read(layer, query, output, mass, scale)
        return output
