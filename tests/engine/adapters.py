# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of random weights, and the oracles of the models they make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from oracle.emulation import Oracle

Adapters = dict[str, tuple[Path, Oracle]]
"""By name: the adapter's folder and the oracle of the model with it."""


def write_adapters(folder: Path, root: Path, gates: Any = None) -> Adapters:
    """Write two adapters for the model in `folder` to folders below `root`; `gates` as `Oracle`."""
    found = {}
    for seed, name in enumerate(("first", "second")):
        adapted = Oracle(folder, gates=gates)
        added = write_adapter(root / name, adapted, seed)
        with torch.no_grad():
            for key, weight in added.items():
                adapted.model.get_parameter(key).add_(weight)
        found[name] = (root / name, adapted)
    return found


def write_adapter(folder: Path, oracle: Oracle, seed: int) -> dict[str, torch.Tensor]:
    """Write a LoRA adapter of random weights and return the change of each weight."""
    generator = torch.Generator().manual_seed(seed)
    rank, scale, added, weights = 8, 4.0, {}, {}
    for layer in range(oracle.layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            module = f"model.language_model.layers.{layer}.self_attn.{name}"
            rows, columns = oracle.model.get_submodule(module).weight.shape
            down = torch.randn(rank, columns, generator=generator) / columns**0.5
            up = torch.randn(rows, rank, generator=generator) / rows**0.5
            added[f"{module}.weight"] = scale * up @ down
            weights[f"base_model.model.{module}.lora_A.weight"] = down
            weights[f"base_model.model.{module}.lora_B.weight"] = up
    folder.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": scale * rank}
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config |= {"target_modules": targets, "bias": "none", "base_model_name_or_path": ""}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, str(folder / "adapter_model.safetensors"))
    return added
