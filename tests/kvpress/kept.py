# SPDX-License-Identifier: Apache-2.0
"""Record the tokens that kvpress keeps. Run in its environment: `python kept.py FOLDER`.

Reads from FOLDER:
    model/          a LlamaForCausalLM
    prompts.json    {name: [token, ...]}
    cases.json      {name: {"prompt": name, "attention": "sdpa" or "eager", "press": class,
                    "options": {...}}}; options "over" are those of the SnapKVPress inside an
                    AdaKVPress

Writes `recorded.safetensors`:
    queries.PROMPT.ATTENTION, keys.PROMPT.ATTENTION     float32 [L, P, Q or H, D], rotated
    kept.CASE                                           bool [L, H, P]
    scores.CASE                                         float32 [L, H, P], of the press
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvpress
import torch
from record import load, states_of
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM


def make_press(name: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """Return the press, and the one that scores: itself, or the press inside an AdaKVPress."""
    press_class = getattr(kvpress, name)
    if "over" not in options:
        press = press_class(**options)
        return press, press
    scorer = kvpress.SnapKVPress(**options["over"])
    return press_class(scorer, **{k: v for k, v in options.items() if k != "over"}), scorer


def record_scores(scorer: Any) -> list[Tensor]:
    """Return a list to which the scores of every layer, ``[H, P]``, will be added."""
    scores: list[Tensor] = []
    score = scorer.score

    def score_and_record(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = score(*args, **kwargs)
        scores.append(result[0].float().clone())  # AdaKV overwrites them
        return result

    scorer.score = score_and_record
    return scores


@contextmanager
def recorded_keys(model: LlamaForCausalLM) -> Iterator[list[Tensor]]:
    """Collect the cached keys ``[H, P, D]`` of every layer before a press evicts any.

    Enter this context before that of the press: hooks run in the order of registration.
    """
    whole: list[Tensor] = []

    def record(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        whole.append(kwargs["past_key_values"].layers[module.layer_idx].keys[0].clone())

    hooks = [
        layer.self_attn.register_forward_hook(record, with_kwargs=True)
        for layer in model.model.layers
    ]
    try:
        yield whole
    finally:
        for hook in hooks:
            hook.remove()


def where_kept(whole: Tensor, left: Tensor) -> Tensor:
    """Return which of the keys ``[H, P, D]`` are among ``[H, n, D]``, bool ``[H, P]``."""
    same = (whole[:, :, None] == left[:, None]).all(dim=-1)  # [H, P, n]
    if not (same.sum(dim=1) == 1).all():
        raise ValueError("a kept key matches no position, or several")
    return same.any(dim=-1)


def run_press(
    model: LlamaForCausalLM, press: Any, scorer: Any, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Return kept positions and scores, each ``[L, H, P]``."""
    attentions = [layer.self_attn for layer in model.model.layers]
    for attention in attentions:
        attention.masked_key_indices = None
    scores, cache = record_scores(scorer), DynamicCache()
    with recorded_keys(model) as whole, press(model):
        model(tokens, past_key_values=cache)
    kept = []
    for attention, keys in zip(attentions, whole, strict=True):
        positions = where_kept(keys, cache.layers[attention.layer_idx].keys[0])
        if attention.masked_key_indices is not None:  # tokens that AdaKV drops stay in the cache
            positions[attention.masked_key_indices[1:]] = False
        kept.append(positions)
    return torch.stack(kept), torch.stack(scores)


@torch.no_grad()
def main(folder: Path) -> None:
    """Run all cases."""
    models = {name: load(folder / "model", name) for name in ("sdpa", "eager")}
    prompts = {
        name: torch.tensor([tokens])
        for name, tokens in json.loads((folder / "prompts.json").read_text()).items()
    }
    found: dict[str, Tensor] = {}
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        prompt, attention = case["prompt"], case["attention"]
        model, tokens = models[attention], prompts[prompt]
        states = f"{prompt}.{attention}"
        if f"queries.{states}" not in found:
            found[f"queries.{states}"], found[f"keys.{states}"] = states_of(model, tokens)
        press, scorer = make_press(case["press"], case["options"])
        found[f"kept.{name}"], found[f"scores.{name}"] = run_press(model, press, scorer, tokens)
    save_file(
        {name: tensor.contiguous() for name, tensor in found.items()},
        folder / "recorded.safetensors",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
