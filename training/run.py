# SPDX-License-Identifier: Apache-2.0
"""A training that can be interrupted: its time, its state on disk, and the loop over its steps."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
Losses = dict[str, Tensor]
"""Numbers by name; `loss` is the one that is minimised."""


class Stopped(Exception):
    """The time is over; what was done is saved."""


class Run:
    """One sitting. Its folder holds what the training is, `training.json`, and `state.pt`."""

    def __init__(self, folder: Path, minutes: float | None, described: Mapping[str, Any]) -> None:
        """Begin, or go on with the state in a folder.

        Args:
            minutes: time until `Stopped`.
            described: what makes a training another one, JSON values.

        Raises:
            ValueError: if the folder holds the state of another training.
        """
        self.folder = folder
        self.began = time.monotonic()
        self._seconds = math.inf if minutes is None else 60 * minutes
        begun = folder / "training.json"
        if begun.exists():
            there = json.loads(begun.read_text(encoding="utf-8"))
            if different := [key for key, value in described.items() if there.get(key) != value]:
                raise ValueError(
                    f"{folder} holds another training (other {', '.join(different)}): continue it "
                    "as it was begun, or give another --output"
                )
        else:
            folder.mkdir(parents=True, exist_ok=True)
            begun.write_text(f"{json.dumps(dict(described), indent=2)}\n", encoding="utf-8")

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self.began > self._seconds

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.0f} s  {text}", flush=True)

    def descend(
        self,
        networks: nn.Module,
        batches: Iterable[T],
        losses: Callable[[T], Losses],
        *,
        steps: int,
        rate: float,
        turn: int = 1,
        accumulate: int = 1,
        decay: float = 0.01,
        norm: float = math.inf,
        report: int,
        save: int,
    ) -> None:
        """Train by AdamW, with half a cosine of the learning rate; go on where a state was saved.

        Args:
            batches: endless, and the same in every sitting.
            rate: first learning rate, which changes every `turn` steps.
            accumulate: batches of a step.
            decay, norm: weight decay, and the greatest norm of the gradient.
            report, save: steps between lines of the log, and between states on disk.

        Raises:
            Stopped: when the time is over.
        """
        optimizer = torch.optim.AdamW(networks.parameters(), lr=rate, weight_decay=decay)
        file, done = self.folder / "state.pt", 0
        if file.exists():
            state = torch.load(file, weights_only=True)
            networks.load_state_dict(state["networks"])
            optimizer.load_state_dict(state["optimizer"])
            done = state["step"]

        def keep(step: int) -> None:
            parts = {"networks": networks.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**parts, "step": step}, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)  # complete or not at all

        following = islice(batches, done * accumulate, None)
        history: dict[str, list[float]] = defaultdict(list)
        for step in range(done, steps):
            if self.is_over:
                keep(step)
                raise Stopped(f"{step} of {steps} steps are done")
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 + math.cos(math.pi * (step // turn * turn / steps))) / 2
            optimizer.zero_grad()
            for batch in islice(following, accumulate):
                found = losses(batch)
                (found["loss"] / accumulate).backward()
                for name, value in found.items():
                    history[name].append(float(value.detach()))
            torch.nn.utils.clip_grad_norm_(networks.parameters(), norm)
            optimizer.step()
            if (step + 1) % report == 0 or step + 1 == steps:
                means = (f"{name} {sum(x) / len(x):.4f}" for name, x in history.items())
                self.say(f"step {step + 1} of {steps}  {'  '.join(means)}")
                history.clear()
            if (step + 1) % save == 0 or step + 1 == steps:
                keep(step + 1)
