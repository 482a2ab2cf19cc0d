# SPDX-License-Identifier: Apache-2.0
"""Exact match of the model in Hugging Face: ``python -m demo.evaluate``.

Each page is asked one question, through the chat template and the image processor as a server
would, and decoded greedily in bfloat16. An answer counts if it is right to the last character.
"""

import argparse
from pathlib import Path

import torch

from demo.huggingface import LlavaForConditionalGeneration, LlavaProcessor
from demo.pages import SPLITS, Page, Question, make_page

MODEL = Path(__file__).with_name("model")


def answer(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, page: Page, question: Question
) -> str:
    """Return what the model says to ``question`` about ``page``."""
    content = [{"type": "image"}, {"type": "text", "text": question.text}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    # The template has put the start token already.
    inputs = processor(
        text=prompt, images=page.image, add_special_tokens=False, return_tensors="pt"
    ).to(model.device, torch.bfloat16)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=12)
    length = inputs["input_ids"].shape[1]
    return processor.tokenizer.decode(output[0, length:], skip_special_tokens=True)


def exact_match(folder: Path, split: str, pages: int) -> float:
    """Return the share of right answers on the first ``pages`` pages of ``split``."""
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16).eval()
    processor = LlavaProcessor.from_pretrained(folder)
    right = 0
    for index in range(pages):
        page = make_page(split, index)
        question = page.questions[index % len(page.questions)]
        right += answer(model, processor, page, question) == question.answer
    return right / pages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--split", choices=SPLITS, default="test")
    parser.add_argument("--pages", type=int, default=300)
    options = parser.parse_args()
    share = exact_match(options.model, options.split, options.pages)
    print(f"exact match on {options.pages} {options.split} pages: {share:.1%}")


if __name__ == "__main__":
    main()
