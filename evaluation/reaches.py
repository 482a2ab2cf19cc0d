# SPDX-License-Identifier: Apache-2.0
"""`python -m evaluation.reaches`: how far a score should count, emulated on training questions.

Takes attention and cache of one prefill of SmolLM2 in PyTorch, hides from the answer what a rule
would evict, and puts the right answer in: where a prediction first differs from it, greedy decoding
would. So one pass judges all rules, without an engine and in a quarter of its time. SnapKV's rows
and retention, maxima over the rows, uniform budgets of whole blocks.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from evaluation.fingerprint import ROOT
from evaluation.text_arms import PASSAGES, number
from measure.smollm import model_folder
from measure.text_tasks import TRAINING, TextQuestion
from vllm_tgvkv.shared.budget import Budget
from vllm_tgvkv.shared.prompt import WINDOW

OUTPUT = ROOT / "docs" / "evaluation" / "text_training" / "reaches.json"
TASKS = (
    *PASSAGES,
    number("prose", 1024),
    number("prose", 512, keys=4),
    number("noise", 1024, keys=4),
)
BLOCK, SINKS = 16, 4
ANSWER_ROWS = 8
"""First tokens of an answer whose attention is looked at: the longest wait."""
RULES_AT_A_TIME = 10
"""Rules whose attention is computed at once, which bounds the memory."""


@dataclass(frozen=True)
class Prefill:
    """The cache of a prompt of P tokens with an answer of T behind it, and what some rows see."""

    keys: Tensor
    """``[L, H, P + T, D]``; values alike."""
    values: Tensor
    attention: Tensor
    """Of the last `WINDOW` rows of the prompt and the first `ANSWER_ROWS` of the answer, to the
    prompt: ``[L, H, G, rows, P]``, G query heads a KV head."""
    predicted: list[int]
    """The token after the prompt, and after each token of the answer."""


class Model:
    """SmolLM2 in plain PyTorch, float32."""

    def __init__(self, folder: Path) -> None:
        from safetensors.torch import load_file
        from transformers import AutoConfig, AutoTokenizer

        config = AutoConfig.from_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._weights = load_file(folder / "model.safetensors")
        self.layers, self.kv_heads = config.num_hidden_layers, config.num_key_value_heads
        self._heads = config.num_attention_heads
        self._group = self._heads // self.kv_heads
        self._size = config.hidden_size // self._heads
        self._epsilon = config.rms_norm_eps
        half = torch.arange(0, self._size, 2).float() / self._size
        self._frequencies = config.rope_parameters["rope_theta"] ** -half

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _weight(self, name: str, layer: int | None = None) -> Tensor:
        place = "" if layer is None else f"layers.{layer}."
        return self._weights[f"model.{place}{name}.weight"]

    def _norm(self, x: Tensor, name: str, layer: int | None = None) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._weight(name, layer), self._epsilon)

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return queries or keys ``[..., T, D]`` with rotary embeddings."""
        angles = positions[:, None] * self._frequencies
        cos, sin = (torch.cat([values, values], -1) for values in (angles.cos(), angles.sin()))
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin

    def _projected(self, x: Tensor, layer: int, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, ``[..., heads, T, D]``."""
        hidden = self._norm(x, "input_layernorm", layer)
        query, key, value = (
            (hidden @ self._weight(f"self_attn.{name}_proj", layer).T)
            .unflatten(-1, (-1, self._size))
            .transpose(-3, -2)
            for name in "qkv"
        )
        return self._turned(query, positions), self._turned(key, positions), value

    def _after(self, x: Tensor, attended: Tensor, layer: int) -> Tensor:
        """Return a layer's output from its input and its attention's, ``[..., heads, T, D]``."""
        mixed = attended.transpose(-3, -2).flatten(-2)
        x = x + mixed @ self._weight("self_attn.o_proj", layer).T
        hidden = self._norm(x, "post_attention_layernorm", layer)
        gate, up = (hidden @ self._weight(f"mlp.{name}_proj", layer).T for name in ("gate", "up"))
        return x + (F.silu(gate) * up) @ self._weight("mlp.down_proj", layer).T

    def _next(self, x: Tensor) -> Tensor:
        return (self._norm(x, "norm") @ self._weight("embed_tokens").T).argmax(-1)

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int], answer: Sequence[int] = ()) -> Prefill:
        """Compute a prompt and the answer behind it."""
        tokens, end = [*ids, *answer], len(ids)
        positions = torch.arange(len(tokens))
        rows = positions[end - WINDOW : end + ANSWER_ROWS]
        hidden = positions > rows[:, None]
        x = self._weight("embed_tokens")[tokens]
        keys, values, attention = [], [], []
        for layer in range(self.layers):
            query, key, value = self._projected(x, layer, positions)
            all_keys, all_values = (part.repeat_interleave(self._group, 0) for part in (key, value))
            logits = query[:, rows] @ all_keys.mT / math.sqrt(self._size)
            seen = logits.masked_fill(hidden, -torch.inf).softmax(-1)[..., :end]
            attention.append(seen.unflatten(0, (self.kv_heads, -1)))
            keys.append(key)
            values.append(value)
            attended = F.scaled_dot_product_attention(
                query[None], all_keys[None], all_values[None], is_causal=True
            )
            x = self._after(x, attended[0], layer)
        cache = torch.stack(keys), torch.stack(values), torch.stack(attention)
        return Prefill(*cache, predicted=self._next(x[end - 1 :]).tolist())

    @torch.inference_mode()
    def predicted(self, prefill: Prefill, kept: Tensor, answer: Tensor) -> Tensor:
        """Return the token after each of an answer's, int64 ``[R, T]``, for R sets of kept keys.

        Args:
            kept: bool ``[R, L, H, P]``.
        """
        rules, num = len(kept), len(answer)
        length = prefill.keys.shape[2]
        positions = torch.arange(length, length + num)
        later = torch.ones(num, num, dtype=torch.bool).triu(1)
        x = self._weight("embed_tokens")[answer].expand(rules, num, -1)
        for layer in range(self.layers):
            query, key, value = self._projected(x, layer, positions)
            query = query.unflatten(1, (self.kv_heads, -1)) / math.sqrt(self._size)
            before = query @ prefill.keys[layer].unsqueeze(1).mT
            before = before.masked_fill(~kept[:, layer, :, None, None], -torch.inf)
            own = (query @ key.unsqueeze(2).mT).masked_fill(later, -torch.inf)
            seen = torch.cat([before, own], -1).softmax(-1)
            attended = seen[..., :length] @ prefill.values[layer].unsqueeze(1)
            attended = attended + seen[..., length:] @ value.unsqueeze(2)
            x = self._after(x, attended.flatten(1, 2), layer)
        return self._next(x)


# -- rules ------------------------------------------------------------------------------------

Shares = Mapping[str, float]
"""Of an answer, by rule and budget."""

Rule = Callable[[Tensor, int], Tensor]
"""Makes scores ``[L, H, P]`` of the largest attention over the rows and the number kept."""


def reaching(weights: Sequence[float]) -> Rule:
    """Return the rule by which a score counts, times a weight, for tokens at distances 0, 1, ..."""

    def pooled(scores: Tensor, num_kept: int) -> Tensor:
        result = scores.clone()
        for distance, weight in enumerate(weights[1:], 1):
            later = result[..., distance:]
            torch.maximum(later, weight * scores[..., :-distance], out=later)
        result[..., :-1] = torch.maximum(result[..., :-1], scores[..., 1:])  # one token back
        return result

    return pooled


def apart(rule: Rule) -> Rule:
    """Return a rule by which the sinks count for no other token."""

    def pooled(scores: Tensor, num_kept: int) -> Tensor:
        scores = scores.clone()
        scores[..., :SINKS] = 0
        return rule(scores, num_kept)

    return pooled


def share(part: float, most: int) -> Rule:
    """Return the rule whose reach is a share of the kept tokens, and not more than ``most``."""

    def pooled(scores: Tensor, num_kept: int) -> Tensor:
        return reaching(flat(min(most, int(part * num_kept))))(scores, num_kept)

    return pooled


def flat(reach: int) -> list[float]:
    return [1.0] * (reach + 1)


def halved(each: int) -> list[float]:
    return [2 ** (-distance / each) for distance in range(4 * each + 1)]


def falling(end: int) -> list[float]:
    return [1 - distance / (end + 1) for distance in range(end + 1)]


RULES: dict[str, Rule] = {
    "40, with sinks": reaching(flat(40)),
    **{str(reach): apart(reaching(flat(reach))) for reach in (16, 24, 32, 40, 48, 56, 64)},
    **{f"half after {each}": apart(reaching(halved(each))) for each in (32, 64)},
    **{f"0 after {end}": apart(reaching(falling(end))) for end in (64, 96, 128)},
    **{
        f"{percent} %, at most {most}": apart(share(percent / 100, most))
        for percent, most in ((12, 48), (18, 48), (25, 48), (33, 48), (50, 48), (25, 64))
    },
}
BUDGETS = (0.3, 0.2, 0.1)


def kept(largest: Tensor, rule: Rule, budget: float) -> Tensor:
    """Return what stays of a prompt by a rule, bool ``[L, H, P]``: sinks and window come first.

    Args:
        largest: attention over the rows, ``[L, H, P]``.
    """
    length = largest.shape[-1]
    candidates = length // BLOCK * BLOCK
    number = Budget(fraction=budget).retained_blocks(length, BLOCK) * BLOCK
    scores = rule(largest, number)
    first = torch.zeros(length, dtype=torch.float64)
    first[-WINDOW:], first[:SINKS] = 1, 2
    # Scores are sums of at most one row, so that no score reaches the next tier.
    best = (first + 0.5 * scores.double())[..., :candidates].topk(number, -1).indices
    mask = torch.zeros(scores.shape, dtype=torch.bool).scatter_(-1, best, value=True)
    mask[..., candidates:] = True
    return mask


# -- questions --------------------------------------------------------------------------------


class Judge:
    """Shares of answers that are right before the first mistake, by rule."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._count = lru_cache(maxsize=1 << 14)(lambda text: len(model.encode(text)))
        self._frame = self._count(self._turn(""))

    def _turn(self, message: str) -> str:
        turns = [{"role": "user", "content": message}]
        return str(
            self.model.tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=False
            )
        )

    def shares(self, question: TextQuestion, known: Shares) -> dict[str, float]:
        """Return the share for each budget and rule, and for the full cache, that is not known."""
        example = question.example(self._frame, self._count)
        prompt = self._turn(example.message) + example.start
        space = " " if example.kind == "number" else ""
        ids = self.model.encode(prompt)
        answer = self.model.encode(f"{prompt}{space}{example.answer}")[len(ids) :]
        prefill = self.model.prefill(ids)
        largest = prefill.attention.mean(2).amax(2)
        masks = {
            f"{name}@{budget}": kept(largest, rule, budget)
            for budget in BUDGETS
            for name, rule in RULES.items()
            if f"{name}@{budget}" not in known
        }
        if "full" not in known:
            masks = {"full": torch.ones_like(largest, dtype=torch.bool), **masks}
        stacked = torch.stack([*masks.values()])
        predicted = torch.cat(
            [
                self.model.predicted(prefill, part, torch.tensor(answer))
                for part in stacked.split(RULES_AT_A_TIME)
            ]
        )
        return {
            name: self._share([*prefill.predicted, *row.tolist()], answer)
            for name, row in zip(masks, predicted, strict=True)
        }

    def _share(self, predicted: Sequence[int], answer: Sequence[int]) -> float:
        texts = [str(self.model.tokenizer.decode([token])) for token in answer]
        for place, (token, text) in enumerate(zip(predicted, texts, strict=False)):
            said = str(self.model.tokenizer.decode([token]))
            # The last token may be one with what follows it, such as a full stop and a quote.
            if said != text and not (place == len(answer) - 1 and said.startswith(text)):
                return place / len(answer)
        return 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge the rules on training questions, write their shares, and print the means.

    Shares that the file has already are not computed again.
    """
    parser = argparse.ArgumentParser(prog="python -m evaluation.reaches", description=__doc__)
    parser.add_argument("--questions", type=int, default=4, help="of each task")
    parser.add_argument("--models", type=Path, default=ROOT / "build" / "models")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    judge = Judge(Model(model_folder(options.models)))
    found: dict[str, dict[str, dict[str, float]]] = {}
    if options.output.exists():
        found = json.loads(options.output.read_text(encoding="utf-8"))
    for index in range(options.questions):
        for task in TASKS:
            asked = TRAINING + index
            known = found.setdefault(task.name, {}).setdefault(str(asked), {})
            shares = judge.shares(TextQuestion(task, asked), known)
            known.update((n, round(s, 4)) for n, s in shares.items())
            print(f"{task.name} {asked}: {known['full']:.2f} with the full cache", flush=True)
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, means in mean_shares(found).items():
        print(f"{name:<24}", *(f"{task} {share:.2f}" for task, share in means.items()))
    return 0


def mean_shares(found: Mapping[str, Mapping[str, Shares]]) -> dict[str, dict[str, float]]:
    """Return the mean share by rule and task, over questions that the full cache answers right."""
    means: dict[str, dict[str, float]] = {}
    for task, questions in found.items():
        solved = [shares for shares in questions.values() if shares["full"] == 1.0]
        for name in dict.fromkeys(name for shares in solved for name in shares):
            mine = [shares[name] for shares in solved if name in shares]
            means.setdefault(name, {})[task] = float(np.mean(mine))
    return means


if __name__ == "__main__":
    sys.exit(main())
