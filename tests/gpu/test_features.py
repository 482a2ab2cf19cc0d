# SPDX-License-Identifier: Apache-2.0
"""Gates, learned sinks, sleep mode and fp8 caches on a CUDA device, as in `test_engine.py`.

What these features are without a GPU is in the files of `tests/engine` that have their names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.attention.backends.fa_utils import (
    flash_attn_supports_kv_cache_dtype,
    flash_attn_supports_sinks,
)

from oracle.emulation import Eviction, Oracle
from oracle.methods import METHODS
from tests.engine import test_fp8
from tests.engine.gated import gated_oracle
from tests.engine.running import Ask, engine
from tests.engine.test_engine import album, tgv
from tests.gpu.test_engine import (
    OPTIONS,
    SCHEDULE,
    assert_answers_close,
    assert_runner,
    requests,
)
from tests.models import LLAVA_IMAGE, random_text
from vllm_tgvkv.shared.prompt import ANSWER_ROWS

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.slow]

SIZE = OPTIONS["block_size"]
CUTS: dict[str, Any] = {"defer": 5, "schedule": ((12, 0.3),), "answer_rows": ANSWER_ROWS}
"""`SCHEDULE` after its first budget, as the oracle has it."""
TOLD: dict[str, Any] = {"logprobs": 1, "xargs": {"kv_eviction_report": 1}}
RECORDS = {"debug": {"record_kept": True}}
GRAPHS = {**OPTIONS, "enforce_eager": False}


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llava", image_size=112, head_size=64)


def test_gates(folder: Path, tmp_path: Path, runner: str) -> None:
    """In steps with prompts and in graphs."""
    oracle = gated_oracle(folder, tmp_path, "rg10")
    settings = {"policy": "trimkv", "gates": str(tmp_path), "decode": SCHEDULE, **RECORDS}
    asks = [album(seed, 30, 200 + 40 * seed, **TOLD) for seed in range(3)]
    with engine(folder, settings, **GRAPHS) as running:
        assert_runner(running, runner)
        wanted = Eviction(0.6, SIZE, method=METHODS["trimkv"], **CUTS)
        assert_answers_close(running, oracle, asks, running.run(asks), wanted)


@pytest.mark.skipif(
    not flash_attn_supports_sinks(), reason="FlashAttention has learned sinks from version 3 on"
)
@pytest.mark.parametrize("decode_kernel", ["stock", "triton"])
def test_learned_sinks(tiny_model: Callable[..., Path], runner: str, decode_kernel: str) -> None:
    folder = tiny_model("gpt_oss", head_size=64)
    oracle = Oracle(folder)
    oracle.model.config.image_token_id = -1
    settings = {"policy": "reach", "when": "always", "text_only": "evict", "min_prompt_tokens": 64}
    settings |= {"decode": SCHEDULE, "decode_kernel": decode_kernel, **RECORDS}
    asks = [Ask(random_text(seed, 190 + 60 * seed), **TOLD) for seed in range(3)]
    with engine(folder, settings, **GRAPHS) as running:
        assert_runner(running, runner)
        wanted = Eviction(0.6, SIZE, method=METHODS["reach"], text_only="evict", **CUTS)
        assert_answers_close(running, oracle, asks, running.run(asks), wanted)


def test_sleep_mode(folder: Path) -> None:
    """Levels 1 and 2: one request has been cut when the engine falls asleep, another waits.

    vLLM allows one engine with sleep mode for each process, so only its default runner is tried.
    """
    settings = {"policy": "reach", "when": "always", "decode": SCHEDULE, **RECORDS}
    oracle, wanted = Oracle(folder), Eviction(0.6, SIZE, method=METHODS["reach"], **CUTS)
    with engine(folder, settings, enable_sleep_mode=True, **GRAPHS) as running:
        for level in (1, 2):
            # New images: vLLM loses track of one that is requested again around a reset.
            asks = [album(10 * level + i, 30, 200 + 40 * i, **TOLD) for i in range(2)]
            names = [running.add(asks[0])]
            while not running.evictor.regions.num_live:
                running.step()
            names.append(running.add(asks[1]))
            for _ in range(3):
                running.step()
            assert running.evictor.regions.num_live == 1
            running.llm.sleep(level=level, mode="keep")
            running.llm.wake_up(tags=["weights"])
            if level == 2:
                running.llm.collective_rpc("reload_weights")
            running.llm.wake_up(tags=["kv_cache"])
            finished = running.drain()
            assert_answers_close(running, oracle, asks, [finished[n] for n in names], wanted)


@pytest.mark.parametrize("decode_kernel", ["auto", "triton"])
def test_fp8_caches(
    tiny_model: Callable[..., Path], tmp_path: Path, runner: str, decode_kernel: str
) -> None:
    """In graphs, with scales of each layer for queries, keys and values."""
    if not flash_attn_supports_kv_cache_dtype(head_size=64):
        pytest.skip("vLLM's FlashAttention reads no fp8 on this GPU")
    plain = tiny_model("llava", image_size=112, head_size=64)
    folder = test_fp8.with_scales(plain, tmp_path / "fp8")
    settings = tgv("head", decode_kernel=decode_kernel)
    with (
        test_fp8.stored_oracle(plain, is_flash=True) as oracle,
        engine(folder, settings, enforce_eager=False, **OPTIONS) as running,
    ):
        assert_runner(running, runner)
        test_fp8.assert_close(running, oracle, requests(LLAVA_IMAGE))
