# SPDX-License-Identifier: Apache-2.0
"""A training that can be interrupted: its time, its lines, its state on disk."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn


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
        self.state: dict[str, Any] = {}
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
        if self._file.exists():
            self.state = torch.load(self._file, weights_only=True)

    @property
    def _file(self) -> Path:
        return self.folder / "state.pt"

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self.began > self._seconds

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.0f} s  {text}", flush=True)

    def resume(self, networks: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Set weights and optimizer to those of the state, if there is one."""
        if "networks" in self.state:
            networks.load_state_dict(self.state["networks"])
            optimizer.load_state_dict(self.state["optimizer"])

    def save(self, networks: nn.Module, optimizer: torch.optim.Optimizer, **numbers: Any) -> None:
        """Write the state, complete or not at all."""
        self.state = {
            "networks": networks.state_dict(),
            "optimizer": optimizer.state_dict(),
            **numbers,
        }
        scratch = self._file.with_suffix(".new")
        torch.save(self.state, scratch)
        scratch.replace(self._file)


def cosine(step: int, steps: int) -> float:
    """Return the share of the learning rate at a step: half a cosine from 1 to 0."""
    return (1 + math.cos(math.pi * step / steps)) / 2
