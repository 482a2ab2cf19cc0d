# SPDX-License-Identifier: Apache-2.0
"""A plan of a fleet, and its lines for the screen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_tgvkv.fleet.capacity import LIMITS, Capacity, Eviction, Server
from vllm_tgvkv.fleet.gpus import Gpu
from vllm_tgvkv.fleet.mix import Mix
from vllm_tgvkv.fleet.model import Model

_SAME = 0.02
"""A difference that means nothing, as a share."""


@dataclass(frozen=True)
class Plan:
    """A fleet of equal replicas."""

    model: Model
    gpu: Gpu
    num_gpus: int
    """Of a replica."""
    server: Server
    mix: Mix
    method: str
    eviction: Eviction
    stock: Capacity
    evicted: Capacity
    price: float
    """Dollars for an hour of a GPU."""
    load: float
    """Share of the capacity that is used."""
    rate: float | None = None
    """Requests per second that are wanted."""
    most_gpus: int | None = None
    """GPUs that there are."""

    @property
    def ratio(self) -> float:
        """Requests per second with eviction for each one without."""
        return self.evicted.rate / self.stock.rate

    def gpus(self, arm: Capacity) -> int | None:
        """Return the GPUs that the wanted rate needs; None if no rate is wanted."""
        if self.rate is None:
            return None
        return math.ceil(self.rate / (arm.rate * self.load) - 1e-9) * self.num_gpus

    def answered(self, arm: Capacity) -> float:
        """Return the requests per second of the GPUs that there are, of a replica if not given."""
        replicas = 1 if self.most_gpus is None else self.most_gpus // self.num_gpus
        return replicas * arm.rate * self.load

    def dollars(self, arm: Capacity) -> float:
        """Return dollars per million answers, for all GPUs that are paid."""
        gpus, rate = self.gpus(arm), self.rate
        if gpus is None or rate is None:
            gpus, rate = self.most_gpus or self.num_gpus, self.answered(arm)
        return self.price * gpus / 3600 / rate * 1e6


def lines(plan: Plan) -> Iterator[str]:
    """Yield the report."""
    model, server = plan.model, plan.server
    replica = "one GPU" if plan.num_gpus == 1 else f"{plan.num_gpus} GPUs"
    yield (
        f"{model.architecture}, {replica} ({plan.gpu.name}) for each replica: "
        f"{model.weight_bytes / 1e9:.1f} GB of weights, {server.pool / 2**30:.1f} GiB for caches."
    )
    total = sum(each.weight for each in plan.mix)
    for each in plan.mix:
        share = f"{100 * each.weight / total:.3g} % of requests" if plan.mix[1:] else "Requests"
        yield (
            f"{share}: {each.tokens} tokens, "
            f"{100 * each.visual:g} % of them visual, and an answer of {each.answer}."
        )
    when = "when memory is short" if plan.eviction.pressure else "always"
    yield f"Eviction: {plan.method} {when}, budget: {plan.eviction.budget}."
    yield ""
    yield from _table(plan)
    yield ""
    yield verdict(plan)
    yield ""
    yield from _origins(plan)


def verdict(plan: Plan) -> str:
    """Return what eviction does for the fleet, in a sentence."""
    limit, saved = LIMITS[plan.stock.limit], 1 - 1 / plan.ratio
    if not plan.evicted.evicts:
        why = f"the limit is {limit}, not memory for caches, so no prompt is evicted"
        if plan.stock.limit == "memory":
            why = "no prompt of the mix has images, the least tokens and a longer answer than defer"
        return f"Eviction saves nothing here: {why}."
    if saved > _SAME:
        how = {
            "memory": "more requests fit the memory for caches",
            "cache": "steps read shorter caches",
        }.get(plan.stock.limit, f"caches are shorter to read; memory is not full, {limit} limits")
        return f"Eviction saves {100 * saved:.0f} % of the GPU time of an answer: {how}."
    if saved < -_SAME:
        return f"Eviction makes answers {-100 * saved:.0f} % dearer here: the limit is {limit}."
    return f"Eviction saves nothing here: the limit is {limit}."


def _table(plan: Plan) -> Iterator[str]:
    arms = (plan.stock, plan.evicted)
    yield f"{'':36}{'stock':>22}{'eviction':>22}"
    rows: list[tuple[str, list[str]]] = [
        ("requests held by a replica", [f"{arm.held:,}" for arm in arms]),
        ("requests per second and GPU", [f"{arm.rate / plan.num_gpus:.2f}" for arm in arms]),
        ("milliseconds between tokens", [f"{1000 * arm.step:.1f}" for arm in arms]),
        ("limit", [LIMITS[arm.limit] for arm in arms]),
    ]
    if plan.rate is not None:
        rows.append((f"GPUs for {plan.rate:g} requests/s", [f"{plan.gpus(arm):,}" for arm in arms]))
    if plan.most_gpus is not None:
        name = f"requests/s of {plan.most_gpus} GPUs"
        rows.append((name, [f"{plan.answered(arm):.1f}" for arm in arms]))
    rows.append(("dollars per million answers", [f"{plan.dollars(arm):,.0f}" for arm in arms]))
    for name, values in rows:
        yield f"{name:36}" + "".join(f"{value:>22}" for value in values)


def _origins(plan: Plan) -> Iterator[str]:
    yield f"Published: memory, bandwidth and operations of the GPU ({plan.gpu.source})."
    yield f"Step costs: {plan.server.costs.source}."
    yield (
        f"Assumed: {plan.price:g} dollars for a GPU's hour, {100 * plan.load:g} % of the capacity "
        f"used, an eviction takes {100 * plan.eviction.cost:g} % of its prompt's prefill (measured "
        "on CPU), and memory outside the pool."
    )
    yield (
        "Not known here: whether answers stay right; your load, its peaks and shared prefixes; "
        "time to the first token; preemptions; how fast a GPU reads caches of unequal "
        "heads; what GPUs of a replica exchange; parts that replicas share."
    )
    if plan.model.refusals:
        yield f"--kv-eviction does not serve this model yet: {'; '.join(plan.model.refusals)}."
    if plan.num_gpus > 1:
        yield "No replica of several GPUs has run with eviction yet."
