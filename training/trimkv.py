# SPDX-License-Identifier: Apache-2.0
"""TrimKV's and DBTrimKV's training: the model with decaying attention learns from itself without.

Each sequence is read twice: by the frozen model as it is, the teacher, and with `(t - j) log
beta[j]` added to the logits of its attention, the student. Only the gates learn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from training.frozen import Attended, FrozenModel
from training.lines import Example
from training.losses import capacity, forward_kl, retained
from training.networks import GateNetworks
from training.prompts import Prompt, Prompter, Stream
from training.run import Run, Stopped, cosine

RATE, DECAY = 2e-4, 1e-6
"""Learning rate and weight decay of AdamW, as in the paper."""

REPORT, SAVE = 10, 50
"""Steps between lines of the log, and between states on disk."""


@dataclass(frozen=True)
class Losses:
    """Terms of the loss of one sequence."""

    divergence: Tensor
    next_token: Tensor
    capacity: Tensor
    teacher: Tensor
    """The teacher's loss for the next token."""
    retained: Tensor
    """Share of the sequence that is left at its end, mean of all heads."""

    @property
    def total(self) -> Tensor:
        """Return `(divergence + next_token) / 2 + capacity`."""
        return (self.divergence + self.next_token) / 2 + self.capacity


def losses(
    frozen: FrozenModel, networks: GateNetworks, prompt: Prompt, memory: float, shared: bool
) -> Losses:
    """Return the losses of a sequence.

    Args:
        memory: M, tokens for each head.
        shared: whether all heads share the memory, as in DBTrimKV.
    """
    documents = prompt.documents.to(frozen.device)
    targets = prompt.labelled.nonzero()[:, 0]
    rows, wanted = targets - 1, prompt.ids[targets].to(frozen.device)
    found: dict[int, Tensor] = {}

    def decay(seen: Attended) -> Tensor:
        found[seen.layer] = networks(seen.layer, seen.hidden).T
        return seen.output(documents, found[seen.layer])

    with torch.no_grad():
        teacher = frozen.logits(prompt, rows, lambda seen: seen.output(documents))
    student = frozen.logits(prompt, rows, decay)
    dtype = torch.promote_types(student.dtype, torch.float32)
    teacher, student = teacher.to(dtype), student.to(dtype)
    log_betas = [found[layer] for layer in range(len(frozen.layers))]
    with torch.no_grad():
        last = documents == documents[-1]
        ends = torch.stack([retained(x[:, last], documents[last])[:, -1] for x in log_betas])
    return Losses(
        forward_kl(teacher, student),
        functional.cross_entropy(student, wanted),
        capacity(log_betas, documents, memory, shared),
        functional.cross_entropy(teacher, wanted),
        ends.mean() / last.sum(),
    )


def fit(
    frozen: FrozenModel,
    networks: GateNetworks,
    prompter: Prompter,
    examples: Sequence[Example],
    run: Run,
    *,
    steps: int,
    accumulate: int,
    memory: float,
    rate: float,
    seed: int,
) -> None:
    """Train the gates.

    Args:
        accumulate: sequences of a step.

    Raises:
        Stopped: when the time is over.
    """
    shared = networks.shape.shares_memory
    optimizer = torch.optim.AdamW(networks.parameters(), lr=rate, weight_decay=DECAY)
    run.resume(networks, optimizer)
    stream = Stream(prompter, examples, seed, run.state.get("position", 0))
    history: dict[str, list[float]] = defaultdict(list)
    for step in range(run.state.get("step", 0), steps):
        if run.is_over:
            run.save(networks, optimizer, step=step, position=stream.position)
            raise Stopped(f"{step} of {steps} steps are done")
        for group in optimizer.param_groups:
            group["lr"] = rate * cosine(step, steps)
        optimizer.zero_grad()
        for _ in range(accumulate):
            found = losses(frozen, networks, next(stream), memory, shared)
            (found.total / accumulate).backward()
            for name, value in {"loss": found.total, **vars(found)}.items():
                history[name].append(float(value.detach()))
        optimizer.step()
        if (step + 1) % REPORT == 0 or step + 1 == steps:
            means = (f"{name} {sum(x) / len(x):.4f}" for name, x in history.items())
            run.say(f"step {step + 1} of {steps}  {'  '.join(means)}")
            history.clear()
        if (step + 1) % SAVE == 0 or step + 1 == steps:
            run.save(networks, optimizer, step=step + 1, position=stream.position)


@torch.no_grad()
def judge(
    frozen: FrozenModel,
    networks: GateNetworks,
    prompter: Prompter,
    examples: Sequence[Example],
    memory: float,
) -> dict[str, float]:
    """Return the mean losses of held-out examples, one a sequence."""
    sums: dict[str, float] = defaultdict(float)
    shared = networks.shape.shares_memory
    for example in examples:
        found = losses(frozen, networks, prompter.dialogue(example), memory, shared)
        for name, value in vars(found).items():
            sums[name] += float(value) / len(examples)
    names = {
        "divergence": "forward KL divergence from the full cache",
        "next_token": "next-token loss",
        "teacher": "next-token loss with the full cache",
        "capacity": "capacity loss",
        "retained": "share retained at the end",
    }
    return {title: sums[name] for name, title in names.items()}
