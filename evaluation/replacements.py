# SPDX-License-Identifier: Apache-2.0
"""Methods with one part replaced, as data: what each part is worth in a model of 30 layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evaluation.arms import ABLATIONS, OTHER_GRANULARITY
from evaluation.parts import reaching

Mix = dict[str, Any]

POOLINGS: dict[str, Mix] = {
    "pool_none": {"pooling": "none"},
    "pool_7": {"pooling": "snapkv"},
    "pool_40": {"pooling": reaching(40, 1)},
    "pool_halve": {"pooling": "reach"},
}
"""None, SnapKV's, over the next 40 tokens, and `reach`'s."""


def _replaced(base: str, common: Mapping[str, Any], changes: Mapping[str, Mix]) -> dict[str, Mix]:
    return {name: {"base": base, **common, **change} for name, change in changes.items()}


def _parts(*fields: str) -> dict[str, Mix]:
    """Return the replacements of some fields of TGV-KV, without `h2o`, which reads all rows."""
    return {
        f"{part.name}_{value}": {part.field: value}
        for part in ABLATIONS
        for value in part.others
        if part.field in fields and value != "h2o"
    }


TGV: dict[str, Mix] = _replaced(
    "tgv",
    {},
    {
        f"tgv_{name}": change
        for name, change in {
            **_parts("allocation", "score", "retain"),
            "head": {"granularity": "head"},
            "score_text_rows_head": {"score": "text_rows", "granularity": "head"},
            "pool_7": POOLINGS["pool_7"],
            "pool_halve": POOLINGS["pool_halve"],
        }.items()
    },
)
"""One part of TGV-KV replaced."""

UNIFORM: dict[str, Mix] = _replaced(
    "tgv",
    {"allocation": "uniform"},
    {
        f"tgv_uniform_{name}": change
        for name, change in {
            **_parts("score", "retain"),
            "head": {"granularity": "head"},
            "pool_7": POOLINGS["pool_7"],
            "pool_halve": POOLINGS["pool_halve"],
        }.items()
    },
)
"""One more part replaced where layers get equal budgets, which is `tgv_budget_uniform`."""

_REACH: dict[str, Mix] = {
    **{
        f"budget_{name}": {"allocation": name}
        for name in ("tt", "entropy", "prefixkv", "pyramid", "adakv")
    },
    "sum": {"reduce": "mean"},
    "rows_text": {"rows": "text"},
    "retain_by_score": {"retain": "by_score"},
    "by_layer": {"granularity": "layer"},
    **{name: POOLINGS[name] for name in ("pool_none", "pool_7", "pool_40")},
}
_REACH_WITH_IMAGES: dict[str, Mix] = {
    **{f"budget_{name}": {"allocation": name} for name in ("tgv", "vv")},
    **{f"retain_{name}": {"retain": name} for name in ("text_first", "vision_first")},
}
REACH = _replaced("reach", {}, {f"reach_{name}": change for name, change in _REACH.items()})
"""One part of `reach` replaced: layer budget, reduction and rows, retention, heads, pooling."""
REACH_WITH_IMAGES = _replaced(
    "reach", {}, {f"reach_{name}": change for name, change in _REACH_WITH_IMAGES.items()}
)
"""Parts that need an image."""

OTHERS: dict[str, Mix] = {
    **{
        name: OTHER_GRANULARITY[name]
        for name in (
            "snapkv_layer",
            "pyramidkv_layer",
            "aircache_head",
            "vlcache_head",
            "prefixkv_head",
            "elastic_head",
        )
    },
    "elastic_dropped": {"base": "elastic", "merge": False},
}
"""Published methods at the other granularity, and Elastic Cache without its merging."""

REPLACED: dict[str, Mix] = TGV | UNIFORM | REACH | REACH_WITH_IMAGES | OTHERS
"""All of them, by name."""
