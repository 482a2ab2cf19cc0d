# SPDX-License-Identifier: Apache-2.0
"""The CUDA attention backend in real engines, without FlashAttention itself (`flash_on_cpu.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends import flash_attn

from oracle.emulation import Oracle
from tests.engine import flash_on_cpu, test_fp8, test_recall, test_speculation
from tests.engine.questions import MIXES, album, budget, ladder, tgv
from tests.engine.running import Ask, SteppedEngine, assert_agrees, assert_close, engine
from tests.engine.test_cuts import LATER, Case, step_xargs
from tests.engine.test_cuts import assert_agrees as assert_cuts_agree
from tests.engine.test_engine import (
    SMALL,
    assert_preemption_changes_no_token,
    test_extreme_shares_make_ragged_caches,  # noqa: F401 - runs here as well
    test_lengths_around_block_borders,  # noqa: F401
)
from tests.gpu.conftest import multiply_bfloat16
from tests.models import random_text
from tests.unit.test_recall import LateCuda
from vllm_tgvkv.attention import cuda as attention_cuda
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.recall import tier
from vllm_tgvkv.recall.tier import PinnedTier
from vllm_tgvkv.shared.prompt import ANSWER_ROWS
from vllm_tgvkv.worker.warm_up import warm_up

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TABLE_BYTES_OF_A_LAYER = 8 * 2 * (1024 // 32) * 4
"""Requests, KV heads, blocks of 32 tokens, bytes of an entry."""


@pytest.fixture(scope="module", autouse=True)
def flash() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        flash_on_cpu.pretend(monkeypatch, flash_on_cpu.ReplayOnCPUWorker)
        # Preempted requests take several slices; tables of 8 rows hold three of the four layers,
        # and those of fewer rows more; 3 rows or more take several launches.
        monkeypatch.setattr(attention_cuda, "_REPLAY_ROWS", 16)
        monkeypatch.setattr(attention_cuda, "_TABLE_BYTES", 3 * TABLE_BYTES_OF_A_LAYER)
        monkeypatch.setattr(attention_cuda, "_MAX_SPLIT_SEQUENCES", 5)
        monkeypatch.setattr(attention_cuda, "_KEYS_PER_LAUNCH", 16)
        yield


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("layer", "stock"), marks=pytest.mark.nightly),
        ("head", "stock"),
        pytest.param(("head", "triton"), marks=pytest.mark.nightly),
    ],
    ids="-".join,
)
def evicting(request: pytest.FixtureRequest, folder: Path) -> Iterator[SteppedEngine]:
    """Run an engine whose decode steps are treated like graphs."""
    granularity, kernel = request.param
    decode = {"on_request": True}
    settings = tgv(granularity, decode=decode, decode_kernel=kernel)
    settings["methods"] = {**settings.get("methods", {}), **MIXES}
    with engine(folder, settings) as running:
        warm_up(running.evictor)  # as the GPU's worker does when it starts
        yield running


@pytest.mark.parametrize(
    ("method", "budget"),
    [("random", 0.1), *product(("tgv", "h2o", "elastic", "pyramidkv"), (0.1, "auto:0.9"))],
)
def test_a_warm_up_leaves_nothing(
    evicting: SteppedEngine, method: str, budget: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any method and budget of the server."""
    evictor = evicting.evictor
    config = EvictionConfig.from_mapping({"policy": method, "budget": budget})
    monkeypatch.setattr(evictor, "config", config)
    evictor.pool.raw.zero_()
    warm_up(evictor)
    assert not evictor.pool.raw.any()
    assert not evictor.regions.num_live
    assert not evictor.regions.num_token_blocks.any()
    assert not any((evictor.observations, evictor.ended, evictor.kept))


def test_it_is_the_cuda_backend(evicting: SteppedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call per layer in every decode step, over pages of one head; none with our kernel."""
    shape, kernel = evicting.evictor.shape, evicting.evictor.config.decode_kernel
    sequences: list[int] = []

    def attend(**arguments: object) -> torch.Tensor:
        keys, table = arguments["k"], arguments["block_table"]
        assert isinstance(keys, torch.Tensor)
        assert isinstance(table, torch.Tensor)
        if arguments["max_seqlen_q"] == 1:
            sequences.append(len(table))
            assert keys.shape[1:] == (shape.block_size, 1, shape.head_size)
            assert keys.stride()[1:] == (2 * shape.head_size, 2 * shape.head_size, 1)
        return flash_on_cpu.attend(**arguments)

    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", attend)
    evicting.run([album(70, 20, 200, max_tokens=11)])
    num_calls = shape.num_layers * 10 if kernel == "stock" else 0
    assert sequences == [shape.num_heads] * num_calls


def test_flash_attention_4_computes_prompts(
    folder: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets what it takes, and no virtual sequences: these are for our kernel."""
    rows: list[int] = []

    def attend(**given: Any) -> torch.Tensor:
        query, keys, values, out = (given[name] for name in ("q", "k", "v", "out"))
        starts, lengths, table = (
            given[name] for name in ("cu_seqlens_q", "seqused_k", "block_table")
        )
        num_rows = len(lengths)
        # As `_flash_attn_fwd` of its `interface.py` checks, and 16 bytes for each copy.
        assert given["fa_version"] == 4
        assert keys.shape == values.shape
        assert keys.shape[1:] == (32, 2, query.shape[2])
        assert out.shape == query.shape
        assert table.shape == (num_rows, table.shape[1])
        assert table.stride(1) == 1
        assert starts.shape == (num_rows + 1,)
        for tensor in (starts, lengths, table):
            assert tensor.dtype == torch.int32
        for tensor in (starts, lengths):
            assert tensor.stride(0) == 1
        for tensor in (query, keys, values, out):
            assert tensor.stride(-1) == 1
            assert tensor.data_ptr() % 16 == 0
            assert not any(stride * tensor.itemsize % 16 for stride in tensor.stride()[:-1])
        for name in ("scheduler_metadata", "alibi_slopes", "s_aux", "mask_mod"):
            assert given[name] is None
        rows.append(num_rows)
        return flash_on_cpu.attend(**given)

    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", attend)
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda *args, **kwargs: 4)
    with engine(folder, tgv("head"), max_num_batched_tokens=64, **SMALL) as running:
        assert running.evictor.decode_kernel == "triton"
        assert_agrees(running, oracle, ladder())
    assert rows


def graph_asks() -> list[Ask]:
    return [
        *ladder(),
        Ask(random_text(53, 150), max_tokens=40, arrival=20),
        album(55, 20, 200, arrival=110, max_tokens=20),
    ]


def test_decode_steps_are_right_as_graphs(evicting: SteppedEngine, oracle: Oracle) -> None:
    """Metadata of the first step of each size are right for any later batch of that size."""
    before = flash_on_cpu.ReplayingBuilder.num_replays
    assert_agrees(evicting, oracle, graph_asks())
    assert flash_on_cpu.ReplayingBuilder.num_replays > before + 100


def test_cuts_of_answers_are_right_with_graphs(evicting: SteppedEngine, oracle: Oracle) -> None:
    """Steps that wait are replayed, and store queries; those that cut are not."""
    schedule = {"kv_eviction_schedule": "6:0.6,30:0.4,61:0.2"}
    cases = [Case("tgv", 5), Case("adakv", 40), Case("h2o", 6), Case("answer", 12)]
    asks = [case.ask(index) for index, case in enumerate(cases)]
    for name in ("tgv", "adakv", "h2o"):
        cases.append(Case(name, 6, 0.6, {"schedule": LATER}))
        asks.append(replace(cases[-1].ask(7), xargs={**step_xargs(cases[-1]), **schedule}))
    for name in ("tgv", "adakv", "snapkv"):
        cases.append(Case(name, 3, 0.3, {"ceiling": 64, "buffer": 16}))
        ask = cases[-1].ask(9)
        asks.append(replace(ask, xargs={**ask.xargs, "kv_eviction_max_tokens": 64}))
    builder = flash_on_cpu.ReplayingBuilder
    before = builder.num_replays, builder.num_storing
    outputs = evicting.run(asks)
    assert_cuts_agree(evicting, oracle, cases, outputs, asks, answer_rows=ANSWER_ROWS)
    assert builder.num_replays > before[0] + 30
    assert builder.num_storing > before[1] + 15


@pytest.fixture(scope="module")
def undrafted(
    tiny_model: Callable[..., Path],
) -> tuple[Path, list[test_speculation.Answer], list[test_speculation.Answer]]:
    """Return the model of the test below, its answers without drafts, and those that waited."""
    folder = tiny_model("llava", image_size=112, initializer_range=0.055)
    with engine(folder, test_speculation.SETTINGS) as running:
        alone = test_speculation.answers(running, test_speculation.ASKS)
        waited = test_speculation.answers(running, test_speculation.WAITING)
    oracle = Oracle(folder)
    for ask, answer in zip(test_speculation.ASKS[:3], alone, strict=False):
        prompt = oracle.prompt(ask.text, ask.images)
        tokens = oracle.generate(prompt, ask.max_tokens, answer.kept, guess=answer.tokens)
        assert tokens == answer.tokens
    return folder, alone, waited


@pytest.mark.parametrize(
    ("method", "decode_kernel"),
    [
        ("ngram", "stock"),
        ("draft_model", "stock"),
        pytest.param("ngram", "triton", marks=pytest.mark.nightly),
        *(pytest.param(name, "stock", marks=pytest.mark.nightly) for name in ("eagle", "eagle3")),
    ],
)
def test_drafts_change_neither_tokens_nor_what_is_kept(
    undrafted: tuple[Path, list[test_speculation.Answer], list[test_speculation.Answer]],
    method: str,
    decode_kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps in which all requests have as many drafts are replayed; preemptions leave others.

    Some of these steps store queries of requests that wait.
    """
    folder, alone, waited = undrafted
    settings = {**test_speculation.SETTINGS, "decode_kernel": decode_kernel}
    builder = flash_on_cpu.ReplayingBuilder
    before = builder.num_replays, builder.num_storing
    with engine(
        folder,
        settings,
        speculative_config=test_speculation.speculative_config(folder, method),
        max_num_batched_tokens=134,
        max_num_seqs=6,
        num_gpu_blocks_override=64,
        disable_log_stats=False,
    ) as running:
        test_speculation.preempt_often(running, monkeypatch)
        if method == "ngram":
            test_speculation.draft_at_random(running, [*alone, *waited], monkeypatch, fills=True)
        test_speculation.assert_same(running, alone)
        found = test_speculation.answers(running, test_speculation.WAITING)
        for answer, wanted in zip(found, waited, strict=True):
            assert answer.tokens == wanted.tokens
            assert torch.equal(answer.kept, wanted.kept)
    assert builder.num_replays > before[0] + 50
    assert builder.num_storing > before[1] + 5


def test_chunks_decodes_and_preemptions_scheduled_ahead(folder: Path, oracle: Oracle) -> None:
    """Prefill chunks in stock attention together with ragged decodes, in a small pool."""
    asks = [
        *ladder(),
        album(52, 3, 200, arrival=9, xargs=budget(0.5)),
        Ask(random_text(53, 150), max_tokens=30, arrival=12),
        album(54, 100, 64, arrival=14),
    ]
    with pytest.MonkeyPatch.context() as monkeypatch:
        flash_on_cpu.pretend(monkeypatch)
        flash_on_cpu.schedule_ahead(monkeypatch)
        with engine(folder, tgv("head"), max_num_batched_tokens=64, **SMALL) as running:
            assert running.core.async_scheduling
            assert_agrees(running, oracle, asks)
            assert_preemption_changes_no_token(running, oracle)


@pytest.mark.parametrize(
    "decode_kernel", ["triton", pytest.param("stock", marks=pytest.mark.nightly)]
)
def test_every_kernel_as_an_interpreted_triton_kernel(
    folder: Path, oracle: Oracle, decode_kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(gpu, "on_cpu", True)
    asks = [replace(ask, max_tokens=10) for ask in graph_asks()[2:4]]
    before = flash_on_cpu.ReplayingBuilder.num_replays
    with engine(folder, tgv("head", decode_kernel=decode_kernel), block_size=16) as running:
        assert_agrees(running, oracle, asks)
    assert flash_on_cpu.ReplayingBuilder.num_replays > before + 9


@pytest.mark.parametrize("kernels", ["pytorch", "triton"])
def test_recall_scheduled_ahead(
    folder: Path, oracle: Oracle, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choices follow steps that are graphs; the tier is a GPU's, whose copies end late."""
    LateCuda(monkeypatch)
    monkeypatch.setattr(flash_on_cpu.ReplayOnCPUWorker, "memory_tier", PinnedTier)
    monkeypatch.setattr(tier, "_WORKSPACE_BYTES", 1)
    if kernels == "triton":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(gpu, "on_cpu", True)
        multiply_bfloat16(monkeypatch)
    flash_on_cpu.schedule_ahead(monkeypatch)
    settings = {**test_recall.SETTINGS, "recall": test_recall.RECALL}
    asks = [test_recall.ask(seed, method, 25) for seed, method in enumerate(("reach", "snapkv"))]
    before = flash_on_cpu.ReplayingBuilder.num_storing
    with engine(folder, settings, max_num_seqs=4) as running:
        assert running.core.async_scheduling
        warm_up(running.evictor)
        for asked, output in zip(asks, running.run(asks), strict=True):
            assert test_recall.assert_agrees(running, oracle, asked, output) > 5
    assert flash_on_cpu.ReplayingBuilder.num_storing > before + 9


@pytest.mark.nightly
def test_bfloat16_is_close_to_the_oracle(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """The comparison that `tests/gpu/test_engine.py` makes on a GPU."""
    folder = tiny_model("llava", image_size=112, head_size=64)
    asks = [replace(ask, logprobs=1) for ask in ladder()]
    with engine(folder, tgv("head"), block_size=16, dtype="bfloat16") as running:
        assert_close(running, Oracle(folder), asks)
    fp8 = test_fp8.with_scales(folder, tmp_path / "fp8")
    with (
        test_fp8.stored_oracle(folder, is_flash=True) as oracle,
        engine(fp8, tgv("head"), block_size=16, dtype="bfloat16") as running,
    ):
        test_fp8.assert_close(running, oracle, asks)
    recall = {**test_recall.SETTINGS, "recall": test_recall.RECALL}
    with engine(folder, recall, block_size=16, dtype="bfloat16") as running:
        test_recall.assert_close(running, Oracle(folder))
