# SPDX-License-Identifier: Apache-2.0
"""A run: engines in processes of their own, rounds in rotating order, and parts with a deadline."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine import ArmEngine
from benchmarks.measurement import Line
from benchmarks.models import Shape
from benchmarks.remote import Remote, RemoteError, TimeUpError
from benchmarks.scale import BUDGET, Scale, Workload
from measure.arm import Arm

STOCK_BLOCK_SIZE = 128
"""vLLM's default on CPU, that of the arm `production`."""
_CHUNK = 1024
"""Fewer tokens than a step prefills: 2,048 by default, less the decoding requests."""


@dataclass(frozen=True)
class Ending:
    """How a part ended."""

    end: str
    """`finished`, `failed`, `time is up` or `not run`."""
    seconds: float = 0.0
    error: str = ""

    def __str__(self) -> str:
        return f"{self.end} after {self.seconds:.0f} s" if self.seconds else self.end


class Arms:
    """The running engines of a comparison; a context manager that ends them all."""

    def __init__(
        self, arms: Sequence[Arm], shape: Shape, root: str, deadline: float = float("inf")
    ) -> None:
        """Start the first engine, then the others at once.

        The others find what the first one compiles in torch's cache.

        Raises:
            RemoteError: if one does not start.
            TimeUpError: at the deadline.
        """
        self.engines: dict[str, Remote] = {}
        with contextlib.ExitStack() as stack:
            for group in (arms[:1], arms[1:]):
                for arm in group:
                    options = {"threads": arm.threads, "deadline": deadline}
                    log = Path(root, "engines.log")
                    remote = Remote(arm.name, ArmEngine, arm, shape, root, log=log, **options)
                    stack.callback(remote.close)
                    self.engines[arm.name] = remote
                for arm in group:
                    self.engines[arm.name].wait_until_built()
            self.close = stack.pop_all().close

    def __enter__(self) -> Arms:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, method: str, **kwargs: Any) -> dict[str, Any]:
        """Ask all engines, one after the other, and return their answers."""
        return {name: engine.ask(method, **kwargs) for name, engine in self.engines.items()}


class Bench:
    """The state that all parts of a run share: sizes, seeds, deadline, and the finished lines."""

    def __init__(
        self,
        scale: Scale,
        root: str,
        block_size: int,
        eager: bool,
        say: Callable[[str], None],
        deadline: float = float("inf"),
    ) -> None:
        """
        Args:
            root: folder for models and logs.
            block_size: of all arms but `production`.
            eager: switch torch.compile off in all arms.
            say: prints a line of progress.
            deadline: end of the run, on the clock of `time.monotonic`.
        """
        self.scale = scale
        self.root = root
        self.block_size = block_size
        self.eager = eager
        self.say = say
        self.deadline = deadline
        self.seeds = itertools.count(0, 1000)
        self.lines: list[Line] = []
        self.engines: dict[str, dict[str, Any]] = {}
        """Settings of the engines by part and arm."""
        self.endings: dict[str, Ending] = {}

    @property
    def failed(self) -> bool:
        return any(ending.end == "failed" for ending in self.endings.values())

    def run(self, parts: Mapping[str, Part], only: Sequence[str] = ()) -> None:
        """Run the parts of the scale, or those named in `only`, and collect their lines.

        A part that fails leaves the others alone, and keeps the lines that it had finished.
        """
        for name, part in parts.items():
            if name not in (only or self.scale.parts) or time.monotonic() >= self.deadline:
                self.endings[name] = Ending("not run")
                continue
            begin, end, message = time.monotonic(), "finished", ""
            self.say(f"part `{name}`")
            try:
                for line in part(self):
                    line.part = name
                    if not self.scale.has_targets:
                        line.targets.clear()
                    self.lines.append(line)
            except TimeUpError:
                end = "time is up"
            except RemoteError as error:
                end, message = "failed", str(error)
                self.say(f"part `{name}` failed: {error}")
            self.endings[name] = Ending(end, time.monotonic() - begin, message)

    def start(self, part: str, shape: Shape, pool_tokens: int, only: Sequence[str] = ()) -> Arms:
        """Start stock vLLM with its defaults and with our flags, ours, and ours `forced`.

        Args:
            only: names of the arms, all by default. They have a pool of the same number of bytes.
        """
        flags = {"block_size": self.block_size}
        ours = {"policy": "tgv", "budget": BUDGET}
        forced = {"policy": "tgv", "budget": 1.0, "debug": {"evict_at_full_budget": True}}
        arms = {
            "production": {},
            "constrained": flags,
            "ours": {**flags, **evicting(ours)},
            "forced": {**flags, **evicting(forced)},
        }
        return self.launch(
            part, shape, pool_tokens, {n: a for n, a in arms.items() if not only or n in only}
        )

    def launch(
        self,
        part: str,
        shape: Shape,
        pool_tokens: int,
        arms: Mapping[str, Mapping[str, Any]],
        threads: int | None = None,
    ) -> Arms:
        """Start engines, and run one short request through each that is not measured.

        Args:
            arms: names, and the engine arguments that are not the same for all.
        """
        same: dict[str, Any] = {
            "max_model_len": min(pool_tokens - 512, 24576),
            "kv_cache_memory_bytes": pool_tokens * shape.kv_bytes_per_token,
            **({"enforce_eager": True} if self.eager else {}),
        }
        chosen = [Arm(name=n, server={**same, **a}, threads=threads) for n, a in arms.items()]
        running = Arms(chosen, shape, self.root, self.deadline)
        try:
            self.engines.setdefault(part, {}).update(running.ask("describe"))
            running.ask("prefill", workload=Workload(1280), seed=next(self.seeds), budget=BUDGET)
        except BaseException:
            running.close()
            raise
        return running

    def turns(
        self, arms: Arms, rounds: int, method: str, skip: Sequence[str] = (), **kwargs: Any
    ) -> dict[str, list[Any]]:
        """Ask each arm in each round, and return its answers by name.

        The order rotates from round to round. All arms of a round get the same new seed, except in
        `decode`, which needs none.
        """
        names = [name for name in arms.engines if name not in skip]
        found: dict[str, list[Any]] = defaultdict(list)
        for number in range(rounds):
            given = kwargs if method == "decode" else {**kwargs, "seed": next(self.seeds)}
            first = number % len(names)
            for name in names[first:] + names[:first]:
                found[name].append(arms.engines[name].ask(method, **given))
        return found

    def pool_for(self, batch: int, prompt_tokens: int, decoded: int) -> int:
        """Return the tokens of a pool in which `batch` requests keep their full caches.

        There is room for one more, because an eviction copies into new blocks.

        Args:
            decoded: tokens that each request decodes once all of them have begun.
        """
        size = max(self.block_size, STOCK_BLOCK_SIZE)
        longest = prompt_tokens + steps_to_fill(batch, prompt_tokens) + decoded
        blocks = -(-longest // size) + 1
        return (batch + 1) * blocks * size


def evicting(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine argument that gives the plugin its settings."""
    return {"additional_config": {"kv_eviction": dict(settings)}}


def steps_to_fill(batch: int, prompt_tokens: int) -> int:
    """Return the most steps in which requests that began earlier decode while a batch fills."""
    return batch * -(-prompt_tokens // _CHUNK)


Part = Callable[[Bench], Iterator[Line]]
