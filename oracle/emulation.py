# SPDX-License-Identifier: Apache-2.0
"""Every method on plain Hugging Face models: the oracle of the engine tests.

Nothing is evicted here. The whole cache stays, and a mask hides the keys that each (layer, KV head)
would have lost from every later query. `oracle.methods` finds these keys from the attention of the
prefill and of the answer so far.

`Oracle.generate` hides one set of keys from everything after the prefill. `Oracle.decode` generates
token by token and may hide more after any of them. `Oracle.answer` decodes with the cuts that an
`Eviction` describes.

Shapes: L layers, Q query heads, H KV heads, P prompt tokens, n prompt and answer tokens so far.
Answer token i, counted from 1, stands at position P + i - 1. Its row gives token i + 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from oracle import methods
from oracle.kernels import merged
from oracle.methods import (
    Auto,
    Earlier,
    Image,
    Layout,
    Mix,
    Selection,
    Settings,
    States,
    mix_of,
)
from oracle.recall import Recall, served
from oracle.recall import attention as recalled_attention
from oracle.summaries import Absorbed
from oracle.token_sets import WINDOW


@dataclass(frozen=True)
class Change:
    """A change of the cache at any token of an answer.

    Attributes:
        after: answer tokens whose rows have been computed.
        blocks: k that a cut leaves of the prompt's full blocks; None if the whole prompt comes
            back, behind any cut after the same token.
        rows: m, the last rows of the answer, which vote at a cut, whatever rows the method names.
        recomputes: whether the keys of the answer are computed again as well, from the whole
            prompt, as a preemption does.
    """

    after: int
    blocks: int | None
    rows: int = 0
    recomputes: bool = False


@dataclass(frozen=True)
class Eviction(Settings):
    """A method and the settings it works under.

    Attributes:
        method: name or parts.
        text_only: "keep" or "evict" prompts without vision.
        defer: m, the answer tokens whose rows are computed before the first cut. They vote as well.
        schedule: further cuts of the prompt, each after that many answer tokens to that budget.
        answer_rows: W, the last rows that vote in a cut after the first, at most those since the
            cut before.
        ceiling, buffer: M and B in tokens. No cut leaves more than M tokens in full blocks, or one
            block. After the first cut, prompt and answer are cut again with every block that is
            then full and makes a head have more than M + B tokens in full blocks, on average. B is
            at least a block.
        summaries: most blocks of those that a cut leaves which hold summaries in place of tokens.
            One block at least holds tokens, and all do where all tokens are left.
        recall: if given, what a cut evicts may come back.
        changes: if given, these in place of all other cuts, in order. A cut of the whole prompt
            chooses among all of it, a further one among what the last one left.
    """

    method: str | Mix = "tgv"
    text_only: str = "keep"
    defer: int = 0
    schedule: tuple[tuple[int, float | int], ...] = ()
    answer_rows: int = WINDOW
    ceiling: int | None = None
    buffer: int = 0
    summaries: int = 0
    changes: tuple[Change, ...] | None = None
    recall: Recall | None = None

    @property
    def whole_after(self) -> dict[int, bool]:
        """By answer tokens after which the whole prompt comes back: whether keys of the answer
        are computed again."""
        changes = self.changes or ()
        return {each.after: each.recomputes for each in changes if each.blocks is None}

    @property
    def merges(self) -> bool:
        """Whether evicted tokens are merged into kept ones."""
        return mix_of(self.method, self).merge


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model sees it.

    Attributes:
        inputs: keyword arguments for the model.
        token_ids: the P prompt tokens, with expanded image placeholders.
        vision: bool [P], true at image placeholders.
        images: run of each image, in order.
    """

    inputs: dict[str, torch.Tensor]
    token_ids: list[int]
    vision: torch.Tensor
    images: tuple[Image, ...] = ()

    @property
    def layout(self) -> Layout:
        """Positions of the prompt."""
        return Layout(len(self.token_ids), self.images)


def select(
    attention: torch.Tensor,
    prompt: Prompt,
    kv_heads: int,
    eviction: Eviction,
    stages: Sequence[int] | None = None,
    states: States | None = None,
) -> Selection:
    """Return the part of a prompt that is kept; arguments as in `methods.select`."""
    layout = prompt.layout
    settings: Settings = eviction
    if not layout.images and eviction.text_only == "keep":
        settings = replace(eviction, budget=layout.length)
    return methods.select(
        eviction.method, attention, layout, kv_heads, settings, stages=stages, states=states
    )


def _states(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None) -> States:
    """Return states with the scale that all models of the tests have."""
    return States(queries, keys, queries.shape[-1] ** -0.5, values)


@dataclass(frozen=True)
class Moment:
    """The end of a step: what a decision about a cut can look at.

    Attributes:
        prompt_tokens: P.
        kept: bool [L, H, n], the keys that the next query of each head will see.
        rows: attention of each step so far, float64 [L, Q, new tokens, positions].
        queries: rotated queries of each step so far, [L, Q, new tokens, D].
        keys: rotated keys, [L, H, n, D], with those that are hidden.
        values: their values, [L, H, n, D], for methods that look at them.
        gates: what the gates said of them, float64 [L, H, n], if there are gates.
        sinks: learned sinks of the query heads, [L, Q], if there are some.
    """

    prompt_tokens: int
    kept: torch.Tensor
    rows: list[torch.Tensor]
    queries: list[torch.Tensor]
    keys: torch.Tensor
    values: torch.Tensor | None = None
    gates: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """n."""
        return self.kept.shape[-1]

    @property
    def answer(self) -> int:
        """Answer tokens whose rows have been computed."""
        return self.length - self.prompt_tokens

    def states(self) -> States:
        """Return the queries and keys that attention comes from, and the values."""
        states = _states(torch.cat(self.queries, dim=2), self.keys, self.values)
        return replace(states, gates=self.gates, sinks=self.sinks)

    def attention(self) -> torch.Tensor:
        """Return A, float64 [L, Q, n, n]; every row is a softmax over the keys it was shown."""
        result = torch.zeros(*self.rows[0].shape[:2], self.length, self.length).double()
        start = 0
        for rows in self.rows:
            result[:, :, start : start + rows.shape[2], : rows.shape[3]] = rows
            start += rows.shape[2]
        return result


@dataclass(frozen=True)
class Cut:
    """A cut as it was decided, and what it was decided from; arguments of `methods.select`.

    Attributes:
        after: answer tokens whose rows had been computed.
        attention: float64 [L, Q, n, n].
        selection: what is left, with `kept` bool [L, H, n].
    """

    after: int
    method: str | Mix
    attention: torch.Tensor
    layout: Layout
    kv_heads: int
    settings: Settings
    stages: Sequence[int] | None
    earlier: Earlier | None
    states: States
    selection: Selection

    def is_stable(self, noise: float = 3e-5, trials: int = 3) -> bool:
        """Return whether rounding decides nothing here, see `methods.is_stable`."""
        given = self.method, self.attention, self.layout, self.kv_heads, self.settings
        later = self.stages, self.earlier, self.states
        return methods.is_stable(*given, [self.settings.budget], noise, trials, *later)


@dataclass
class Cutter:
    """Decides the cuts of an answer as an `Eviction` describes them, and keeps them in order."""

    eviction: Eviction
    layout: Layout
    kv_heads: int
    stages: Sequence[int] | None = None
    cuts: list[Cut] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    """Blocks of summaries after each cut."""

    def __call__(self, moment: Moment) -> torch.Tensor | None:
        """Return what is left after the cuts that are due, bool [L, H, n]; None if none is due."""
        eviction, layout, size = self.eviction, self.layout, self.eviction.block_size
        before = len(self.cuts)
        if not layout.images and eviction.text_only == "keep":
            return None
        has_later = eviction.schedule or eviction.ceiling is not None or eviction.changes
        merges_again = eviction.merges and mix_of(eviction.method, eviction).score != "fixed_place"
        if merges_again and has_later:
            raise ValueError(f"{eviction.method} merges; that is defined for one cut only")
        kept, so_far = moment.kept, replace(layout, length=moment.length, answer=moment.answer)
        if eviction.changes is not None:
            for change in eviction.changes:
                if change.after == moment.answer and change.blocks is not None:
                    tokens = change.blocks * size + layout.length % size
                    kept = self._cut(moment, so_far, tokens, kept, change.rows)
            return kept if len(self.cuts) > before else None
        if moment.answer == eviction.defer:
            kept = self._cut(moment, so_far, self._first_budget(), None)
        for after, budget in eviction.schedule:
            if after <= eviction.defer:
                raise ValueError(f"schedule: {after} is not after the first cut")
            if moment.answer == after:
                kept = self._cut(moment, so_far, budget, kept)
        ceiling = eviction.ceiling
        if ceiling is not None and moment.answer > eviction.defer and moment.length % size == 0:
            held = kept.sum().item() / kept[..., 0].numel() + self.taken[-1] * size
            if held > ceiling + max(eviction.buffer, size):
                whole = replace(layout, length=moment.length)  # no part of it is exempt
                kept = self._cut(moment, whole, ceiling, kept)
        return kept if len(self.cuts) > before else None

    def is_idle(self, answer: int) -> bool:
        """Return whether no decision is due once this many answer tokens have been computed."""
        eviction = self.eviction
        if eviction.recall is not None:
            return False
        if eviction.changes is not None:
            return all(answer != change.after for change in eviction.changes)
        at_ceiling = eviction.ceiling is not None and answer > eviction.defer
        if at_ceiling and (self.layout.length + answer) % eviction.block_size == 0:
            return False
        return answer not in (eviction.defer, *(after for after, _ in eviction.schedule))

    def _first_budget(self) -> Any:
        """Return the budget of the first cut: at most what the ceiling leaves."""
        eviction, length = self.eviction, self.layout.length
        if eviction.ceiling is None:
            return eviction.budget
        if isinstance(eviction.budget, Auto):
            raise ValueError("auto: a guarded budget has no ceiling")
        size = eviction.block_size
        blocks = methods.retained_blocks(length, size, eviction.budget)
        return min(blocks, max(eviction.ceiling // size, 1)) * size + length % size

    def _cut(
        self,
        moment: Moment,
        layout: Layout,
        budget: Any,
        kept: torch.Tensor | None,
        answer_rows: int | None = None,
    ) -> torch.Tensor:
        """Decide one cut.

        Args:
            kept: what the cuts before it left; None for the first one.
            answer_rows: last rows of the answer that vote; None for those since the cut before.
        """
        eviction, size = self.eviction, self.eviction.block_size
        self.taken.append(0)
        if eviction.summaries:
            full, tail = divmod(layout.prompt, size)
            blocks = methods.retained_blocks(layout.prompt, size, budget)
            if blocks < full:
                self.taken[-1] = min(eviction.summaries, blocks - 1)
            budget = (blocks - self.taken[-1]) * size + tail
        settings, earlier = replace(eviction, budget=budget), None
        if kept is not None:
            since = max((cut.after for cut in self.cuts if cut.after < moment.answer), default=0)
            if answer_rows is None:
                answer_rows = min(eviction.answer_rows, moment.answer - since)
            voters = range(moment.length - answer_rows, moment.length)
            before = self.cuts[-1].selection.scores if self.cuts else None
            earlier = Earlier(kept, tuple(voters), before)
        attention = moment.attention()
        given = (eviction.method, attention, layout, self.kv_heads, settings)
        states = moment.states()
        selection = methods.select(*given, stages=self.stages, earlier=earlier, states=states)
        self.cuts.append(Cut(moment.answer, *given, self.stages, earlier, states, selection))
        return selection.kept


@dataclass
class Chooser:
    """Chooses the tokens of an answer's prompt again, out of all of them."""

    eviction: Eviction
    cutter: Cutter
    last: int
    """Answer tokens of the last choice that would serve a token."""
    given: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """By answer tokens: what comes into force in place of the own choice, bool [L, H, any n]."""
    choices: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """Answer tokens and what was chosen, bool [L, H, n]."""

    def __call__(self, moment: Moment) -> torch.Tensor | None:
        """Return what later queries may see, bool [L, H, n], if a choice comes into force."""
        recall, cuts = self.eviction.recall, self.cutter.cuts
        if recall is None or not cuts:
            return None
        since = cuts[-1].after
        if any(since <= after < moment.answer for after in self.eviction.whole_after):
            return None
        age = moment.answer - since
        is_due = age > 0 and age % recall.every == 0 and moment.answer <= self.last
        if not is_due or self._is_cut_soon(moment.answer):
            return None
        kept = self._choose(moment, recall, cuts[-1], age)
        self.choices.append((moment.answer, kept))
        if (other := self.given.get(moment.answer)) is not None:
            size = self.eviction.block_size
            full = self.cutter.layout.length // size * size
            kept = kept.clone()
            kept[..., :full] = other[..., :full]
        missing = moment.length - kept.shape[-1]
        return torch.nn.functional.pad(kept, (0, missing), value=True)

    def _is_cut_soon(self, answer: int) -> bool:
        """Return whether rows that vote at a cut are computed after this token of the answer."""
        changes = self.eviction.changes or ()
        cuts = (each for each in changes if each.blocks is not None)
        return any(each.after - each.rows < answer <= each.after for each in cuts)

    def _choose(self, moment: Moment, recall: Recall, cut: Cut, age: int) -> torch.Tensor:
        eviction, layout = self.eviction, self.cutter.layout
        full, tail = divmod(layout.length, eviction.block_size)
        states = moment.states()
        size = full * eviction.block_size
        pooling = methods.mix_of(eviction.method, eviction).pooling
        voters = recall.voters(moment.length, age)
        votes = recalled_attention(
            states.queries, states.keys, states.scale, size, recall.bits, voters, states.sinks
        )
        return methods.select(
            eviction.method,
            votes,
            replace(layout, length=moment.length, answer=moment.answer),
            self.cutter.kv_heads,
            replace(
                eviction,
                budget=cut.selection.blocks * eviction.block_size + tail,
                pooling=served(pooling, recall),
            ),
            stages=self.cutter.stages,
            earlier=Earlier(torch.ones_like(moment.kept), voters),
            states=states,
        ).kept


@dataclass(frozen=True)
class Answer:
    """An answer with the cuts that were made while it grew.

    Attributes:
        tokens: the greedy tokens, or those that were given.
        logprobs: log-probabilities [T, V], float64; row i is the distribution of token i.
        cuts: all cuts in order, also those that left everything.
        choices: all choices in order, see `Chooser`.
    """

    tokens: list[int]
    logprobs: torch.Tensor
    cuts: list[Cut] = field(default_factory=list)
    choices: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    @property
    def kept(self) -> list[torch.Tensor]:
        """Keys that are left after each cut, bool [L, H, n at that time]."""
        return [cut.selection.kept for cut in self.cuts]


class Oracle:
    """A Hugging Face model that generates as if prompt keys were evicted or merged."""

    def __init__(
        self,
        folder: Path | str,
        dtype: torch.dtype = torch.float32,
        gates: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Load the model of `folder` with eager attention.

        Args:
            dtype: of weights and arithmetic.
            gates: returns what the gate of a layer says of hidden states [n, d], float64 [n, H].
        """
        self.gates = gates
        self.processor = AutoProcessor.from_pretrained(folder)
        sees = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        self.model = kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        text = self.model.config.get_text_config()
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
        reading = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        num_owners = len(kinds) - (getattr(text, "num_kv_shared_layers", 0) or 0)
        self.attending = [i for i in reading if i < num_owners]
        """Layers with a cache that can be evicted, by their index in the model. L counts these."""
        self.numbers = {i: min(n, len(self.attending) - 1) for n, i in enumerate(reading)}
        """Number of the cache that a layer with full attention reads, by its index in the model.
        The last layers may read that of the last of those before them."""
        self.layers = len(self.attending)
        self.takes_blocks = {*kinds} <= {"full_attention", "sliding_attention"}
        """Whether tokens behind a prompt can be computed together; states take them one by one."""
        self.query_heads: int = text.num_attention_heads
        # Layers with full attention may have other heads than those with a window.
        of_layers = getattr(text, "per_layer_config", None)
        first = of_layers[self.attending[0]] if of_layers else text
        self.kv_heads: int = first.num_key_value_heads
        owners = [layer.self_attn for layer in self._attention_layers(self.attending)]
        self.sinks: torch.Tensor | None = None
        """Learned sinks of the query heads, [L, Q]; None if the model has none."""
        if getattr(owners[0], "sinks", None) is not None:
            self.sinks = torch.stack([owner.sinks.detach() for owner in owners])

    def prompt(self, text: str, images: Sequence[PIL.Image.Image] = ()) -> Prompt:
        """Return the prompt for `text`, which has one placeholder per image."""
        inputs = self.processor(text=text, images=list(images) or None, return_tensors="pt")
        ids = inputs["input_ids"][0]
        vision = ids == self.model.config.image_token_id
        places = vision.nonzero().flatten().tolist()
        found = []
        for grid in self._grids(inputs, len(places), len(images)):
            size = grid[0] * grid[1]
            found.append(Image(places[0], size, grid))
            places = places[size:]
        assert not places
        return Prompt(dict(inputs), ids.tolist(), vision, tuple(found))

    def _grids(self, inputs: Any, tokens: int, images: int) -> list[tuple[int, int]]:
        """Return rows and columns of tokens of each image."""
        if "image_grid_thw" in inputs:
            merge = self.model.config.vision_config.spatial_merge_size
            return [(h // merge, w // merge) for _, h, w in inputs["image_grid_thw"].tolist()]
        if "target_sizes" in inputs:  # of MiniCPM's slices, merged twice
            return [(h // 4, w // 4) for h, w in inputs["target_sizes"].tolist()]
        return [(math.isqrt(tokens // images),) * 2] * images if images else []

    @torch.no_grad()
    def attention(self, prompt: Prompt) -> torch.Tensor:
        """Return the prefill's attention [L, Q, P, P] in float64."""
        output = self.model(**prompt.inputs, output_attentions=True, use_cache=False)
        return self._rows(output)

    def _rows(self, output: Any) -> torch.Tensor:
        """Return the attention of the layers whose caches are evicted, [L, Q, rows, keys]."""
        rows = output.attentions
        if len(rows) > len(self.numbers):  # those of layers with a window are among them
            rows = [rows[i] for i in self.numbers]
        return torch.cat([rows[n] for n in range(self.layers)]).double()

    @torch.no_grad()
    def states(self, prompt: Prompt) -> States:
        """Return the queries, keys and values of the prefill."""
        self._forget_positions()
        with self._recorded() as seen, self._gated() as gated:
            output = self.model(**prompt.inputs, use_cache=True)
        queries = torch.cat([seen[layer] for layer in range(self.layers)])
        states = _states(queries, *self._kept_states(output.past_key_values))
        gates = torch.stack(gated) if gated else None
        return replace(states, gates=gates, sinks=self.sinks)

    def select(
        self, prompt: Prompt, eviction: Eviction, stages: Sequence[int] | None = None
    ) -> Selection:
        """Return the part of `prompt` that is kept, by stages with that many layers."""
        states = self.states(prompt)
        return select(self.attention(prompt), prompt, self.kv_heads, eviction, stages, states)

    @torch.no_grad()
    def generate(
        self,
        prompt: Prompt,
        max_tokens: int,
        kept: torch.Tensor | None = None,
        merging: int = 0,
        guess: Sequence[int] | None = None,
    ) -> list[int]:
        """Return `max_tokens` greedy tokens; an end-of-text token does not stop generation.

        The first token comes from the full prompt. Later ones see the kept part of the prompt, and
        all generated tokens.

        Args:
            kept: bool [L, H, P], by default everything.
            merging: among this many first positions, those not kept are merged into kept ones.
            guess: what the tokens may be. A right guess takes two passes, a wrong one costs time.
        """
        if guess is not None and len(guess) == max_tokens and self.takes_blocks:
            logprobs = self.logprobs(prompt, guess, kept, merging)
            if (tokens := logprobs.argmax(1).tolist()) == list(guess):
                return tokens
        with self._masked(kept, merging):
            output = self.model.generate(
                **prompt.inputs,
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=None,
            )
        return output[0, len(prompt.token_ids) :].tolist()

    @torch.no_grad()
    def logprobs(
        self,
        prompt: Prompt,
        tokens: Sequence[int],
        kept: torch.Tensor | None = None,
        merging: int = 0,
    ) -> torch.Tensor:
        """Return log-probabilities [T, V]; row i is the distribution of `tokens[i]`.

        Each token sees the prompt's kept positions and all tokens before it. Others as in
        `generate`.
        """
        after = torch.tensor(tokens[:-1])[None]
        self._forget_positions()
        with self._masked(kept, merging):
            output = self.model(**prompt.inputs, use_cache=True)
            if len(tokens) == 1:
                return output.logits[0, -1:].double().log_softmax(-1)
            cache = output.past_key_values
            rest = self.model(input_ids=after, past_key_values=cache, use_cache=True)
        logits = torch.cat((output.logits[0, -1:], rest.logits[0]))
        return logits.double().log_softmax(-1)

    def answer(
        self,
        prompt: Prompt,
        max_tokens: int,
        eviction: Eviction,
        stages: Sequence[int] | None = None,
        tokens: Sequence[int] | None = None,
        chosen: Mapping[int, torch.Tensor] | None = None,
        guess: Sequence[int] | None = None,
    ) -> Answer:
        """Return the answer to `prompt`, with the cuts of `eviction`.

        A cut after m tokens is made if the row of token m is computed, so if the answer has at
        least m + 1 tokens. Tokens 1 to m + 1 do not depend on it.

        Args:
            stages: number of layers of each pipeline stage.
            tokens: answer to follow in place of the greedy one.
            chosen: by answer tokens, sets to use in place of its own choices.
            guess: what the greedy answer may be. A right guess takes one pass for all tokens up to
                the next cut; after a wrong one the answer is computed token by token.
        """
        if guess is not None and len(guess) == max_tokens:
            found = self.answer(prompt, max_tokens, eviction, stages, guess, chosen)
            if found.logprobs.argmax(1).tolist() == list(guess):
                return found
        cutter = Cutter(eviction, prompt.layout, self.kv_heads, stages)
        full = len(prompt.token_ids) // eviction.block_size * eviction.block_size
        merging = full if eviction.merges else 0
        chooser = Chooser(eviction, cutter, max_tokens - 2, chosen or {})
        more: dict[str, Any] = {"whole_after": eviction.whole_after, "choose": chooser}
        if self.takes_blocks:
            more["is_idle"] = cutter.is_idle
        answer = self.decode(prompt, max_tokens, cutter, tokens, merging, **more)
        return replace(answer, cuts=cutter.cuts, choices=chooser.choices)

    @torch.no_grad()
    def decode(
        self,
        prompt: Prompt,
        max_tokens: int,
        cut: Callable[[Moment], torch.Tensor | None] | Mapping[int, torch.Tensor] | None = None,
        tokens: Sequence[int] | None = None,
        merging: int = 0,
        absorb: Callable[[Moment, torch.Tensor], Absorbed] | None = None,
        whole_after: Mapping[int, bool] | None = None,
        choose: Callable[[Moment], torch.Tensor | None] = lambda moment: None,
        is_idle: Callable[[int], bool] = lambda answer: False,
    ) -> Answer:
        """Return `max_tokens` greedy tokens, generated one by one under a mask that changes.

        Args:
            cut: called at the end of each step, it returns what every later query may see, bool
                [L, H, n], or None for no change. A mapping has the same by answer tokens whose
                rows have been computed. What was hidden once stays hidden until everything
                comes back.
            tokens: answer to follow in place of the greedy one.
            merging: among this many first positions, those that the first cut hides are merged into
                those that it leaves.
            absorb: called with what a cut looked at and what it leaves, it returns what later
                queries read of the rest, in place of what the cut before returned.
            whole_after: by answer tokens whose rows have been computed, behind any cut: nothing is
                hidden any more, and whether these tokens' keys are computed again so. Otherwise
                they stay as they are.
            choose: called behind any cut, it returns what every later query may see, in place of
                what is left, or None for no change.
            is_idle: called with a number of answer tokens, it returns whether nothing can change
                after them. Given tokens up to the next change are computed in one step. By default
                each token is a step.
        """
        given = list(tokens[:max_tokens]) if tokens is not None else None
        number = max_tokens if given is None else len(given)
        length = len(prompt.token_ids)
        kept = torch.ones(self.layers, self.kv_heads, length, dtype=torch.bool)
        rows: list[torch.Tensor] = []
        queries: list[torch.Tensor] = []
        gates: torch.Tensor | None = None
        chosen: list[int] = []
        logprobs: list[torch.Tensor] = []
        inputs: dict[str, Any] = dict(prompt.inputs)
        cache: Any = None
        absorbed: Absorbed | None = None
        self._forget_positions()
        while True:
            hidden = self._hooked(partial(self._hide, ~kept))
            with hidden, self._recorded(absorbed) as seen, self._gated() as gated:
                output = self.model(
                    **inputs, past_key_values=cache, use_cache=True, output_attentions=True
                )
            cache = output.past_key_values
            rows.append(self._rows(output))
            new_tokens = inputs["input_ids"].shape[1] if chosen else 1
            logprobs.append(output.logits[0, -new_tokens:].double().log_softmax(-1))
            queries.append(torch.cat([seen[layer] for layer in range(self.layers)]))
            if gated:
                new_gates = torch.stack(gated)
                gates = new_gates if gates is None else torch.cat((gates, new_gates), dim=2)
            states = self._kept_states(cache)
            moment = Moment(length, kept, rows, queries, *states, gates, self.sinks)
            if given is not None:
                chosen = given[: moment.answer]
            new = cut(moment) if callable(cut) else (cut or {}).get(moment.answer)
            if new is not None:
                kept = kept & new
                if absorb is not None:
                    absorbed = absorb(moment, kept)
                if merging:
                    self._merge(cache, kept, merging)
                    merging = 0
            kept = kept if (chosen_again := choose(moment)) is None else chosen_again
            if (recomputes := (whole_after or {}).get(moment.answer)) is not None:
                kept, absorbed = torch.ones_like(kept), None
                if recomputes:
                    cache, gates = self._computed_again(prompt, chosen)
            chosen.append(int(logprobs[-1].argmax()) if given is None else given[moment.answer])
            if len(chosen) == number:
                return Answer(chosen, torch.cat(logprobs))
            end = len(chosen)
            while given is not None and end < number - 1 and is_idle(end):
                end += 1
            step = (chosen if given is None else given)[moment.answer : end]
            inputs = {"input_ids": torch.tensor([step])}
            kept = torch.nn.functional.pad(kept, (0, len(step)), value=True)

    def _computed_again(
        self, prompt: Prompt, tokens: Sequence[int]
    ) -> tuple[Any, torch.Tensor | None]:
        """Return the whole cache of a prompt and the first tokens of its answer, and the gates."""
        inputs = dict(prompt.inputs)
        for name, each in inputs.items():
            if each.shape == (1, len(prompt.token_ids)):  # token ids, and a mask of ones
                more = each.new_ones(1, len(tokens))
                if name == "input_ids":
                    more = torch.tensor([list(tokens)], dtype=each.dtype)
                elif name != "attention_mask":
                    more = torch.zeros_like(more)
                inputs[name] = torch.cat((each, more), dim=1)
        self._forget_positions()
        with self._gated() as gated:
            output = self.model(**inputs, use_cache=True)
        return output.past_key_values, torch.stack(gated) if gated else None

    @contextmanager
    def _masked(self, kept: torch.Tensor | None, merging: int) -> Iterator[None]:
        """Hide the prompt keys that are not kept from every query after the prefill."""
        if kept is None:
            yield
            return
        length = kept.shape[-1]

        def hide(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            layer = self.numbers[module.layer_idx]
            owner = self.attending[layer]
            cached = kwargs["past_key_values"].get_seq_length(owner)
            if module.layer_idx != owner:  # which has stored this step's tokens already
                cached -= kwargs["hidden_states"].shape[1]
            if cached < length:
                return args, kwargs  # the prefill
            if cached == length and merging and module.layer_idx == owner:
                # The first token after it.
                self._merge(kwargs["past_key_values"], kept, merging, [layer])
            return self._hide(~kept, module, args, kwargs)

        with self._hooked(hide):
            yield

    def _hide(
        self, hidden: torch.Tensor, module: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return an attention layer's arguments with keys hidden, bool [L, H, P or fewer].

        Eager attention adds its mask [batch, 1, queries, keys] to the scores. A mask with a head
        dimension of Q works as well, so it is enough to change the mask that each layer gets.
        """
        group = self.query_heads // self.kv_heads
        layer = self.numbers[module.layer_idx]
        of_layer = hidden[layer].repeat_interleave(group, dim=0)  # [Q, P]
        mask = kwargs["attention_mask"]
        mask = mask.expand(-1, self.query_heads, -1, -1).clone()
        lowest = torch.finfo(mask.dtype).min
        mask[..., : hidden.shape[-1]].masked_fill_(of_layer[None, :, None], lowest)
        return args, {**kwargs, "attention_mask": mask}

    def _merge(
        self, cache: Any, kept: torch.Tensor, merging: int, layers: Sequence[int] | None = None
    ) -> None:
        """Replace kept keys and values in the cache by the means that `merged` defines."""
        for number in layers if layers is not None else range(self.layers):
            layer = cache.layers[self.attending[number]]
            for head, row in enumerate(kept[number].tolist()):
                for states in (layer.keys, layer.values):
                    states[0, head, : len(row)] = merged(states[0, head, : len(row)], row, merging)

    def _forget_positions(self) -> None:
        """Forget by how much images shortened the positions of the prompt before.

        Models with two-dimensional positions keep that for later tokens, also behind the next
        prompt if it has no image. Only `generate` of Hugging Face resets it.
        """
        if hasattr(self.model.model, "rope_deltas"):
            self.model.model.rope_deltas = None

    @contextmanager
    def _hooked(self, hook: Callable[..., Any]) -> Iterator[None]:
        """Call `hook` before each attention layer, with the layer and its arguments."""
        handles = [
            layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)
            for layer in self._attention_layers(self.numbers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _gated(self) -> Iterator[list[torch.Tensor]]:
        """Yield a list that gets what each layer's gate says of the new tokens, float64 [H, n].

        A gate reads the input of the layer's attention, which is behind the input norm.
        """
        found: list[torch.Tensor] = []
        gates = self.gates
        if gates is None:
            yield found
            return

        def read(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            found.append(gates(module.layer_idx, hidden[0]).T)

        with self._hooked(read):
            yield found

    def _attention_layers(self, indices: Iterable[int]) -> list[Any]:
        """Return some layers of the language model."""
        layers = getattr(self.model.model, "language_model", self.model.model).layers
        return [layers[i] for i in indices]

    def _kept_states(self, cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotated keys and the values of a cache, each [L, H, n, D]."""
        layers = [cache.layers[i] for i in self.attending]
        keys, values = (torch.cat([getattr(x, k) for x in layers]) for k in ("keys", "values"))
        return keys, values

    @contextmanager
    def _recorded(self, absorbed: Absorbed | None = None) -> Iterator[dict[int, torch.Tensor]]:
        """Yield a dictionary that gets each layer's rotated queries [1, Q, new tokens, D].

        Meanwhile all queries read what is `absorbed` as keys whose logits are raised.
        Models call their own eager attention unless one is registered under that name.
        """
        owners = self._attention_layers(self.attending)
        numbers = {layer.self_attn: i for i, layer in enumerate(owners)}
        queries: dict[int, torch.Tensor] = {}

        def attend(
            module: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            scaling: float,
            **_: Any,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            layer = numbers.get(module)
            if layer is not None:
                queries[layer] = query
            group = query.shape[1] // key.shape[1]
            logits = query @ key.repeat_interleave(group, dim=1).transpose(2, 3) * scaling
            if attention_mask is not None:
                logits = logits + attention_mask
            num_keys = logits.shape[-1]
            if (sinks := getattr(module, "sinks", None)) is not None:
                if absorbed is not None:
                    raise ValueError("summaries are not defined for layers with sinks")
                of_sinks = sinks.to(logits.dtype).view(1, -1, 1, 1)
                logits = torch.cat((logits, of_sinks.expand(*logits.shape[:3], 1)), dim=-1)
            if absorbed is not None and layer is not None:
                more, means, raised = (
                    x[layer].repeat_interleave(group, dim=0).to(query.dtype)
                    for x in (absorbed.keys, absorbed.values, absorbed.log_masses)
                )
                of_rows = query @ more.transpose(1, 2) * scaling + raised.unsqueeze(1)
                logits = torch.cat((logits, of_rows), dim=-1)
            weights = logits.softmax(-1, dtype=torch.float32).to(query.dtype)
            output = weights[..., :num_keys] @ value.repeat_interleave(group, dim=1)
            if absorbed is not None and layer is not None:
                output = output + weights[..., num_keys:] @ means
            return output.transpose(1, 2).contiguous(), weights[..., :num_keys]

        ALL_ATTENTION_FUNCTIONS["eager"] = attend
        try:
            yield queries
        finally:
            del ALL_ATTENTION_FUNCTIONS["eager"]
