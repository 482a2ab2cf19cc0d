# SPDX-License-Identifier: Apache-2.0
"""`python -m evaluation.waits`: who should vote, and how scores fall, on training questions.

As `evaluation.reaches`, with a wait: the first tokens of the answer are computed from the full
cache, vote, and are kept; the rest is judged. Two rules differ from `reach` in one part or two.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from evaluation.fingerprint import ROOT
from evaluation.reaches import (
    BLOCK,
    RULES_AT_A_TIME,
    SINKS,
    Judge,
    Model,
    Prefill,
    Rule,
    apart,
    falling,
    halved,
    mean_shares,
    reaching,
    share,
)
from evaluation.text_arms import PASSAGES, number
from measure.smollm import model_folder
from measure.text_tasks import TRAINING, TextQuestion
from vllm_tgvkv.shared.budget import Budget
from vllm_tgvkv.shared.prompt import WINDOW

OUTPUT = ROOT / "docs" / "evaluation" / "text_training" / "waits.json"
TASKS = (PASSAGES[1], number("noise", 1024, keys=4), PASSAGES[0], number("prose", 512, keys=4))
"""The tasks of which `reach` lost some at 20 %."""
FIRST = 10
"""Of the questions for training; those before it chose the first reach."""


@dataclass(frozen=True)
class Choice:
    """Who votes, how far a score counts, and what a head keeps."""

    pooled: Rule
    wait: int = 0
    answer_alone: bool = False
    """Whether only the answer's tokens vote; otherwise the last `WINDOW` of the prompt as well."""
    heads: str = "mean"
    """Over the query heads of a KV head: `mean` or `max`."""
    first: int = WINDOW
    """Last tokens of the prompt that are kept first."""
    weigh_values: bool = False
    """Whether attention is multiplied by the norm of the value."""
    allocation: str = "uniform"
    """Or `adakv`, where the heads of a layer compete, or `pyramid`, from 3/2 to 1/2 of the mean."""


_FLAT, _HALVED = share(0.25, 48), reaching(halved(64))
CHOICES = {
    "48, a quarter": Choice(_FLAT),
    "keeps the last 8": Choice(_FLAT, first=8),
    "keeps no window": Choice(_FLAT, first=0),
    "maximum over query heads": Choice(_FLAT, heads="max"),
    "norm of values": Choice(_FLAT, weigh_values=True),
    "adakv": Choice(_FLAT, allocation="adakv"),
    "pyramid": Choice(_FLAT, allocation="pyramid"),
    "half after 32": Choice(reaching(halved(32))),
    "half after 64": Choice(_HALVED),
    "half after 64, adakv": Choice(_HALVED, allocation="adakv"),
    "0 after 128": Choice(reaching(falling(128))),
    "wait 4": Choice(_FLAT, 4),
    "wait 4, half after 64": Choice(_HALVED, 4),
    "wait 4, answer votes": Choice(_FLAT, 4, answer_alone=True),
    "wait 4, answer votes, half after 32": Choice(reaching(halved(32)), 4, answer_alone=True),
    "wait 4, answer votes, half after 64": Choice(_HALVED, 4, answer_alone=True),
}
BUDGETS = (0.2, 0.12)


def kept(found: Prefill, choice: Choice, budget: float) -> Tensor:
    """Return what stays of a prompt and the tokens that were waited for, bool ``[L, H, P + w]``."""
    num_layers, num_heads, _, _, length = found.attention.shape
    start = WINDOW if choice.answer_alone else 0
    rows = found.attention[..., start : WINDOW + choice.wait, :]
    scores = (rows.amax(2) if choice.heads == "max" else rows.mean(2)).amax(2)
    if choice.weigh_values:
        scores = scores * found.values[:, :, :length].norm(dim=-1)
        scores = scores / scores.amax(-1, keepdim=True)
    candidates = length // BLOCK * BLOCK
    blocks = Budget(fraction=budget).retained_blocks(length, BLOCK)
    pooled = apart(choice.pooled)(scores, blocks * BLOCK).double()
    first = torch.zeros(length, dtype=torch.float64)
    first[length - choice.first :] = 1
    first[:SINKS] = 2
    # No score reaches the next tier.
    values = (first + 0.5 * pooled / max(1.0, float(pooled.max())))[..., :candidates]
    number = torch.full((num_layers, num_heads), blocks)
    if choice.allocation == "pyramid":
        steps = torch.linspace(1.5, 0.5, num_layers) * blocks
        number = steps.round().long()[:, None].expand(num_layers, num_heads)
    if choice.allocation == "adakv":
        number = _competing(values, blocks)
    ranks = values.argsort(-1, descending=True).argsort(-1)
    mask = torch.ones(num_layers, num_heads, length + choice.wait, dtype=torch.bool)
    mask[..., :candidates] = ranks < number[..., None] * BLOCK
    return mask


def _competing(values: Tensor, blocks: int) -> Tensor:
    """Return the blocks of each head: a fifth of the mean, the others to a layer's best blocks."""
    num_heads = values.shape[1]
    floor = max(1, blocks // 5)
    ends = values.sort(-1, descending=True).values[..., BLOCK - 1 :: BLOCK][..., floor:]
    best = ends.flatten(1).topk(num_heads * (blocks - floor), -1).indices // ends.shape[-1]
    return floor + F.one_hot(best, num_heads).sum(1)


class WaitingJudge(Judge):
    """Shares of answers that are right before the first mistake, by choice."""

    def shares_of(
        self, question: TextQuestion, choices: Mapping[str, Choice], budget: float
    ) -> dict[str, float]:
        """Return the share for each choice, and for the full cache; only that if it is wrong."""
        example = question.example(self._frame, self._count)
        prompt = self._turn(example.message) + example.start
        space = " " if example.kind == "number" else ""
        ids = self.model.encode(prompt)
        answer = self.model.encode(f"{prompt}{space}{example.answer}")[len(ids) :]
        found = self.model.prefill(ids, answer)
        shares = {"full": self._share(found.predicted, answer)}
        if shares["full"] < 1:
            return shares
        for wait in dict.fromkeys(choice.wait for choice in choices.values()):
            mine = [name for name, choice in choices.items() if choice.wait == wait]
            end = len(ids) + wait
            prefill = replace(found, keys=found.keys[:, :, :end], values=found.values[:, :, :end])
            for start in range(0, len(mine), RULES_AT_A_TIME):
                names = mine[start : start + RULES_AT_A_TIME]
                masks = torch.stack([kept(found, choices[name], budget) for name in names])
                rest = self.model.predicted(prefill, masks, torch.tensor(answer[wait:]))
                for name, row in zip(names, rest.tolist(), strict=True):
                    shares[name] = self._share([*found.predicted[: wait + 1], *row], answer)
        return shares


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge the choices on training questions, write their shares, and print the means."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.waits", description=__doc__)
    parser.add_argument("--questions", type=int, default=4, help="of each task")
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS)
    parser.add_argument("--models", type=Path, default=ROOT / "build" / "models")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    judge = WaitingJudge(Model(model_folder(options.models)))
    found: dict[str, dict[str, dict[str, float]]] = {}
    if options.output.exists():
        found = json.loads(options.output.read_text(encoding="utf-8"))
    asked = range(TRAINING + FIRST, TRAINING + FIRST + options.questions)
    for index, task in ((index, task) for index in asked for task in TASKS):
        known = found.setdefault(task.name, {}).setdefault(str(index), {})
        for budget in options.budgets:
            missing = {n: CHOICES[n] for n in options.choices if f"{n}@{budget:g}" not in known}
            if not missing or known.get("full", 1.0) < 1:
                continue
            shares = judge.shares_of(TextQuestion(task, index), missing, budget)
            known["full"] = round(shares.pop("full"), 4)
            known.update((f"{name}@{budget:g}", round(s, 4)) for name, s in shares.items())
        print(f"{task.name} {index}: {known.get('full', 0):.2f} with the full cache", flush=True)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, means in mean_shares(found).items():
        print(f"{name:<40}", *(f"{task} {part:.2f}" for task, part in means.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
