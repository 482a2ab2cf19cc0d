# SPDX-License-Identifier: Apache-2.0
"""TrimKV's and DBTrimKV's training: the model with decaying attention learns from itself without.

Each sequence is read twice: by the frozen model as it is, the teacher, and with `(t - j) log
beta[j]` added to the logits of its attention, the student. Only the gates learn.
Sources: arXiv 2605.09649, github.com/ngocbh/trimkv.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from training.data import Example, Prompt, Prompter, sequences
from training.frozen import Attended, FrozenModel, ages, visible
from training.networks import GateNetworks
from training.run import Losses, Run

RATE, DECAY = 2e-4, 1e-6
"""Learning rate and weight decay of AdamW, as in the paper."""

JUDGED = {
    "divergence": "forward KL divergence from the full cache",
    "next_token": "next-token loss",
    "teacher": "next-token loss with the full cache",
    "capacity": "capacity loss",
    "retained": "share retained at the end",
}
"""Parts of the losses that the card has, and their titles there."""


def retained(log_betas: Tensor, documents: Tensor) -> Tensor:
    """Return what is left of all tokens at each token t, the sum of `beta[i] ** (t - i)`.

    Both `[H, S]`; the sum is over tokens of the same document.
    """

    def add(log_betas: Tensor) -> Tensor:
        return ((log_betas[:, None] * ages(documents)).exp() * visible(documents)).sum(-1)

    # The [H, S, S] powers are computed again for the gradient instead of kept for all layers.
    return checkpoint(add, log_betas, use_reentrant=False)


def capacity(
    log_betas: Sequence[Tensor],
    documents: Tensor,
    memory: float,
    shared: bool,
    printed: bool = False,
) -> Tensor:
    """Return how far the retained tokens exceed the memory, relative to what they could exceed.

    For n heads with a memory of M tokens each, `relu(S[t] - n M) / max(t n - n M, 1)`, averaged
    over the tokens where it is not 0. t counts the tokens of a document. DBTrimKV's memory is
    shared by all heads of all layers; in TrimKV each has its own, n = 1.

    Args:
        log_betas: of each layer, `[H, S]`.
        printed: whether to add up `relu(S[t] - n M)` instead, as the papers do.
    """
    sums = torch.cat([retained(layer, documents) for layer in log_betas])
    counts = visible(documents).sum(-1)
    num_heads = len(sums) if shared else 1
    if shared:
        sums = sums.sum(0, keepdim=True)
    excess = functional.relu(sums - num_heads * memory)
    if printed:
        return excess.sum()
    excess = excess / (num_heads * (counts - memory)).clamp(min=1)
    return excess.sum() / (excess > 0).sum().clamp(min=1)


def forward_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Return `sum of p (log p - log q)`, averaged over rows of logits `[n, V]`."""
    student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    return functional.kl_div(student, teacher, reduction="batchmean", log_target=True)


def losses(
    frozen: FrozenModel,
    networks: GateNetworks,
    prompt: Prompt,
    memory: float,
    printed: bool = False,
) -> Losses:
    """Return the losses of a sequence: `(divergence + next_token) / 2 + capacity` is minimised.

    `teacher` is the teacher's loss for the next token, `retained` the share of the sequence that
    is left at its end, mean of all heads.

    Args:
        memory: M, tokens for each head.
        printed: whether to minimise `divergence + next_token + capacity`, each of them summed over
            the tokens, as the papers do.
    """
    documents = prompt.documents.to(frozen.device)
    targets = prompt.labelled.nonzero()[:, 0]
    rows, wanted = targets - 1, prompt.ids[targets].to(frozen.device)
    log_betas: list[Tensor] = []

    def decay(seen: Attended) -> Tensor:
        log_betas.append(networks(seen.layer, seen.hidden).T)
        return seen.output(documents, log_betas[-1])

    with torch.no_grad():
        teacher = frozen.logits(prompt, rows, lambda seen: seen.output(documents))
    student = frozen.logits(prompt, rows, decay)
    dtype = torch.promote_types(student.dtype, torch.float32)
    teacher, student = teacher.to(dtype), student.to(dtype)
    with torch.no_grad():
        last = documents == documents[-1]
        ends = torch.stack([retained(x[:, last], documents[last])[:, -1] for x in log_betas])
    divergence = forward_kl(teacher, student)
    next_token = functional.cross_entropy(student, wanted)
    excess = capacity(log_betas, documents, memory, networks.shares_memory, printed)
    quality = divergence + next_token
    return {
        "loss": quality * len(targets) + excess if printed else quality / 2 + excess,
        "divergence": divergence,
        "next_token": next_token,
        "capacity": excess,
        "teacher": functional.cross_entropy(teacher, wanted),
        "retained": ends.mean() / last.sum(),
    }


def fit(
    frozen: FrozenModel,
    networks: GateNetworks,
    prompter: Prompter,
    examples: Sequence[Sequence[Example]],
    run: Run,
    options: argparse.Namespace,
) -> dict[str, float]:
    """Train the gates, and return the mean losses of the held-out examples, one a sequence.

    Raises:
        Stopped: when the time is over.
    """
    training, held_out = examples

    def losses_of(prompt: Prompt) -> Losses:
        return losses(frozen, networks, prompt, options.memory, options.loss == "paper")

    run.descend(
        networks,
        sequences(prompter, training, options.seed),
        losses_of,
        steps=options.steps,
        rate=options.rate,
        accumulate=options.accumulate,
        decay=DECAY,
        report=10,
        save=50,
    )
    with torch.no_grad():
        found = [losses_of(prompter.dialogue(example)) for example in held_out]
    return {
        title: sum(float(each[name]) / len(found) for each in found)
        for name, title in JUDGED.items()
    }
