# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine in this process that answers every question once per arm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from demo.tasks import MAX_ANSWER_TOKENS, Example
from evaluation.answering import Held
from evaluation.answers import Answer, Key, compare
from evaluation.arms import EvaluatedArm, engine_methods
from evaluation.fingerprint import ROOT, fingerprint
from evaluation.questions import Question
from measure.engines import LocalEngine, Request
from measure.facts import versions
from vllm_tgvkv.shared.budget import Budget

MODEL = ROOT / "demo" / "model"
PACKAGES = ("vllm", "vllm-tgvkv", "torch", "transformers", "numpy", "pillow", "matplotlib")
"""Packages that may change an answer; matplotlib brings the fonts of the pages."""

Work = tuple[Question, Sequence[EvaluatedArm]]
"""A question and the arms that answer it together, so that they share its prefix."""


@dataclass(frozen=True)
class Group:
    """Arms that share one request, and the tokens of the right answer, its end included."""

    question: Question
    arms: tuple[EvaluatedArm, ...]
    truth: tuple[int, ...]


@dataclass(frozen=True)
class Settings:
    """Settings of an engine that may change its answers."""

    block_size: int = 16
    max_num_seqs: int = 96
    max_model_len: int = 2048
    seed: int = 0

    @property
    def fingerprint(self) -> str:
        """Return a hash of these settings, the model, versions, pages, tasks and questions."""
        model = [path for path in MODEL.iterdir() if path.is_file()]
        tasks = [ROOT / "demo" / name for name in ("pages.py", "tasks.py")]
        facts = [asdict(self), engine_methods(), versions(PACKAGES)]
        return fingerprint(facts, [*model, *tasks, Path(__file__).with_name("questions.py")])


@dataclass(frozen=True)
class Kept:
    """Positions of the full prompt blocks that one request kept, and its images."""

    key: Key
    counts: np.ndarray
    """Pages of each layer and head, int ``[L, H]``."""
    positions: np.ndarray
    """Their positions, int ``[pages, block size]``, ordered by layer and head."""
    images: tuple[tuple[int, int], ...]
    """Start and length of each image."""


class AnsweringEngine(LocalEngine):
    """The demonstration model in an engine that answers for all arms."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        eviction = {
            "policy": "tgv",
            "methods": engine_methods(),
            "debug": {"record_kept": True},
        }
        super().__init__(
            MODEL,
            eviction,
            dtype="bfloat16",
            enforce_eager=True,
            block_size=settings.block_size,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
            seed=settings.seed,
            enable_prefix_caching=True,
            limit_mm_per_prompt={"image": 2},
        )
        tokenizer = self.llm.get_tokenizer()
        self._encode = tokenizer.encode
        self._end = tokenizer.eos_token_id
        self._images: dict[Question, tuple[tuple[int, int], ...]] = {}

    def answers(self, work: Iterable[Work]) -> Iterator[Answer]:
        """Yield the answer of every arm to its question, in the order in which they finish."""
        requests = (request for item in work for request in self._requests(*item))
        for group, output in self.finish(requests, 2 * self.settings.max_num_seqs):
            yield from self._answers(group, output)

    def _requests(
        self, question: Question, arms: Sequence[EvaluatedArm]
    ) -> Iterator[Request[Group]]:
        from vllm import SamplingParams

        example = question.example()
        prompt = rendered(self.llm.renderer, example)
        self._images[question] = tuple(
            (place.offset, place.length) for place in prompt["mm_placeholders"]["image"]
        )
        truth = (*self._encode(example.answer, add_special_tokens=False), self._end)
        for same in self._grouped(arms, len(prompt["prompt_token_ids"])):
            sampling = SamplingParams(
                max_tokens=MAX_ANSWER_TOKENS, temperature=0, extra_args=same[0].xargs
            )
            name = f"{question.task}/{question.number}/{same[0].key}"
            yield Request(name, Group(question, tuple(same), truth), prompt, sampling)

    def _grouped(
        self, arms: Sequence[EvaluatedArm], num_tokens: int
    ) -> Iterable[list[EvaluatedArm]]:
        """Group arms with the same request: one method, and budgets of equally many blocks."""
        groups: dict[tuple[str, int | str], list[EvaluatedArm]] = {}
        for arm in arms:
            blocks: int | str = str(arm.budget)
            if isinstance(arm.budget, float):
                budget = Budget.parse(arm.budget, "the budget of an arm")
                blocks = budget.retained_blocks(num_tokens, self.settings.block_size)
            groups.setdefault((arm.method, blocks), []).append(arm)
        return groups.values()

    def _answers(self, group: Group, output: Any) -> Iterator[Answer]:
        """Yield the answer once for each arm that shares the request."""
        (completion,) = output.outputs
        held = Held.of(output)
        for arm in group.arms:
            yield Answer(
                task=group.question.task,
                number=group.question.number,
                arm=arm.key,
                text=completion.text,
                hits=compare(list(completion.token_ids), group.truth),
                **vars(held),
            )

    def kept(self) -> Iterator[Kept]:
        """Yield the positions that recent evictions kept; the engine stores 256."""
        (records,) = self.llm.collective_rpc("kv_eviction_kept")
        for record in records:
            # vLLM appends a random suffix to ids.
            task, number, arm = record["request_id"].rsplit("-", 1)[0].split("/")
            images = self._images[Question(task, int(number))]
            yield Kept((task, int(number), arm), record["counts"], record["positions"], images)


def rendered(renderer: Any, example: Example) -> Any:
    """Return the engine's input for an example, as vLLM's renderer makes it."""
    from vllm.renderers.params import ChatParams

    messages = example.messages(lambda image: {"type": "image_pil", "image_pil": image})
    _, (prompt,) = renderer.render_chat(
        [messages],
        ChatParams(chat_template_kwargs={"add_generation_prompt": True}),
        # The template has added the start token.
        renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False),
    )
    return prompt
