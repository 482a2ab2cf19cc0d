# SPDX-License-Identifier: Apache-2.0
"""Queries and keys of every layer, as seen by the attention of a Hugging Face model.

Runs in both environments, so it imports only torch and transformers.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama
from transformers.utils import logging

logging.disable_progress_bar()


def load(folder: Path, attention: str) -> LlamaForCausalLM:
    """Load the model of `folder` in float32, with "sdpa" or "eager" attention."""
    return LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    ).eval()


@torch.no_grad()
def states_of(model: LlamaForCausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return rotated queries ``[L, P, Q, D]`` and keys ``[L, P, H, D]`` of a prompt ``[1, P]``."""
    layers: list[tuple[Tensor, Tensor]] = []
    rotate = modeling_llama.apply_rotary_pos_emb

    def rotate_and_record(*args: Tensor, **kwargs: int) -> tuple[Tensor, Tensor]:
        queries, keys = rotate(*args, **kwargs)
        layers.append((queries[0].transpose(0, 1).clone(), keys[0].transpose(0, 1).clone()))
        return queries, keys

    modeling_llama.apply_rotary_pos_emb = rotate_and_record
    try:
        model(tokens)
    finally:
        modeling_llama.apply_rotary_pos_emb = rotate
    all_queries, all_keys = zip(*layers, strict=True)
    return torch.stack(all_queries), torch.stack(all_keys)
