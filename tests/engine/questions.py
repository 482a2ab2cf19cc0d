# SPDX-License-Identifier: Apache-2.0
"""Questions about one image, and settings of engines that answer them."""

from __future__ import annotations

from typing import Any

from tests.engine.running import (
    Ask,
)
from tests.models import LLAVA_IMAGE, random_image, random_text

DEBUG = {"poison": True, "record_kept": True, "check_integrity": True}
SETTINGS = {"policy": "tgv", "budget": 0.1, "debug": DEBUG}
BLOCK_SIZE = 32
VISION_TOKENS = 64


def question(seed: int, before: int, after: int, **fields: Any) -> Ask:
    """Return a prompt of text, an image and text, with these numbers of letters."""
    text = random_text(2 * seed, before) + LLAVA_IMAGE + random_text(2 * seed + 1, after)
    return Ask(text, (random_image(seed, 112, 112),), **fields)


def budget(value: float | str, **more: Any) -> dict[str, Any]:
    """Return the `vllm_xargs` of a budget and more."""
    return {"kv_eviction_budget": value, **more}


JSON_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["yes", "no"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
