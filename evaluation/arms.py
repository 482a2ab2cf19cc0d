# SPDX-License-Identifier: Apache-2.0
"""Arms of the evaluation: methods and mixes of their parts at budgets, and engines for them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from evaluation.ablations import BOUNDS  # importing it registers the parts that mixes below name
from measure.arm import FULL, FULL_CACHE, Arm
from vllm_tgvkv.config.request import RequestOptions
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.gates.folder import Gates
from vllm_tgvkv.shared.errors import EvictionConfigError

__all__ = ["FULL", "Arm"]

ROOT = Path(__file__).parents[1]

Mix = dict[str, Any]
Pair = tuple[Arm, Arm]

METHODS: tuple[str, ...] = EvictionConfig().method_names[1:]
"""All methods, with those of other installed packages."""


def _mixes(base: str, changes: Mapping[str, Mix], start: str = "", **common: Any) -> dict[str, Mix]:
    """Return mixes named after their base and after what replaces which of its parts."""
    named = start or base
    return {f"{named}_{name}": {"base": base, **common, **mix} for name, mix in changes.items()}


def _each(prefix: str, part: str, *values: str) -> dict[str, Mix]:
    return {f"{prefix}_{value}": {part: value} for value in values}


_POOL_7: dict[str, Mix] = {"pool_7": {"pooling": "snapkv"}}

_FORWARD: dict[str, Mix] = {
    "forward16": {"pooling": "sequence_forward16"},
    "forward40": {"pooling": "sequence_forward40"},
    "grid16": {"pooling": "grid_forward16"},
    "grid40": {"pooling": "grid_forward40"},
}
"""A score counts for tokens after its own, and one before. Grids are of a page's patches."""

FORWARD = {
    **_mixes("snapkv", _FORWARD, "snapkv_max", reduce="max"),
    **_mixes(
        "snapkv",
        {name: _FORWARD[name] for name in ("forward16", "grid16")},
        "snapkv_answer",
        rows="answer",
        reduce="max",
    ),
}
"""Mixes that pool forward, with maxima over the rows of the window or of the answer alone."""

_REPLACED: dict[str, Mix] = {
    **_each("score", "score", "text_rows", "vv_tt", "snapkv"),
    **_each("retain", "retain", "vision_first", "by_score"),
    "head": {"granularity": "head"},
    **_POOL_7,
    "pool_halve": {"pooling": "reach"},
}

TGV = _mixes(
    "tgv",
    {
        **_each("budget", "allocation", "vv", "tt", "uniform", "entropy"),
        **_REPLACED,
        "score_text_rows_head": {"score": "text_rows", "granularity": "head"},
    },
)
"""One part of TGV-KV replaced."""

UNIFORM = _mixes("tgv", _REPLACED, "tgv_uniform", allocation="uniform")
"""One more part replaced where layers get equal budgets, which is `tgv_budget_uniform`."""

REACH = _mixes(
    "reach",
    {
        **_each("budget", "allocation", "tt", "entropy", "prefixkv", "pyramid", "adakv"),
        "sum": {"reduce": "mean"},
        **_each("rows", "rows", "text"),
        **_each("retain", "retain", "by_score"),
        "by_layer": {"granularity": "layer"},
        "pool_none": {"pooling": "none"},
        **_POOL_7,
        "pool_40": {"pooling": "sequence_forward40"},
    },
)
"""One part of `reach` replaced: layer budget, reduction, rows, retention, heads or pooling."""

REACH_WITH_IMAGES = _mixes(
    "reach",
    {
        **_each("budget", "allocation", "tgv", "vv"),
        **_each("retain", "retain", "text_first", "vision_first"),
    },
)
"""Parts that need an image."""

GRANULARITY: dict[str, Mix] = {
    **{f"{name}_layer": {"base": name, "granularity": "layer"} for name in ("snapkv", "pyramidkv")},
    **{
        f"{name}_head": {"base": name, "granularity": "head"}
        for name in ("aircache", "vlcache", "prefixkv", "elastic")
    },
    "elastic_dropped": {"base": "elastic", "merge": False},
}
"""Published methods at the granularity that is not theirs, and Elastic Cache without merging."""

PRINTED: dict[str, Mix] = {
    "tgv_all_text": {"base": "tgv", "rows": "all_text"},
    "ada_pyramid": {"base": "adakv", "allocation": "ada_pyramid"},
    **_mixes(
        "aircache",
        _each("budget", "allocation", "uniform", "aircache_strength", "aircache_skewness"),
    ),
    "aircache_query_heads": {"base": "aircache", "score": "aircache_query_heads"},
}
"""Mixes that papers define: TGV-KV with rows of all text, Ada-Pyramid-KV, AirCache's ablation of
layer budgets, and AirCache with an elite for each query head."""

SUMMARIES: dict[str, Mix] = {
    **{f"{n}_summaries": {"base": n, "summaries": "both"} for n in ("tgv", "snapkv", "reach")},
    **_mixes(
        "retentivekv",
        {"tokens": {}, "attention_tokens": {"score": "text_rows"}},
        summaries="none",
    ),
}
"""Summaries of what is evicted, RetentiveKV without them, and without entropy in its scores too."""

RANDOM = _mixes("random", {"vision": {"retain": "text_first"}, "text": {"retain": "vision_first"}})
"""Random tokens of one modality are evicted before any of the other."""

AIRCACHE = _mixes(
    "aircache",
    {
        "window_16": {"score": "window_16"},
        "window_32": {"score": "snapkv"},
        "all_text": {"score": "vlcache"},
        "vision_rows": {"score": "vv_tt"},
        **_each("budget", "allocation", "pyramid"),
        "unified": {"retain": "by_score"},
        "merged": {"merge": True},
        **{f"elite_{percent}": {"score": f"elite_{percent}"} for percent in (60, 80, 99)},
    },
)
"""One part of AirCache replaced, as its paper does: rows that vote, layer budgets, what is evicted
and merged, and the elite's threshold."""

_VOTES = {"votes": {"score": "trimkv_votes", "rows": "window", "reduce": "max"}}
_AHEAD = {"next": {"score": "trimkv_next"}}
GATED = {
    **_mixes("dbtrimkv", _VOTES | _AHEAD | {"five": {"score": "trimkv_five"}}),
    **_mixes("trimkv", _AHEAD),
}
"""Scores of gates plus the logarithm of the largest attention of the last rows, and with one or
five tokens to come."""

MIXES = (
    GATED
    | FORWARD
    | TGV
    | UNIFORM
    | REACH
    | REACH_WITH_IMAGES
    | GRANULARITY
    | PRINTED
    | SUMMARIES
    | RANDOM
    | AIRCACHE
)
"""By name: the setting `methods`, of which an engine gets those that its arms name."""


STATES = "retentivekv_state"
"""Stands for a method of arms that `evaluation.states` emulates, with a `State` as options."""


def arm(method: str, budget: float, gates: str = "", **options: Any) -> Arm:
    """Return a method or mix at a budget, with further options of its requests."""
    return Arm(method, budget, tuple(options.items()), mix=MIXES.get(method), gates=gates)


def crossed(
    methods: Iterable[str],
    budgets: Sequence[float],
    waits: Sequence[int] = (0,),
    gates: str = "",
) -> tuple[Arm, ...]:
    """Return every method at every budget, with every wait in tokens of the answer."""
    return tuple(
        arm(method, budget, gates, **({"defer": wait} if wait else {}))
        for method, budget, wait in product(methods, budgets, waits)
    )


def recalling(
    method: str, budgets: Sequence[float], every: int = 3, sketch: int | str = 4, wait: int = 4
) -> tuple[Arm, ...]:
    """Return a method at every budget whose evicted tokens may come back.

    `sketch` has bits, or is `ablations.BOUNDS`.
    """
    recall = (("every", every), ("sketch", sketch))
    return tuple(
        Arm(method, budget, (("defer", wait),), MIXES.get(method), recall=recall)
        for budget in budgets
    )


def paired(first: Sequence[Arm], second: Sequence[Arm]) -> tuple[Pair, ...]:
    return tuple(zip(first, second, strict=True))


def drafting(arms: Iterable[Arm], drafts: int) -> tuple[Arm, ...]:
    """Return the arms with the model as its own draft."""
    return tuple(replace(arm, drafts=drafts) for arm in arms)


# -- engines for arms -----------------------------------------------------------------------


def identity(arm: Arm) -> str:
    """Return what a log calls an arm: a changed mix, or other gates, make another one."""
    return " ".join([arm.identity, *([gates_digest(arm.gates)] if arm.gates else [])])


@cache
def gates_digest(folder: str) -> str:
    """Return a hash of the configuration and the weights of a folder of gates.

    Raises:
        EvictionConfigError: if there are no gates.
    """
    gates = Gates.read(str(ROOT / folder), "the folder of gates, which docs/gates.md trains,")
    files = [Path(gates.folder, "config.json"), Path(gates.folder, gates.file)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def eviction_settings(arms: Iterable[Arm]) -> dict[str, Any]:
    """Return the eviction configuration of an engine that answers for these arms.

    Raises:
        EvictionConfigError: for arms with different gates or recall: an engine has one of each.
    """
    arms = tuple(arms)
    recalls = {arm.recall for arm in arms if arm != FULL}
    if len(recalls) > 1:
        raise EvictionConfigError(
            f"an engine has one setting of recall, and the arms name {len(recalls)}: start an "
            "engine for each"
        )
    folders = sorted({arm.gates for arm in arms} - {""})
    if len(folders) > 1:
        raise EvictionConfigError(
            f"an engine reads one folder of gates, and the arms name {', '.join(folders)}: start "
            "an engine for each"
        )
    settings: dict[str, Any] = {
        "policy": "snapkv",
        "text_only": "evict",
        "methods": {str(arm.method): dict(arm.mix) for arm in arms if arm.mix},
    }
    if folders:
        settings["gates"] = str(ROOT / folders[0])
    if recall := dict[str, Any](max(recalls, default=())):
        if recall["sketch"] == BOUNDS:
            recall["sketch"] = 2
        settings |= {"policy": "reach", "when": "always", "recall": recall}
    # They need positions of kept tokens, which other engines do not store.
    if any(arm.has_schedule or arm.has_ceiling for arm in arms):
        settings["decode"] = {"on_request": True}
    return settings


def by_engine(arms: Iterable[Arm]) -> list[tuple[Arm, ...]]:
    """Return the arms of each engine: one for each folder of gates, kind of recall, and drafts.

    Arms without gates are in all with gates; if no arm has gates, there is one engine without. The
    full cache is in all. Emulated arms have one of their own.
    """
    arms = tuple(dict.fromkeys(arms))
    kinds = {arm: (arm.method == STATES, arm.drafts) for arm in arms if arm != FULL}
    if len(set(kinds.values())) > 1:
        return [
            engine
            for kind in sorted(set(kinds.values()))
            for engine in by_engine(arm for arm in arms if kinds.get(arm, kind) == kind)
        ]
    folders = dict.fromkeys(arm.gates for arm in arms if arm.gates) or {"": None}
    recalls = dict.fromkeys(arm.recall for arm in arms if arm != FULL) or {(): None}
    found = [
        tuple(
            arm
            for arm in arms
            if arm == FULL or (arm.gates in ("", folder) and arm.recall == recall)
        )
        for recall in recalls
        for folder in (folders if not recall else ("",))
    ]
    return [each for each in found if each]


def check(arms: Iterable[Arm], has_images: bool = False) -> None:
    """Check that this version of the plugin knows all that the arms of an engine ask for.

    Args:
        has_images: whether prompts have images, without which some layer budgets are undefined.

    Raises:
        EvictionConfigError: naming the arm or mix, and what is not known.
    """
    arms = tuple(arms)
    config = EvictionConfig.from_mapping(eviction_settings(arms))
    for each in arms:
        try:
            if each.method == STATES:
                continue
            RequestOptions.resolve(config, each.xargs)
            if has_images or each.method in (None, FULL_CACHE):
                continue
            if config.build_policy(str(each.method)).allocation.needs_vision:
                raise EvictionConfigError("its layer budget is the attention to images")
        except EvictionConfigError as error:
            raise EvictionConfigError(f"arm {each.key}: {error}") from error
