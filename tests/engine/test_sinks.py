# SPDX-License-Identifier: Apache-2.0
"""Models with learned attention sinks: a tiny gpt-oss against Hugging Face's of the same weights.

Every other layer has a window. On a CPU, and with the CUDA backend over a pretended FlashAttention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle.emulation import Answer, Eviction, Oracle
from tests.engine import flash_on_cpu
from tests.engine import test_recall as recalls
from tests.engine.questions import DEBUG
from tests.engine.running import Ask, SteppedEngine, assert_cuts_agree, engine
from tests.gpu.conftest import multiply_bfloat16
from tests.models import random_text
from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.shared.prompt import ANSWER_ROWS
from vllm_tgvkv.worker.warm_up import warm_up

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]

BLOCK_SIZE = 16
SETTINGS: dict[str, Any] = {
    "policy": "snapkv",
    "text_only": "evict",
    "min_prompt_tokens": 64,
    "decode": {"on_request": True},
    "debug": {**DEBUG, "evict_at_full_budget": True},
}
OPTIONS = {
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": 600,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 160,
    "enable_prefix_caching": True,
}
TOKENS = 20
CASES: list[tuple[str, float, dict[str, Any]]] = [
    ("snapkv", 0.3, {}),
    ("snapkv", 0.4, {"schedule": ((6, 0.2),), "answer_rows": ANSWER_ROWS}),
    ("h2o", 0.2, {"defer": 3}),
    ("adakv", 0.1, {}),
    ("rkv", 0.3, {}),
    ("elastic", 0.3, {}),
]
"""Methods, budgets, and further fields of the oracle's `Eviction`."""


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("gpt_oss")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    found = Oracle(folder)
    found.model.config.image_token_id = -1
    assert found.sinks is not None
    assert found.sinks.shape == (2, 4)
    return found


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[SteppedEngine]:
    with engine(folder, SETTINGS, **OPTIONS) as running:
        yield running


def stable(oracle: Oracle, seed: int, method: str, budget: float, own: Any) -> tuple[Ask, Answer]:
    """Return a request whose cuts do not depend on rounding, and the oracle's answer."""
    xargs = {"kv_eviction": method, "kv_eviction_report": 1}
    if "schedule" in own:
        cuts = ((0, budget), *own["schedule"])
        xargs["kv_eviction_schedule"] = ",".join(f"{after}:{share}" for after, share in cuts)
    else:
        xargs |= {"kv_eviction_budget": budget, "kv_eviction_defer": own.get("defer", 0)}
    given = {"observation_window": 128, "method": method, "text_only": "evict"}
    wanted = Eviction(budget, BLOCK_SIZE, **given, **own)
    for attempt in range(10):
        text = random_text(seed + 100 * attempt, 190 + 23 * seed)
        answer = oracle.answer(oracle.prompt(text), TOKENS, wanted)
        if all(cut.is_stable() for cut in answer.cuts):
            return Ask(text, (), TOKENS, xargs, arrival=2 * seed), answer
    raise AssertionError(f"{method}: no inputs are good")


def assert_serves_as_the_oracle(running: SteppedEngine, oracle: Oracle) -> None:
    """Chunks and decodes in one batch, then again with preemptions: tokens and kept positions.

    A preempted request recomputes its answer, several ragged tokens at a time.
    """
    made = [stable(oracle, seed, *case) for seed, case in enumerate(CASES)]
    asks, preempted = [asked for asked, _ in made], set[str]()

    def disturb() -> None:
        for request in list(running.scheduler.running):
            if request.num_output_tokens == 9 and request.request_id not in preempted:
                preempted.add(request.request_id)
                running.preempt(request)

    for after_step in (lambda: None, disturb):
        names = [running.add(asked) for asked in asks]
        outputs = running.drain(after_step)
        for name, case, (_, answer) in zip(names, CASES, made, strict=True):
            kept = running.kept_after_cuts(name)
            assert_cuts_agree(kept, answer, outputs[name], BLOCK_SIZE, whole=False, case=case)
    assert len(preempted) == len(asks)


def test_tokens_and_kept_positions_are_the_oracles(served: SteppedEngine, oracle: Oracle) -> None:
    assert_serves_as_the_oracle(served, oracle)


def test_sinks_decide_what_is_kept(oracle: Oracle) -> None:
    """Without them the tests here would compare something else."""
    prompt = oracle.prompt(random_text(3, 300))
    asked, answer = stable(oracle, 0, *CASES[0])
    # Under Hugging Face's own attention, which `generate` runs.
    assert answer.tokens == oracle.generate(oracle.prompt(asked.text), TOKENS, *answer.kept)
    whole = oracle.attention(prompt).sum(-1)
    assert whole.min() < 0.1
    assert whole.mean() < 0.9
    wanted = Eviction(0.3, BLOCK_SIZE, method="h2o", text_only="evict")
    kept, tokens = oracle.select(prompt, wanted).kept, oracle.generate(prompt, TOKENS)
    layers = [oracle.model.model.layers[i].self_attn for i in oracle.attending]
    sinks = [layer.sinks.data for layer in layers]
    for layer in layers:
        layer.sinks.data = torch.full_like(layer.sinks, -torch.inf)
    without = oracle.select(prompt, wanted).kept, oracle.generate(prompt, TOKENS)
    for layer, data in zip(layers, sinks, strict=True):
        layer.sinks.data = data
    assert not torch.equal(kept, without[0])
    assert tokens != without[1]


@pytest.mark.parametrize("kernel", ["stock", "triton"])
def test_the_cuda_backend(
    folder: Path, oracle: Oracle, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode steps get the metadata of the first step of their size, as a graph would."""
    flash_on_cpu.pretend(monkeypatch, flash_on_cpu.ReplayOnCPUWorker)
    if kernel == "triton":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        multiply_bfloat16(monkeypatch)
    with engine(folder, {**SETTINGS, "decode_kernel": kernel}, **OPTIONS) as running:
        warm_up(running.evictor)  # as the GPU's worker does when it starts
        if kernel == "stock":
            assert_serves_as_the_oracle(running, oracle)
            return
        asked, answer = stable(oracle, 3, *CASES[3])
        monkeypatch.setattr(gpu, "on_cpu", True)
        (output,) = running.run([replace(asked, max_tokens=7)])  # interpreted, so a few
        assert list(output.outputs[0].token_ids) == answer.tokens[:7]


def test_tokens_come_back(folder: Path, oracle: Oracle) -> None:
    """By the attention of rows with sinks to the sketch of a prompt."""
    settings = {**SETTINGS, "policy": "reach", "when": "always", "recall": recalls.RECALL}
    with engine(folder, settings, **{**OPTIONS, "block_size": recalls.SIZE}) as running:
        made = recalls.ask(2, tokens=30)
        asked = Ask(random_text(7, 400), (), 30, made.xargs)  # without sinks 3 % would differ
        (output,) = running.run([asked])
        assert recalls.assert_agrees(running, oracle, asked, output, text_only="evict")
