# SPDX-License-Identifier: Apache-2.0
"""Train the demonstration model: ``python -m demo.train``.

``READING`` teaches one task, ``value``: the tower first learns to read small windows of pages, then
the language model to look up a bare key in them, then to understand whole questions, and finally
everything on whole pages. Looking up is learnt suddenly: in the shipped model's run after 1300
steps with questions, where ``outlook`` falls first, then ``answer``.

``ANSWERING`` adds the other tasks: the tower learns where on the page an entry stands, then the
language model the tasks in brief, then everything in whole sentences and on whole pages;
``compare`` needs the most examples.
``python -m demo.train --continue-from FOLDER`` has these stages only.

The model in ``demo/model`` is not the result of one run. Its training was interrupted and adjusted
on the way. It had 3000, 1550, 450 and 600 steps where ``READING`` has 3000, 2000, 500 and 800, with
windows that did not begin on a row of slots, and its first 800 steps with questions used whole
phrases. Then, with ``--continue-from``, it had 450 steps of the first stage of ``ANSWERING`` and
2100 of the second, in pieces between which ``slot``, ``choice``, ``lead`` and ``partner`` were
added, and the last four stages nearly as they are written here. ``READING`` has not been run again
since. The stages of ``ANSWERING`` take about 45 minutes on two CPU cores by the time of single
steps; ``python -m demo.evaluate`` tells how well the model does.

Set ``MALLOC_MMAP_THRESHOLD_`` and ``MALLOC_TRIM_THRESHOLD_`` to a few GB on Linux: the C library
otherwise returns the memory of every step to the system, which is slow.
"""

import argparse
import time
from collections import defaultdict
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from demo.batches import Stage, make_batch
from demo.network import LOSSES, Trainee
from demo.pages import SPLITS
from demo.processor import save_processor

TINY, SMALL, WHOLE = (12, 9), (12, 12), (24, 24)
TWO_ROWS, FOUR_ROWS = (24, 6), (24, 12)
VALUES = 3 * ("value",)
ONE_PAGE = (*2 * ("value",), *3 * ("row",), *6 * ("compare",), *2 * ("chat",))
MOSTLY_COMPARE = ("value", *2 * ("row",), *8 * ("compare",), "chat")
TWO_PAGES = (*2 * ("value",), *8 * ("two_images",))

READING = (
    Stage(2500, 32, SMALL, entries=(2, 4), rates=(3e-3, 1e-3)),
    Stage(500, 16, WHOLE, entries=(3, 10), rates=(1e-3, 1e-3)),
    Stage(2000, 32, TINY, (2, 3), (1.5e-3, 1e-3), VALUES, VALUES, brief=True),
    Stage(500, 32, SMALL, (2, 4), (1e-3, 1e-3), VALUES, VALUES),
    Stage(800, 16, WHOLE, (3, 8), (1e-3, 0), VALUES, VALUES),
)
"""Stages that teach to read and to look up."""

ANSWERING = (
    Stage(200, 24, TWO_ROWS, (2, 4), (1e-3, 1e-3)),
    Stage(
        *(1500, 8, FOUR_ROWS, (3, 6), (8e-4, 8e-4), ONE_PAGE, TWO_PAGES),
        brief=True,
        seen=150,
        reading=False,
    ),
    Stage(*(450, 8, FOUR_ROWS, (3, 6), (8e-4, 8e-4), ONE_PAGE, TWO_PAGES), seen=150),
    Stage(*(350, 8, WHOLE, (3, 8), (8e-4, 3e-4), ONE_PAGE, TWO_PAGES), seen=200),
    Stage(*(300, 8, WHOLE, (3, 8), (4e-4, 0), ONE_PAGE, TWO_PAGES)),
    Stage(*(130, 8, WHOLE, (3, 8), (3e-4, 0), MOSTLY_COMPARE, TWO_PAGES), pairs=0.15),
)
"""Stages that teach all tasks to a model that looks up values."""

WARM_UP = 50
"""Steps at the start of a stage in which the learning rate grows."""

REPORT, SAVE = 50, 250
"""Steps between lines of the log, and between saved models."""


def train(folder: Path, checkpoint: Path | None, start: Path | None, seed: int) -> None:
    """Train through all stages; write the model to ``folder`` regularly and at the end.

    With ``checkpoint``, the state of the training is kept there too, and continued if it exists.
    With ``start``, training begins with the weights in that folder and has the stages of
    ``ANSWERING`` only.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # On CPUs without bfloat16 instructions, bfloat16 is slower than float32.
    fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    torch.manual_seed(seed)
    trainee = Trainee(start).to(device)
    optimizer = torch.optim.AdamW(
        trainee.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    done = 0
    if checkpoint and checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        trainee.load_state_dict(state["trainee"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    stages = ANSWERING if start else READING + ANSWERING
    plan = [pair for stage in stages for pair in _rates(stage)]
    began = time.monotonic()
    history: dict[str, list[float]] = defaultdict(list)
    for step, (stage, rate) in enumerate(plan[done:], done + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = make_batch(np.random.default_rng([SPLITS["train"], seed, step]), stage).to(device)
        trainee.llava.model.vision_tower.requires_grad_(stage.reading)
        with torch.autocast(device.type, torch.bfloat16, enabled=fast):
            losses, right = trainee(batch)
        optimizer.zero_grad()
        sum(LOSSES[name] * loss for name, loss in losses.items()).backward()
        torch.nn.utils.clip_grad_norm_(trainee.parameters(), 1.0)
        optimizer.step()
        for name, value in (*losses.items(), *zip(batch.tasks, right, strict=True)):
            history[name].append(value.item())
        if step % REPORT == 0:
            text = "  ".join(f"{name} {np.mean(values):.3f}" for name, values in history.items())
            print(f"{time.monotonic() - began:5.0f} s  step {step}/{len(plan)}  {text}", flush=True)
            history.clear()
        if step % SAVE == 0 or step == len(plan):
            save(trainee, folder)
            if checkpoint:
                state = {"trainee": trainee.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"step": step}, checkpoint)


def save(trainee: Trainee, folder: Path) -> None:
    """Write weights in bfloat16, configuration and processor, named as vLLM expects them."""
    deepcopy(trainee.llava).bfloat16().save_pretrained(folder)
    weights = folder / "model.safetensors"
    # transformers 5 omits a level of the tower's names that vLLM needs; both load this.
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model."): value
        for name, value in load_file(weights).items()
    }
    save_file(renamed, weights, metadata={"format": "pt"})
    save_processor(folder)


def _rates(stage: Stage) -> list[tuple[Stage, float]]:
    """Return the stage and the learning rate of each of its steps, the first ones small."""
    rates = np.linspace(*stage.rates, stage.steps)
    warm = np.minimum(np.arange(1, stage.steps + 1) / WARM_UP, 1)
    return [(stage, float(rate)) for rate in rates * warm]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("model"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="state to keep and to continue from")
    parser.add_argument("--continue-from", type=Path, help="model that can look up values already")
    options = parser.parse_args()
    train(options.output, options.checkpoint, options.continue_from, options.seed)


if __name__ == "__main__":
    main()
