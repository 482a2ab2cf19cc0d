# SPDX-License-Identifier: Apache-2.0
"""Part `ranks`: what two tensor-parallel ranks exchange, as a share of an eviction's time.

The engine's workers are processes, so it runs in a program of its own:
`python -m benchmarks.ranks`, which reads its arguments as JSON and prints what it found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.bench import Bench, evicting
from benchmarks.costs import QUESTION
from benchmarks.measurement import Line, Target
from benchmarks.models import model_folder
from benchmarks.remote import RemoteError
from benchmarks.scale import BUDGET, COMMON, Workload
from measure.engines import ENVIRONMENT

METHODS = ("tgv", "snapkv", "reach")
MOST = 5.0
"""Percent of an eviction."""


def ranks(bench: Bench) -> Iterator[Line]:
    """Measure lines r: the time of the exchanges over the time of the eviction."""
    tokens = bench.scale.long.prompt_tokens
    given = {"root": bench.root, "tokens": tokens, "rounds": bench.scale.long_rounds}
    given |= {"block_size": bench.block_size, "pool": bench.pool_for(1, tokens, 8)}
    bench.say(f"r. exchanges of two ranks, {tokens} tokens")
    environment = {
        **{name: value for name, value in os.environ.items() if name != "VLLM_CPU_KVCACHE_SPACE"},
        **ENVIRONMENT,
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    program = [sys.executable, "-m", "benchmarks.ranks", json.dumps(given)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RemoteError(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    for method, rounds in found.items():
        shares = [100 * each["exchanging"] / each["eviction"] for each in rounds]
        what = f"r. exchanges of two ranks, share of an eviction by {method}, {tokens} tokens"
        line = Line(what, "%", "lower", {"ours": shares})
        line.targets.append(Target(f"<= {MOST:g} %", line.median("ours"), MOST, "lower"))
        first = rounds[0]
        line.notes = f"{first['exchanges']} exchanges, {first['bytes'] / 1e6:.2f} MB of each rank"
        yield line


def measure(
    root: str, tokens: int, rounds: int, block_size: int, pool: int
) -> dict[str, list[dict[str, float]]]:
    """Return of each method and round the seconds of its eviction, and of what it exchanged."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(model_folder(root, COMMON)),
        load_format="dummy",
        dtype=COMMON.dtype,
        tensor_parallel_size=2,
        block_size=block_size,
        max_model_len=tokens + 512,
        kv_cache_memory_bytes=pool * COMMON.kv_bytes_per_token // 2,
        limit_mm_per_prompt={"image": 64},
        enforce_eager=True,
        enable_prefix_caching=False,
        **evicting({"policy": "tgv", "budget": BUDGET, "when": "always"}),
    )
    engine.collective_rpc(watch)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in METHODS}
    for number in range(rounds + 1):
        for method in METHODS:
            prompt = Workload(tokens, QUESTION).prompt(COMMON, seed=number)
            extra = {"kv_eviction": method}
            params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, extra_args=extra)
            engine.collective_rpc(times)
            engine.generate(prompt, params, use_tqdm=False)
            if number:  # the first one warms up
                found[method].append(engine.collective_rpc(times)[0])
    return found


def watch(worker: Any) -> None:
    """Take the times of a worker's evictions, and of its exchanges.

    Before an exchange the ranks meet, so that its time holds no waiting for a slower one.
    """
    import torch

    evictor, ranks = worker.evictor, worker.evictor.ranks
    spent = worker.spent = dict.fromkeys(("eviction", "exchanging", "waiting"), 0.0)
    spent |= {"exchanges": 0, "bytes": 0}
    exchange, meet = ranks._exchange, torch.zeros(1)

    def watched_exchange(values: torch.Tensor) -> torch.Tensor:
        begin = time.perf_counter()
        exchange(meet)
        met = time.perf_counter()
        gathered = exchange(values)
        end = time.perf_counter()
        for name, seconds in (("waiting", met - begin), ("exchanging", end - met)):
            spent[name] += seconds
        spent["exchanges"] += 1
        spent["bytes"] += values.nbytes
        return gathered

    def watched(name: str) -> None:
        original = getattr(evictor, name)

        def timed(*args: Any) -> Any:
            begin, waited = time.perf_counter(), spent["waiting"]
            result = original(*args)
            spent["eviction"] += time.perf_counter() - begin - (spent["waiting"] - waited)
            return result

        setattr(evictor, name, timed)

    ranks._exchange = watched_exchange
    watched("observe_layer")
    watched("take_outcomes")


def times(worker: Any) -> dict[str, float]:
    """Return the times of a worker since the last call."""
    found = dict(worker.spent)
    worker.spent.update(dict.fromkeys(found, 0))
    return found


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
