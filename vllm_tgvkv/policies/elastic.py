# SPDX-License-Identifier: Apache-2.0
"""Elastic Cache: attention sums, and evicted tokens merged into their nearest kept neighbours.

Source: Liu et al., "Efficient Inference of Vision Instruction-Following Models with Elastic Cache",
2024. With `merge: false` in a mix, evicted tokens are dropped.
"""

from __future__ import annotations

from vllm_tgvkv.policies.registry import POLICIES, Recipe

POLICIES.add("elastic", Recipe("text_rows", "uniform", "by_score", merge=True))
