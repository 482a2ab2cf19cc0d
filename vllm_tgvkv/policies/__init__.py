# SPDX-License-Identifier: Apache-2.0
"""Eviction policies: token scores, allocation of pages to heads, order of retention."""

# Importing a method's module registers it; lists of methods follow the order of these imports.
from vllm_tgvkv.policies import retention, uniform  # noqa: F401, I001
from vllm_tgvkv.policies import tgv, vlcache, aircache  # noqa: F401
from vllm_tgvkv.policies import snapkv, pyramidkv, adakv, sparsemm, reach  # noqa: F401
from vllm_tgvkv.policies import rkv, mixkv, retentive  # noqa: F401
from vllm_tgvkv.policies import trimkv, kvzap  # noqa: F401
from vllm_tgvkv.policies import h2o, prefixkv, elastic, streaming, random  # noqa: F401
from vllm_tgvkv.policies.base import (
    NO_ATTENTION,
    AllLayers,
    Allocation,
    Attention,
    Depth,
    Granularity,
    LayerView,
    Policy,
    Prompt,
    Retention,
    Score,
    VoteScore,
)
from vllm_tgvkv.policies.pooling import Pooling
from vllm_tgvkv.policies.registry import (
    POLICIES,
    Mix,
    Recipe,
    build_policy,
    gates_of,
    has_summaries,
    method_names,
    needs_head_scores,
)
from vllm_tgvkv.summaries.options import Summaries

METHOD_NAMES = POLICIES.names
"""All methods of this package; `method_names` adds methods of other installed packages."""

POLICY_NAMES = tuple(
    name
    for name in METHOD_NAMES
    if not needs_head_scores(name) and gates_of(name) is None and not has_summaries(name)
)
"""Methods that every server has: they need no file and keep no summaries."""

__all__ = [
    "METHOD_NAMES",
    "NO_ATTENTION",
    "POLICY_NAMES",
    "AllLayers",
    "Allocation",
    "Attention",
    "Depth",
    "Granularity",
    "LayerView",
    "Mix",
    "Policy",
    "Pooling",
    "Prompt",
    "Recipe",
    "Retention",
    "Score",
    "Summaries",
    "VoteScore",
    "build_policy",
    "gates_of",
    "has_summaries",
    "method_names",
]
