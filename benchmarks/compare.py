# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.compare OLD [NEW]`: two checkouts of the plugin against each other.

Both serve the same requests in turn, each in one process with one thread, on a model so small that
a step is mostly the host's work. Only names of vLLM are used, so that any two releases can be
compared. CPU time tells more than wall time on a busy machine.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measurement import Ratio
from benchmarks.remote import Remote
from measure.document import Table

POLICIES = ("tgv", "snapkv", "adakv")
BATCH = 32
_CLOCKS = (time.perf_counter, time.process_time)
Seconds = tuple[float, float]
"""Wall time and CPU time of the process."""


class Side:
    """An engine that runs the plugin of one checkout."""

    def __init__(self, checkout: str, root: str) -> None:
        sys.path.insert(0, checkout)  # before the plugin is imported

        import vllm_tgvkv

        assert Path(checkout) in Path(str(vllm_tgvkv.__file__)).parents, vllm_tgvkv.__file__
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from benchmarks.models import model_folder
        from benchmarks.scale import BRIEF, BUDGET

        self.shape = BRIEF
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model_folder(root, BRIEF)),
                load_format="dummy",
                dtype=BRIEF.dtype,
                seed=0,
                enforce_eager=True,
                max_model_len=4096,
                max_num_seqs=BATCH,
                block_size=32,
                kv_cache_memory_bytes=(1 << 16) * BRIEF.kv_bytes_per_token,
                limit_mm_per_prompt={"image": 4},
                additional_config={"kv_eviction": {"policy": "tgv", "budget": BUDGET}},
            )
        )
        core: Any = self.engine.engine_core
        self.scheduler = core.engine_core.scheduler
        self._scheduling = [0.0, 0.0]
        for name in ("schedule", "update_from_output"):
            self._watch(name)
        self._count = 0

    def _watch(self, name: str) -> None:
        """Add up the time that a method of the scheduler takes."""
        method = getattr(self.scheduler, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = [clock() for clock in _CLOCKS]
            try:
                return method(*args, **kwargs)
            finally:
                for index, clock in enumerate(_CLOCKS):
                    self._scheduling[index] += clock() - begin[index]

        setattr(self.scheduler, name, timed)

    def prefill(self, policy: str, tokens: int, seed: int) -> Seconds:
        """Return the time of the steps from a prompt to its first token."""
        self._add(policy, tokens, seed, 2)
        begin = [clock() for clock in _CLOCKS]
        while not self.engine.step():
            pass
        seconds = tuple(clock() - b for clock, b in zip(_CLOCKS, begin, strict=True))
        self._finish()
        return seconds[0], seconds[1]

    def decode(self, tokens: int, seed: int, steps: int) -> dict[str, Seconds]:
        """Return the mean time of a decode step of a full batch, and of its scheduling."""
        for number in range(BATCH):
            self._add(POLICIES[number % len(POLICIES)], tokens, seed + number, steps + BATCH + 8)
        while len(self.engine.step()) < BATCH:
            pass
        self._scheduling = [0.0, 0.0]
        begin = [clock() for clock in _CLOCKS]
        for _ in range(steps):
            assert len(self.engine.step()) == BATCH
        whole = [(clock() - b) / steps for clock, b in zip(_CLOCKS, begin, strict=True)]
        part = [spent / steps for spent in self._scheduling]
        self._finish()
        return {"decode step": (whole[0], whole[1]), "scheduler, per step": (part[0], part[1])}

    def _add(self, policy: str, tokens: int, seed: int, max_tokens: int) -> None:
        from vllm import SamplingParams

        from benchmarks.prompts import image_prompt

        self._count += 1
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_eviction": policy},
        )
        prompt = image_prompt(self.shape, tokens, seed)
        self.engine.add_request(f"r{self._count}", prompt, params)

    def _finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()


def measure(sides: dict[str, Remote], rounds: int) -> dict[str, dict[str, list[Seconds]]]:
    """Ask both sides in turn, in an order that is drawn for each measurement."""
    found: dict[str, dict[str, list[Seconds]]] = defaultdict(lambda: defaultdict(list))
    shuffler = random.Random(0)
    for number in range(-1, rounds):  # the first round warms up
        for place, policy in enumerate(POLICIES):
            seed = len(POLICIES) * (number + 1) + place  # a new prompt: nothing is cached
            for name in shuffler.sample(sorted(sides), len(sides)):
                spent = sides[name].ask("prefill", policy=policy, tokens=2048, seed=seed)
                if number >= 0:
                    found[f"prefill and eviction, {policy}"][name].append(spent)
        for name in shuffler.sample(sorted(sides), len(sides)):
            seed = 1000 * (number + 2)
            decoded = sides[name].ask("decode", tokens=640, seed=seed, steps=48)
            if number >= 0:
                for measure, spent in decoded.items():
                    found[measure][name].append(spent)
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return found


def table(found: dict[str, dict[str, list[Seconds]]]) -> Table:
    """Return the medians, and how many times as fast the new side is."""
    rows: list[Sequence[str]] = []
    for measure, of_side in found.items():
        for index, clock in enumerate(("wall", "CPU")):
            old, new = ([each[index] for each in of_side[name]] for name in ("old", "new"))
            ratio = Ratio.of("old", new, old, "lower")
            middle = [f"{1e3 * sorted(values)[len(values) // 2]:.3f}" for values in (old, new)]
            rows.append([f"{measure}, {clock} ms", *middle, str(ratio)])
    return Table(["measure", "old", "new", "old by new"], rows)


def main() -> None:
    """Compare and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=Path(__file__).parents[1])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        sides = {}
        try:
            for name in ("old", "new"):
                checkout = str(getattr(options, name).resolve())
                sides[name] = Remote(name, Side, checkout, root, threads=1)
                sides[name].wait_until_built()
            print(table(measure(sides, options.rounds)).markdown())
        finally:
            for side in sides.values():
                side.close()


if __name__ == "__main__":
    main()
