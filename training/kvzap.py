# SPDX-License-Identifier: Apache-2.0
"""KVzap's training: the model reads each text and its repetition, then a regression is fitted.

The forward passes come first and are kept on disk, `collected/NUMBER.safetensors`: hidden states
`[L, n, d]` and scores `[L, n, H]` of some random tokens of each text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from training.frozen import Attended, FrozenModel
from training.lines import Example
from training.losses import repeat_scores
from training.networks import GateNetworks
from training.prompts import Prompt, Prompter, TrainingError
from training.run import Run, Stopped, cosine

RATE = 5e-3
"""Learning rate of AdamW, as the authors'; so are batch, epochs, norm and penalty."""

BATCH, EPOCHS, NORM = 512, 15, 1.0
"""Tokens of a step, times round all, and greatest norm of the gradient."""

SAMPLED = 256
"""Most tokens of a text."""

PENALTY = 1.0
"""Ridge penalty on the weights of a linear gate."""


@dataclass(frozen=True)
class Pairs:
    """Hidden states `[L, n, d]` and scores `[L, n, H]`."""

    hidden: Tensor
    scores: Tensor


@torch.no_grad()
def collect_prompt(frozen: FrozenModel, prompt: Prompt) -> Pairs:
    """Return hidden states and KVzip+'s scores of a text's tokens, in all layers."""
    documents = prompt.documents.to(frozen.device)
    hidden, scores = [], []

    def see(seen: Attended) -> Tensor:
        projection = getattr(seen.module, "o_proj", None)
        if not isinstance(projection, torch.nn.Linear):
            raise TrainingError(f"the attention of layer {seen.layer} has no `o_proj`")
        dtype = torch.promote_types(seen.query.dtype, torch.float32)
        found = repeat_scores(
            seen.query.to(dtype),
            seen.key.to(dtype),
            seen.value.to(dtype),
            seen.hidden.to(dtype),
            projection.weight.to(dtype),
            seen.scaling,
            prompt.keys,
            prompt.rows,
        )
        hidden.append(seen.hidden[prompt.keys].to(dtype))
        scores.append(found.T)
        return seen.output(documents)

    frozen.logits(prompt, torch.zeros(1, dtype=torch.int64), see)
    return Pairs(torch.stack(hidden), torch.stack(scores))


def collect(
    frozen: FrozenModel,
    prompter: Prompter,
    examples: Sequence[Example],
    run: Run,
    seed: int,
    part: str,
) -> Pairs:
    """Return what was collected of all examples, at most `SAMPLED` tokens of each.

    Raises:
        Stopped: when the time is over; another run goes on with the next example.
    """
    folder = run.folder / "collected" / part
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for index, example in enumerate(examples):
        file = folder / f"{index:05}.safetensors"
        if not file.exists():
            if run.is_over:
                raise Stopped(f"{index} of {len(examples)} texts are read")
            pairs = collect_prompt(frozen, prompter.repeated(example))
            generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
            order = torch.randperm(pairs.hidden.shape[1], generator=generator)[:SAMPLED]
            scratch = file.with_suffix(".new")
            save_file({n: x.cpu()[:, order].contiguous() for n, x in vars(pairs).items()}, scratch)
            scratch.replace(file)
            if (index + 1) % 10 == 0 or index + 1 == len(examples):
                run.say(f"{part}: {index + 1} of {len(examples)} texts read")
        found.append(load_file(file))
    hidden, scores = (torch.cat([part[name] for part in found], 1) for name in ("hidden", "scores"))
    return Pairs(hidden, scores)


@torch.no_grad()
def fit_linear(networks: GateNetworks, pairs: Pairs) -> None:
    """Set linear gates to the ridge regression of the scores, in float64; biases are free."""
    for layer, (hidden, scores) in enumerate(zip(pairs.hidden, pairs.scores, strict=True)):
        (linear,) = networks.linears[layer]
        x, y = hidden.double(), scores.double()
        x_mean, y_mean = x.mean(0), y.mean(0)
        x, y = x - x_mean, y - y_mean
        gram = x.T @ x + PENALTY * torch.eye(x.shape[1], dtype=x.dtype)
        weight = torch.linalg.solve(gram, x.T @ y).T
        linear.weight.copy_(weight)
        linear.bias.copy_(y_mean - weight @ x_mean)


def fit_mlp(networks: GateNetworks, pairs: Pairs, run: Run, seed: int) -> None:
    """Train gates with a hidden layer by AdamW on the squared error, all layers at once.

    The last bias starts at the mean score (**a choice**).

    Raises:
        Stopped: when the time is over, after a whole epoch.
    """
    device = next(networks.parameters()).device
    optimizer = torch.optim.AdamW(networks.parameters(), lr=RATE)
    with torch.no_grad():
        for layer, scores in zip(networks.linears, pairs.scores, strict=True):
            layer[-1].bias.copy_(scores.mean(0))
    run.resume(networks, optimizer)
    for epoch in range(run.state.get("epoch", 0), EPOCHS):
        if run.is_over:
            raise Stopped(f"{epoch} of {EPOCHS} epochs are done")
        for group in optimizer.param_groups:
            group["lr"] = RATE * cosine(epoch, EPOCHS)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(pairs.hidden.shape[1], generator=generator)
        total = 0.0
        for part in order.split(BATCH):
            hidden = pairs.hidden[:, part].to(device)
            scores = pairs.scores[:, part].to(device)
            loss = squared_error(networks, hidden, scores)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(networks.parameters(), NORM)
            optimizer.step()
            total += float(loss.detach()) * len(part)
        run.say(f"epoch {epoch + 1} of {EPOCHS}  squared error {total / len(order):.4f}")
        run.save(networks, optimizer, epoch=epoch + 1)


def squared_error(networks: GateNetworks, hidden: Tensor, scores: Tensor) -> Tensor:
    """Return the mean over layers, tokens and heads."""
    errors = [
        functional.mse_loss(networks(layer, x), y.to(networks.linears[0][-1].weight.dtype))
        for layer, (x, y) in enumerate(zip(hidden, scores, strict=True))
    ]
    return torch.stack(errors).mean()


@torch.no_grad()
def judge(networks: GateNetworks, pairs: Pairs, training: Pairs) -> dict[str, float]:
    """Return how well held-out scores are predicted.

    `squared_error`, that of predicting each head's mean score in training, and the mean, over
    layers and heads, of the correlation of predicted and true scores.
    """
    device = next(networks.parameters()).device
    means = training.scores.mean(1, keepdim=True)
    correlations = []
    for layer, (hidden, scores) in enumerate(zip(pairs.hidden, pairs.scores, strict=True)):
        found = networks(layer, hidden.to(device)).cpu().double()
        both = torch.stack([found.T, scores.T.double()])
        both = functional.normalize(both - both.mean(-1, keepdim=True), dim=-1)
        correlations.append((both[0] * both[1]).sum(-1))
    every = torch.stack(correlations)
    return {
        "squared error": float(
            squared_error(networks, pairs.hidden.to(device), pairs.scores.to(device))
        ),
        "squared error of the mean score": float((pairs.scores - means).square().mean()),
        "correlation, mean of layers and heads": float(every.mean()),
        "correlation, worst layer": float(every.mean(1).min()),
    }
