# SPDX-License-Identifier: Apache-2.0
"""Every method on plain Hugging Face models: the oracle of the engine tests.

Nothing is evicted here. The whole cache stays, and a mask hides the prompt keys that each (layer,
KV head) would have lost from every query after the prefill. `oracle.methods` finds these keys from
the prefill's attention.

Shapes: L layers, Q query heads, H KV heads, P prompt tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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

from oracle import methods
from oracle.kernels import merged
from oracle.methods import Image, Layout, Mix, Selection, Settings, mix_of


@dataclass(frozen=True)
class Eviction(Settings):
    """A method and the settings it works under.

    Attributes:
        method: name or parts.
        text_only: "keep" or "evict" prompts without vision.
    """

    method: str | Mix = "tgv"
    text_only: str = "keep"

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
) -> Selection:
    """Return the part of a prompt that is kept; arguments as in `methods.select`."""
    layout = prompt.layout
    settings: Settings = eviction
    if not layout.images and eviction.text_only == "keep":
        settings = replace(eviction, budget=layout.length)
    return methods.select(eviction.method, attention, layout, kv_heads, settings, stages=stages)


class Oracle:
    """A Hugging Face model that generates as if prompt keys were evicted or merged."""

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
        return [(math.isqrt(tokens // images),) * 2] * images if images else []

    @torch.no_grad()
    def attention(self, prompt: Prompt) -> torch.Tensor:
        """Return the prefill's attention [L, Q, P, P] in float64."""
        output = self.model(**prompt.inputs, output_attentions=True, use_cache=False)
        return torch.cat(output.attentions).double()

    def select(
        self, prompt: Prompt, eviction: Eviction, stages: Sequence[int] | None = None
    ) -> Selection:
        """Return the part of `prompt` that is kept, by stages with that many layers."""
        return select(self.attention(prompt), prompt, self.kv_heads, eviction, stages)

    @torch.no_grad()
    def generate(
        self,
        prompt: Prompt,
        max_tokens: int,
        kept: torch.Tensor | None = None,
        merging: int = 0,
    ) -> list[int]:
        """Return `max_tokens` greedy tokens; an end-of-text token does not stop generation.

        The first token comes from the full prompt. Later ones see the kept part of the prompt, and
        all generated tokens.

        Args:
            kept: bool [L, H, P], by default everything.
            merging: among this many first positions, those not kept are merged into kept ones.
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
        """Return log-probabilities [T, V]; row i is the distribution of `tokens[i]`.

        Each token sees the prompt's kept positions and all tokens before it.
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

        Eager attention adds its mask [batch, 1, queries, keys] to the scores. A mask with a head
        dimension of Q works as well, so it is enough to change the mask that each layer gets.
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
