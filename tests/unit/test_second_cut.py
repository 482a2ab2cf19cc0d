# SPDX-License-Identifier: Apache-2.0
"""Two evictions of one request by the evictor, the second from what the first left, by the oracle.

Engine tests do the same with models; here every head has random queries, keys and values, so it
takes no engine to see that a method looks at the keys which are left.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from oracle import methods
from oracle.attention import causal_attention
from oracle.methods import HEAD, METHODS, Earlier, Image, Layout, Mix, Settings, States
from tests.inputs import gates, head_scores
from vllm_tgvkv.cache.pages import CacheShape, page_pool
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.shared.plan import Eviction, Observation, StepPlan
from vllm_tgvkv.shared.prompt import PromptMap, VisionSpan, Voters, voters
from vllm_tgvkv.worker.evictor import Evictor
from vllm_tgvkv.worker.ranks import Ranks
from vllm_tgvkv.worker.stages import Stages

LAYERS, HEADS, GROUP, HEAD_SIZE, SIZE = 2, 2, 2, 16, 16
PROMPT, ANSWER = 150, 30
TOKENS, FULL, TAIL = PROMPT + ANSWER, PROMPT // SIZE, PROMPT % SIZE
IMAGE = Image(20, 64, (8, 8))
SCALE = HEAD_SIZE**-0.5
FIRST, SECOND = 6, 3
"""Blocks that the two evictions leave."""


def of_eviction(evictor: Evictor) -> torch.Tensor:
    """Return what the last eviction kept and everything behind the full blocks, bool [L, H, n]."""
    _, found = evictor.kept[-1]
    kept = torch.zeros(LAYERS * HEADS, TOKENS, dtype=torch.bool)
    pairs = torch.repeat_interleave(torch.arange(LAYERS * HEADS), found.counts.flatten())
    kept[pairs[:, None], found.positions[: len(pairs)].long()] = True
    kept[:, FULL * SIZE :] = True
    return kept.view(LAYERS, HEADS, TOKENS)


SCORES = {
    name: Mix(name, "uniform", "window", HEAD) for name in ("retentive_rows", "retentive_spread")
}
"""Mixes of scores that belong to no method."""


@pytest.mark.parametrize(
    "method",
    ["snapkv", "adakv", "mixkv", "sparsemm", "rkv", "trimkv", "dbtrimkv", "kvzap", *SCORES],
)
def test_a_second_eviction_looks_at_what_is_left(method: str) -> None:
    scores, mix = head_scores(LAYERS, HEADS, GROUP), {**METHODS, **SCORES}[method]
    settings = Settings(0.5, SIZE, head_scores=torch.tensor(scores.scores))
    config = EvictionConfig.from_mapping(
        {
            "policy": method,
            "methods": {
                name: {"base": "snapkv", "score": name, "pooling": "none"} for name in SCORES
            },
            "head_scores": scores,
            "gates": gates("kvzap" if method == "kvzap" else "trimkv", LAYERS, HEADS),
            "decode": {"schedule": [[0, 0.5], [ANSWER, 0.3]]},
            "debug": {"record_kept": True},
        }
    )
    layout, rows = Layout(TOKENS, (IMAGE,), ANSWER), np.arange(TOKENS - 20, TOKENS)
    for _ in range(30):
        queries = torch.randn(LAYERS, TOKENS, HEADS, GROUP, HEAD_SIZE) * 2
        keys = torch.randn(LAYERS, TOKENS, HEADS, HEAD_SIZE) + torch.randn(LAYERS, 1, HEADS, 1)
        values = torch.randn(LAYERS, TOKENS, HEADS, HEAD_SIZE) * torch.rand(LAYERS, TOKENS, 1, 1)
        said = (torch.rand(LAYERS, HEADS, TOKENS) ** 0.2).log()
        evictor, blocks = evictor_with(config, keys, values, said)
        first = plan_of_first(config, blocks)
        step(evictor, first, queries)
        kept = of_eviction(evictor)
        attention = torch.stack(
            [causal_attention(q, k, SCALE) for q, k in zip(queries, keys, strict=True)]
        )
        states = States(
            queries.flatten(2, 3).transpose(1, 2),
            keys.transpose(1, 2),
            SCALE,
            values.transpose(1, 2),
            said.double(),
        )
        earlier = Earlier(kept, tuple(rows.tolist()))
        given = replace(settings, budget=SECOND * SIZE + TAIL)
        more = {"earlier": earlier, "states": states}
        if methods.is_stable(mix, attention, layout, HEADS, given, [given.budget], **more):  # type: ignore[arg-type]
            break
    else:
        raise AssertionError("no random inputs are good: the condition is wrong")
    # The first eviction is the one of a prompt without an answer.
    part = slice(0, PROMPT)
    of_prompt = States(
        states.queries[:, :, part],
        states.keys[:, :, part],
        SCALE,
        states.values[:, :, part],
        states.gates[:, :, part],
    )
    alone = methods.select(
        mix,
        attention[:, :, part, part],
        Layout(PROMPT, (IMAGE,)),
        HEADS,
        replace(settings, budget=FIRST * SIZE + TAIL),
        states=of_prompt,
    )
    assert torch.equal(kept[..., part], alone.kept)

    row = np.zeros(len(blocks["old"]), np.int32)
    row[:FIRST], row[FULL:] = blocks["first"], blocks["old"][FULL:]
    (eviction,) = first.evictions
    again = replace(
        eviction,
        voters=Voters(dict.fromkeys(eviction.voters.kinds, rows), rows, every_row=False),
        old_blocks=row,
        new_blocks=blocks["second"],
        row_blocks=blocks["second"],
        num_answer=ANSWER,
        num_replaced=FULL,
        is_first=False,
    )
    step(
        evictor,
        StepPlan(observations=[Observation("x", 0, rows, None)], evictions=[again]),
        queries,
    )
    wanted = methods.select(mix, attention, layout, HEADS, given, **more)  # type: ignore[arg-type]
    assert torch.equal(of_eviction(evictor), wanted.kept)
    assert torch.equal(evictor.kept[-1][1].counts, wanted.pages)
    assert (wanted.kept <= kept).all()
    assert (wanted.kept != kept).any()


def evictor_with(
    config: EvictionConfig, keys: torch.Tensor, values: torch.Tensor, said: torch.Tensor
) -> tuple[Evictor, dict[str, np.ndarray]]:
    """Return an evictor whose cache holds the tokens in shuffled blocks, and free blocks."""
    num_old = -(-TOKENS // SIZE)
    ids = np.random.default_rng(random.getrandbits(32)).permutation(num_old + FIRST + SECOND) + 1
    old, first, second = np.split(ids.astype(np.int32), [num_old, num_old + FIRST])
    cache = torch.full((len(ids) + 1, LAYERS, HEADS, SIZE, 2 * HEAD_SIZE), float("nan"))
    for layer, j in itertools.product(range(LAYERS), range(TOKENS)):
        slot = cache[int(old[j // SIZE]), layer, :, j % SIZE]
        slot[:] = torch.cat((keys[layer, j], values[layer, j]), dim=-1)
    shape = CacheShape(LAYERS, HEADS, GROUP, HEAD_SIZE, SIZE)
    pool = page_pool(cache.unbind(1), slots_first=True)
    evictor = Evictor(config, shape, pool, Ranks(), Stages(LAYERS))
    outputs = evictor.context.gate_outputs
    assert outputs is not None
    outputs.fill(range(len(ids) + 1), float("nan"))
    positions = torch.arange(TOKENS)
    slots = torch.from_numpy(old).long()[positions // SIZE] * SIZE + positions % SIZE
    for layer in range(LAYERS):  # in two batches, padded as those of graphs are
        for batch in positions.split(100):
            padded = torch.cat((slots[batch], torch.tensor([-1, -1])))
            outputs.store(layer, padded, torch.cat((said[layer].T[batch], torch.zeros(9, HEADS))))
    return evictor, {"old": old, "first": first, "second": second}


def plan_of_first(config: EvictionConfig, blocks: dict[str, np.ndarray]) -> StepPlan:
    prompt = PromptMap(PROMPT, (VisionSpan(IMAGE.start, IMAGE.length, IMAGE.grid),))
    row_sets = config.build_policy(config.policy).row_sets
    voting = voters(prompt, row_sets, config.observation_window)
    eviction = Eviction(
        request_id="x",
        method=config.policy,
        prompt=prompt,
        voters=voting,
        num_cached=0,
        guard=None,
        traced_budget=None,
        old_blocks=blocks["old"][: FULL + 1],
        num_replaced=FULL,
        new_blocks=blocks["first"],
        row_blocks=blocks["first"],
    )
    return StepPlan(observations=[Observation("x", 0, voting.rows, None)], evictions=[eviction])


def step(evictor: Evictor, plan: StepPlan, queries: torch.Tensor) -> None:
    """Run one step, with the queries of all tokens as its batch."""
    evictor.begin_step(plan)
    evictor.prepare(lambda _: 0)
    with torch.inference_mode():
        for layer in range(LAYERS):
            evictor.observe_layer(layer, queries[layer].flatten(1, 2), SCALE)
    evictor.take_outcomes()
