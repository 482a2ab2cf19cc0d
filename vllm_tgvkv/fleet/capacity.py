# SPDX-License-Identifier: Apache-2.0
"""Requests per second of one replica that always has requests waiting, by formulas.

With rho requests that begin, and as many that end, in a mean step, a request stays for s steps of
its prefill and D of its answer, so N = rho * (s + D) are held, rho * D of them decode, and the step
has rho * (P + D) tokens. All constraints grow with rho: the largest one that keeps memory,
`--max-num-seqs` and `--max-num-batched-tokens` is the capacity, rho / (seconds of a mean step).
Steps with a part of a prompt and steps without are counted apart, for a step that only decodes
reads the weights just as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vllm_tgvkv.fleet.costs import Step, StepCosts
from vllm_tgvkv.fleet.mix import Mix, Prompt, mean
from vllm_tgvkv.gain import Gain, LayerKind, gain
from vllm_tgvkv.shared.budget import Budget
from vllm_tgvkv.shared.errors import EvictionConfigError

LIMITS = {
    "memory": "memory for caches",
    "seqs": "--max-num-seqs",
    "time": "--max-inter-token-ms",
    "prompts": "computing prompts",
    "weights": "reading weights",
    "cache": "reading caches",
    "images": "the vision tower",
    "host": "the host",
}
"""The limits of a replica, in words."""

_MORE = 1.05
"""Times the requests per second from which a constraint is said to be the limit."""


@dataclass(frozen=True)
class Server:
    """One replica, which may be several GPUs."""

    kinds: Sequence[LayerKind]
    """Layers, with the bytes of all GPUs of the replica."""
    pool: float
    """Bytes for caches, likewise."""
    costs: StepCosts
    block_size: int = 16
    chunk: int = 8192
    """`--max-num-batched-tokens`."""
    max_num_seqs: int = 256
    max_step: float = math.inf
    """Seconds of a mean step, at most."""


@dataclass(frozen=True)
class Eviction:
    """How prompts with visual tokens are evicted."""

    budget: Budget
    defer: int = 0
    """Tokens of the answer during which a request holds its whole prompt."""
    cost: float = 0.0
    """Time of an eviction, as a share of its prompt's computation."""
    least: int = 128
    """Shorter prompts are kept, `min_prompt_tokens`."""
    pressure: bool = False
    """Whether prompts are evicted only when memory is short."""


@dataclass(frozen=True)
class Capacity:
    """Throughput of a replica when requests always wait."""

    held: int
    """Requests at once."""
    rate: float
    """Requests per second."""
    step: float
    """Seconds of a mean step: the time between two tokens of an answer."""
    limit: str
    """A key of `LIMITS`."""
    parts: dict[str, float]
    """Seconds of a mean step by what they are spent on."""
    evicts: bool = False


@dataclass(frozen=True)
class _Need:
    """Work and memory of the requests of a mix, as means over requests."""

    prompt: float
    decode_steps: float
    pairs: float
    visual: float
    held: float
    """Bytes, summed over the steps of an answer; every step reads them."""
    prompt_bytes: float
    """Of a whole prompt, and of what it keeps while it is evicted."""
    prefill_cost: float
    """Times the computation of prompts, eviction included."""
    evicts: bool


def capacity(server: Server, mix: Mix, eviction: Eviction | None) -> Capacity:
    """Return the capacity of a replica, with eviction or without.

    Raises:
        EvictionConfigError: if a request of the mix does not fit the memory.
    """
    stock = _capacity(server, mix, None)
    if eviction is None or (eviction.pressure and stock.limit != "memory"):
        return stock
    return _capacity(server, mix, eviction)


def _capacity(server: Server, mix: Mix, eviction: Eviction | None) -> Capacity:
    need, longest = _need(server, mix, eviction), max(mix, key=lambda each: each.tokens)
    most = [_gain(server, each, each.answer, eviction) for each in mix]
    if any(max(each.peak, each.after) > server.pool for each in most):
        raise EvictionConfigError(
            f"--mix has prompts of {longest.tokens} tokens, and {server.pool / 2**30:.1f} GiB are "
            "left for caches, too little for one: choose another --gpu, or lower --reserve"
        )

    def held(rho: float) -> float:
        return rho * (_prefill_steps(server, mix, need, rho) + need.decode_steps)

    def tokens(rho: float) -> float:
        return rho * (need.prompt + need.decode_steps)

    def memory(rho: float) -> float:
        steps = _prefill_steps(server, mix, need, rho)
        if need.evicts:  # room for one prompt, and for what it keeps of it, is always spared
            return rho * need.held + max(rho * steps, 1.0) * need.prompt_bytes
        # A prompt takes its blocks chunk by chunk.
        return rho * (need.held + need.prompt_bytes * (steps + 1) / 2)

    def at(rho: float) -> Capacity:
        return _steady(server, mix, need, rho, held(rho))

    whole = max(math.floor(held(_largest(memory, server.pool)) + 1e-9), 1)
    full = _largest(tokens, server.chunk)
    bounds = {
        "memory": _largest(held, whole),
        "seqs": _largest(held, server.max_num_seqs),
        "time": min(full, _largest(lambda rho: at(rho).step, server.max_step, full)),
    }
    rho = min(full, *bounds.values())
    if held(rho) < 0.99:
        raise EvictionConfigError(
            f"--max-inter-token-ms is {1000 * server.max_step:g}, and a request alone takes longer "
            "steps: give more, or lower --max-num-batched-tokens"
        )
    result = at(rho)
    # Where two bounds are close, only without both a replica would answer more: the looser one is
    # said to be the limit, since it would be one without the other.
    tightest = sorted(bounds, key=lambda name: bounds[name])
    for name, more in zip(tightest, [*(bounds[name] for name in tightest[1:]), full], strict=True):
        if at(min(more, full)).rate > _MORE * result.rate:
            return replace(result, limit=name)
    return result


def _steady(server: Server, mix: Mix, need: _Need, rho: float, held: float) -> Capacity:
    """Return the capacity with `rho` requests for each step."""
    busy = min(rho * _prefill_steps(server, mix, need, rho), 1.0)  # share of steps with a prompt
    decoding = Step(
        tokens=rho * need.decode_steps, read=rho * need.held, rows=rho * need.decode_steps
    )
    with_prompt = Step(
        tokens=decoding.tokens + rho * need.prompt * need.prefill_cost / busy,
        pairs=rho * need.pairs * need.prefill_cost / busy,
        read=decoding.read,
        rows=decoding.rows + 1,
        visual=rho * need.visual / busy,
    )
    long, short = server.costs.parts(with_prompt), server.costs.parts(decoding)
    parts = {name: busy * long[name] + (1 - busy) * short[name] for name in long}
    if not decoding.tokens:
        parts = {name: busy * each for name, each in long.items()}
    seconds = sum(parts.values())
    limit = max(parts, key=lambda name: parts[name])
    return Capacity(round(held), rho / seconds, seconds, limit, parts, need.evicts)


def _need(server: Server, mix: Mix, eviction: Eviction | None) -> _Need:
    def byte_steps(each: Prompt) -> float:
        steps, middle = each.answer - 1, (each.answer + 1) // 2
        waits = min(eviction.defer, steps) if eviction and _is_evicted(each, eviction) else 0
        found = _gain(server, each, middle, eviction)
        return waits * found.before + (steps - waits) * found.after

    prompt = mean(mix, lambda each: each.tokens)
    evicted = mean(mix, lambda each: each.tokens * _is_evicted(each, eviction))
    return _Need(
        prompt=prompt,
        decode_steps=mean(mix, lambda each: each.answer - 1),
        pairs=mean(mix, lambda each: pairs(server.kinds, each.tokens)),
        visual=mean(mix, lambda each: each.num_visual),
        held=mean(mix, byte_steps),
        prompt_bytes=mean(mix, lambda each: _gain(server, each, 0, eviction).peak),
        prefill_cost=1 + (eviction.cost if eviction else 0) * evicted / prompt,
        evicts=evicted > 0,
    )


def pairs(kinds: Sequence[LayerKind], num_tokens: int, start: int = 0) -> float:
    """Return the pairs of query and key of a prompt's tokens from `start` on, over all layers."""

    def of_layer(window: int | None) -> float:
        whole = (num_tokens**2 - start**2) / 2
        return whole if window is None else min(whole, (num_tokens - start) * window)

    return sum(k.num_layers * of_layer(k.window) for k in kinds if k.bytes_per_token)


def _is_evicted(each: Prompt, eviction: Eviction | None) -> bool:
    if eviction is None or each.visual == 0:
        return False
    return each.tokens >= eviction.least and each.answer - 1 > eviction.defer


def _gain(server: Server, each: Prompt, num_answer: int, eviction: Eviction | None) -> Gain:
    """Return the bytes of a request with `num_answer` tokens of its answer."""
    budget = eviction.budget if eviction else Budget(fraction=1.0)
    found = gain(server.kinds, each.tokens, num_answer, budget, server.block_size)
    return found if _is_evicted(each, eviction) else Gain(*[found.before] * 3)


def _prefill_steps(server: Server, mix: Mix, need: _Need, rho: float) -> float:
    """Return the steps of a prefill: others' tokens of answers take their part of each step."""
    room = max(server.chunk - rho * need.decode_steps, 1.0)
    return mean(mix, lambda each: max(each.tokens / room, 1.0))


def _largest(grows: Callable[[float], float], bound: float, most: float = 1e9) -> float:
    """Return the largest rho, at most `most`, at which a growing function is within the bound."""
    low, high = 0.0, min(1.0, most)
    while high < most and grows(high) <= bound:
        high = min(2 * high, most)
    if grows(high) <= bound:
        return high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if grows(middle) <= bound else (low, middle)
    return low
