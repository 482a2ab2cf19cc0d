# SPDX-License-Identifier: Apache-2.0
"""Requests about random images, and settings of engines that answer them."""

from __future__ import annotations

from typing import Any

from tests.configs import pooling_name
from tests.engine.running import Ask
from tests.inputs import head_scores
from tests.models import LLAVA_IMAGE, random_image, random_text

DEBUG = {"poison": True, "record_kept": True, "check_integrity": True}
SETTINGS = {"policy": "tgv", "budget": 0.1, "debug": DEBUG}
BLOCK_SIZE = 32
VISION_TOKENS = 64
BUDGETS = (0.5, 0.2, 0.1)
HEAD_SCORES = head_scores(layers=4, kv_heads=2, group=2)
"""Of the tiny LLaVA; the fixture `heads` writes them to a file."""

AHEAD = pooling_name("sequence", forward=6, back=1)
MIXES: dict[str, dict[str, Any]] = {
    "forward": {"base": "snapkv", "pooling": AHEAD},
    "largest": {"base": "snapkv", "pooling": AHEAD, "reduce": "max"},
    "answer": {"base": "snapkv", "rows": "answer", "retain": "by_score"},
    "accumulated": {"base": "h2o", "score": "h2o_accumulated"},
    "place": {"base": "elastic", "score": "fixed_place"},
}


def tgv(granularity: str = "layer", **settings: Any) -> dict[str, Any]:
    """Return settings of an engine with TGV, of its own granularity or another."""
    if granularity == "layer":
        return {**SETTINGS, **settings}
    mixes = {"tgv_head": {"base": "tgv", "granularity": granularity}, **settings.pop("methods", {})}
    return {**SETTINGS, "policy": "tgv_head", "methods": mixes, **settings}


def question(seed: int, before: int, after: int, **fields: Any) -> Ask:
    """Return a prompt of text, an image and text, with these numbers of letters."""
    text = random_text(2 * seed, before) + LLAVA_IMAGE + random_text(2 * seed + 1, after)
    return Ask(text, (random_image(seed, 112, 112),), **fields)


def album(seed: int, *lengths: int, image_text: str = LLAVA_IMAGE, **fields: Any) -> Ask:
    """Return a prompt of texts with these numbers of letters and an image between any two."""
    texts = [random_text(100 * seed + i, n) for i, n in enumerate(lengths)]
    sizes = [(112, 112), (140, 84), (84, 168)]
    images = tuple(
        random_image(100 * seed + i, *sizes[i % len(sizes)]) for i in range(len(lengths) - 1)
    )
    return Ask(image_text.join(texts), images, **fields)


def budget(value: float | str, **more: Any) -> dict[str, Any]:
    """Return the `vllm_xargs` of a budget and more."""
    return {"kv_eviction_budget": value, **more}


def ladder() -> list[Ask]:
    """Return requests of several lengths, one for each of `BUDGETS`, that arrive in turn."""
    return [
        album(seed, 20 + 9 * seed, 170 + 41 * seed, xargs=budget(value), arrival=3 * seed)
        for seed, value in enumerate(BUDGETS)
    ]


JSON_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["yes", "no"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
