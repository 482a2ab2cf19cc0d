# SPDX-License-Identifier: Apache-2.0
"""SmolLM2 in a vLLM engine of this process, which answers questions about texts for all arms."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from evaluation.answers import Answer
from evaluation.fingerprint import ROOT, fingerprint
from evaluation.text_arms import FULL, TextArm, eviction_settings
from evaluation.text_tasks import TextExample, TextQuestion
from evaluation.text_words import python_prose
from measure.engines import LocalLLM
from measure.facts import machine, versions
from measure.smollm import PACKAGE, model_folder
from vllm_tgvkv.config import CONFIG_KEY

PACKAGES = ("vllm", "vllm-tgvkv", "torch", "transformers", "tokenizers", "numpy", PACKAGE)
"""Packages that may change an answer."""

MODELS = ROOT / "build" / "models"
SPARE_TOKENS = 8
"""Tokens of an answer beyond those of the truth, before it is cut off. Lists get as many more as
the truth has: models put each item on its own line."""

BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
"""Of SmolLM2's cache: layers, keys and values, KV heads, head size, bytes of a float32."""

Work = tuple[TextQuestion, TextArm]


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
    def cache_tokens(self) -> int:
        """Return the number of tokens that the cache holds."""
        return (self.cache_gib << 30) // BYTES_PER_TOKEN

    @property
    def fingerprint(self) -> str:
        """Return a hash of these settings, the model's package, versions, questions and prose."""
        facts = [asdict(self), versions(PACKAGES), machine()["python"], python_prose()]
        mine = [Path(__file__).with_name(name) for name in ("text_tasks.py", "text_words.py")]
        return fingerprint(facts, [*mine, ROOT / "measure" / "smollm.py", Path(__file__)])


class TextEngine(LocalLLM):
    """One vLLM engine that answers for all arms, closed at the end of a `with` block."""

    def __init__(self, settings: TextSettings, arms: Sequence[TextArm]) -> None:
        """Start the engine; the first call writes the model's folder.

        Raises:
            WeightsMissingError: if the package with the weights is not installed.
        """
        self.settings = settings
        with _unset("VLLM_CPU_KVCACHE_SPACE"):  # it would replace the size below
            super().__init__(
                model_folder(MODELS),
                eviction_settings(arms),
                dtype=settings.dtype,
                enforce_eager=True,
                block_size=settings.block_size,
                max_num_seqs=settings.max_num_seqs,
                max_model_len=settings.max_model_len,
                seed=settings.seed,
                enable_prefix_caching=True,
                kv_cache_memory_bytes=settings.cache_gib << 30,
            )
        self._tokenizer = self.llm.get_tokenizer()
        self._count = lru_cache(maxsize=1 << 14)(lambda text: len(self._encode(text)))
        self._frame = self._count(self._rendered("", ""))

    def __enter__(self) -> TextEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answers(self, work: Sequence[Work]) -> list[Answer]:
        """Return the answers, in order. Arms of one question that follow each other share it.

        Raises:
            NotEvictedError: naming the arm and the plugin's reason.
        """
        from vllm import SamplingParams, TokensPrompt

        examples = {question: self._example(question) for question, _ in work}
        prompts = {
            question: self._encode(self._rendered(example.message, example.start))
            for question, example in examples.items()
        }
        pieces = {
            question: [self._tokenizer.decode([i]) for i in self._encode(example.answer)]
            for question, example in examples.items()
        }
        sampling = [
            SamplingParams(
                temperature=0,
                max_tokens=_most_tokens(examples[question], pieces[question]),
                extra_args=arm.xargs,
            )
            for question, arm in work
        ]
        inputs = [TokensPrompt(prompt_token_ids=prompts[question]) for question, _ in work]
        outputs = self.llm.generate(inputs, sampling, use_tqdm=False)
        return [
            _answer(question, arm, output, examples[question], pieces[question])
            for (question, arm), output in zip(work, outputs, strict=True)
        ]

    def _example(self, question: TextQuestion) -> TextExample:
        return question.example(self._frame, self._count)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _rendered(self, message: str, start: str) -> str:
        """Return the prompt's text: the user's turn, and the beginning of the assistant's."""
        turn: str = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False
        )
        return turn + start


@contextmanager
def _unset(variable: str) -> Iterator[None]:
    """Leave out an environment variable within a `with` block."""
    value = os.environ.pop(variable, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[variable] = value


def _most_tokens(example: TextExample, pieces: Sequence[str]) -> int:
    return len(pieces) * (2 if example.items else 1) + SPARE_TOKENS


def _answer(
    question: TextQuestion, arm: TextArm, output: Any, example: TextExample, pieces: Sequence[str]
) -> Answer:
    (completion,) = output.outputs
    report = output.kv_transfer_params[CONFIG_KEY]
    untouched = report["blocks_after"] is None
    if untouched and arm != FULL and report["skip_reason"] != "answer_too_short":
        raise NotEvictedError(
            f"question {question.number} of {question.task.name}, arm {arm.key}: the prompt of "
            f"{report['prompt_tokens']} tokens was not evicted ({report['skip_reason']})"
        )
    before, tokens = report["blocks_before"], report["prompt_tokens"]
    return Answer(
        task=question.task.name,
        number=question.number,
        arm=arm.identity,
        text=completion.text,
        hits=example.hits(completion.text, pieces),
        prompt_tokens=tokens,
        kept_tokens=tokens if untouched else report["kept_tokens"],
        blocks_before=before,
        blocks_after=before if untouched else report["blocks_after"],
        right_tokens=len(pieces) + 1,
        cuts=tuple(
            (cut["answer_tokens"], cut["blocks_before"], cut["blocks_after"])
            for cut in report["cuts"]
        ),
    )
