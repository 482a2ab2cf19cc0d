# SPDX-License-Identifier: Apache-2.0
"""Exact match of the model in Hugging Face: ``python -m demo.evaluate``.

Asks one question of each task per page, through the chat template and image processor that a server
uses, and decodes greedily in bfloat16. An answer counts if it is right to the last character.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from demo.huggingface import LlavaForConditionalGeneration, LlavaProcessor
from demo.pages import SPLITS
from demo.tasks import MAX_ANSWER_TOKENS, TASKS, Example, make_example

MODEL = Path(__file__).with_name("model")
BATCH = 16


def answers(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, examples: list[Example]
) -> list[str]:
    """Return the model's answers to ``examples``, which have the same number of pages."""
    prompts = [
        processor.apply_chat_template(example.messages(_image_part), add_generation_prompt=True)
        for example in examples
    ]
    # The template has added the start token.
    inputs = processor(
        text=prompts,
        images=[[page.image for page in example.pages] for example in examples],
        padding=True,
        padding_side="left",
        add_special_tokens=False,
        return_tensors="pt",
    ).to(model.device, torch.bfloat16)
    output = model.generate(  # type: ignore[misc]  # transformers annotates another class
        **inputs, do_sample=False, max_new_tokens=MAX_ANSWER_TOKENS
    )
    length = inputs["input_ids"].shape[1]
    texts: list[str] = processor.tokenizer.batch_decode(
        output[:, length:], skip_special_tokens=True
    )
    return texts


def _image_part(_: Image.Image) -> dict[str, Any]:
    return {"type": "image"}


def exact_match(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, examples: list[Example]
) -> float:
    """Return the share of right answers; ``examples`` have the same number of pages."""
    right = 0
    for start in range(0, len(examples), BATCH):
        some = examples[start : start + BATCH]
        said = answers(model, processor, some)
        right += sum(text == example.answer for text, example in zip(said, some, strict=True))
    return right / len(examples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--task", choices=TASKS, nargs="+", default=TASKS)
    parser.add_argument("--split", choices=SPLITS, default="test")
    parser.add_argument("--pages", type=int, default=300)
    options = parser.parse_args()
    model = LlavaForConditionalGeneration.from_pretrained(options.model, dtype=torch.bfloat16)
    processor = LlavaProcessor.from_pretrained(options.model)
    print(f"Exact match on {options.pages} {options.split} pages")
    for task in options.task:
        examples = [make_example(task, options.split, index) for index in range(options.pages)]
        print(f"{task:12}{exact_match(model.eval(), processor, examples):.1%}", flush=True)


if __name__ == "__main__":
    main()
