# SPDX-License-Identifier: Apache-2.0
"""Methods that go by trained gates: tokens and kept positions of real engines, as the oracle's.

The gates are random. Freed blocks are filled with NaN, what the gates said of their tokens as well.
KVzap is in `unit/test_later_cuts.py`: equal tokens have equal scores in the first layer, so that
rounding would decide between them here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle.methods import METHODS
from tests.engine import flash_on_cpu, test_cuts
from tests.engine.gated import gated_oracle
from tests.engine.questions import DEBUG
from tests.engine.running import engine
from tests.engine.test_cuts import (
    CACHED,
    CHUNKED,
    LATER,
    SCHEDULE,
    SIZE,
    Case,
    assert_agrees,
    preempt_sometimes,
    step_xargs,
)
from tests.models import LLAVA_IMAGE, QWEN_IMAGE
from vllm_tgvkv.shared.prompt import ANSWER_ROWS

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ATTENDED = {"base": "dbtrimkv", "score": "trimkv_votes"}
MIXES = {"attended": replace(METHODS["dbtrimkv"], score="trimkv_votes")}
"""Those of the oracle."""


@pytest.fixture(autouse=True)
def _attended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell the oracle of the mix, and draw the same gates every time."""
    torch.manual_seed(5)
    known = test_cuts.oracles
    monkeypatch.setattr(test_cuts, "oracles", lambda name: MIXES.get(name) or known(name))


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=pytest.mark.nightly), "cuda"])
def test_retention_over_several_cuts(
    folder: Path, tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With chunks, prefix-cache hits, preemptions and other methods in the batch.

    Also over the attention backend of CUDA, with decode steps that are replayed.
    """
    if backend == "cuda":
        flash_on_cpu.pretend(monkeypatch, flash_on_cpu.ReplayOnCPUWorker)
    gates, oracle = str(tmp_path), gated_oracle(folder, tmp_path, "rg10")
    settings = {
        "policy": "trimkv",
        "gates": gates,
        "methods": {"attended": ATTENDED},
        "decode": {"schedule": SCHEDULE},
        "debug": DEBUG,
    }
    names = ("trimkv", "dbtrimkv", "attended", "snapkv", "dbtrimkv", "trimkv")
    cases = [Case(name, 6, 0.6) for name in names]
    more: dict[str, Any] = {"schedule": LATER, "answer_rows": ANSWER_ROWS}
    with engine(folder, settings, **CACHED, **CHUNKED) as running:
        asks = [replace(c.ask(i), xargs=step_xargs(c)) for i, c in enumerate(cases)]
        hits = {}
        for index in (0, 1, 3):
            for _ in range(2):  # the second time with a hit
                (output,) = running.run([asks[index]])
                one = ([cases[index]], [output], [asks[index]])
                assert_agrees(running, oracle, *one, **more)
            hits[names[index]] = output.num_cached_tokens, len(output.prompt_token_ids)
        # No token of the prompt votes, so a hit is as long as in stock vLLM.
        for name in ("trimkv", "dbtrimkv"):
            assert hits[name][0] == (hits[name][1] - 1) // SIZE * SIZE
        assert 0 < hits["snapkv"][0] < (hits["snapkv"][1] - 1) // SIZE * SIZE
        running.llm.reset_prefix_cache()
        preempt_sometimes(running, monkeypatch)
        outputs = running.run(asks)
        assert_agrees(running, oracle, cases, outputs, asks, **more)
        assert running.preempted


def test_retention_in_a_compiled_model(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile, vLLM's default: the gates are outside of what is compiled.

    With chunks, positions in three dimensions, and a ceiling.
    """
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # traced, and not turned into C++
    folder = tiny_model("qwen3_vl")
    gates, oracle = str(tmp_path), gated_oracle(folder, tmp_path, "rg")
    settings = {
        "policy": "dbtrimkv",
        "budget": 0.3,
        "gates": gates,
        "decode": {"max_tokens": 96},
        "debug": DEBUG,
    }
    cases = [Case("dbtrimkv", 3), Case("trimkv", 0, 0.9), Case("snapkv", 2)]
    with engine(folder, settings, enforce_eager=False, **CHUNKED) as running:
        asks = []
        for index, case in enumerate(cases):
            ask = case.ask(index)
            text = ask.text.replace(LLAVA_IMAGE, QWEN_IMAGE)
            asks.append(replace(ask, text=text, max_tokens=150))
        outputs = running.run(asks)
        more = {"ceiling": 96, "buffer": 24, "answer_rows": ANSWER_ROWS}
        assert_agrees(running, oracle, cases, outputs, asks, **more)
