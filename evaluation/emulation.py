# SPDX-License-Identifier: Apache-2.0
"""Eviction with any block size in Hugging Face, by hiding the prompt keys that it would drop.

No engine has pages of one token. The oracle's definition of the methods, which has no smallest
page, selects the tokens from the attention of a full prefill. All tokens but the first are then
generated without seeing the dropped ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from demo.huggingface import LlavaForConditionalGeneration, LlavaProcessor
from demo.tasks import MAX_ANSWER_TOKENS, Example
from evaluation.answers import Answer, compare
from evaluation.arms import EvaluatedArm
from evaluation.engine import MODEL, Work
from evaluation.questions import Question
from oracle.methods import Image, Layout, Selection, Settings, choose, mix_of, observe
from vllm_tgvkv.config.server import EvictionConfig


class Emulation:
    """The demonstration model in bfloat16, with pages of `block_size` tokens.

    It answers like an `AnsweringEngine`.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._model = LlavaForConditionalGeneration.from_pretrained(
            MODEL, dtype=torch.bfloat16, attn_implementation="eager"
        )
        self._processor = LlavaProcessor.from_pretrained(MODEL)
        self._end: int = self._processor.tokenizer.eos_token_id
        text = self._model.config.get_text_config()
        self._kv_heads: int = text.num_key_value_heads
        self._group: int = text.num_attention_heads // text.num_key_value_heads

    def __enter__(self) -> Emulation:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def answers(self, work: Iterable[Work]) -> Iterator[Answer]:
        """Yield the answer of every arm to its question. All arms evict to a fixed budget."""
        for question, arms in work:
            yield from self._ask(question, arms)

    @torch.no_grad()
    def _ask(self, question: Question, arms: Sequence[EvaluatedArm]) -> Iterator[Answer]:
        example = question.example()
        inputs = self._render(example)
        prefill = self._model(**inputs, output_attentions=True, use_cache=True)
        ids = inputs["input_ids"][0]
        attention = torch.cat(prefill.attentions).double()
        layout = self._layout(ids, len(example.pages))
        selections = self._select(arms, attention, layout, question)
        kept = torch.stack([selections[arm].kept for arm in arms])
        tokens = self._generate(prefill, kept)
        tokenizer, end = self._processor.tokenizer, self._end
        truth = [*tokenizer.encode(example.answer, add_special_tokens=False), end]
        for arm, row in zip(arms, tokens.tolist(), strict=True):
            given = row[: row.index(end) + 1] if end in row else row
            length, tail = len(ids), len(ids) % self.block_size
            blocks = selections[arm].blocks
            yield Answer(
                task=question.task,
                number=question.number,
                arm=arm.key,
                text=tokenizer.decode(given, skip_special_tokens=True),
                hits=compare(given, truth),
                prompt_tokens=length,
                kept_tokens=blocks * self.block_size + tail,
                blocks_before=length // self.block_size + (tail > 0),
                blocks_after=blocks + (tail > 0),
            )

    def _render(self, example: Example) -> Any:
        prompt = self._processor.apply_chat_template(
            example.messages(lambda image: {"type": "image"}), add_generation_prompt=True
        )
        # The template has added the start token.
        return self._processor(
            text=prompt,
            images=[page.image for page in example.pages],
            add_special_tokens=False,
            return_tensors="pt",
        ).to(torch.bfloat16)

    def _layout(self, ids: Tensor, num_images: int) -> Layout:
        places = (ids == self._model.config.image_token_id).nonzero().flatten()
        runs = places.view(num_images, -1)
        return Layout(len(ids), tuple(Image(int(run[0]), len(run)) for run in runs))

    def _select(
        self, arms: Sequence[EvaluatedArm], attention: Tensor, layout: Layout, question: Question
    ) -> dict[EvaluatedArm, Selection]:
        """Return the selection of every arm; attention is float64 `[L, Q, P, P]`."""
        defaults = EvictionConfig()
        selections = {}
        by_method: dict[str, list[EvaluatedArm]] = defaultdict(list)
        for arm in arms:
            by_method[arm.method].append(arm)
        for method, mine in by_method.items():
            settings = [
                Settings(
                    budget=float(arm.budget),
                    block_size=self.block_size,
                    sinks=defaults.sinks,
                    observation_window=defaults.observation_window,
                    floor=defaults.floor_pages,
                )
                for arm in mine
            ]
            mix = mix_of(method, settings[0])
            scores = self._random(attention, question) if mix.score == "random" else None
            evidence = observe(mix, attention, layout, self._kv_heads, settings[0], scores)
            for arm, its_settings in zip(mine, settings, strict=True):
                selections[arm] = choose(mix, evidence, self._kv_heads, its_settings)
        return selections

    def _random(self, attention: Tensor, question: Question) -> Tensor:
        generator = torch.Generator().manual_seed(question.index)
        return torch.rand(len(attention), 1, attention.shape[-1], generator=generator)

    def _generate(self, prefill: Any, kept: Tensor) -> Tensor:
        """Return greedy tokens `[arms, steps]` until all end; `kept` is bool `[arms, L, H, P]`."""
        cache = prefill.past_key_values
        cache.batch_repeat_interleave(len(kept))
        token = prefill.logits[:, -1:].argmax(-1).expand(len(kept), 1)
        tokens, ended = [token], token == self._end
        with self._hiding(~kept.repeat_interleave(self._group, dim=2)):
            while len(tokens) < MAX_ANSWER_TOKENS and not ended.all():
                step = self._model(input_ids=token, past_key_values=cache, use_cache=True)
                token = step.logits[:, -1:].argmax(-1)
                tokens.append(token)
                ended = ended | (token == self._end)
        return torch.cat(tokens, dim=1)

    @contextmanager
    def _hiding(self, hidden: Tensor) -> Iterator[None]:
        """Hide prompt keys, bool `[arms, L, Q, P]`, from all queries.

        Eager attention adds its mask `[arms, heads, queries, keys]` to the logits.
        """
        length = hidden.shape[-1]

        def hide(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            seen = kwargs["past_key_values"].get_seq_length(module.layer_idx)
            lowest = torch.finfo(torch.bfloat16).min
            mask = torch.zeros(
                *hidden.shape[:1], hidden.shape[2], 1, seen + 1, dtype=torch.bfloat16
            )
            mask[..., :length].masked_fill_(hidden[:, module.layer_idx, :, None], lowest)
            return args, {**kwargs, "attention_mask": mask}

        handles = [
            layer.self_attn.register_forward_pre_hook(hide, with_kwargs=True)
            for layer in self._model.model.language_model.layers
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
