# SPDX-License-Identifier: Apache-2.0
"""KVzap's training: the model reads each text and its repetition, then a regression is fitted.

The forward passes come first and are kept on disk, `collected/NUMBER.safetensors`: hidden states
`[L, n, d]` and scores `[L, n, H]` of some random tokens of each text.
Sources: arXiv 2601.07891, github.com/NVIDIA/kvpress.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from training.data import Example, Prompt, Prompter, TrainingError
from training.frozen import Attended, FrozenModel
from training.networks import GateNetworks
from training.run import Losses, Run, Stopped

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


def fit(
    frozen: FrozenModel,
    networks: GateNetworks,
    prompter: Prompter,
    examples: Sequence[Sequence[Example]],
    run: Run,
    options: argparse.Namespace,
) -> dict[str, float]:
    """Collect scores, fit the gates to them, and return how well held-out ones are predicted.

    Raises:
        Stopped: when the time is over.
    """
    training, held_out = (
        collect(frozen, prompter, part, run, options.seed, name)
        for part, name in zip(examples, ("training", "held_out"), strict=True)
    )
    if options.form == "linear":
        fit_linear(networks, training)
    else:
        fit_mlp(networks, training, run, options.seed)
    return judge(networks, held_out, training)


def repeat_scores(seen: Attended, output_weight: Tensor, keys: slice, rows: slice) -> Tensor:
    """Return KVzip+'s scores of some keys, which KVzap predicts: `[n, H]`.

    `log max over t of a[t, j] * norm(W_o v[j]) / norm(x[t])`, t being the rows in which the text
    is repeated, in all query heads of a group; a is their attention over all keys that they see,
    x the hidden states behind the input norm.

    Args:
        output_weight: the output projection W_o, `[d, Q * D]`.
    """
    dtype = torch.promote_types(seen.query.dtype, torch.float32)
    query, key, value = (part.to(dtype) for part in (seen.query, seen.key, seen.value))
    group = len(query) // len(key)
    columns = torch.arange(key.shape[1], device=key.device)
    hidden_norms = seen.hidden[rows].to(dtype).norm(dim=-1).log()
    found = []
    for head, (queries, weight) in enumerate(
        zip(query, output_weight.to(dtype).unflatten(1, (len(query), -1)).unbind(1), strict=True)
    ):
        logits = queries[rows] @ key[head // group].T * seen.scaling
        logits = logits.masked_fill(columns > columns[rows, None], -math.inf)
        norms = (value[head // group, keys] @ weight.T).norm(dim=-1).log()
        logs = logits[:, keys] - logits.logsumexp(-1, keepdim=True) - hidden_norms[:, None]
        found.append(logs.amax(0) + norms)
    return torch.stack(found).unflatten(0, (-1, group)).amax(1).T


@torch.no_grad()
def collect_prompt(frozen: FrozenModel, prompt: Prompt) -> Pairs:
    """Return hidden states and KVzip+'s scores of a text's tokens, in all layers."""
    documents = prompt.documents.to(frozen.device)
    hidden, scores = [], []

    def see(seen: Attended) -> Tensor:
        projection = getattr(frozen.layers[seen.layer].self_attn, "o_proj", None)
        if not isinstance(projection, torch.nn.Linear):
            raise TrainingError(f"the attention of layer {seen.layer} has no `o_proj`")
        scores.append(repeat_scores(seen, projection.weight, prompt.keys, prompt.rows))
        hidden.append(seen.hidden[prompt.keys].to(scores[-1].dtype))
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
    return Pairs(*(torch.cat([part[name] for part in found], 1) for name in ("hidden", "scores")))


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
    """Train gates with a hidden layer on the squared error, all layers at once.

    The last bias starts at the mean score (**a choice**).
    """
    number = pairs.hidden.shape[1]
    with torch.no_grad():
        for layer, scores in zip(networks.linears, pairs.scores, strict=True):
            layer[-1].bias.copy_(scores.mean(0))

    def batches() -> Iterator[Tensor]:
        for epoch in itertools.count():
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            yield from torch.randperm(number, generator=generator).split(BATCH)

    def losses(part: Tensor) -> Losses:
        return {
            "loss": squared_error(networks, Pairs(pairs.hidden[:, part], pairs.scores[:, part]))
        }

    epoch = -(-number // BATCH)
    run.descend(
        networks,
        batches(),
        losses,
        steps=EPOCHS * epoch,
        rate=RATE,
        turn=epoch,
        norm=NORM,
        report=epoch,
        save=epoch,
    )


def predicted(networks: GateNetworks, pairs: Pairs) -> Tensor:
    """Return the predicted scores `[L, n, H]`."""
    device = next(networks.parameters()).device
    return torch.stack([networks(n, x.to(device)) for n, x in enumerate(pairs.hidden)])


def squared_error(networks: GateNetworks, pairs: Pairs) -> Tensor:
    """Return the mean over layers, tokens and heads."""
    found = predicted(networks, pairs)
    return functional.mse_loss(found, pairs.scores.to(found))


@torch.no_grad()
def judge(networks: GateNetworks, pairs: Pairs, training: Pairs) -> dict[str, float]:
    """Return how well held-out scores are predicted.

    The squared error beside that of predicting each head's mean score in training, and the mean,
    over layers and heads, of the correlation of predicted and true scores.
    """
    means = training.scores.mean(1, keepdim=True)
    both = torch.stack([predicted(networks, pairs).cpu().double(), pairs.scores.double()])
    both = functional.normalize(both - both.mean(2, keepdim=True), dim=2)
    correlations = (both[0] * both[1]).sum(1)
    return {
        "squared error": float(squared_error(networks, pairs)),
        "squared error of the mean score": float((pairs.scores - means).square().mean()),
        "correlation, mean of layers and heads": float(correlations.mean()),
        "correlation, worst layer": float(correlations.mean(1).min()),
    }
