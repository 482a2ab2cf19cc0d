# SPDX-License-Identifier: Apache-2.0
"""Ranks, stages, replicas and drafts in combination, and more than two stages."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from oracle.emulation import Oracle
from oracle.methods import Auto
from tests.engine.questions import DEBUG, album
from tests.engine.running import Ask, engine
from tests.engine.test_parallel import ParallelEngine, with_method, workers
from tests.engine.test_parallel import serve as serve_on_ranks
from tests.engine.test_pipeline import (
    SETTINGS,
    STAGES,
    PipelineEngine,
    assert_served,
    break_method,
    expect,
)
from tests.engine.test_speculation import (
    GRANULARITIES,
    METHODS,
    NGRAM,
    answers,
    draft_counts,
    speculative_config,
)
from tests.models import QWEN_IMAGE, random_text
from tests.server.serving import ChatServer, eventually, messages, report_of, serve

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]

FOUR_WORKERS = "0|1|0|1"
REPEATS_ITSELF = 0.055
"""Weights small enough that some n-gram drafts are accepted."""


# -- ranks and stages -----------------------------------------------------------------------


class GridEngine(PipelineEngine):
    """Two stages of two ranks each."""

    keeps_traces = 2
    """The first rank of the last stage."""

    def kept_on_workers(self, name: str, num_tokens: int) -> list[torch.Tensor]:
        """Return the positions that each stage kept, bool [L, H, P] with the tail.

        All workers must keep the same number of pages per (layer, head) on average.
        """
        parts = super().kept_on_workers(name, num_tokens)
        size = self.scheduler.block_size
        full = num_tokens // size * size
        assert len({float(part[..., :full].float().mean()) for part in parts}) == 1
        return [torch.cat(parts[first : first + 2], dim=1) for first in (0, 2)]


@pytest.mark.nightly
def test_ranks_in_stages(tiny_model: Callable[..., Path]) -> None:
    """Each stage keeps what one worker would; a failure on one rank of one stage is one of all."""
    folder = tiny_model("llava", image_size=112, layers=sum(STAGES))
    oracle = Oracle(folder)
    names = ("tgv_by_layer", "vlcache_by_layer", "h2o_by_layer", "tgv_by_head", "adakv_by_head")
    cases = [
        expect(oracle, 200 + i, (20, 140 + 20 * i), name, 0.3, 40, arrival=2 * i)
        for i, name in enumerate(names)
    ]
    bad = [
        album(220 + i, 20, 90, max_tokens=40, arrival=3 * i, xargs={"kv_eviction": "snapkv"})
        for i in range(2)
    ]
    with workers(
        folder,
        SETTINGS,
        GridEngine,
        FOUR_WORKERS,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        enable_prefix_caching=True,
        max_num_batched_tokens=128,
        max_model_len=640,
        num_gpu_blocks_override=40,
    ) as running:
        outputs = running.run([case.ask for case in cases])
        running.llm.collective_rpc(break_method, args=((STAGES[0],), 1))
        failed = running.run([*bad, cases[0].ask])
        running.llm.collective_rpc(break_method, args=((),))
        outputs.append(failed.pop())
        assert [output.outputs[0].finish_reason for output in failed] == ["error"] * len(bad)
        for case, output in zip([*cases, cases[0]], outputs, strict=True):
            if case.ask.xargs["kv_eviction"].endswith("head"):  # heads' pages stay on their rank
                case = replace(case, selection=None)
            assert_served(running, oracle, case, output)
        statuses = running.llm.collective_rpc("kv_eviction_status")
        assert statuses == statuses[:1] * 4
        assert statuses[0]["pool"]["kv_heads"] == 2
        assert statuses[0]["pool"]["layers"] == sum(STAGES)


@pytest.mark.nightly
def test_three_stages(tiny_model: Callable[..., Path]) -> None:
    """Requests preempted with a step in flight give the same answers as without preemption."""
    stages = (2, 2, 1)
    folder = tiny_model("llava", image_size=112, layers=sum(stages))
    oracle = Oracle(folder)
    variants = product(("tgv_by_layer", "tgv_by_head"), (0.6, 0.4, Auto(0.8, 0.1, 0.9)))
    cases = [
        expect(oracle, 280 + i, (20, 150 + 20 * i), *variant, 220, arrival=i, stages=stages)
        for i, variant in enumerate(variants)
    ]
    with workers(
        folder,
        SETTINGS,
        PipelineEngine,
        "0|1|0",
        pipeline_parallel_size=3,
        max_num_batched_tokens=128,
        max_model_len=640,
        num_gpu_blocks_override=21,
        enable_prefix_caching=True,
    ) as running:
        outputs = running.run([case.ask for case in cases])
        for case, output in zip(cases, outputs, strict=True):
            assert_served(running, oracle, case, output, stages)
        assert running.counters["requests_evicted"] > len(cases), "no request was preempted"


# -- drafts ---------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
def test_drafts_on_ranks(tiny_model: Callable[..., Path], method: str) -> None:
    """Chunks, compressed rows with right and wrong drafts, and a pool too small for all."""
    folder = tiny_model("llava", image_size=112, initializer_range=REPEATS_ITSELF)
    oracle = Oracle(folder)
    variants = product(GRANULARITIES, (0.5, 0.2, "auto:0.8"))
    asks = [
        with_method(album(240 + i, 20, 170 + 17 * i, arrival=2 * i), name, value, 60)
        for i, (name, value) in enumerate(variants)
    ]
    settings = {"policy": "tgv", "methods": GRANULARITIES, "debug": DEBUG}
    with workers(
        folder,
        settings,
        ParallelEngine,
        tensor_parallel_size=2,
        speculative_config=speculative_config(folder, method),
        disable_log_stats=False,
        max_num_batched_tokens=128,
        max_model_len=640,
        num_gpu_blocks_override=30 if method == "ngram" else 40,
    ) as running:
        assert len(list(serve_on_ranks(oracle, running, asks))) == len(asks)
        # A draft model sees no images, so it is seldom right about them.
        text = Ask(random_text(3, 150), max_tokens=60)
        expected = oracle.generate(oracle.prompt(text.text), text.max_tokens)
        for output in running.run([text] * 2):
            assert list(output.outputs[0].token_ids) == expected
        assert_some_were_right(*draft_counts(running))


@pytest.mark.nightly
def test_drafts_with_positions_in_three_dimensions(tiny_model: Callable[..., Path]) -> None:
    """Qwen2.5-VL, whose drafts continue from the positions that its images used."""
    folder = tiny_model("qwen2_5_vl", initializer_range=REPEATS_ITSELF)
    asks = [
        album(
            260 + i,
            *(20, 100 + 31 * i, 40),
            image_text=QWEN_IMAGE,
            arrival=2 * i,
            xargs={"kv_eviction": name, "kv_eviction_budget": value},
        )
        for i, (name, value) in enumerate(product(GRANULARITIES, (0.5, 0.2, "auto:0.8")))
    ]
    settings = {"policy": "tgv", "methods": GRANULARITIES, "debug": DEBUG}
    with engine(folder, settings) as running:
        alone = [answers(running, [ask])[0] for ask in asks]
    with engine(
        folder,
        settings,
        speculative_config=NGRAM,
        max_num_batched_tokens=128,
        disable_log_stats=False,
    ) as running:
        for found, wanted in zip(answers(running, asks), alone, strict=True):
            assert found.tokens == wanted.tokens
            assert found.kept is not None
            assert wanted.kept is not None
            assert torch.equal(found.kept, wanted.kept)
        assert_some_were_right(*draft_counts(running))


def assert_some_were_right(drafted: int, accepted: int) -> None:
    """Check that some drafts were accepted and some rejected."""
    assert 10 < accepted < drafted - 10


# -- replicas -------------------------------------------------------------------------------


NUM_QUESTIONS = 8
ANSWER: dict[str, Any] = {"max_tokens": 60, "temperature": 0}
# With equal shares of all layers, stages deal the same pages as one worker.
OPTIONS = {"kv_eviction": "snapkv", "kv_eviction_budget": 0.3}
TRACED = {**OPTIONS, "kv_eviction_report": 1, "kv_eviction_trace": 1}
CONFIG = {"debug": {"check_integrity": True}}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("flags", "counted"),
    [
        (
            ["--tensor-parallel-size", "2", "--speculative-config", json.dumps(NGRAM)],
            ["kv_eviction_requests_total", "spec_decode_num_accepted_tokens_total"],
        ),
        (["--pipeline-parallel-size", "2"], ["kv_eviction_requests_total"]),
    ],
    ids=["ranks with drafts", "stages"],
)
def test_replicas_of_several_workers(
    tiny_model: Callable[..., Path], tmp_path: Path, flags: Sequence[str], counted: Sequence[str]
) -> None:
    """Serve with two engines of two workers each; the `counted` metrics are above 0 on both."""
    folder = tiny_model("llava", image_size=112, initializer_range=REPEATS_ITSELF, layers=4)
    questions = [messages(300 + seed) for seed in range(NUM_QUESTIONS)]
    with engine(folder, {"policy": "tgv", **CONFIG}) as single:
        sampling = SamplingParams(**ANSWER, ignore_eos=True, extra_args=OPTIONS)
        alone = [o.outputs[0].text for o in single.llm.chat(questions, sampling, use_tqdm=False)]
        assert single.counters["requests_evicted"] == NUM_QUESTIONS
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": FOUR_WORKERS,
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    with serve(
        folder,
        tmp_path / "server.log",
        CONFIG,
        environment=environment,
        flags=[*flags, "--data-parallel-size", "2"],
        start_seconds=600,
    ) as server:

        def ask(number: int) -> Any:
            return server.client.chat.completions.create(
                model="tiny",
                messages=questions[number],
                **ANSWER,
                extra_headers={"X-data-parallel-rank": str(number % 2)},
                extra_body={"ignore_eos": True, "vllm_xargs": TRACED},
            )

        with ThreadPoolExecutor(NUM_QUESTIONS) as threads:
            found = list(threads.map(ask, range(NUM_QUESTIONS)))
        assert [answer.choices[0].message.content for answer in found] == alone
        for report in map(report_of, found):
            trace = json.loads(get(server, f"/kv-eviction/requests/{report['trace']}"))
            assert trace["kept_tokens"] == report["kept_tokens"]
        for name in counted:
            assert eventually(
                lambda name=name: (
                    {s.labels["engine"] for s in server.samples(f"vllm:{name}") if s.value > 0}
                    == {"0", "1"}
                )
            ), name
        # Before the end: API servers that outlive the engines for a moment log that as an error.
        wrong = r"\bERROR\b|Traceback|Integrity"
        assert [line for line in server.lines() if re.search(wrong, line)] == []
        server.interrupt()


def get(server: ChatServer, path: str) -> str:
    with urllib.request.urlopen(f"{server.url}{path}", timeout=60) as response:
        return response.read().decode()
