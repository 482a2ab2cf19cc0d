# SPDX-License-Identifier: Apache-2.0
"""A run of benchmarks: its parts, their engines, the time they have, and the lines they give."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.engine import ArmEngine
from benchmarks.measurement import Line
from benchmarks.models import Shape
from benchmarks.remote import Remote, RemoteError, TimeUpError
from benchmarks.scale import BUDGET, Scale
from benchmarks.workload import Workload
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
        took = f" after {self.seconds:.0f} s" if self.seconds else ""
        return f"{self.end}{took}"


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
                    remote = Remote(
                        arm.name,
                        ArmEngine,
                        arm,
                        shape,
                        root,
                        threads=arm.threads,
                        deadline=deadline,
                    )
                    stack.callback(remote.close)
                    self.engines[arm.name] = remote
                for arm in group:
                    self.engines[arm.name].wait_until_built()
            self.facts = {name: engine.ask("describe") for name, engine in self.engines.items()}
            self._closing = stack.pop_all()

    def __getitem__(self, name: str) -> Remote:
        return self.engines[name]

    def __enter__(self) -> Arms:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all engines."""
        self._closing.close()


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
            root: folder for models.
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

    def start(
        self,
        part: str,
        shape: Shape,
        pool_tokens: int,
        forced: bool = False,
        only: Sequence[str] = (),
    ) -> Arms:
        """Start stock vLLM with its defaults and with our flags, ours, and ours `forced` if asked.

        All have a pool of the same number of bytes.
        """
        stock = self.engine_args(shape, pool_tokens)
        same = {**stock, "block_size": self.block_size}
        ours = {"policy": "tgv", "budget": BUDGET}
        everything = {"policy": "tgv", "budget": 1.0, "debug": {"evict_at_full_budget": True}}
        arms = [
            Arm(name="production", server=stock),
            Arm(name="constrained", server=same),
            Arm(name="ours", server={**same, "additional_config": {"kv_eviction": ours}}),
        ]
        if forced:
            arms.append(
                Arm(
                    name="forced", server={**same, "additional_config": {"kv_eviction": everything}}
                )
            )
        return self.launch(part, shape, [arm for arm in arms if not only or arm.name in only])

    def engine_args(self, shape: Shape, pool_tokens: int) -> dict[str, Any]:
        """Return the engine arguments that all arms of a part have in common."""
        args: dict[str, Any] = {
            "max_model_len": min(pool_tokens - 512, 24576),
            "kv_cache_memory_bytes": pool_tokens * shape.kv_bytes_per_token,
        }
        if self.eager:
            args["enforce_eager"] = True
        return args

    def launch(self, part: str, shape: Shape, arms: Sequence[Arm]) -> Arms:
        """Start engines, and run one short request through each that is not measured."""
        running = Arms(arms, shape, self.root, self.deadline)
        self.engines.setdefault(part, {}).update(running.facts)
        try:
            for engine in running.engines.values():
                engine.ask("prefill", workload=Workload(1280), seed=next(self.seeds), budget=BUDGET)
        except BaseException:
            running.close()
            raise
        return running

    def turns(
        self, arms: Arms, rounds: int, skip: Sequence[str] = ()
    ) -> Iterator[tuple[str, Remote, int]]:
        """Yield the name and engine of each arm in each round, and a seed for the round.

        The order rotates from round to round.
        """
        engines = [(name, engine) for name, engine in arms.engines.items() if name not in skip]
        for number in range(rounds):
            seed = next(self.seeds)
            first = number % len(engines)
            for name, engine in (*engines[first:], *engines[:first]):
                yield name, engine, seed

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


def steps_to_fill(batch: int, prompt_tokens: int) -> int:
    """Return the most steps in which requests that began earlier decode while a batch fills."""
    return batch * -(-prompt_tokens // _CHUNK)


Part = Callable[[Bench], Iterator[Line]]
