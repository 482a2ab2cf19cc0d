# SPDX-License-Identifier: Apache-2.0
"""Cuts after the first one in engines of several ranks and stages, each a process with a core.

Both attention backends are tried; FlashAttention is pretended (`flash_on_cpu.py`), and its ranks
have steps scheduled ahead. The oracle is one process: it decides when a request is cut, deals the
pages of each rank and stage, and hides the keys that each head loses. Prompts come in chunks, the
pool is too small for all, and freed blocks are filled with NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle.emulation import Eviction, Oracle
from tests.engine import flash_on_cpu
from tests.engine.changes import assert_changes_agree, causes_of, restore_soon
from tests.engine.gated import gated_oracle
from tests.engine.questions import DEBUG, album
from tests.engine.running import Ask, assert_cuts_agree
from tests.engine.test_parallel import ParallelEngine, fail_at, workers
from tests.engine.test_pipeline import PipelineEngine
from vllm_tgvkv.shared.prompt import ANSWER_ROWS

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]

SIZE, ROWS = 32, 128
LAYERS = (3, 2)
"""Layers of each stage."""
NAMES = {
    f"{method}_by_{granularity}": {"base": method, "granularity": granularity}
    for granularity, methods in {
        "layer": ("tgv", "h2o", "prefixkv"),
        "head": ("tgv", "adakv", "pyramidkv", "rkv", "dbtrimkv"),
    }.items()
    for method in methods
}
SCHEDULE = ((6, 0.6), (30, 0.4), (61, 0.2))
DECODE: dict[str, dict[str, Any]] = {
    "schedule": {"schedule": SCHEDULE},
    "ceiling": {"max_tokens": 96},
}
EVICTION: dict[str, dict[str, Any]] = {
    "schedule": {"budget": 0.6, "defer": 6, "schedule": SCHEDULE[1:]},
    "ceiling": {"budget": 0.7, "defer": 3, "ceiling": 96, "buffer": 24},
}
TOKENS = {"schedule": 90, "ceiling": 150}
FEWER = ("tgv_by_layer", "rkv_by_head", "adakv_by_head", "h2o_by_layer", "dbtrimkv_by_head")
"""Methods of longer answers."""


@dataclass(frozen=True)
class Split:
    """Processes that a model is split into."""

    kind: type[ParallelEngine]
    ranks: int
    stages: Sequence[int]
    cores: str = "0|1"

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join what each worker kept, bool [L', H', n], to [L, H, n]."""
        of_stages = [parts[i : i + self.ranks] for i in range(0, len(parts), self.ranks)]
        return torch.cat([torch.cat(list(ranks), dim=1) for ranks in of_stages])


SPLITS = {
    "ranks": Split(ParallelEngine, 2, (5,)),
    "stages": Split(PipelineEngine, 1, LAYERS),
    "grid": Split(PipelineEngine, 2, LAYERS, "0|1|0|1"),
}


@pytest.mark.parametrize(
    ("backend", "name", "kind"),
    [
        ("flash", "ranks", "schedule"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ("flash", "stages", "ceiling"),
                *(("cpu", name, "schedule") for name in ("ranks", "stages")),
                *(("cpu", name, "ceiling") for name in SPLITS),
                ("flash", "grid", "ceiling"),
            )
        ),
    ],
)
def test_every_cut_leaves_what_one_process_leaves(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    name: str,
    kind: str,
) -> None:
    if backend == "flash":
        flash_on_cpu.use_worker(monkeypatch, "tests.engine.flash_worker.FlashWorker")
        if len(SPLITS[name].stages) == 1:  # model runner V1 cannot do both
            flash_on_cpu.schedule_ahead(monkeypatch)
    folder = tiny_model("llava", image_size=112, layers=sum(LAYERS))
    serve(folder, tmp_path, name, kind)


def serve(folder: Path, gates: Path, name: str, kind: str) -> None:
    """Serve requests in an engine and assert the oracle's answers and cuts.

    `gates` is a folder for gates that are made here.
    """
    torch.manual_seed(5)
    oracle, split = gated_oracle(folder, gates, "rg10"), SPLITS[name]
    fewer = (*FEWER[:2], FEWER[-1]) if name == "grid" else FEWER
    names = {"schedule": tuple(NAMES), "ceiling": fewer}[kind]
    asks = [ask(seed, method, kind) for seed, method in enumerate(names)]
    settings = {
        "policy": "tgv",
        "observation_window": ROWS,
        "methods": NAMES,
        "gates": str(gates),
        "decode": DECODE[kind],
        "debug": DEBUG,
    }
    with workers(
        folder,
        settings,
        split.kind,
        split.cores,
        tensor_parallel_size=split.ranks,
        pipeline_parallel_size=len(split.stages),
        max_num_batched_tokens=128,
        max_model_len=640,
        num_gpu_blocks_override=28,
        enable_prefix_caching=True,
    ) as running:
        outputs = running.run(asks)
        for asked, output in zip(asks, outputs, strict=True):
            assert_cut(running, oracle, split, kind, asked, output)
        assert running.preempted or kind == "ceiling"
        with pytest.MonkeyPatch.context() as monkeypatch:
            restore_soon(monkeypatch)
            assert_pressure(running, oracle, split)
        if split.ranks > 1:
            for call in range(2):
                assert_failure(running, call, kind)
            (output,) = running.run(asks[:1])
            assert_cut(running, oracle, split, kind, asks[0], output)


def assert_failure(running: ParallelEngine, call: int, kind: str) -> None:
    """Assert that a rank which fails before an exchange ends its request, and nothing else."""
    running.llm.collective_rpc(fail_at, args=(call,))
    (output,) = running.run([ask(8 + call, "tgv_by_layer", kind)])
    assert output.outputs[0].finish_reason == "error"
    running.llm.collective_rpc(fail_at, args=(None,))
    running.assert_forgotten()


def assert_pressure(running: ParallelEngine, oracle: Oracle, split: Split) -> None:
    """Assert the oracle's answers to requests that are cut when memory is short, and restored."""
    asks = []
    for seed, method in enumerate(("tgv_by_layer", "rkv_by_head", "adakv_by_head")):
        xargs = {"kv_eviction_when": "pressure", "kv_eviction_schedule": "none"}
        xargs |= {"kv_eviction": method, "kv_eviction_report": 1, "kv_eviction_budget": 0.1}
        lengths = 20, 170 + 19 * seed
        asks.append(album(60 + seed, *lengths, max_tokens=80, arrival=3 * seed, xargs=xargs))

    def kept_of(name: str) -> list[torch.Tensor]:
        of_workers = running.cuts_on_workers(name)
        return [split.joined(parts) for parts in zip(*of_workers, strict=True)]

    outputs = running.run(asks)
    more = {"stages": split.stages, "ranks": split.ranks}
    assert_changes_agree(running, oracle, asks, outputs, kept_of, **more)
    assert sum(causes_of(output).count("pressure") for output in outputs) >= 2


def ask(seed: int, method: str, kind: str) -> Ask:
    xargs = {"kv_eviction": method, "kv_eviction_report": 1}
    if kind == "ceiling":
        options = EVICTION[kind]
        xargs |= {"kv_eviction_budget": options["budget"], "kv_eviction_defer": options["defer"]}
    lengths = 20, 170 + 19 * seed
    return album(seed, *lengths, max_tokens=TOKENS[kind], arrival=2 * seed, xargs=xargs)


def assert_cut(
    running: ParallelEngine, oracle: Oracle, split: Split, kind: str, asked: Ask, output: Any
) -> None:
    """Assert that tokens, the report, and what every cut left are the oracle's."""
    name = asked.xargs["kv_eviction"]
    wanted = Eviction(
        block_size=SIZE,
        method=NAMES[name]["base"],
        granularity=NAMES[name]["granularity"],
        observation_window=ROWS,
        ranks=split.ranks,
        answer_rows=ANSWER_ROWS,
        **EVICTION[kind],
    )
    prompt = oracle.prompt(asked.text, asked.images)
    tokens = list(output.outputs[0].token_ids)
    answer = oracle.answer(prompt, asked.max_tokens, wanted, split.stages, guess=tokens)
    assert len(answer.cuts) >= 3, name
    of_workers = running.cuts_on_workers(output.request_id)
    assert len(set(map(len, of_workers))) == 1
    kept = [split.joined(parts) for parts in zip(*of_workers, strict=True)]
    assert_cuts_agree(kept, answer, output, SIZE, whole=kind == "ceiling", case=name)
    for of_worker in of_workers:  # pages do not move between workers
        for part, cut in zip(of_worker[-len(answer.cuts) :], answer.cuts, strict=True):
            assert part.sum() == cut.selection.blocks * SIZE * part[..., 0].numel(), name
