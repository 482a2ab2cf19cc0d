# SPDX-License-Identifier: Apache-2.0
"""Arms of the evaluation: methods and mixes of their parts at budgets, and engines for them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from evaluation import ablations  # noqa: F401  # registers the parts that mixes below name
from evaluation.fingerprint import ROOT
from measure.arm import FULL, FULL_CACHE, SCHEDULE, Arm
from vllm_tgvkv.config.request import RequestOptions
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.gates.folder import Gates
from vllm_tgvkv.shared.errors import EvictionConfigError

__all__ = ["FULL", "Arm"]

Mix = dict[str, Any]
Pair = tuple[Arm, Arm]

METHODS: tuple[str, ...] = EvictionConfig().method_names[1:]
"""All methods, with those of other installed packages."""

POOLINGS: dict[str, Mix] = {
    "pool_none": {"pooling": "none"},
    "pool_7": {"pooling": "snapkv"},
    "pool_40": {"pooling": "sequence_forward40"},
    "pool_halve": {"pooling": "reach"},
}
"""None, SnapKV's, over the next 40 tokens, and `reach`'s."""


def _pooled(forward: int, kind: str = "sequence") -> Mix:
    """Return the pooling in which a score counts for tokens after its own, and one before."""
    return {"pooling": f"{kind}_forward{forward}"}


FORWARD: dict[str, Mix] = {
    "snapkv_max_forward16": {"base": "snapkv", "reduce": "max", **_pooled(16)},
    "snapkv_max_forward40": {"base": "snapkv", "reduce": "max", **_pooled(40)},
    "snapkv_max_grid16": {"base": "snapkv", "reduce": "max", **_pooled(16, "grid")},
    "snapkv_max_grid40": {"base": "snapkv", "reduce": "max", **_pooled(40, "grid")},
    "snapkv_answer_forward16": {
        "base": "snapkv",
        "rows": "answer",
        "reduce": "max",
        **_pooled(16),
    },
    "snapkv_answer_grid16": {
        "base": "snapkv",
        "rows": "answer",
        "reduce": "max",
        **_pooled(16, "grid"),
    },
}
"""Mixes that pool forward, with maxima over the rows of the window or of the answer alone. A grid
is that of the patches of a page."""


def _replaced(base: str, common: Mapping[str, Any], changes: Mapping[str, Mix]) -> dict[str, Mix]:
    return {f"{base}_{name}": {"base": base, **common, **mix} for name, mix in changes.items()}


_BUDGETS: dict[str, Mix] = {
    f"budget_{name}": {"allocation": name} for name in ("vv", "tt", "uniform", "entropy")
}
_SCORES: dict[str, Mix] = {
    f"score_{name}": {"score": name} for name in ("text_rows", "vv_tt", "snapkv")
}
_RETENTION: dict[str, Mix] = {
    f"retain_{name}": {"retain": name} for name in ("vision_first", "by_score")
}
_OTHER: dict[str, Mix] = {
    "head": {"granularity": "head"},
    "pool_7": POOLINGS["pool_7"],
    "pool_halve": POOLINGS["pool_halve"],
}

TGV = _replaced(
    "tgv",
    {},
    {
        **_BUDGETS,
        **_SCORES,
        **_RETENTION,
        "score_text_rows_head": {"score": "text_rows", "granularity": "head"},
        **_OTHER,
    },
)
"""One part of TGV-KV replaced."""

UNIFORM = {
    name.replace("tgv_", "tgv_uniform_", 1): mix
    for name, mix in _replaced(
        "tgv", {"allocation": "uniform"}, {**_SCORES, **_RETENTION, **_OTHER}
    ).items()
}
"""One more part replaced where layers get equal budgets, which is `tgv_budget_uniform`."""

REACH = _replaced(
    "reach",
    {},
    {
        **{
            f"budget_{name}": {"allocation": name}
            for name in ("tt", "entropy", "prefixkv", "pyramid", "adakv")
        },
        "sum": {"reduce": "mean"},
        "rows_text": {"rows": "text"},
        "retain_by_score": {"retain": "by_score"},
        "by_layer": {"granularity": "layer"},
        **{name: POOLINGS[name] for name in ("pool_none", "pool_7", "pool_40")},
    },
)
"""One part of `reach` replaced: layer budget, reduction, rows, retention, heads or pooling."""

REACH_WITH_IMAGES = _replaced(
    "reach",
    {},
    {
        **{f"budget_{name}": {"allocation": name} for name in ("tgv", "vv")},
        **{f"retain_{name}": {"retain": name} for name in ("text_first", "vision_first")},
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

SUMMARIES: dict[str, Mix] = {
    **{
        f"{name}_summaries": {"base": name, "summaries": "both"}
        for name in ("tgv", "snapkv", "reach")
    },
    "retentivekv_tokens": {"base": "retentivekv", "summaries": "none"},
    "retentivekv_attention_tokens": {
        "base": "retentivekv",
        "score": "text_rows",
        "summaries": "none",
    },
}
"""Summaries of what is evicted, RetentiveKV without them, and without entropy in its scores too."""

GATED: dict[str, Mix] = {
    "dbtrimkv_votes": {
        "base": "dbtrimkv",
        "score": "trimkv_votes",
        "rows": "window",
        "reduce": "max",
    }
}
"""Scores of gates plus the logarithm of the largest attention of the last rows."""

MIXES: dict[str, Mix] = (
    GATED | FORWARD | TGV | UNIFORM | REACH | REACH_WITH_IMAGES | GRANULARITY | SUMMARIES
)
"""By name: the setting `methods`, of which an engine gets those that its arms name."""


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
        for method in methods
        for budget in budgets
        for wait in waits
    )


def scheduled(methods: Iterable[str], schedules: Iterable[str]) -> tuple[Arm, ...]:
    """Return every method with every schedule, such as `8:0.3,24:0.1`."""
    return tuple(
        arm(method, float(schedule.rpartition(":")[2]), **{SCHEDULE: schedule})
        for method in methods
        for schedule in schedules
    )


def paired(first: Sequence[Arm], second: Sequence[Arm]) -> tuple[Pair, ...]:
    return tuple(zip(first, second, strict=True))


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
    gates = Gates.read(str(ROOT / folder), "the folder of an arm's gates")
    files = [Path(gates.folder, "config.json"), Path(gates.folder, gates.file)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def eviction_settings(arms: Iterable[Arm]) -> dict[str, Any]:
    """Return the eviction configuration of an engine that answers for these arms.

    Raises:
        EvictionConfigError: for arms with different gates, of which an engine has one folder.
    """
    arms = tuple(arms)
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
    # They need positions of kept tokens, which other engines do not store.
    if any(arm.has_schedule or arm.has_ceiling for arm in arms):
        settings["decode"] = {"on_request": True}
    return settings


def by_gates(arms: Iterable[Arm]) -> dict[str, tuple[Arm, ...]]:
    """Return for each folder of gates the arms that an engine with it answers for.

    Arms without gates are in all; if no arm has gates, there is one engine without, "".
    """
    arms = tuple(dict.fromkeys(arms))
    folders = dict.fromkeys(arm.gates for arm in arms if arm.gates) or {"": None}
    return {folder: tuple(arm for arm in arms if arm.gates in ("", folder)) for folder in folders}


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
            RequestOptions.resolve(config, each.xargs)
            if has_images or each.method in (None, FULL_CACHE):
                continue
            if config.build_policy(str(each.method)).allocation.needs_vision:
                raise EvictionConfigError("its layer budget is the attention to images")
        except EvictionConfigError as error:
            raise EvictionConfigError(f"arm {each.key}: {error}") from error
