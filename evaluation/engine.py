# SPDX-License-Identifier: Apache-2.0
"""SmolLM2, alone or behind a tower that reads pages, in an engine that answers for all arms."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import isnan
from pathlib import Path
from typing import Any
from unittest.mock import patch

from evaluation.ablations import BOUNDS, page_bounds
from evaluation.answers import Answer
from evaluation.arms import FULL_CACHE, ROOT, Arm, eviction_settings, identity
from measure.engines import LocalEngine, Request
from measure.smollm import model_folder
from measure.text_tasks import TextExample, TextQuestion
from reader.assemble import load_vocabulary, page_model_folder
from reader.tasks import TASKS, PageQuestion
from vllm_tgvkv.config.server import CONFIG_KEY

MODELS = ROOT / "build" / "models"
SPARE_TOKENS = 8
"""Tokens of an answer beyond those of the truth, before it is cut off."""

BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
"""Of SmolLM2's cache: layers, keys and values, KV heads, head size, bytes of a float32."""


class NotEvictedError(RuntimeError):
    """The plugin left a prompt untouched that an arm was to evict."""


@dataclass(frozen=True)
class Settings:
    """Settings of an engine that may change its answers."""

    max_num_seqs: int
    cache_gib: int
    requests_at_a_time: int
    """Twice the batch keeps it full, where prompts are small."""
    block_size: int = 16
    max_model_len: int = 4352
    dtype: str = "float32"
    seed: int = 0

    @property
    def cache_tokens(self) -> int:
        """Return the number of tokens that the cache holds."""
        return (self.cache_gib << 30) // BYTES_PER_TOKEN


@dataclass(frozen=True)
class Asked:
    """A question that an arm answers."""

    task: str
    number: int
    arm: Arm
    example: TextExample
    pieces: tuple[str, ...]
    """Texts of the right answer's tokens."""
    forced: tuple[int, ...] = ()
    """These tokens, if they are given one by one."""

    def _hits(self, completion: Any) -> str:
        """Return a digit for each token of the right answer, and one for its end.

        Raises:
            ValueError: for log-probabilities that are not numbers, of which none is the largest.
        """
        if not self.forced:
            return self.example.hits(completion.text, self.pieces)
        if any(isnan(each.logprob) for step in completion.logprobs for each in step.values()):
            raise ValueError(f"question {self.number} of {self.task}: log-probabilities are NaN")
        best = (max(step.items(), key=lambda item: item[1].logprob) for step in completion.logprobs)
        said = [token == forced for (token, _), forced in zip(best, self.forced, strict=True)]
        return "".join("01"[each] for each in (*said, all(said)))

    def answer(self, output: Any, steps: int) -> Answer:
        """Return the answer of a finished request that got its tokens in some steps.

        Raises:
            NotEvictedError: if its prompt was to be evicted and was not.
        """
        (completion,) = output.outputs
        report = output.kv_transfer_params[CONFIG_KEY]
        tokens, reason = report["prompt_tokens"], report["skip_reason"]
        before, after = report["blocks_before"], report["blocks_after"]
        if after is None and self.arm.method != FULL_CACHE and reason != "answer_too_short":
            raise NotEvictedError(
                f"question {self.number} of {self.task}, arm {self.arm.key}: the prompt of "
                f"{tokens} tokens was not evicted ({reason})"
            )
        return Answer(
            task=self.task,
            number=self.number,
            arm=identity(self.arm),
            text=completion.text,
            hits=self._hits(completion),
            prompt_tokens=tokens,
            # A prompt that was not evicted is held whole.
            kept_tokens=tokens if after is None else report["kept_tokens"],
            blocks_before=before,
            blocks_after=before if after is None else after,
            right_tokens=len(self.pieces) + 1,
            sketch_blocks=report["sketch_blocks"],
            recalled=tuple(each["recalled_tokens"] for each in report["recalls"]),
            tokens_per_step=(len(completion.token_ids) - 1) / max(steps - 1, 1)
            if self.arm.drafts
            else 0.0,
            cuts=tuple(
                (cut["answer_tokens"], cut["blocks_before"], cut["blocks_after"])
                for cut in report["cuts"]
            ),
        )


def turns(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a conversation's text, up to the assistant's next turn."""
    text: str = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, tokenize=False
    )
    return text


class TextWriter:
    """Writes questions about texts whose prompts have a length by a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._count = lru_cache(maxsize=1 << 14)(
            lambda text: len(tokenizer.encode(text, add_special_tokens=False))
        )
        self._frame = self._count(turns(tokenizer, [{"role": "user", "content": ""}]))

    def __call__(self, question: TextQuestion) -> TextExample:
        """Return the question's words."""
        return question.example(self._frame, self._count)


class LanguageEngine(LocalEngine):
    """SmolLM2 in vLLM, and the questions of a field."""

    def __init__(
        self, folder: Path, settings: Settings, arms: Sequence[Arm], **options: Any
    ) -> None:
        """Start the engine with the model in a folder, and further options of `LLM`."""
        from evaluation.forced import Forced

        self.settings = settings
        self._ablation = ExitStack()
        if any(dict(arm.recall).get("sketch") == BOUNDS for arm in arms):
            self._ablation.enter_context(page_bounds())
        if drafts := max(arm.drafts for arm in arms):
            options["speculative_config"] = {
                "method": "draft_model",
                "model": str(folder),
                "num_speculative_tokens": drafts,
            }
        with patch.dict(os.environ):
            os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would replace the size below
            super().__init__(
                folder,
                eviction_settings(arms),
                dtype=settings.dtype,
                enforce_eager=True,
                block_size=settings.block_size,
                max_num_seqs=settings.max_num_seqs,
                max_model_len=settings.max_model_len,
                seed=settings.seed,
                enable_prefix_caching=True,
                kv_cache_memory_bytes=settings.cache_gib << 30,
                # vLLM has none beside drafts, so no answer is forced there.
                logits_processors=[] if drafts else [Forced],
                **options,
            )
        self._tokenizer = self.llm.get_tokenizer()

    def close(self) -> None:
        super().close()
        self._ablation.close()

    def example(self, question: Any) -> tuple[TextExample, dict[str, Any]]:
        """Return the question's words, and vLLM's input, which all arms share."""
        raise NotImplementedError

    def answers(self, work: Sequence[tuple[Any, Arm]]) -> Iterator[Answer]:
        """Yield the answers in the order in which they finish.

        Arms of one question that follow each other share it.

        Raises:
            NotEvictedError: naming the arm and the plugin's reason.
        """
        most = self.settings.requests_at_a_time
        for asked, output, steps in self.finish(self._requests(work), most):
            yield asked.answer(output, steps)

    def _requests(self, work: Sequence[tuple[Any, Arm]]) -> Iterator[Request[Asked]]:
        from vllm import SamplingParams

        from evaluation.forced import FORCED

        for question, same in groupby(work, key=lambda item: item[0]):
            example, given = self.example(question)
            (prompt,) = self._rendered(given)
            ids = tuple(self._encode(example.answer))
            pieces = tuple(self._tokenizer.decode([i]) for i in ids)
            forced = ids if question.task.forced else ()
            # Raw log-probabilities say what the model would have said.
            more: dict[str, Any] = {"max_tokens": len(ids) + SPARE_TOKENS}
            if forced:
                more = {"max_tokens": len(ids), "ignore_eos": True, "logprobs": 1}
            for _, arm in same:
                asked = Asked(question.task.name, question.number, arm, example, pieces, forced)
                xargs = {**arm.xargs, "kv_eviction_report": 1, FORCED: list(forced)}
                sampling = SamplingParams(temperature=0, extra_args=xargs, **more)
                name = f"{question.task.name}/{question.number}/{arm.key}"
                yield Request(name, asked, prompt, sampling)

    def _rendered(self, given: dict[str, Any]) -> list[Any]:
        """Return vLLM's input for a prompt, or for messages whose last one is to be continued."""
        from vllm.renderers import ChatParams

        renderer = self.llm.renderer
        if "messages" not in given:
            rendered: list[Any] = renderer.render_cmpl([given])
            return rendered
        kwargs = {"add_generation_prompt": False, "continue_final_message": True}
        _, rendered = renderer.render_chat(
            [given["messages"]], ChatParams(chat_template_kwargs=kwargs)
        )
        return rendered

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _turns(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return turns(self._tokenizer, messages)


class TextEngine(LanguageEngine):
    """SmolLM2 alone."""

    def __init__(self, settings: Settings, arms: Sequence[Arm]) -> None:
        """Start the engine; the first call writes the model's folder.

        Raises:
            WeightsMissingError: if the package with the weights is not installed.
        """
        super().__init__(model_folder(MODELS), settings, arms)
        self._write = TextWriter(self._tokenizer)

    def example(self, question: TextQuestion) -> tuple[TextExample, dict[str, Any]]:
        """Return the question's words, and the tokens of its prompt."""
        example = self._write(question)
        if example.system:  # as a chat, so that the plugin finds it
            roles = ("system", "user", "assistant")
            contents = (example.system, example.message, example.start)
            messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
            return example, {"messages": messages}
        text = self._turns([{"role": "user", "content": example.message}]) + example.start
        return example, {"prompt_token_ids": self._encode(text)}


class PageEngine(LanguageEngine):
    """SmolLM2 behind the tower that reads pages."""

    def __init__(self, settings: Settings, arms: Sequence[Arm]) -> None:
        """Start the engine; the first call writes the model's folder.

        Raises:
            WeightsMissingError: if the package with the language model is not installed.
        """
        folder = page_model_folder(MODELS)
        pages = max(task.pages for task in TASKS)
        # A page is sent once for each arm of its questions, and vLLM's cache would keep them all.
        options = {"limit_mm_per_prompt": {"image": pages}, "mm_processor_cache_gb": 0}
        super().__init__(folder, settings, arms, **options)
        self._vocabulary = load_vocabulary(folder)

    def example(self, question: PageQuestion) -> tuple[TextExample, dict[str, Any]]:
        """Return the question's words, and its prompt with pages."""
        example = question.example(self._vocabulary)
        text = self._turns(example.messages()) + example.asked.start
        return example.asked, {
            "prompt": text,
            "multi_modal_data": {"image": list(example.pages)},
        }
