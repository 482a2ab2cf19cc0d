# SPDX-License-Identifier: Apache-2.0
"""A fleet on paper: GPUs and dollars for a mix of prompts, with eviction and without.

Usage: python -m vllm_tgvkv.fleet MODEL --gpu h100 --mix 8192,0.9,256 --rate 100

MODEL is a folder with a `config.json`, or a name as in `vllm serve`.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from vllm_tgvkv.fleet.capacity import Eviction, Server, capacity
from vllm_tgvkv.fleet.costs import StepCosts, read_costs, roofline
from vllm_tgvkv.fleet.gpus import GPUS, Gpu, parse_gpu
from vllm_tgvkv.fleet.mix import Mix, parse_mix
from vllm_tgvkv.fleet.model import Model, read_model
from vllm_tgvkv.fleet.report import Plan, lines
from vllm_tgvkv.gain import cannot_build, count
from vllm_tgvkv.shared.budget import Budget
from vllm_tgvkv.shared.errors import EvictionConfigError, choose

_GIB = 2**30
_SIZES = ("bytes_per_token", "state_bytes")
_H2O_COST = 1.56
"""Share of a prefill of an eviction by `h2o`, which computes the prompt's attention again; of
others 0.034. Both on CPU: docs/benchmarks.md, lines c and g."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan of a fleet; returns the exit status."""
    options = _parser().parse_args(arguments)
    # Before vLLM is imported: its log would stand between the lines.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        gpu, mix = parse_gpu(options.gpu), parse_mix(options.mix or ["8192,0.9,256"])
        costs = read_costs(options.step_costs) if options.step_costs else None
        price = gpu.dollars if options.price is None else options.price
        if price is None:
            raise EvictionConfigError(f"--gpu {gpu.name} has no price here: give --price")
        if options.gpus is not None and options.gpus < options.tensor_parallel_size:
            raise EvictionConfigError(
                f"--gpus is {options.gpus}, fewer than one replica has: give at least "
                f"{options.tensor_parallel_size} or lower --tensor-parallel-size"
            )
        method, eviction = _eviction(options)
        try:
            given = {"block_size": options.block_size, "max_model_len": options.max_model_len}
            model = read_model(options.model, **given)
        except Exception as error:  # whatever vLLM raises for a model that it cannot build here
            print(cannot_build(options.model, error), file=sys.stderr)
            return 1
        _check_context(mix, model)
        stock, evicting = _servers(options, gpu, model, costs)
        plan = Plan(
            model=model,
            gpu=gpu,
            num_gpus=options.tensor_parallel_size,
            server=stock,
            mix=mix,
            method=method,
            eviction=eviction,
            stock=capacity(stock, mix, None),
            evicted=capacity(evicting, mix, eviction),
            price=price,
            load=options.load,
            rate=options.rate,
            most_gpus=options.gpus,
        )
    except EvictionConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(*lines(plan), sep="\n")
    return 0


def _eviction(options: argparse.Namespace) -> tuple[str, Eviction]:
    from vllm_tgvkv.policies import POLICIES

    if options.method not in POLICIES.names:
        raise EvictionConfigError(
            f"--method is {options.method!r}: {choose(options.method, POLICIES.names)}"
        )
    recipe = POLICIES[options.method]
    budget = Budget.parse(recipe.budget if options.budget is None else options.budget, "--budget")
    pressure = (options.when or recipe.when) == "pressure"
    cost = options.eviction_cost
    if cost is None:
        cost = _H2O_COST if options.method == "h2o" else 0.034
    if pressure and budget.is_auto:
        raise EvictionConfigError(
            f"--budget is {options.budget} and evicts under pressure: give a fraction, or "
            "--when always"
        )
    # Under pressure requests shrink while they decode, so no eviction waits for the answer.
    return options.method, Eviction(budget, 0 if pressure else recipe.defer, cost, 128, pressure)


def _check_context(mix: Mix, model: Model) -> None:
    for each in mix:
        if each.tokens + each.answer > model.context:
            raise EvictionConfigError(
                f"--mix has {each.tokens} + {each.answer} tokens, and the model's context is "
                f"{model.context}: make them shorter or set --max-model-len"
            )


def _servers(
    options: argparse.Namespace, gpu: Gpu, model: Model, costs: StepCosts | None
) -> tuple[Server, Server]:
    """Return a replica without eviction, and one that spares memory for it."""
    ranks = options.tensor_parallel_size
    if model.num_kv_heads % ranks and ranks % model.num_kv_heads:
        raise EvictionConfigError(
            f"--tensor-parallel-size is {ranks}, and the model has {model.num_kv_heads} KV heads: "
            "give a divisor or a multiple"
        )
    copies = max(ranks // model.num_kv_heads, 1)  # more ranks than heads hold each head more often
    kinds = [
        replace(kind, **{name: getattr(kind, name) * copies for name in _SIZES})
        for kind in model.kinds
    ]
    pool = ranks * (
        gpu.gigabytes * 1e9 * options.gpu_memory_utilization - options.reserve * _GIB
    ) - float(model.weight_bytes)
    if costs is None:
        costs = roofline(
            model, gpu, ranks, options.flops_share, options.read_share, options.host_ms / 1000
        )
    is_large = gpu.gigabytes >= 75 and not gpu.name.startswith("a100")
    server = Server(
        kinds=kinds,
        pool=pool,
        costs=costs,
        block_size=model.block_size,
        chunk=options.max_num_batched_tokens or (8192 if is_large else 2048),
        max_num_seqs=options.max_num_seqs or (1024 if is_large else 256),
        max_step=(options.max_inter_token_ms or math.inf) / 1000,
    )
    return server, replace(server, pool=pool - ranks * options.eviction_memory * _GIB)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_tgvkv.fleet",
        description="GPUs and dollars for a mix of prompts, with eviction and without.",
    )
    add, as_in_serve = parser.add_argument, "as in vllm serve"
    add("model", help="a folder with a config.json, or a name as in vllm serve")
    add("--gpu", required=True, help=f"{', '.join(GPUS)}, or NAME:GB,TB/s,TFLOP/s")
    add(
        "--mix",
        action="append",
        metavar="TOKENS,VISUAL,ANSWER[,WEIGHT]",
        help="requests of one kind, given once for each kind: tokens of the prompt, share of "
        "visual ones, tokens of the answer (default: 8192,0.9,256)",
    )
    add("--rate", type=_positive, help="requests per second that are wanted")
    add("--gpus", type=count, help="GPUs that there are")
    add("--price", type=_positive, help="dollars for an hour of a GPU (default: a guess)")
    add("--load", type=_share, default=0.8, help="share of the capacity that is used (0.8)")
    add("--max-inter-token-ms", type=_positive, help="milliseconds between tokens, at most")
    add("--method", default="reach", help="as --kv-eviction (reach)")
    add("--budget", help="as --kv-eviction-budget (the method's own)")
    add("--when", choices=("always", "pressure"), help="as --kv-eviction-when (the method's own)")
    add(
        "--step-costs",
        metavar="FILE",
        help="JSON file of measured costs, by python -m benchmarks.step_costs",
    )
    add("--flops-share", type=_share, default=0.5, help="reached share of operations (0.5)")
    add("--read-share", type=_share, default=0.7, help="reached share of bandwidth (0.7)")
    add("--host-ms", type=float, default=1.0, help="milliseconds of host in each step (1)")
    add("--eviction-cost", type=float, help="time of an eviction by its prefill's (0.034)")
    add("--reserve", type=float, default=6.0, help="GiB of a GPU for activations and graphs (6)")
    add("--eviction-memory", type=float, default=1.2, help="GiB of a GPU besides, with eviction")
    add("--tensor-parallel-size", type=count, default=1, help=as_in_serve)
    add("--gpu-memory-utilization", type=_share, default=0.9, help=f"{as_in_serve} (0.9)")
    add("--max-num-seqs", type=count, help=as_in_serve)
    add("--max-num-batched-tokens", type=count, help=as_in_serve)
    add("--block-size", type=count, default=16, help=f"{as_in_serve} (16)")
    add("--max-model-len", type=count, help=as_in_serve)
    return parser


def _positive(text: str) -> float:
    if not 0 < (number := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def _share(text: str) -> float:
    if not 0 < (number := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share: give 0 < share <= 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
