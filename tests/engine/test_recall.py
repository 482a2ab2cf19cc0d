# SPDX-License-Identifier: Apache-2.0
"""Recall in the engine: tokens and kept positions after every cut and choice are the oracle's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oracle.emulation import Eviction, Oracle
from oracle.recall import Recall
from tests.engine.changes import causes_of, changes_of, restore_soon
from tests.engine.questions import DEBUG, question
from tests.engine.running import Ask, SteppedEngine, engine
from tests.engine.test_pressure import serve
from vllm_tgvkv.shared.prompt import PRESSURE_ROWS

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SIZE = 32
RECALL: dict[str, Any] = {"every": 3, "sketch": 2, "gib": 0.05}
SETTINGS = {"policy": "reach", "when": "always", "debug": DEBUG}


def ask(seed: int, method: str = "reach", tokens: int = 60, **more: Any) -> Ask:
    xargs = {"kv_eviction": method, "kv_eviction_report": 1, "kv_eviction_defer": 4, **more}
    return question(seed, 60 + 13 * seed, 150 + 29 * seed, max_tokens=tokens, xargs=xargs)


def assert_agrees(
    running: SteppedEngine, oracle: Oracle, asked: Ask, output: Any, **more: Any
) -> int:
    """Assert that a request's tokens, kept positions and reported choices are the oracle's.

    Args:
        more: fields of the oracle's `Eviction`.

    Returns:
        The number of its choices.
    """
    config = running.scheduler.eviction_config
    assert config.recall is not None
    recall = Recall(config.recall.every, config.recall.sketch, min(config.recall.every, 4))
    wanted = Eviction(
        asked.xargs.get("kv_eviction_budget", 0.2),
        SIZE,
        method=asked.xargs["kv_eviction"],
        defer=4,
        observation_window=config.observation_window,
        recall=recall if asked.xargs.get("kv_eviction_recall", 1) else None,
        **more,
    )
    report, prompt = (
        output.kv_transfer_params["kv_eviction"],
        oracle.prompt(asked.text, asked.images),
    )
    told = [each["answer_tokens"] for each in report["recalls"]]
    cuts = [
        each["answer_tokens"] for each in report["cuts"] if each["cause"] in ("first", "pressure")
    ]
    kept = running.kept_after_cuts(output.request_id)
    # A cut and a choice never come after the same token.
    by_token = dict(zip(sorted(cuts + told), kept, strict=True))
    chosen = {after: by_token[after] for after in told}
    answer = oracle.answer(prompt, asked.max_tokens, wanted, chosen=chosen)
    assert told == [after for after, _ in answer.choices]
    theirs = dict([(cut.after, cut.selection.kept) for cut in answer.cuts] + answer.choices)
    num_full, num_others, num_kept = len(prompt.token_ids) // SIZE * SIZE, 0, 0
    for after, mine in by_token.items():
        others = int((mine[..., :num_full] & ~theirs[after][..., :num_full]).sum())
        assert not others or after in chosen, f"the cut after {after}"
        num_others, num_kept = num_others + others, num_kept + int(mine.sum())
        assert mine.sum() == theirs[after][..., :num_full].sum(), after
    # Of thousands of scores some are as good as equal, and rounding decides.
    assert num_others <= 1e-3 * num_kept, (num_others, num_kept)
    assert list(output.outputs[0].token_ids) == answer.tokens
    assert not told or any(each["recalled_tokens"] for each in report["recalls"])
    return len(told)


@pytest.mark.parametrize("tier", ["memory", "file"])
def test_choices(tier: str, folder: Path, oracle: Oracle, tmp_path: Path) -> None:
    """Sets and tokens are the oracle's, with any method, budget and wait, from either tier."""
    where = {"folder": str(tmp_path)} if tier == "file" else {}
    recall = {**RECALL, "tier": tier, **where}
    with engine(folder, {**SETTINGS, "recall": recall}, max_num_seqs=4) as running:
        asks = [
            ask(0),
            ask(1, "snapkv"),
            ask(2, kv_eviction_budget=0.4),
            ask(3, kv_eviction_recall=0),
        ]
        outputs = running.run(asks)
        choices = [
            assert_agrees(running, oracle, *each) for each in zip(asks, outputs, strict=True)
        ]
        assert [bool(number) for number in choices] == [True, True, True, False]
        running.assert_forgotten()


@pytest.fixture
def pressed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SteppedEngine]:
    """Yield an engine with little memory, whose requests have their prompts back soon."""
    restore_soon(monkeypatch)
    options = {"max_model_len": 640, "max_num_batched_tokens": 160, "max_num_seqs": 6}
    settings = {**SETTINGS, "when": "pressure", "budget": 0.1, "recall": RECALL}
    more = {"num_gpu_blocks_override": 48, "enable_prefix_caching": True}
    with engine(folder, settings, **options, **more, scheduling_policy="priority") as running:
        yield running


def test_with_pressure(pressed: SteppedEngine, oracle: Oracle) -> None:
    """Requests are cut, choose, are cut further, whole again, cut again, preempted."""
    asks = [ask(seed, ("reach", "snapkv")[seed % 2], 150) for seed in range(4)]
    outputs = serve(pressed, asks, crowds={30: 1, 70: 1, 110: 2}, preempt_at=(90,))
    causes, choices = [causes_of(output) for output in outputs], 0
    for asked, output in zip(asks, outputs, strict=True):
        changes = changes_of(output, SIZE, PRESSURE_ROWS)
        choices += assert_agrees(pressed, oracle, asked, output, changes=changes)
    assert choices > 20
    flat = [cause for each in causes for cause in each]
    assert {"pressure", "restored", "preempted"} <= set(flat), causes
