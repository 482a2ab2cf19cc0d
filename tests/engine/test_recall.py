# SPDX-License-Identifier: Apache-2.0
"""Recall in the engine: tokens and kept positions after every choice are the oracle's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle.emulation import Eviction, Oracle
from oracle.recall import Recall
from tests.engine.questions import DEBUG, question
from tests.engine.running import Ask, SteppedEngine, engine
from vllm_tgvkv.shared.prompt import PRESSURE_ROWS

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SIZE = 32
EVERY, BITS = 3, 2


@pytest.fixture(scope="module", params=["memory", "file"])
def running(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SteppedEngine]:
    recall: dict[str, Any] = {"every": EVERY, "sketch": BITS, "tier": request.param, "gib": 0.05}
    if request.param == "file":
        recall["folder"] = str(tmp_path_factory.mktemp("tier"))
    settings = {"policy": "reach", "when": "always", "recall": recall, "debug": DEBUG}
    with engine(folder, settings, max_num_seqs=4) as started:
        yield started


def ask(seed: int, method: str = "reach", tokens: int = 60, **more: Any) -> Ask:
    xargs = {"kv_eviction": method, "kv_eviction_report": 1, "kv_eviction_defer": 4, **more}
    return question(seed, 60 + 13 * seed, 150 + 29 * seed, max_tokens=tokens, xargs=xargs)


def test_choices(running: SteppedEngine, oracle: Oracle) -> None:
    asks = [ask(0), ask(1, "snapkv"), ask(2, kv_eviction_budget=0.4), ask(3, kv_eviction_recall=0)]
    outputs = running.run(asks)
    for asked, output in zip(asks, outputs, strict=True):
        recall = Recall(EVERY, BITS, min(EVERY, PRESSURE_ROWS)) if asked is not asks[3] else None
        wanted = Eviction(
            asked.xargs.get("kv_eviction_budget", 0.2),
            SIZE,
            method=asked.xargs["kv_eviction"],
            defer=4,
            observation_window=128,
            recall=recall,
        )
        prompt = oracle.prompt(asked.text, asked.images)
        answer = oracle.answer(prompt, asked.max_tokens, wanted)
        num_full = len(prompt.token_ids) // SIZE * SIZE
        kept = running.kept_after_cuts(output.request_id)
        theirs = [cut.selection.kept for cut in answer.cuts] + [
            found for _, found in answer.choices
        ]
        told = output.kv_transfer_params["kv_eviction"]["recalls"]
        assert [each["answer_tokens"] for each in told] == [after for after, _ in answer.choices]
        for number, (one, other) in enumerate(zip(kept, theirs, strict=True)):
            assert torch.equal(one[..., :num_full], other[..., :num_full]), number
        assert list(output.outputs[0].token_ids) == answer.tokens
        assert bool(answer.choices) == (recall is not None)
        assert recall is None or any(each["recalled_tokens"] for each in told)
