# SPDX-License-Identifier: Apache-2.0
"""Train the tower: draw word pieces, and learn to name them.

    python -m reader.train --minutes 45

Stops at a step, a time or an interrupt, and continues from its checkpoint. Needs the language
model's tokenizer, but not its weights.
"""

from __future__ import annotations

import argparse
import math
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from measure.smollm import model_folder
from reader.assemble import MODELS
from reader.layout import FACES, PATCH, SCALES, SHIFT, draw_piece, shifted
from reader.tower import FEATURES, Recogniser
from reader.vocabulary import Vocabulary, piece_counts

CHECKPOINT = MODELS.parent / "reader" / "checkpoint.pt"

BATCH = 512
STEPS = 3500
RATE = 1.5e-3
WARM_UP = 100
NORMALISER = 0.2
"""Weight of the loss that keeps the sum of the pieces' probabilities at 1."""

FREQUENT = 0.4
"""Share of a batch that is drawn as often as the tasks' texts use it; the rest is drawn evenly."""

SIZES = 2
"""Sizes in which each piece is drawn in each face, new ones in every round."""

ROUND = 1000
"""Steps with the same drawings; only their shifts differ."""

REPORT, SAVE = 100, 500
"""Steps between lines of the log, and between checkpoints."""


def draw(texts: Sequence[str], rng: np.random.Generator, sizes: int) -> np.ndarray:
    """Draw each text in every face, in `sizes` random sizes, with a frame for shifts.

    Returns:
        `[pieces, drawings, side, side]`, uint8.
    """
    side = PATCH + 2 * SHIFT
    ink = np.zeros((len(texts), len(FACES) * sizes, side, side), np.uint8)
    inner = slice(SHIFT, SHIFT + PATCH)
    for number, face in enumerate(np.repeat(FACES, sizes)):
        # A few sizes for all pieces, as on pages; a font is loaded for each.
        scales = rng.uniform(*SCALES, size=8)
        chosen = scales[rng.integers(len(scales), size=len(texts))]
        for index, (text, scale) in enumerate(zip(texts, chosen, strict=True)):
            ink[index, number, inner, inner] = draw_piece(text, str(face), scale)
    return ink


def batch_of(ink: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> Tensor:
    """Return drawings of the labels, `[n, PATCH * PATCH]` in 0..1, at random places."""
    drawings = rng.integers(ink.shape[1], size=len(labels))
    corners = rng.integers(2 * SHIFT + 1, size=(len(labels), 2))
    patches = [
        ink[label, drawing, y : y + PATCH, x : x + PATCH]
        for label, drawing, (y, x) in zip(labels, drawings, corners, strict=True)
    ]
    return torch.from_numpy(np.stack(patches).reshape(len(labels), -1)).float() / 255


def uses(vocabulary: Vocabulary) -> np.ndarray:
    """Return how often texts use each piece, `[pieces]`."""
    counts = piece_counts(vocabulary.tokenizer)
    return np.array([counts[token] for token in vocabulary.ids], float)


def start(recogniser: Recogniser, drawings: np.ndarray, rng: np.random.Generator) -> None:
    """Set the first map to the main directions of drawings, and the last to the pieces' means."""
    labels = rng.integers(len(drawings), size=12_000)
    ink = batch_of(drawings, labels, rng)
    ink -= ink.mean(1, keepdim=True)
    values, vectors = torch.linalg.eigh(ink.T @ ink / len(ink))
    values, vectors = values[-FEATURES:], vectors[:, -FEATURES:]
    with torch.no_grad():
        # Halfway to equal variances: small directions carry details, and noise.
        recogniser.patch.weight.copy_((vectors / values.sqrt().sqrt()).T * 0.5)
        recogniser.down.weight.mul_(0.1)
        means = torch.zeros(len(drawings), FEATURES)
        count = 4
        for _ in range(count):
            for part in torch.arange(len(means)).split(2048):
                ink = batch_of(drawings, part.numpy(), rng)
                means[part] += recogniser.features(ink) / count
        means -= means.mean(0)
        recogniser.pieces.weight.copy_(means / means.norm(dim=1, keepdim=True))
        recogniser.pieces.bias.zero_()


def rate_at(step: int, steps: int) -> float:
    """Return the learning rate: a warm-up, then half a cosine down to a hundredth."""
    warm = min((step + 1) / WARM_UP, 1)
    return RATE * warm * (0.01 + 0.99 * (1 + math.cos(math.pi * step / steps)) / 2)


@torch.no_grad()
def held_out(
    recogniser: Recogniser, vocabulary: Vocabulary, rng: np.random.Generator, number: int
) -> tuple[float, float]:
    """Return the shares of right pieces, evenly drawn and as texts use them, in new sizes."""
    used = uses(vocabulary)
    shares = []
    for weights in (np.ones(len(used)), used):
        labels = rng.choice(len(used), size=number, p=weights / weights.sum())
        patches = []
        for label in labels:
            face = FACES[int(rng.integers(len(FACES)))]
            patch = draw_piece(vocabulary.texts[label], face, float(rng.uniform(*SCALES)))
            patches.append(shifted(patch, *rng.integers(-SHIFT, SHIFT + 1, size=2)))
        ink = torch.from_numpy(np.stack(patches).reshape(number, -1)).float() / 255
        right = recogniser(ink).argmax(-1) == torch.from_numpy(labels)
        shares.append(float(right.float().mean()))
    return shares[0], shares[1]


def train(
    vocabulary: Vocabulary,
    checkpoint: Path,
    *,
    steps: int,
    seconds: float,
    seed: int,
    sizes: int = SIZES,
    batch: int = BATCH,
) -> Recogniser:
    """Train up to `steps` steps in all or for `seconds`, and keep the state in `checkpoint`."""
    torch.manual_seed(seed)
    recogniser = Recogniser(len(vocabulary))
    optimizer = torch.optim.AdamW(
        recogniser.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.01, fused=True
    )
    done, stopped, began = 0, False, time.monotonic()
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        recogniser.load_state_dict(state["recogniser"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  step {step} of {steps}  {text}", flush=True)

    def stop(*_: Any) -> None:
        nonlocal stopped
        stopped = True

    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, stop)
    used = np.sqrt(uses(vocabulary))
    shares = FREQUENT * used / used.sum() + (1 - FREQUENT) / len(used)
    fast = torch.cpu._is_avx512_bf16_supported()
    history: list[list[float]] = []
    drawings = None
    for step in range(done, steps):
        if drawings is None or step % ROUND == 0:
            rng = np.random.default_rng([seed, 0, step])
            drawings = draw(vocabulary.texts, rng, sizes)
            say(f"drawn {drawings.shape}")
            if step == 0:
                start(recogniser, drawings, rng)
        rng = np.random.default_rng([seed, 1, step])
        labels = rng.choice(len(shares), size=batch, p=shares)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps)
        with torch.autocast("cpu", torch.bfloat16, enabled=fast):
            logits = recogniser(batch_of(drawings, labels, rng))
        targets = torch.from_numpy(labels)
        logits = logits.float()
        normaliser = logits.logsumexp(-1)
        entropy = (normaliser - logits.gather(1, targets[:, None])[:, 0]).mean()
        square = normaliser.square().mean()
        optimizer.zero_grad()
        (entropy + NORMALISER * square).backward()
        optimizer.step()
        right = (logits.detach().argmax(-1) == targets).float().mean()
        history.append([value.item() for value in (entropy, square, right)])
        stopped |= time.monotonic() - began > seconds
        if (step + 1) % REPORT == 0:
            say("loss {:.4f}  norm {:.4f}  right {:.4f}".format(*np.mean(history, 0)))
            history.clear()
        if stopped or (step + 1) % SAVE == 0 or step + 1 == steps:
            parts = {"recogniser": recogniser.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            scratch = checkpoint.with_suffix(".new")
            torch.save({**parts, "ids": vocabulary.ids, "step": step + 1}, scratch)
            scratch.replace(checkpoint)  # complete or not at all
            even, usual = held_out(recogniser, vocabulary, np.random.default_rng([seed, 2]), 1000)
            say(f"held out: {even:.1%} of all, {usual:.2%} of usual")
        if stopped:
            break
    return recogniser


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="in all sittings together")
    parser.add_argument("--minutes", type=float, default=1e9, help="of this sitting")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of model folders")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(model_folder(options.models))
    if options.checkpoint.exists():
        known = torch.load(options.checkpoint, weights_only=True, mmap=True)["ids"]
        vocabulary = Vocabulary(tokenizer, known)
    else:
        vocabulary = Vocabulary.of_tasks(tokenizer)
    print(f"{len(vocabulary)} word pieces", flush=True)
    train(
        vocabulary,
        options.checkpoint,
        steps=options.steps,
        seconds=60 * options.minutes,
        seed=options.seed,
    )


if __name__ == "__main__":
    main()
