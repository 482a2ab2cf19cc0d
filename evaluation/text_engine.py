# SPDX-License-Identifier: Apache-2.0
"""SmolLM2 in a vLLM engine of this process, which answers questions for all arms."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from evaluation.answering import Held
from evaluation.answers import Answer
from evaluation.fingerprint import ROOT, fingerprint
from evaluation.text_arms import FULL, TextArm, eviction_settings
from measure.engines import LocalEngine, Request
from measure.facts import machine, versions
from measure.smollm import PACKAGE, model_folder
from measure.text_tasks import TextExample, TextQuestion
from measure.text_words import python_prose
from vllm_tgvkv.config.server import CONFIG_KEY

PACKAGES = ("vllm", "vllm-tgvkv", "torch", "transformers", "tokenizers", "numpy", PACKAGE)
"""Packages that may change an answer."""

MODELS = ROOT / "build" / "models"
SPARE_TOKENS = 8
"""Tokens of an answer beyond those of the truth, before it is cut off. Lists get as many more as
the truth has: models put each item on its own line. So does the truth of a list that is copied."""

BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
"""Of SmolLM2's cache: layers, keys and values, KV heads, head size, bytes of a float32."""


class HasName(Protocol):
    """A task."""

    @property
    def name(self) -> str: ...


class AnyQuestion(Protocol):
    """A question of a task."""

    @property
    def task(self) -> HasName: ...

    @property
    def number(self) -> int: ...


Q = TypeVar("Q", bound=AnyQuestion)


class NotEvictedError(RuntimeError):
    """The plugin left a prompt untouched that an arm was to evict."""


@dataclass(frozen=True)
class TextSettings:
    """Settings of an engine that may change its answers."""

    block_size: int = 16
    max_num_seqs: int = 64
    max_model_len: int = 4352
    dtype: str = "float32"
    seed: int = 0
    cache_gib: int = 3

    @property
    def packages(self) -> tuple[str, ...]:
        """Return the packages that may change an answer."""
        return PACKAGES

    @property
    def versions(self) -> dict[str, str]:
        return versions(self.packages)

    @property
    def most_requests(self) -> int:
        """Return the number of requests that the engine has at a time."""
        return 2 * self.max_num_seqs

    @property
    def cache_tokens(self) -> int:
        """Return the number of tokens that the cache holds."""
        return (self.cache_gib << 30) // BYTES_PER_TOKEN

    @property
    def fingerprint(self) -> str:
        """Return a hash of these settings, the model's package, versions, questions and prose."""
        facts = [asdict(self), self.versions, machine()["python"], python_prose()]
        names = ("text_tasks", "text_words", "smollm")
        shared = [ROOT / "measure" / f"{name}.py" for name in names]
        return fingerprint(facts, [*shared, Path(__file__)])


class LanguageEngine(LocalEngine, Generic[Q]):
    """SmolLM2, alone or behind a tower, in an engine that answers for all arms."""

    def __init__(
        self, folder: Path, settings: TextSettings, arms: Sequence[TextArm], **options: Any
    ) -> None:
        """Start the engine.

        Args:
            folder: of the model.
            options: further ones of `LLM`.
        """
        self.settings = settings
        with _unset("VLLM_CPU_KVCACHE_SPACE"):  # it would replace the size below
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
                **options,
            )
        self._tokenizer = self.llm.get_tokenizer()

    @abstractmethod
    def _example(self, question: Q) -> TextExample:
        """Return the question's words."""

    @abstractmethod
    def _prompt(self, question: Q) -> Any:
        """Return the engine's input, which all arms share."""

    def answers(self, work: Sequence[tuple[Q, TextArm]]) -> Iterator[Answer]:
        """Yield the answers in the order in which they finish.

        Arms of one question that follow each other share it.

        Raises:
            NotEvictedError: naming the arm and the plugin's reason.
        """
        most = self.settings.most_requests
        for asked, output in self.finish(self._requests(work), most):
            yield asked.answer(output)

    def _requests(self, work: Sequence[tuple[Q, TextArm]]) -> Iterator[Request[Asked[Q]]]:
        from vllm import SamplingParams

        for question, same in groupby(work, key=lambda item: item[0]):
            example, prompt = self._example(question), self._prompt(question)
            pieces = tuple(self._tokenizer.decode([i]) for i in self._encode(example.answer))
            for _, arm in same:
                asked = Asked(question, arm, example, pieces)
                sampling = SamplingParams(
                    temperature=0, max_tokens=asked.most_tokens, extra_args=arm.xargs
                )
                name = f"{question.task.name}/{question.number}/{arm.key}"
                yield Request(name, asked, prompt, sampling)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _turns(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return a conversation's text, up to the assistant's next turn."""
        text: str = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False
        )
        return text


class TextEngine(LanguageEngine[TextQuestion]):
    """SmolLM2 alone."""

    def __init__(self, settings: TextSettings, arms: Sequence[TextArm]) -> None:
        """Start the engine; the first call writes the model's folder.

        Raises:
            WeightsMissingError: if the package with the weights is not installed.
        """
        super().__init__(model_folder(MODELS), settings, arms)
        self._count = lru_cache(maxsize=1 << 14)(lambda text: len(self._encode(text)))
        self._frame = self._count(self._rendered("", ""))

    def _example(self, question: TextQuestion) -> TextExample:
        return question.example(self._frame, self._count)

    def _prompt(self, question: TextQuestion) -> Any:
        example = self._example(question)
        ids = self._encode(self._rendered(example.message, example.start))
        (prompt,) = self.llm.renderer.render_cmpl([{"prompt_token_ids": ids}])
        return prompt

    def _rendered(self, message: str, start: str) -> str:
        """Return the prompt's text: the user's turn, and the beginning of the assistant's."""
        return self._turns([{"role": "user", "content": message}]) + start


@contextmanager
def _unset(variable: str) -> Iterator[None]:
    """Leave out an environment variable within a `with` block."""
    value = os.environ.pop(variable, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[variable] = value


@dataclass(frozen=True)
class Asked(Generic[Q]):
    """A question that an arm answers."""

    question: Q
    arm: TextArm
    example: TextExample
    pieces: tuple[str, ...]
    """Texts of the right answer's tokens."""

    @property
    def most_tokens(self) -> int:
        """Return the number of tokens at which the answer is cut off."""
        has_layout = self.example.items and self.example.kind != "copy"
        return len(self.pieces) * (2 if has_layout else 1) + SPARE_TOKENS

    def answer(self, output: Any) -> Answer:
        """Return the answer of a finished request.

        Raises:
            NotEvictedError: if its prompt was to be evicted and was not.
        """
        (completion,) = output.outputs
        report = output.kv_transfer_params[CONFIG_KEY]
        reason = report["skip_reason"]
        untouched = report["blocks_after"] is None
        if untouched and self.arm != FULL and reason != "answer_too_short":
            raise NotEvictedError(
                f"question {self.question.number} of {self.question.task.name}, arm "
                f"{self.arm.key}: the prompt of {report['prompt_tokens']} tokens was not evicted "
                f"({reason})"
            )
        return Answer(
            task=self.question.task.name,
            number=self.question.number,
            arm=self.arm.identity,
            text=completion.text,
            hits=self.example.hits(completion.text, self.pieces),
            right_tokens=len(self.pieces) + 1,
            cuts=tuple(
                (cut["answer_tokens"], cut["blocks_before"], cut["blocks_after"])
                for cut in report["cuts"]
            ),
            **vars(Held.of(output)),
        )
