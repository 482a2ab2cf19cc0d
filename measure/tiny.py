# SPDX-License-Identifier: Apache-2.0
"""A tiny LLaVA with random weights, for load: real images and a real cache at little cost.

It answers to every image with 576 tokens of random bytes that never end by themselves. Its four
layers have four query heads and two KV heads of 32 values each.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlavaForConditionalGeneration

from measure.folders import (
    byte_tokenizer,
    clip_config,
    llava_config,
    llava_processor,
    text_sizes,
    written_once,
)

NAME = "tiny"
"""Name of the model in profiles of load tests."""

SEED, PAGE_SIZE, PATCH, LAYERS = 0, 336, 14, 4
DEVIATION = 0.08
"""Of the weights: with transformers' own, the model repeats two tokens forever."""

TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] in ('image', 'image_url') %}<image>{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


MODELS = Path(__file__).parents[1] / "build" / "models"


def tiny_folder(root: Path | str = MODELS) -> Path:
    """Return the folder of the model below `root`, written on the first call (4 MB)."""
    return written_once(root, NAME, {"seed": SEED, "deviation": DEVIATION, "format": 1}, _write)


@torch.no_grad()
def _write(folder: Path) -> None:
    tokenizer, ids = byte_tokenizer(
        TOKENS, eos="<|im_end|>", pad="<|endoftext|>", max_length=8192, chat_template=CHAT_TEMPLATE
    )
    sizes = text_sizes(
        hidden=128, intermediate=256, layers=LAYERS, query_heads=4, kv_heads=2, max_positions=8192
    )
    tower = clip_config(image_size=PAGE_SIZE, patch=PATCH, layers=3)
    ends = {"bos_token_id": None, "eos_token_id": ids["<|im_end|>"]}
    text = {**sizes, **ends, "vocab_size": len(tokenizer)}
    network = LlavaForConditionalGeneration(llava_config(text, tower, ids["<image>"], "float32"))
    generator = torch.Generator().manual_seed(SEED)
    for parameter in network.parameters():
        if parameter.ndim >= 2:  # norms and biases keep their neutral values
            parameter.normal_(0.0, DEVIATION, generator=generator)
    # A logit of 0 never wins: answers neither end nor contain images.
    network.lm_head.weight[list(ids.values())] = 0.0
    network.generation_config.eos_token_id = ids["<|im_end|>"]
    network.generation_config.pad_token_id = ids["<|endoftext|>"]
    network.save_pretrained(folder)
    llava_processor(tokenizer, PAGE_SIZE, PATCH).save_pretrained(folder)
    # transformers 5 omits a level of the tower's names that vLLM needs; both load this.
    weights = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model."): value
        for name, value in weights.items()
    }
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
