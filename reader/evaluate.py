# SPDX-License-Identifier: Apache-2.0
"""`python -m reader.evaluate`: what the model reads and answers, in vLLM with the full cache.

For each task: how many of its questions are answered right to the last character, from the pages
and from their text.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from measure.engines import LocalEngine, set_environment

set_environment()

from reader.assemble import MODELS, TOWER, load_vocabulary, page_model_folder  # noqa: E402
from reader.tasks import TASKS, PageExample, PageQuestion  # noqa: E402
from reader.vocabulary import Vocabulary  # noqa: E402

SPARE_TOKENS = 8
"""Tokens of an answer beyond those of the truth, before it is cut off."""


class PageEngine(LocalEngine):
    """Stock vLLM with the model, and its questions."""

    def __init__(
        self, folder: Path, vocabulary: Vocabulary, pages: int, dtype: str = "float32"
    ) -> None:
        """Start the engine for prompts of up to `pages` pages."""
        super().__init__(
            folder,
            dtype=dtype,
            enforce_eager=True,
            max_model_len=4608,
            max_num_seqs=8,
            limit_mm_per_prompt={"image": pages},
            kv_cache_memory_bytes=1 << 30,
        )
        self.vocabulary = vocabulary

    def right(self, examples: Sequence[PageExample], as_text: bool = False) -> list[bool]:
        """Return for each example whether its answer is right.

        Args:
            as_text: give the language model the text instead of the pages.
        """
        from vllm import SamplingParams

        tokenizer = self.vocabulary.tokenizer
        prompts, sampling = [], []
        for example in examples:
            text = tokenizer.apply_chat_template(
                example.messages(), add_generation_prompt=True, tokenize=False
            )
            prompt = {"prompt": text + example.asked.start}
            if as_text:
                shown = example.asked.message.split("\n")[1]
                prompt["prompt"] = prompt["prompt"].replace("<image>" * len(example.pages), shown)
            else:
                prompt["multi_modal_data"] = {"image": list(example.pages)}
            prompts.append(prompt)
            tokens = len(tokenizer.encode(example.asked.answer)) + SPARE_TOKENS
            sampling.append(SamplingParams(temperature=0, max_tokens=tokens))
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        return [
            example.asked.found(output.outputs[0].text) == example.asked.answer
            for example, output in zip(examples, outputs, strict=True)
        ]


def main() -> None:
    """Ask the questions of each task and print a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=20, help="of each task")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--tasks", nargs="+", default=[task.name for task in TASKS])
    parser.add_argument("--text", action="store_true", help="ask about the texts, too")
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of model folders")
    parser.add_argument("--tower", type=Path, default=TOWER)
    options = parser.parse_args()
    tasks = [task for task in TASKS if task.name in options.tasks]
    folder = page_model_folder(options.models, options.tower)
    vocabulary = load_vocabulary(folder, options.tower)
    with PageEngine(folder, vocabulary, max(task.pages for task in tasks)) as engine:
        for task in tasks:
            numbers = range(options.first, options.first + options.questions)
            examples = [PageQuestion(task, number).example(vocabulary) for number in numbers]
            found = f"{sum(engine.right(examples))} from pages"
            if options.text:
                found += f", {sum(engine.right(examples, as_text=True))} from their text"
            print(f"{task.title}: right of {len(examples)}: {found}", flush=True)


if __name__ == "__main__":
    main()
