# SPDX-License-Identifier: Apache-2.0
"""Answers under pressure, compared with the oracle's: with the changes that the reports tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from oracle.emulation import Answer, Change, Eviction, Oracle
from tests.engine.running import Ask, SteppedEngine
from vllm_tgvkv.scheduler import pressure
from vllm_tgvkv.shared.prompt import PRESSURE_ROWS


def restore_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests have their prompts back soon after a cut, however little is free."""
    for name, value in (("_RESTORE_EVERY", 1), ("_RESTORE_AFTER", 6), ("_ROOM", 0.0)):
        monkeypatch.setattr(pressure, name, value)


def causes_of(output: Any) -> list[str]:
    """Return the causes of a request's changes, in order."""
    return [cut["cause"] for cut in output.kv_transfer_params["kv_eviction"]["cuts"]]


def changes_of(output: Any, size: int, num_rows: int | None = None) -> tuple[Change, ...]:
    """Return the changes that a request's report tells of, for blocks of `size` tokens.

    Args:
        num_rows: rows that vote; by default the rows of the request's wait, or none.
    """
    report = output.kv_transfer_params["kv_eviction"]
    if num_rows is None:
        num_rows = report["defer"] or PRESSURE_ROWS
    num_prompt, found = report["prompt_tokens"], []
    for cut in report["cuts"]:
        after = cut["answer_tokens"]
        if cut["cause"] == "pressure":
            num_tail = -(-(num_prompt + after) // size) - num_prompt // size
            num_kept = cut["blocks_after"] - num_tail - report["sketch_blocks"]
            found.append(Change(after, num_kept, num_rows))
        else:
            assert cut["cause"] in ("restored", "preempted")
            found.append(Change(after, None, recomputes=cut["cause"] == "preempted"))
    return tuple(found)


def assert_kept(
    kept: Sequence[torch.Tensor], answer: Answer, num_prompt: int, size: int, case: Any
) -> None:
    """Assert that a request's regions held what the oracle's cuts leave, bool [L, H, n]."""
    num_full = num_prompt // size * size
    assert len(kept) == len(answer.cuts), case
    for ours, cut in zip(kept, answer.cuts, strict=True):
        theirs = cut.selection.kept[..., :num_full]
        assert torch.equal(ours[..., :num_full], theirs), f"{case}: the cut after {cut.after}"
        assert not ours[..., num_full:].any(), case


def assert_changes_agree(
    running: SteppedEngine,
    oracle: Oracle,
    asks: Sequence[Ask],
    outputs: Sequence[Any],
    kept_of: Callable[[str], Sequence[torch.Tensor]] | None = None,
    stages: Sequence[int] | None = None,
    **more: Any,
) -> list[Answer]:
    """Assert that tokens and kept positions are the oracle's with the changes of the reports.

    Args:
        kept_of: returns what a request's region held after each cut; by default the engine's own.
        stages: layers of each pipeline stage.
        more: fields of the oracle's `Eviction`.
    """
    answers, size = [], running.scheduler.tokens_per_block
    config = running.scheduler.eviction_config
    for index, (ask, output) in enumerate(zip(asks, outputs, strict=True)):
        name = ask.xargs.get("kv_eviction", config.policy)
        wanted = Eviction(
            1.0,
            size,
            config.build_policy(name).granularity,
            method=config.methods[name].base if name in config.methods else name,
            sinks=config.sinks,
            observation_window=config.observation_window,
            text_only=config.text_only,
            changes=changes_of(output, size),
            **more,
        )
        prompt = oracle.prompt(ask.text, ask.images)
        tokens = list(output.outputs[0].token_ids)
        answer = oracle.answer(prompt, ask.max_tokens, wanted, stages, guess=tokens)
        kept = (kept_of or running.kept_after_cuts)(output.request_id)
        case = f"request {index}, {name}"
        assert_kept(kept, answer, len(prompt.token_ids), size, case)
        assert tokens == answer.tokens, case
        answers.append(answer)
    return answers
