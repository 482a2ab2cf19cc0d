# SPDX-License-Identifier: Apache-2.0
"""Eviction policies: what a token is worth, what a head is owed, which modality stays first."""

# Importing a method's module registers what is in it.
from vllm_tgvkv.policies import retention, tgv, uniform  # noqa: F401
from vllm_tgvkv.policies.base import (
    Attention,
    Budget,
    Granularity,
    ImageSpan,
    Policy,
    Prompt,
    Retention,
    Score,
)
from vllm_tgvkv.policies.pooling import Pooling
from vllm_tgvkv.policies.registry import POLICIES, build_policy

POLICY_NAMES = POLICIES.names

__all__ = [
    "POLICY_NAMES",
    "Attention",
    "Budget",
    "Granularity",
    "ImageSpan",
    "Policy",
    "Pooling",
    "Prompt",
    "Retention",
    "Score",
    "build_policy",
]
