# SPDX-License-Identifier: Apache-2.0
"""Pooling, registry, and every method's whole decision without a synchronisation.

`unit/test_methods.py` compares the kept tokens of each method with its definition.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from oracle import methods
from oracle.attention import attention_probabilities
from oracle.methods import Image, Layout, Pool, Settings
from tests.inputs import Launches
from tests.unit.test_methods import (
    BLOCK_SIZE,
    GROUP,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    SCALE,
    build,
    layout_of,
    prompt_of,
)
from vllm_tgvkv.kernels.copy import copy_kept
from vllm_tgvkv.kernels.merge import merge_evicted
from vllm_tgvkv.kernels.page_tables import write_lengths, write_page_tables
from vllm_tgvkv.kernels.ragged import kept_slots, whole_tables
from vllm_tgvkv.kernels.row_sums import RowSums
from vllm_tgvkv.kernels.select import page_offsets
from vllm_tgvkv.kernels.statistics import observe
from vllm_tgvkv.policies import (
    METHOD_NAMES,
    NO_ATTENTION,
    Attention,
    LayerView,
    Mix,
    Policy,
    Pooling,
    Prompt,
    build_policy,
)
from vllm_tgvkv.policies.pooling import Pooler
from vllm_tgvkv.policies.registry import POLICIES, SCORES
from vllm_tgvkv.shared.budget import Guard
from vllm_tgvkv.shared.prompt import RowSet, VisionSpan
from vllm_tgvkv.testing import SYNCHRONISING
from vllm_tgvkv.worker.decision import ScoredPrompt

SETTINGS = Settings(2, BLOCK_SIZE, sinks=2)


def make_prompt(layout: str, device: str = "cpu") -> Prompt:
    found = prompt_of(layout_of(layout), SETTINGS)
    return replace(found, is_vision=found.is_vision.to(device))


REACHES = st.sampled_from([0, 1, 2, 3, 5, 7, 11, 16, 100])
IMAGES = (Image(3, 12, (3, 4)), Image(15, 2, (1, 2)), Image(19, 4, (4, 1)))
# Images of the same grid are pooled together.
SAME = (Image(0, 6, (2, 3)), Image(6, 6, (2, 3)), Image(14, 6, (3, 2)), Image(20, 6, (2, 3)))
POOLED = [Layout(27), Layout(25, IMAGES), Layout(30, SAME)]
POOLED += [
    replace(found, images=tuple(Image(run.start, run.length) for run in found.images))
    for found in map(layout_of, ("one", "several", "side by side", "at the start"))
]


@st.composite
def poolings(draw: st.DrawFn) -> Pooling:
    kind, reduce = map(draw, map(st.sampled_from, (["grid", "sequence"], ["max", "mean"])))
    if draw(st.booleans()):
        return Pooling(kind, draw(st.sampled_from([1, 3, 5, 7])), reduce)
    forward, back = draw(REACHES), draw(REACHES)
    halve = draw(st.sampled_from([None, None, 1, 3, 64])) if reduce == "max" and forward else None
    return Pooling(kind, None, reduce, forward, back, halve=halve)


@settings(max_examples=300)
@given(st.sampled_from(POOLED), poolings(), st.sampled_from([0, 2, 4, 40]))
def test_pooling_is_as_defined(layout: Layout, pooling: Pooling, sinks: int) -> None:
    """It stays inside runs and images. Text is pooled by `sequence` only."""
    if pooling.kind == "grid" and any(image.grid is None for image in layout.images):
        layout = POOLED[1]
    scores = torch.randn(2, layout.length)
    if pooling.halve:
        scores = scores.clamp(min=0)  # as all scores that have a weight; half of them are 0
    images = tuple(VisionSpan(image.start, image.length, image.grid) for image in layout.images)
    pooled = pool(scores, images, pooling, sinks)
    reaches = (pooling.forward, pooling.back, pooling.halve)
    by_definition = Pool(pooling.kind, pooling.kernel or 3, pooling.reduce, *reaches)
    expected = torch.stack([methods.pooled(row, layout, by_definition, sinks) for row in scores])
    if not pooling.halve and (pooling.kind == "sequence" or pooling.reduce == "max"):
        assert torch.equal(pooled, expected.float())
    torch.testing.assert_close(pooled, expected.float())


def test_pooling_of_scores_that_serve_a_few_tokens() -> None:
    far, kernel = Pooling("sequence", forward=256, back=1, halve=64), Pooling("grid", 5)
    assert far.serving(6) == Pooling("sequence", forward=12, back=1, halve=6)
    assert far.serving(100) == Pooling("sequence", forward=200, back=1, halve=64)
    assert (far.serving(128), kernel.serving(1)) == (far, kernel)
    assert Pooling("grid", forward=40).serving(6) == Pooling("grid", forward=12)


def pool(
    scores: torch.Tensor, images: tuple[VisionSpan, ...], pooling: Pooling, sinks: int = 0
) -> torch.Tensor:
    return Pooler(pooling, scores.shape[1], images, scores.device, sinks)(scores)


@pytest.mark.parametrize(
    "pooling",
    [
        *(
            Pooling(kind, size, reduce)
            for kind, size in (("sequence", 7), ("grid", 3))
            for reduce in ("max", "mean")
        ),
        *(Pooling(kind, forward=16, back=1) for kind in ("sequence", "grid")),
        Pooling("sequence", forward=16, back=1, halve=4),
    ],
    ids=str,
)
def test_a_video_is_pooled_in_as_many_launches_as_an_image(pooling: Pooling) -> None:
    """Frames with text between them; what depends on the prompt alone is made once."""
    counts = []
    for num_frames in (1, 32):
        frames = tuple(VisionSpan(3 + 26 * i, 24, (4, 6)) for i in range(num_frames))
        num_tokens = 26 * num_frames + 40
        is_vision = torch.zeros(num_tokens, dtype=torch.bool)
        prompt = Prompt(num_tokens, num_tokens, is_vision, 4, frames)
        policy = build_policy(Mix(pooling=pooling))
        scores = torch.randn(2, num_tokens)
        with Launches() as first:
            policy.pooled(scores, prompt)
        with Launches() as second:
            policy.pooled(scores, prompt)
        assert len(second.names) > 0
        counts.append((len(first.names), len(second.names)))
    assert counts[1] == counts[0]
    assert counts[0][1] <= counts[0][0] <= counts[0][1] + 3  # copies to the device


def test_grid_pooling_names_an_image_without_grid() -> None:
    scores = torch.zeros(1, 34)
    for pooling in (Pooling("grid"), Pooling("grid", forward=2)):
        with pytest.raises(ValueError, match=r"positions 5\.\.10 is not known"):
            pool(scores, (VisionSpan(5, 6),), pooling)
        with pytest.raises(ValueError, match="6 tokens, its grid 2 x 2"):
            pool(scores, (VisionSpan(5, 6, (2, 2)),), pooling)


def test_statistics_that_no_row_was_observed_for_name_the_row_sets_that_have_them() -> None:
    sums = RowSums(1, 4, torch.device("cpu"))
    with pytest.raises(AttributeError, match=r"column_sums is not observed.*'text'.*or 'all'"):
        _ = NO_ATTENTION.column_sums
    with pytest.raises(AttributeError, match=r"text_column_sums is not observed.*to one of 'all'"):
        _ = NO_ATTENTION.text_column_sums
    with pytest.raises(ValueError, match=r"modality_sums was not computed: name it in"):
        _ = sums.text_column_sums
    with pytest.raises(AttributeError, match=r"row_positions is not observed.*'window'$"):
        _ = sums.row_positions
    with pytest.raises(AttributeError, match=r"weighted_column_sums is not observed"):
        sums.weighted_column_sums(torch.ones(1, 4))


class NoSynchronisation(TorchDispatchMode):
    """Raises on every operation that would wait for a device or has a data-dependent shape."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__
        assert name not in SYNCHRONISING, f"{name} synchronises"
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            dtypes = {index.dtype for index in args[1] if index is not None}
            assert torch.bool not in dtypes, f"{name} with a boolean mask synchronises"
        if name == "repeat_interleave":
            assert "output_size" in (kwargs or {}), "repeat_interleave synchronises"
        return func(*args, **(kwargs or {}))


def test_the_check_itself_catches_synchronisation() -> None:
    tensor = torch.ones(3)
    for operation in (torch.Tensor.nonzero, lambda x: x[0].item(), lambda x: x[x > 0], torch.any):
        with NoSynchronisation(), pytest.raises(AssertionError, match="synchronises"):
            bool(operation(tensor))


def run_everything(
    policy: Policy, device: str, workspace_bytes: int = 1 << 20, guard: Guard | None = None
) -> None:
    """Run one prompt from statistics to page tables, on tensors of ``device``."""
    prompt, num_tokens = make_prompt("several", device), layout_of("several").length
    num_old, k, pairs = prompt.num_candidates // BLOCK_SIZE, 2, LAYERS * HEADS
    queries = torch.randn(num_tokens, HEADS, GROUP, HEAD_SIZE, device=device)
    pages = torch.randn(num_old + 1, HEADS, BLOCK_SIZE, HEAD_SIZE, device=device)
    values = torch.randn_like(pages)
    cache = torch.zeros(2, (num_old + k) * pairs, BLOCK_SIZE, HEAD_SIZE, device=device)
    blocks = torch.randperm(num_old + k).int().to(device)
    row = torch.zeros(1, num_old + 1, dtype=torch.int32, device=device)
    seq_lens = torch.full((1,), num_tokens, dtype=torch.int32, device=device)
    regions = (torch.full_like(seq_lens, k), torch.full_like(seq_lens, num_old))
    tables = torch.empty(LAYERS, 1, HEADS, num_old + 1, dtype=torch.int32, device=device)
    ids = torch.arange(num_old + 1, device=device)
    positions = torch.arange(num_tokens, device=device)
    num_sets = HEADS if policy.granularity == "head" else 1

    def attention(rows: RowSet) -> Attention:
        first = 0 if rows == "all" else num_tokens - 5
        observed = observe(
            *(queries[first:], pages, ids, positions[first:], num_tokens, SCALE),
            per_head=policy.granularity == "head",
            statistics=policy.statistics(rows),
            workspace_bytes=workspace_bytes,
            value_pages=values,
        )
        if rows != "all":
            return observed
        sums = RowSums(num_sets, num_tokens, positions.device, by_modality=True)
        sums.add(observed, prompt.is_vision)
        return sums

    with NoSynchronisation():
        scores, strengths, masses = [], [], []
        for layer in range(LAYERS):
            seen = {rows: attention(rows) for rows in policy.row_sets}
            said = torch.zeros(num_sets, num_tokens, device=device) if policy.score.gates else None
            attended = seen.get(policy.score.rows, NO_ATTENTION)
            view = LayerView(layer, num_sets, prompt, attended, gate_outputs=said)
            score = policy.scores(view)
            if guard:
                masses.append(view.attention.column_sums)
            view = replace(view, attention=seen.get(policy.allocation.rows, NO_ATTENTION))
            strengths.append(policy.allocation.strength(view, score))
            scores.append(policy.pooled(score, prompt)[:, : prompt.num_candidates])
        observed = torch.stack(masses) if guard else None
        together = (torch.stack(scores), torch.stack(strengths))
        scored = ScoredPrompt(policy, prompt, *together, HEADS, BLOCK_SIZE, 0, observed)
        decision = scored.decide(k, guard)
        scored.preference(decision.counts, guarded=guard is not None)  # for a trace
        offsets = page_offsets(decision.counts)
        kept = (decision.positions, offsets, blocks[:num_old])
        whole = whole_tables(blocks[:num_old].int(), pairs)
        target = (blocks[num_old:], LAYERS, HEADS)
        sources = kept_slots(*kept[:2], whole, None, len(cache[0]) * BLOCK_SIZE)
    # The values of a CPU are at hand: its copy reads which pages stay whole.
    with nullcontext() if device == "cpu" else NoSynchronisation():
        copy_kept(*cache, sources, offsets, *target, workspace_bytes)
    with NoSynchronisation():
        if policy.merge:
            merge_evicted(*cache, *kept, *target)
        state = (row, seq_lens, *regions, offsets[None], BLOCK_SIZE)
        write_page_tables(*state, 0, tables)
        write_lengths(*state, tables[..., 0])


MIXES = [
    *(Mix(name) for name in METHOD_NAMES),
    Mix("sparsemm", granularity="layer"),
    *(Mix(name, granularity="head") for name in ("tgv", "vlcache", "aircache", "prefixkv")),
    *(Mix(allocation=part) for part in ("vv", "tt", "entropy", "aircache_skewness")),
    Mix("adakv", allocation="ada_pyramid"),
    Mix(rows="all_text"),
    Mix(score="vv_tt"),
    Mix(pooling=Pooling("grid")),
    *(Mix(pooling=Pooling(kind, forward=16, back=1)) for kind in ("grid", "sequence")),
    Mix(pooling=Pooling("sequence", None, "mean", forward=3)),
    Mix(pooling=Pooling("sequence", forward=16, back=1, halve=4)),
    Mix("snapkv", rows="all"),
    Mix("aircache", rows="window"),
    *(Mix("aircache", "aircache_query_heads", granularity=kind) for kind in ("head", "layer")),
    Mix("trimkv", score="trimkv_votes", reduce="max"),
    Mix("tgv", rows="answer"),
    *(Mix("snapkv", granularity=kind, reduce="max") for kind in ("head", "layer")),
]


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_nothing_synchronises(mix: Mix) -> None:
    """Tensors of `meta` have no data: every read fails, even one the dispatch mode cannot see."""
    policy = build(mix)
    run_everything(policy, "meta", workspace_bytes=0)
    guard = Guard(0.9, 1) if policy.score.rows != "none" else None
    run_everything(policy, "meta", guard=guard)


@pytest.mark.parametrize("granularity", ["layer", "head"])
def test_the_worked_example_of_the_docs_works(
    granularity: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code block of docs/new_method.md registers a method that works like all others."""
    page = Path(__file__).parents[2] / "docs" / "new_method.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    for registry in (SCORES, POLICIES):
        monkeypatch.setattr(registry, "_values", dict(registry._values))
    exec(example, {})
    policy = build_policy(Mix("last_row", granularity=granularity))
    run_everything(policy, "cpu")
    run_everything(policy, "meta", guard=Guard(0.9, 1))
    prompt = make_prompt("one")
    rows = torch.arange(prompt.num_tokens - 5, prompt.num_tokens)
    keys = torch.randn(8, HEADS, BLOCK_SIZE, HEAD_SIZE)
    arguments = (torch.randn(5, HEADS, GROUP, HEAD_SIZE), keys, torch.arange(8), rows)
    attention = observe(
        *arguments, prompt.num_tokens, SCALE, granularity == "head", policy.statistics("window")
    )
    scores = policy.score(LayerView(0, attention.num_groups, prompt, attention))
    exact = attention_probabilities(*arguments, prompt.num_tokens, SCALE)[:, :, -1]
    expected = exact.mean((0, 1))[None] if granularity == "layer" else exact.mean(1)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_nothing_synchronises_on_cuda(mix: Mix) -> None:
    policy = build(mix)
    run_everything(policy, "cuda")  # first use sets up the device
    previous = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_everything(policy, "cuda")
    finally:
        torch.cuda.set_sync_debug_mode(previous)
