# SPDX-License-Identifier: Apache-2.0
"""A small LLaVA with random weights, for load tests on a CPU: its answers mean nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlavaForConditionalGeneration

from measure.folders import (
    byte_tokenizer,
    clip_config,
    clip_name_of_vllm,
    llava_config,
    llava_processor,
    rename_weights,
    text_sizes,
    written_once,
)

NAME = "random-weights"
"""Name in a profile's `model`."""

MODELS = Path(__file__).parents[1] / "build" / "models"
_PATCH, _IMAGE_SIZE = 14, 336
_SPECIAL = ("<|end|>", "<|pad|>", "<image>")
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<image>{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
_TEXT = text_sizes(
    hidden=128, intermediate=256, layers=4, query_heads=4, kv_heads=2, max_positions=4096
)


def model_folder(root: Path = MODELS) -> Path:
    """Return the folder of the model below `root`, written on the first call.

    An image takes 576 tokens, a letter one.
    """
    return written_once(root, NAME, {**_TEXT, "template": _TEMPLATE}, _write)


def _write(folder: Path) -> None:
    tokenizer, ids = byte_tokenizer(_SPECIAL, eos="<|end|>", pad="<|pad|>", max_length=4096)
    tokenizer.chat_template = _TEMPLATE
    # With weights as small as usual, tokens would be nearly as likely as each other.
    text = {
        **_TEXT,
        "vocab_size": len(tokenizer),
        "initializer_range": 0.15,
        "eos_token_id": ids["<|end|>"],
    }
    tower = clip_config(image_size=_IMAGE_SIZE, patch=_PATCH, layers=2)
    config = llava_config(text, tower, ids["<image>"], "float32")
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    rename_weights(folder, clip_name_of_vllm)
    llava_processor(tokenizer, _IMAGE_SIZE, _PATCH).save_pretrained(folder)
