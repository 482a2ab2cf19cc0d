# SPDX-License-Identifier: Apache-2.0
"""Every method on plain Hugging Face models: the independent oracle of the engine tests.

Nothing is evicted here. The whole cache is kept, and every query after the prefill is kept from
seeing the prompt keys that its (layer, KV head) would have lost. `oracle.methods` works out which
from the prefill's attention. No code is shared with the plugin.

Shapes: L layers, Q query heads, H KV heads, P prompt tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
)

from oracle import methods
from oracle.methods import (
    HEAD,
    LAYER,
    Auto,
    Layout,
    Mix,
    Pool,
    Selection,
    Settings,
    deal,
    merged,
    mix_of,
    retained_blocks,
    retained_positions,
    rows,
    tgv_scores,
    water_fill,
)

__all__ = [
    "HEAD",
    "LAYER",
    "Eviction",
    "Oracle",
    "Prompt",
    "Selection",
    "deal",
    "emulate",
    "observation_rows",
    "retained_blocks",
    "retained_positions",
    "select",
    "token_scores",
    "water_fill",
]


@dataclass(frozen=True)
class Eviction:
    """What to evict.

    Attributes:
        budget: a float is a fraction of the prompt, an int a number of tokens per head.
        block_size: tokens per page, N.
        granularity: "layer", one token set for all heads of a layer, or "head"; None is the
            method's own.
        sinks: leading positions that are kept before all others.
        observation_window: at most so many text rows vote, the last ones.
        floor: least number of pages of every (layer, head).
        method: name or parts.
        pooling: of the scores; None is the method's own.
        text_only: "keep" or "evict", what happens to prompts without vision.
    """

    budget: float | int | Auto
    block_size: int = 32
    granularity: str | None = None
    sinks: int = 4
    observation_window: int = 512
    floor: int = 1
    method: str | Mix = "tgv"
    pooling: Pool | None = None
    text_only: str = "keep"

    @property
    def settings(self) -> Settings:
        """Return what is asked of the method."""
        return Settings(
            budget=self.budget,
            block_size=self.block_size,
            sinks=self.sinks,
            window=self.observation_window,
            floor=self.floor,
            granularity=self.granularity,
            pooling=self.pooling,
        )

    @property
    def merges(self) -> bool:
        """Return whether evicted tokens live on in the kept ones."""
        return mix_of(self.method, self.settings).merge


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model sees it.

    Attributes:
        inputs: keyword arguments for the model.
        token_ids: the P prompt tokens, image placeholders expanded.
        vision: bool [P], true at image placeholders.
        images: the run of each image, in order.
    """

    inputs: dict[str, torch.Tensor]
    token_ids: list[int]
    vision: torch.Tensor
    images: tuple[methods.Image, ...] = ()

    @property
    def layout(self) -> Layout:
        """Return the positions alone."""
        return Layout(len(self.token_ids), self.images)


def layout_of(vision: torch.Tensor) -> Layout:
    """Return the layout in which every run of vision positions is one image.

    Args:
        vision: bool [P].
    """
    images: list[methods.Image] = []
    for j, is_vision in enumerate(vision.tolist()):
        if is_vision and images and images[-1].start + images[-1].length == j:
            images[-1] = methods.Image(images[-1].start, images[-1].length + 1)
        elif is_vision:
            images.append(methods.Image(j, 1))
    return Layout(len(vision), tuple(images))


def observation_rows(vision: torch.Tensor, window: int) -> list[int]:
    """Return the last `window` text positions after the first vision token.

    Args:
        vision: bool [P].
    """
    return rows("text", layout_of(vision), window)


def token_scores(
    attention: torch.Tensor, rows: Sequence[int], vision: torch.Tensor
) -> torch.Tensor:
    """Return TGV-KV's scores [P].

    Args:
        attention: float64 [P, P], causal.
        vision: bool [P].
    """
    return tgv_scores(attention, rows, vision.tolist())


def select(
    attention: torch.Tensor,
    prompt: Prompt | torch.Tensor,
    kv_heads: int,
    eviction: Eviction,
    stages: Sequence[int] | None = None,
) -> Selection:
    """Return what the method keeps of a prompt.

    Args:
        attention: float64 [L, Q, P, P], softmax over all keys.
        prompt: or its vision positions, bool [P].
        kv_heads: H; query head q belongs to KV head q // (Q / H).
        stages: layers of each pipeline stage, where there are several.
    """
    layout = prompt.layout if isinstance(prompt, Prompt) else layout_of(prompt)
    settings = eviction.settings
    if not layout.images and eviction.text_only == "keep":
        settings = replace(settings, budget=layout.length)
    return methods.select(eviction.method, attention, layout, kv_heads, settings, stages=stages)


class Oracle:
    """A Hugging Face model that generates as if prompt keys were evicted, or merged."""

    def __init__(self, folder: Path | str, dtype: torch.dtype = torch.float32) -> None:
        """Load the model of `folder` with eager attention.

        Args:
            dtype: of weights and arithmetic.
        """
        self.processor = AutoProcessor.from_pretrained(folder)
        sees = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        self.model = kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        text = self.model.config.get_text_config()
        self.layers: int = text.num_hidden_layers
        self.query_heads: int = text.num_attention_heads
        self.kv_heads: int = text.num_key_value_heads

    def prompt(self, text: str, images: Sequence[Image.Image] = ()) -> Prompt:
        """Return the prompt for `text`, which holds one placeholder text per image."""
        inputs = self.processor(text=text, images=list(images) or None, return_tensors="pt")
        ids = inputs["input_ids"][0]
        vision = ids == self.model.config.image_token_id
        places = vision.nonzero().flatten().tolist()
        found = []
        for grid in self._grids(inputs, len(places), len(images)):
            size = grid[0] * grid[1]
            found.append(methods.Image(places[0], size, grid))
            places = places[size:]
        assert not places
        return Prompt(dict(inputs), ids.tolist(), vision, tuple(found))

    def _grids(self, inputs: Any, tokens: int, images: int) -> list[tuple[int, int]]:
        """Return rows and columns of tokens of each image."""
        if "image_grid_thw" in inputs:
            merge = self.model.config.vision_config.spatial_merge_size
            return [(h // merge, w // merge) for _, h, w in inputs["image_grid_thw"].tolist()]
        return [(math.isqrt(tokens // images),) * 2] * images if images else []

    @torch.no_grad()
    def attention(self, prompt: Prompt) -> torch.Tensor:
        """Return the prefill's attention [L, Q, P, P] in float64."""
        output = self.model(**prompt.inputs, output_attentions=True, use_cache=False)
        return torch.cat(output.attentions).double()

    def select(
        self, prompt: Prompt, eviction: Eviction, stages: Sequence[int] | None = None
    ) -> Selection:
        """Return what the method keeps of `prompt`, in pipeline stages of so many layers."""
        return select(self.attention(prompt), prompt, self.kv_heads, eviction, stages)

    @torch.no_grad()
    def generate(
        self,
        prompt: Prompt,
        max_tokens: int,
        kept: torch.Tensor | None = None,
        merging: int = 0,
    ) -> list[int]:
        """Return `max_tokens` greedy tokens; the end-of-text token does not stop it.

        The first token comes from the full prompt. All later ones see of the prompt only what is
        kept, and of what was generated everything.

        Args:
            kept: bool [L, H, P], by default everything.
            merging: of so many leading positions, those that are not kept are merged into those
                that are.
        """
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
        self, prompt: Prompt, tokens: Sequence[int], kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the log-probabilities [T, V] of what may follow the prompt and each token.

        Row i is the distribution of `tokens[i]`, which sees the prompt's kept positions and all
        tokens before it.
        """
        after = torch.tensor(tokens[:-1])[None]
        with self._masked(kept, 0):
            output = self.model(**prompt.inputs, use_cache=True)
            cache = output.past_key_values
            rest = self.model(input_ids=after, past_key_values=cache, use_cache=True)
        logits = torch.cat((output.logits[0, -1:], rest.logits[0]))
        return logits.double().log_softmax(-1)

    @contextmanager
    def _masked(self, kept: torch.Tensor | None, merging: int) -> Iterator[None]:
        """Hide the prompt keys that are not kept from every query after the prefill.

        Eager attention adds its mask [batch, 1, queries, keys] to the scores, and a mask with a
        head dimension of Q does as well; so it is enough to change the mask each layer is given.
        """
        if kept is None:
            yield
            return
        hidden = ~kept.repeat_interleave(self.query_heads // self.kv_heads, dim=1)  # [L, Q, P]
        length = kept.shape[-1]

        def hide(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            cached = kwargs["past_key_values"].get_seq_length(module.layer_idx)
            if cached < length:
                return args, kwargs  # the prefill
            if cached == length and merging:  # the first token after it
                cache = kwargs["past_key_values"].layers[module.layer_idx]
                for head, row in enumerate(kept[module.layer_idx].tolist()):
                    for states in (cache.keys, cache.values):
                        states[0, head, :length] = merged(states[0, head, :length], row, merging)
            mask = kwargs["attention_mask"]
            mask = mask.expand(-1, self.query_heads, -1, -1).clone()
            lowest = torch.finfo(mask.dtype).min
            mask[..., :length].masked_fill_(hidden[module.layer_idx][None, :, None], lowest)
            return args, {**kwargs, "attention_mask": mask}

        handles = [
            layer.self_attn.register_forward_pre_hook(hide, with_kwargs=True)
            for layer in getattr(self.model.model, "language_model", self.model.model).layers
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def emulate(
    oracle: Oracle, prompt: Prompt, eviction: Eviction, max_tokens: int
) -> tuple[list[int], Selection]:
    """Return the greedy tokens of a prompt under `eviction`, and what was kept of it."""
    selection = oracle.select(prompt, eviction)
    if not selection.evicts:
        return oracle.generate(prompt, max_tokens), selection
    candidates = len(prompt.token_ids) // eviction.block_size * eviction.block_size
    merging = candidates if eviction.merges else 0
    return oracle.generate(prompt, max_tokens, selection.kept, merging), selection
