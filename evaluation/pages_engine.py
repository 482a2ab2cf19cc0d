# SPDX-License-Identifier: Apache-2.0
"""The model that reads pages in a vLLM engine, which answers questions about them for all arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from evaluation.fingerprint import ROOT, fingerprint
from evaluation.text_arms import TextArm
from evaluation.text_engine import LanguageEngine, TextSettings
from measure.facts import machine
from measure.text_tasks import TextExample
from measure.text_words import python_prose
from reader.assemble import MODELS, TOWER, load_vocabulary, page_model_folder
from reader.tasks import TASKS, PageExample, PageQuestion

_SOURCES = (
    *(Path(__file__).with_name(f"{name}.py") for name in ("text_engine", "pages_engine")),
    *(ROOT / "reader" / f"{name}.py" for name in ("assemble", "layout", "tasks", "vocabulary")),
    *(ROOT / "measure" / f"{name}.py" for name in ("text_tasks", "text_words", "smollm")),
    TOWER,
)
"""Files that may change a question or an answer."""


@dataclass(frozen=True)
class PageSettings(TextSettings):
    """Settings of an engine that may change its answers."""

    max_num_seqs: int = 16
    cache_gib: int = 1

    @property
    def packages(self) -> tuple[str, ...]:
        """Return the packages that may change an answer; matplotlib brings the pages' fonts."""
        return (*super().packages, "pillow", "matplotlib")

    @property
    def most_requests(self) -> int:
        """Return the number of requests that the engine has at a time, each with its pages."""
        return self.max_num_seqs

    @property
    def fingerprint(self) -> str:
        """Return a hash of these settings, the model, versions, pages and questions."""
        facts = [asdict(self), self.versions, machine()["python"], python_prose()]
        return fingerprint(facts, _SOURCES)


class PageEngine(LanguageEngine[PageQuestion]):
    """SmolLM2 behind the tower that reads pages."""

    def __init__(self, settings: PageSettings, arms: Sequence[TextArm]) -> None:
        """Start the engine; the first call writes the model's folder.

        Raises:
            WeightsMissingError: if the package with the language model is not installed.
        """
        folder = page_model_folder(MODELS)
        pages = max(task.pages for task in TASKS)
        # A page takes 28 MB for vLLM, and is sent once for each of its questions' arms.
        options = {"limit_mm_per_prompt": {"image": pages}, "mm_processor_cache_gb": 0}
        super().__init__(folder, settings, arms, **options)
        vocabulary = load_vocabulary(folder)
        self._drawn = lru_cache(maxsize=1)(lambda question: question.example(vocabulary))

    def _example(self, question: PageQuestion) -> TextExample:
        example: PageExample = self._drawn(question)
        return example.asked

    def _prompt(self, question: PageQuestion) -> Any:
        example: PageExample = self._drawn(question)
        text = self._turns(example.messages()) + example.asked.start
        pages = {"image": list(example.pages)}
        (prompt,) = self.llm.renderer.render_cmpl([{"prompt": text, "multi_modal_data": pages}])
        return prompt
