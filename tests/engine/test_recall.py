# SPDX-License-Identifier: Apache-2.0
"""Recall in the engine: tokens and kept positions after every cut and choice are the oracle's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.sampling_params import RequestOutputKind

from oracle.emulation import Eviction, Oracle
from oracle.recall import Recall
from tests.engine.changes import causes_of, changes_of, restore_soon
from tests.engine.questions import DEBUG, question
from tests.engine.running import Ask, SteppedEngine, engine
from tests.engine.test_parallel import workers
from tests.engine.test_pressure import serve
from tests.engine.test_speculation import draft_counts, speculative_config
from tests.engine.test_split_cuts import SPLITS
from tests.engine.test_windows import CausalOracle
from tests.models import FAMILIES, random_image, random_text
from vllm_tgvkv.shared.prompt import PRESSURE_ROWS

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SIZE = 32
RECALL: dict[str, Any] = {"every": 3, "sketch": 2, "gib": 0.05}
SETTINGS = {"policy": "reach", "when": "always", "debug": DEBUG}


def ask(seed: int, method: str = "reach", tokens: int = 60, **more: Any) -> Ask:
    xargs = {"kv_eviction": method, "kv_eviction_report": 1, "kv_eviction_defer": 4, **more}
    return question(seed, 60 + 13 * seed, 150 + 29 * seed, max_tokens=tokens, xargs=xargs)


def assert_agrees(
    running: SteppedEngine,
    oracle: Oracle,
    asked: Ask,
    output: Any,
    kept: Sequence[torch.Tensor] | None = None,
    stages: Sequence[int] | None = None,
    **more: Any,
) -> int:
    """Assert that a request's tokens, kept positions and reported choices are the oracle's.

    Args:
        kept: what its region held after each cut and choice; by default the engine's own.
        stages: layers of each pipeline stage.
        more: fields of the oracle's `Eviction`.

    Returns:
        The number of its choices.
    """
    wanted, prompt = wanted_of(running, asked, **more), oracle.prompt(asked.text, asked.images)
    by_token, told = kept_by_token(output, kept or running.kept_after_cuts(output.request_id))
    chosen = {after: by_token[after] for after in told}
    answer = oracle.answer(prompt, asked.max_tokens, wanted, stages, chosen=chosen)
    assert told == [after for after, _ in answer.choices]
    theirs = dict([(cut.after, cut.selection.kept) for cut in answer.cuts] + answer.choices)
    num_full, num_others, num_kept = len(prompt.token_ids) // SIZE * SIZE, 0, 0
    for after, mine in by_token.items():
        others = int((mine[..., :num_full] & ~theirs[after][..., :num_full]).sum())
        assert not others or after in chosen, f"the cut after {after}"
        num_others, num_kept = num_others + others, num_kept + int(mine.sum())
        assert mine.sum() == theirs[after][..., :num_full].sum(), after
    # Where a token's step, a float16, is rounded the other way, its scores differ a little, and
    # some of thousands are as good as equal. Steps that are 3 % too small move 12 % of the tokens.
    assert num_others <= 0.02 * num_kept, (num_others, num_kept)
    assert list(output.outputs[0].token_ids) == answer.tokens
    report = output.kv_transfer_params["kv_eviction"]
    assert not told or any(each["recalled_tokens"] for each in report["recalls"])
    return len(told)


def wanted_of(running: SteppedEngine, asked: Ask, **more: Any) -> Eviction:
    """Return what the oracle shall do for a request; `more` are fields of it."""
    config = running.scheduler.eviction_config
    assert config.recall is not None
    recall = Recall(config.recall.every, config.recall.sketch)
    return Eviction(
        asked.xargs.get("kv_eviction_budget", 0.2),
        running.engine.vllm_config.cache_config.block_size,
        method=asked.xargs["kv_eviction"],
        defer=4,
        observation_window=config.observation_window,
        recall=recall if asked.xargs.get("kv_eviction_recall", 1) else None,
        **more,
    )


def kept_by_token(
    output: Any, kept: Sequence[torch.Tensor]
) -> tuple[dict[int, torch.Tensor], list[int]]:
    """Return what a region held after each cut and choice by answer tokens, and which chose."""
    report = output.kv_transfer_params["kv_eviction"]
    told = [each["answer_tokens"] for each in report["recalls"]]
    cuts = [
        each["answer_tokens"] for each in report["cuts"] if each["cause"] in ("first", "pressure")
    ]
    # A cut and a choice never come after the same token.
    return dict(zip(sorted(cuts + told), kept, strict=True)), told


def assert_close(running: SteppedEngine, oracle: Oracle) -> None:
    """Serve requests in bf16, whose tokens and choices the oracle follows.

    The bounds are those of `running.assert_close`. Without recall it deviates more.
    """
    asks = [
        replace(ask(seed, method, 40, kv_eviction_budget=0.2), logprobs=1)
        for seed, method in enumerate(("reach", "snapkv"))
    ]
    for asked, output in zip(asks, running.run(asks), strict=True):
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        by_token, told = kept_by_token(output, running.kept_after_cuts(output.request_id))
        chosen = {after: by_token[after] for after in told}
        assert len(told) > 5
        steps = zip(completion.logprobs, tokens, strict=True)
        ours = torch.tensor([step[token].logprob for step, token in steps])
        prompt, wanted = oracle.prompt(asked.text, asked.images), wanted_of(running, asked)
        deviations = []
        for eviction in (wanted, replace(wanted, recall=None)):
            answer = oracle.answer(prompt, len(tokens), eviction, tokens=tokens, chosen=chosen)
            theirs = answer.logprobs.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
            deviations.append(float((theirs - ours).abs().max()))
        assert deviations[0] < 0.5 < deviations[1]


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


def test_two_answers_to_a_prompt(folder: Path) -> None:
    """With `n`, each recalls for itself: both are the greedy answer of a request alone.

    With `top_k` 1 vLLM gives it twice.
    """
    several = {"n": 2, "temperature": 1, "top_k": 1, "output_kind": RequestOutputKind.FINAL_ONLY}
    with engine(folder, {**SETTINGS, "recall": RECALL}, max_num_seqs=4) as running:
        (alone,) = running.run([ask(1)])
        (both,) = serve(running, [ask(1)], crowds={}, **several)
        tokens = list(alone.outputs[0].token_ids)
        assert [list(each.token_ids) for each in both.outputs] == [tokens, tokens]
        running.assert_forgotten()


@pytest.mark.compatibility
@pytest.mark.parametrize("name", ["ranks", pytest.param("stages", marks=pytest.mark.nightly)])
def test_on_ranks_and_stages(tiny_model: Callable[..., Path], name: str) -> None:
    """Each worker chooses for its own heads and layers, and holds its own part of the tier."""
    split = SPLITS[name]
    folder = tiny_model("llava", image_size=112, layers=sum(split.stages))
    oracle = Oracle(folder)
    options = {"max_num_batched_tokens": 128, "max_model_len": 640}
    options |= {"tensor_parallel_size": split.ranks, "pipeline_parallel_size": len(split.stages)}
    settings = {**SETTINGS, "recall": RECALL}
    with workers(folder, settings, split.kind, split.cores, **options) as running:
        asks = [ask(0, tokens=30), ask(1, "snapkv", 30)]
        for asked, output in zip(asks, running.run(asks), strict=True):
            of_workers = running.cuts_on_workers(output.request_id)
            kept = [split.joined(parts) for parts in zip(*of_workers, strict=True)]
            assert assert_agrees(running, oracle, asked, output, kept, split.stages) > 5


@pytest.mark.compatibility
@pytest.mark.parametrize(
    "method", [pytest.param("ngram", marks=pytest.mark.nightly), "draft_model"]
)
def test_with_drafts(tiny_model: Callable[..., Path], method: str) -> None:
    """Choices are between tokens that were accepted, also where several are in a step."""
    folder = tiny_model("llava", image_size=112, initializer_range=0.055)
    oracle, settings = Oracle(folder), {**SETTINGS, "recall": RECALL}
    options = {"speculative_config": speculative_config(folder, method), "disable_log_stats": False}
    with engine(folder, settings, max_num_seqs=4, **options) as running:
        asks = [ask(seed, ("reach", "snapkv")[seed % 2], 80) for seed in range(3)]
        for asked, output in zip(asks, running.run(asks), strict=True):
            assert assert_agrees(running, oracle, asked, output) > 10
        _, accepted = draft_counts(running)
        assert accepted > (10 if method == "ngram" else 0)  # a draft model sees no images


@pytest.mark.compatibility
def test_with_windows(tiny_model: Callable[..., Path]) -> None:
    """Layers with full attention recall, and the others keep their windows."""
    arch = "cohere2_vision"
    folder, image = tiny_model(arch, layers=6, image_size=112), FAMILIES[arch].image_text
    oracle, settings = CausalOracle(folder), {**SETTINGS, "recall": RECALL}
    with engine(folder, settings, max_num_seqs=2, skip_mm_profiling=True) as running:
        texts = [[random_text(9 * seed + i, 90) for i in range(3)] for seed in range(2)]
        pictures = random_image(0), random_image(1)
        asks = [replace(ask(0), text=image.join(each), images=pictures) for each in texts]
        for asked, output in zip(asks, running.run(asks), strict=True):
            assert assert_agrees(running, oracle, asked, output) > 5


def assert_apart(running: SteppedEngine) -> int:
    """Assert that only sketches have bytes that are NaN or infinite as keys and values.

    A whole request's attention reads slots that are not written yet, with a weight of 0.

    Returns:
        The number of blocks with such bytes.
    """
    pool, recaller = running.evictor.pool, running.evictor.recaller
    assert recaller is not None
    finite = pool.raw.isfinite().flatten(1).all(1).view(pool.num_blocks, -1).all(1)
    found = set((~finite).nonzero().flatten().tolist())
    assert found <= {i for row in recaller._rows.values() for i in row.sketch_blocks.tolist()}
    return len(found)


@pytest.fixture
def pressed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SteppedEngine]:
    """Yield an engine with little memory, whose requests have their prompts back soon."""
    restore_soon(monkeypatch)
    options = {"max_model_len": 640, "max_num_batched_tokens": 160, "max_num_seqs": 6}
    # With `poison`, vLLM clears the blocks that it hands out.
    debug = {**DEBUG, "poison": False}
    recall = {"when": "pressure", "budget": 0.1, "recall": RECALL}
    settings = {**SETTINGS, **recall, "debug": debug}
    more = {"num_gpu_blocks_override": 48, "enable_prefix_caching": True}
    with engine(folder, settings, **options, **more, scheduling_policy="priority") as running:
        yield running


def test_with_pressure(
    pressed: SteppedEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are cut, choose, are cut further, whole again, cut again, preempted."""
    step, sketched = pressed.step, list[int]()

    def checked() -> list[Any]:
        outputs = step()
        sketched.append(assert_apart(pressed))
        return outputs

    monkeypatch.setattr(pressed, "step", checked)
    asks = [ask(seed, ("reach", "snapkv")[seed % 2], 150) for seed in range(4)]
    outputs = serve(pressed, asks, crowds={30: 1, 70: 1, 110: 2}, preempt_at=(90,))
    causes, choices = [causes_of(output) for output in outputs], 0
    for asked, output in zip(asks, outputs, strict=True):
        changes = changes_of(output, SIZE, PRESSURE_ROWS)
        choices += assert_agrees(pressed, oracle, asked, output, changes=changes)
    assert choices > 20
    flat = [cause for each in causes for cause in each]
    assert {"pressure", "restored", "preempted"} <= set(flat), causes
    assert any(sketched)
