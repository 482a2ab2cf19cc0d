# SPDX-License-Identifier: Apache-2.0
"""Compare inputs of linear gates: `python -m training.inputs MODEL FOLDER`.

FOLDER is that of a KVzap training, with `collected/` in it. Gates are fitted once more to the same
scores: from the hidden state, and for each KV head from its own key and value, which is what it has
once the layer has run. Keys are those before rotary positions. Prints how well the scores of
held-out texts are predicted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from training.frozen import FrozenModel
from training.kvzap import PENALTY, Pairs
from training.prompts import TrainingError


def collected(folder: Path) -> Pairs:
    """Return what a training collected of its texts.

    Raises:
        TrainingError: if there is nothing.
    """
    parts = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    if not parts:
        raise TrainingError(f"{folder} has no collected texts: train KVzap's gates there first")
    hidden, scores = (torch.cat([part[name] for part in parts], 1) for name in parts[0])
    return Pairs(hidden, scores)


def correlations(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Tensor:
    """Return the correlations of held-out scores with a ridge regression's, float64 ``[H]``.

    Both arguments are inputs ``[n, m]`` and scores ``[n, H]``; the regression is that of
    `kvzap.fit_linear`.
    """
    (x, y), (x_test, y_test) = ((a.double(), b.double()) for a, b in (train, test))
    mean = x.mean(0)
    x, y = x - mean, y - y.mean(0)
    gram = x.T @ x + PENALTY * torch.eye(x.shape[1], dtype=x.dtype)
    found = (x_test - mean) @ torch.linalg.solve(gram, x.T @ y)
    both = torch.stack([found - found.mean(0), y_test - y_test.mean(0)])
    one, other = functional.normalize(both, dim=1)
    return (one * other).sum(0)


@torch.no_grad()
def compare(frozen: FrozenModel, train: Pairs, test: Pairs) -> dict[str, Tensor]:
    """Return the correlations of each layer and KV head by input, float64 ``[L, H]``."""
    hidden, own = [], []
    for layer, module in enumerate(frozen.layers):
        inputs = train.hidden[layer], test.hidden[layer]
        scores = train.scores[layer], test.scores[layer]
        (first, second), heads = inputs, scores[0].shape[-1]
        hidden.append(correlations((first, scores[0]), (second, scores[1])))
        projections = module.self_attn.k_proj, module.self_attn.v_proj
        one, other = (
            torch.cat([project(x).unflatten(1, (heads, -1)) for project in projections], 2)
            for x in inputs
        )
        of_heads = [
            correlations((one[:, n], scores[0][:, [n]]), (other[:, n], scores[1][:, [n]]))
            for n in range(heads)
        ]
        own.append(torch.cat(of_heads))
    return {"the hidden state": torch.stack(hidden), "its key and value": torch.stack(own)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.inputs", description=__doc__)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("folder", type=Path, help="folder of a KVzap training for it")
    options = parser.parse_args(arguments)
    try:
        train, test = (
            collected(options.folder / "collected" / name) for name in ("training", "held_out")
        )
    except TrainingError as error:
        sys.exit(f"inputs: {error}")
    frozen = FrozenModel.load(options.model, "cpu", torch.float32)
    found = compare(frozen, train, test)
    for name, values in found.items():
        print(
            f"from {name}: correlation {values.mean():.3f}, worst layer {values.mean(1).min():.3f}"
        )
    first, second = found.values()
    print(f"the hidden state is better in {int((first > second).sum())} of {first.numel()} heads")


if __name__ == "__main__":
    main()
