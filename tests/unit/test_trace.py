# SPDX-License-Identifier: Apache-2.0
"""Traces against a slow count of what each head keeps; how many of them are kept."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.inputs import new_rng
from vllm_tgvkv.policies import Mix, Prompt, build_policy
from vllm_tgvkv.shared.prompt import PromptMap, VisionSpan
from vllm_tgvkv.shared.trace import Trace, Traces
from vllm_tgvkv.worker.decision import ScoredPrompt

N, L, H = 4, 3, 2


def make_trace(
    rng: np.random.Generator,
    num_tokens: int,
    granularity: str = "head",
    name: str = "r",
    num_answer: int = 0,
    num_replaced: int | None = None,
) -> tuple[Trace, dict[tuple[int, int], set[int]]]:
    """Return a trace of random pages, and the tokens that each (layer, head) keeps."""
    num_full = num_tokens // N if num_replaced is None else num_replaced
    blocks_before = math.ceil((num_tokens + num_answer) / N)
    num_retained = int(rng.integers(1, num_full + 1))
    per_set = 1 if granularity == "layer" else H
    # Pages of each token set, at most the blocks that they replace.
    units = np.zeros((L, per_set), dtype=np.int64)
    for _ in range(num_retained * L * per_set):
        open_ = np.argwhere(units < num_full)
        units[tuple(open_[rng.integers(len(open_))])] += 1
    counts = np.repeat(units, H // per_set, axis=1)
    kept: dict[tuple[int, int], set[int]] = {}
    pages = []
    for layer in range(L):
        for token_set in range(per_set):
            size = units[layer, token_set] * N
            chosen = rng.permutation(num_full * N)[:size]
            for head in range(token_set * (H // per_set), (token_set + 1) * (H // per_set)):
                kept[layer, head] = set(chosen.tolist())
                pages.append(rng.permutation(chosen))
    unused = np.full((int(rng.integers(0, 3)), N), 10**6)  # as with a guard
    positions = np.concatenate([np.concatenate(pages).reshape(-1, N), unused]).astype(np.int32)
    scores = rng.normal(size=(L, per_set, num_full * N)).astype(np.float32)
    vision = (VisionSpan(1, 4, (2, 2)), VisionSpan(7, 2, None))
    trace = Trace(
        *(name, "tgv", "10 %", granularity, 1.5),
        prompt=PromptMap(num_tokens, vision),
        num_answer=num_answer,
        num_replaced=num_full,
        blocks_before=blocks_before,
        block_size=N,
        counts=counts,
        positions=positions,
        scores=scores,
        unpooled=None,
        preference=np.zeros(num_full * N, np.uint8),
        preferred="text",
        sinks=2,
    )
    return trace, kept


@pytest.mark.parametrize("granularity", ["layer", "head"])
def test_a_trace_has_all_cuts_of_its_request(granularity: str) -> None:
    """The last cut also evicts from the answer: 21 tokens of the prompt, 7 of the answer."""
    rng = new_rng()
    plans = [(3, 5), (9, 5), (12, 7)]
    cuts = [make_trace(rng, 21, granularity, "r", *plan) for plan in plans]
    traces = Traces(10, 1 << 30)
    for trace, _ in cuts:
        traces.add(trace)
    (found,) = traces.newest_first()
    sizes = [cut.summary()["cuts"][0] for cut, _ in cuts]
    assert [size["answer_tokens"] for size in sizes] == [3, 9, 12]
    for (num_answer, num_replaced), size, (cut, _) in zip(plans, sizes, cuts, strict=True):
        num_retained = int(cut.counts.sum()) // (L * H)
        assert size["kept_tokens"] == num_retained * N + max(21 - num_replaced * N, 0)
        num_tail = 21 + num_answer - num_replaced * N
        assert size["blocks_after"] == num_retained + math.ceil(num_tail / N)
    summary = found.summary()
    assert summary["cuts"] == sizes
    assert summary["blocks_before"] == sizes[0]["blocks_before"] == 6
    for name in ("kept_tokens", "blocks_after"):
        assert summary[name] == sizes[-1][name]

    for index, ((_, num_replaced), size, (_, kept)) in enumerate(
        zip(plans, sizes, cuts, strict=True)
    ):
        detail = json.loads(json.dumps(found.detail(index)))
        assert detail["cut"] == index
        assert detail["pages"] == [[len(kept[la, h]) // N for h in range(H)] for la in range(L)]
        tail = list(range(num_replaced * N, 21))
        assert detail["kept_by"] == [
            L * H if token in tail else sum(token in of_pair for of_pair in kept.values())
            for token in range(max(21, num_replaced * N))
        ]
        assert sum(detail["kept_by"]) == size["kept_tokens"] * L * H
        layer = found.layer(1, index)
        assert layer is not None
        for of_set in layer["token_sets"]:
            assert len(of_set["scores"]) == num_replaced * N
            for head in of_set["heads"]:
                assert of_set["positions"] == sorted(kept[1, head]) + tail
    assert found.detail() == found.detail(2)
    assert found.layer(0) == found.layer(0, 2)
    assert found.detail(3) is found.detail(-1) is found.layer(0, 3) is None


def test_a_preemption_undoes_cuts() -> None:
    traces = Traces(10, 1 << 30)

    def cuts_after(num_answer: int) -> list[int]:
        traces.add(make_trace(new_rng(), 21, num_answer=num_answer)[0])
        (found,) = traces.newest_first()
        told = [cut["answer_tokens"] for cut in found.summary()["cuts"]]
        assert [cut.num_answer for cut in found.cuts] == told
        assert all(not cut.earlier for cut in found.earlier)
        return told

    assert [cuts_after(n) for n in (2, 5, 9)] == [[2], [2, 5], [2, 5, 9]]
    assert [cuts_after(n) for n in (2, 5)] == [[2], [2, 5]]


def test_the_oldest_are_dropped() -> None:
    """By number or by size: requests before cuts of the newest, of which the oldest are first."""
    rng = new_rng()
    other, *traces = (make_trace(rng, 16, name=f"r{index}")[0] for index in range(6))

    def ids(found: Traces) -> list[str]:
        return [trace.id for trace in found.newest_first()]

    def holding(added: Any, max_traces: int, max_bytes: int) -> Traces:
        found = Traces(max_traces, max_bytes)
        for trace in added:
            found.add(trace)
        return found

    by_number = holding(traces, 3, 1 << 30)
    assert ids(by_number) == ["r5", "r4", "r3"]
    by_number.add(traces[2])  # evicted again after a preemption
    assert ids(by_number) == ["r3", "r5", "r4"]
    assert ids(holding(traces, 100, traces[3].nbytes + traces[4].nbytes)) == ["r5", "r4"]
    cuts = [make_trace(rng, 16, name="long", num_answer=n)[0] for n in range(4)]
    room = sum(cut.nbytes for cut in cuts[1:])
    (found,) = holding([other, *cuts], 10, room).newest_first()
    assert (found.id, [cut.num_answer for cut in found.cuts]) == ("long", [1, 2, 3])
    assert found.nbytes <= room


@pytest.mark.parametrize("by_set", [False, True])
@pytest.mark.parametrize("pools", [False, True])
def test_reasons_divide_what_is_kept(pools: bool, by_set: bool) -> None:
    """Slowly, token by token, from the definition of each reason."""
    rng = new_rng()
    seen: set[str] = set()
    # One trace alone may keep no token of some reason.
    for _ in range(20):
        trace, kept = make_trace(rng, 39)
        num_candidates = 39 // N * N
        shape = (L, H, num_candidates) if by_set else (num_candidates,)
        preference = rng.choice(3, size=shape, p=[0.6, 0.3, 0.1]).astype(np.uint8)
        unpooled = trace.scores - rng.exponential(size=trace.scores.shape).astype(np.float32)
        # A maximum leaves the scores of some tokens as they are.
        unpooled = np.where(rng.random(unpooled.shape) < 0.3, trace.scores, unpooled)
        trace = replace(
            trace, preferred="recent", preference=preference, unpooled=unpooled if pools else None
        )
        for (layer, head), of_pair in kept.items():
            of_set = preference[layer, head] if by_set else preference
            ranked = [t for t in of_pair if t >= 2 and of_set[t] == 0]
            lowest = min((trace.scores[layer, head, t] for t in ranked), default=0)
            expected: dict[str, list[int]] = {}
            for token in [*sorted(of_pair), *range(num_candidates, 39)]:
                if token >= num_candidates:
                    reason = "tail"
                elif token < 2:
                    reason = "sink"
                elif of_set[token]:
                    reason = {1: "recent", 2: "text"}[int(of_set[token])]
                elif pools and unpooled[layer, head, token] < lowest:
                    reason = "neighbour"
                else:
                    reason = "score"
                expected.setdefault(reason, []).append(token)
            found = trace.layer(layer)
            assert found is not None
            assert found["token_sets"][head]["reasons"] == expected
            seen |= expected.keys()
    assert {"score", "recent", "text", "tail"} <= seen
    assert ("neighbour" in seen) == pools


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("retain", ["text_first", "vision_first", "by_score", "recent_half"])
def test_preference_is_what_comes_before_others(retain: str, guarded: bool) -> None:
    rng = new_rng()
    num_tokens, sinks = 39, 3
    num_candidates = num_tokens // N * N
    is_vision = rng.random(num_tokens) < 0.6
    policy = Mix(retain=retain, granularity="head")
    scored = ScoredPrompt(
        build_policy(policy),
        Prompt(num_tokens, num_candidates, torch.from_numpy(is_vision), sinks),
        torch.from_numpy(rng.normal(size=(L, H, num_candidates)).astype(np.float32)),
        torch.ones(L, H, 1),
        num_heads=H,
        block_size=N,
        floor_pages=1,
    )
    counts = rng.integers(1, num_candidates // N, size=(L, H))
    found = scored.preference(torch.from_numpy(counts), guarded).numpy()
    assert found.dtype == np.uint8
    assert (found.ndim == 3) == (retain == "recent_half")
    found = np.broadcast_to(found, (L, H, num_candidates))
    for layer, head, token in np.ndindex(found.shape):
        num_recent = (counts[layer, head] * N + num_tokens - num_candidates) // 2
        preferred = {
            "text_first": not is_vision[token],
            "vision_first": is_vision[token],
            "by_score": False,
            "recent_half": token >= num_tokens - num_recent,
        }[retain]
        expected = 2 if guarded and not is_vision[token] else int(preferred)
        assert found[layer, head, token] == (0 if token < sinks else expected)


def test_scores_are_short_numbers_that_json_can_say() -> None:
    trace, _ = make_trace(new_rng(), 16)
    special = [np.nan, np.inf, -np.inf, 0.0, 1 / 3, -2e-30, 123456.7, 1e38]
    trace.scores[0, 0, : len(special)] = special
    layer = trace.layer(0)
    text = json.dumps(layer, allow_nan=False)
    scores = json.loads(text)["token_sets"][0]["scores"]
    assert scores[:4] == [None, None, None, 0.0]
    assert scores[4:8] == [0.33333, -2e-30, 123460.0, 1e38]


def test_traces_are_found_by_the_id_that_a_client_sees() -> None:
    rng, traces = new_rng(), Traces(10, 1 << 30)
    for name in ("cmpl-a-01234567", "cmpl-ab-89abcdef", "1_cmpl-n-00000000", "cmpl-a-11111111"):
        traces.add(make_trace(rng, 12, name=name)[0])
    for name, wanted in (
        ("cmpl-a-01234567", "cmpl-a-01234567"),
        ("cmpl-a", "cmpl-a-11111111"),  # the newest
        ("cmpl-n", "1_cmpl-n-00000000"),
        *((unknown, None) for unknown in ("cmpl-", "cmpl.a", "")),  # no pattern
    ):
        trace = traces.find(name)
        assert (trace and trace.id) == wanted
