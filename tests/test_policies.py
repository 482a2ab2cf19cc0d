# SPDX-License-Identifier: Apache-2.0
"""Policies against their definitions, and the whole decision without a synchronisation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.reference import (
    causal_attention,
    fresh_seed,
    heads_of,
    paged,
    tgv_kept,
    tgv_score,
    tgv_strength,
)
from vllm_tgvkv.kernels import reference
from vllm_tgvkv.kernels.apportion import apportion
from vllm_tgvkv.kernels.copy import copy_kept
from vllm_tgvkv.kernels.page_tables import write_lengths, write_page_tables
from vllm_tgvkv.kernels.select import page_offsets, select_tokens
from vllm_tgvkv.kernels.statistics import ObservedAttention, observe
from vllm_tgvkv.policies import ImageSpan, Policy, Pooling, Prompt, build_policy
from vllm_tgvkv.policies.pooling import pool
from vllm_tgvkv.policies.registry import Recipe, Registry

LAYERS, HEADS, GROUP, HEAD_SIZE, BLOCK_SIZE = 3, 2, 3, 8, 4
SCALE = HEAD_SIZE**-0.5

# (start, length) of the images, and the prompt's length: one image, several with text between,
# two side by side, an image first of all, images up to the last token but one.
LAYOUTS = {
    "one": ([(6, 12)], 29),
    "several": ([(5, 6), (13, 4), (20, 9)], 34),
    "side by side": ([(4, 6), (10, 6)], 23),
    "at the start": ([(0, 9)], 16),
    "short question": ([(2, 30)], 33),
    "little text": ([(1, 20), (22, 2)], 26),
}


def make_prompt(layout: str, sinks: int = 2) -> Prompt:
    images, num_tokens = LAYOUTS[layout]
    is_vision = torch.zeros(num_tokens, dtype=torch.bool)
    for start, length in images:
        is_vision[start : start + length] = True
    rows = [j for j in range(images[0][0], num_tokens) if not is_vision[j]]
    return Prompt(
        num_tokens=num_tokens,
        num_candidates=num_tokens // BLOCK_SIZE * BLOCK_SIZE,
        is_vision=is_vision,
        rows=torch.tensor(rows),
        sinks=sinks,
        images=tuple(ImageSpan(start, length) for start, length in images),
    )


def make_layers(prompt: Prompt) -> tuple[list[ObservedAttention], list[torch.Tensor]]:
    """Observations of random layers, and their whole attention matrices ``[H, G, P, P]``."""
    observed, exact = [], []
    for _ in range(LAYERS):
        queries = torch.randn(prompt.num_tokens, HEADS, GROUP, HEAD_SIZE) * 2
        keys = torch.randn(prompt.num_tokens, HEADS, HEAD_SIZE)
        pages, ids = paged(keys, BLOCK_SIZE, transposed=True)
        rows = prompt.rows
        observed.append(observe(queries[rows], pages, ids, rows, prompt.num_tokens, SCALE))
        exact.append(causal_attention(queries, keys, SCALE))
    return observed, exact


def decide(
    policy: Policy, layers: list[ObservedAttention], prompt: Prompt, num_retained: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts ``[L, H]`` and kept positions of all pages, as the cache does it."""
    looks = [policy.look(attention, prompt) for attention in layers]
    scores = torch.stack([score[:, : prompt.num_candidates] for score, _ in looks])
    shares = policy.budget.shares(torch.stack([strength for _, strength in looks]))
    total, cap = num_retained * shares.numel(), prompt.num_candidates // BLOCK_SIZE
    counts = apportion(shares.flatten(), total, 0, cap).view(shares.shape)
    counts = counts.expand(LAYERS, HEADS).contiguous()
    tiers = policy.retention.tiers(prompt)[: prompt.num_candidates]
    num_pages = num_retained * LAYERS * HEADS
    return counts, select_tokens(scores, tiers, counts, num_pages, BLOCK_SIZE)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("granularity", ["layer", "head"])
def test_tgv_keeps_what_its_definition_says(layout: str, granularity: Any) -> None:
    fresh_seed()
    prompt = make_prompt(layout)
    observed, exact = make_layers(prompt)
    vision = set(torch.arange(prompt.num_tokens)[prompt.is_vision].tolist())
    rows = prompt.rows.tolist()
    matrices = [heads_of(attention, granularity) for attention in exact]
    strengths = [tgv_strength(a, vision, rows) for layer in matrices for a in layer]
    cap = prompt.num_candidates // BLOCK_SIZE
    policy = build_policy("tgv", granularity=granularity)
    for num_retained in range(1, cap + 1):
        counts, positions = decide(policy, observed, prompt, num_retained)
        expected = reference.apportion(strengths, num_retained * len(strengths), 0, cap)
        assert counts.sum() == num_retained * LAYERS * HEADS
        assert counts[:, : len(matrices[0])].flatten().tolist() == expected
        offsets = page_offsets(counts).tolist()
        for pair in range(LAYERS * HEADS):
            layer, head = divmod(pair, HEADS)
            matrix = matrices[layer][head if granularity == "head" else 0]
            kept = tgv_kept(
                tgv_score(matrix, vision, rows),
                vision,
                prompt.sinks,
                prompt.num_candidates,
                int(counts[layer, head]) * BLOCK_SIZE,
            )
            assert positions[offsets[pair] : offsets[pair + 1]].flatten().tolist() == kept


@pytest.mark.parametrize("granularity", ["layer", "head"])
def test_tgv_scores_and_strengths(granularity: Any) -> None:
    fresh_seed()
    prompt = make_prompt("several")
    observed, exact = make_layers(prompt)
    policy = build_policy("tgv", granularity=granularity)
    vision = set(torch.arange(prompt.num_tokens)[prompt.is_vision].tolist())
    rows = prompt.rows.tolist()
    for attention, whole in zip(observed, exact, strict=True):
        scores, strength = policy.look(attention, prompt)
        heads = heads_of(whole, granularity)
        expected = torch.tensor([tgv_score(a, vision, rows) for a in heads])
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)
        expected = torch.tensor([tgv_strength(a, vision, rows) for a in heads])
        torch.testing.assert_close(strength, expected, rtol=1e-4, atol=1e-6)


def test_retention_orders() -> None:
    prompt = make_prompt("at the start", sinks=2)
    orders = {
        name: build_policy("tgv", retain=name).retention.tiers(prompt).tolist()
        for name in ("text_first", "vision_first", "by_score")
    }
    assert orders["text_first"] == [2] * 2 + [0] * 7 + [1] * 7
    assert orders["vision_first"] == [2] * 2 + [1] * 7 + [0] * 7
    assert orders["by_score"] == [2] * 2 + [0] * 14


@pytest.mark.parametrize(("granularity", "heads"), [("layer", 1), ("head", HEADS)])
def test_uniform_budget(granularity: Any, heads: int) -> None:
    fresh_seed()
    prompt = make_prompt("one")
    observed, _ = make_layers(prompt)
    policy = build_policy("tgv", granularity=granularity, budget="uniform")
    _, strength = policy.look(observed[0], prompt)
    assert strength.tolist() == [1.0] * heads
    counts, _ = decide(policy, observed, prompt, 3)
    assert counts.tolist() == [[3] * HEADS] * LAYERS


def test_a_prompt_that_nobody_looks_at_gets_equal_budgets() -> None:
    fresh_seed()
    prompt = make_prompt("one")
    text = Prompt(
        prompt.num_tokens,
        prompt.num_candidates,
        torch.zeros_like(prompt.is_vision),
        prompt.rows,
        sinks=0,
    )
    observed, _ = make_layers(text)
    counts, _ = decide(build_policy("tgv", granularity="head"), observed, text, 2)
    assert counts.tolist() == [[2] * HEADS] * LAYERS


def naive_pool(scores: list[float], neighbours: list[list[int]], reduce: str) -> list[float]:
    groups = [[scores[j] for j in near] for near in neighbours]
    return [max(group) if reduce == "max" else sum(group) / len(group) for group in groups]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("kernel", [1, 3, 7])
def test_sequence_pooling_stays_inside_runs(layout: str, reduce: Any, kernel: int) -> None:
    fresh_seed()
    prompt = make_prompt(layout)
    size = prompt.num_tokens
    run = [0] * size  # 0 before the first image; an image and the text behind it have their own
    for number, image in enumerate(prompt.images):
        for j in range(image.start, size):
            run[j] = 2 * number + (1 if j < image.start + image.length else 2)
    near = [
        [i for i in range(size) if abs(i - j) <= kernel // 2 and run[i] == run[j]]
        for j in range(size)
    ]
    scores = torch.randn(2, size)
    pooled = pool(scores, prompt.is_vision, prompt.images, Pooling("sequence", kernel, reduce))
    expected = torch.tensor([naive_pool(row, near, reduce) for row in scores.tolist()])
    torch.testing.assert_close(pooled, expected)


@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_grid_pooling_stays_inside_images(reduce: Any, kernel: int) -> None:
    fresh_seed()
    images = (ImageSpan(3, 12, (3, 4)), ImageSpan(15, 2, (1, 2)), ImageSpan(19, 4, (4, 1)))
    size = 25
    is_vision = torch.zeros(size, dtype=torch.bool)
    near = [[j] for j in range(size)]
    for image in images:
        is_vision[image.start : image.start + image.length] = True
        _, columns = image.grid
        for j in range(image.length):
            near[image.start + j] = [
                image.start + i
                for i in range(image.length)
                if abs(i // columns - j // columns) <= kernel // 2
                and abs(i % columns - j % columns) <= kernel // 2
            ]
    scores = torch.randn(2, size)
    pooled = pool(scores, is_vision, images, Pooling("grid", kernel, reduce))
    expected = torch.tensor([naive_pool(row, near, reduce) for row in scores.tolist()])
    torch.testing.assert_close(pooled, expected)


def test_grid_pooling_names_an_image_without_grid() -> None:
    prompt = make_prompt("several")
    scores = torch.zeros(1, prompt.num_tokens)
    with pytest.raises(ValueError, match=r"positions 5\.\.10 is not known"):
        pool(scores, prompt.is_vision, prompt.images, Pooling("grid"))
    wrong = (ImageSpan(5, 6, (2, 2)),)
    with pytest.raises(ValueError, match="6 tokens, its grid 2 x 2"):
        pool(scores, prompt.is_vision, wrong, Pooling("grid"))


@pytest.mark.parametrize(
    ("options", "word"),
    [({"kind": "cube"}, "kind"), ({"reduce": "min"}, "reduce"), ({"kernel": 4}, "kernel")],
)
def test_wrong_pooling_is_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Pooling(**options)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown policy 'tgvv': choose one of .*tgv"):
        build_policy("tgvv")
    with pytest.raises(ValueError, match=r"unknown score .*tgv"):
        build_policy("tgv", score="nothing")
    with pytest.raises(ValueError, match=r"unknown budget .*tgv, uniform|unknown budget .*uniform"):
        build_policy("tgv", budget="nothing")
    with pytest.raises(ValueError, match=r"unknown retention .*text_first"):
        build_policy("tgv", retain="nothing")
    with pytest.raises(ValueError, match="granularity"):
        build_policy("tgv", granularity="token")  # type: ignore[arg-type]


def test_a_name_is_registered_once() -> None:
    registry: Registry[Recipe] = Registry("policy")
    registry.add("x", Recipe("tgv", "tgv", "by_score"))
    with pytest.raises(ValueError, match="already"):
        registry.add("x", Recipe("tgv", "tgv", "by_score"))


class NoSynchronisation(TorchDispatchMode):
    """Raises on every operation that would wait for a device or has a data-dependent shape."""

    FORBIDDEN = frozenset(
        {
            "_local_scalar_dense",
            "item",
            "nonzero",
            "masked_select",
            "is_nonzero",
            "equal",
            "_unique2",
            "unique_dim",
            "unique_consecutive",
            "argwhere",
            "bincount",
        }
    )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__
        assert name not in self.FORBIDDEN, f"{name} synchronises"
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            dtypes = {index.dtype for index in args[1] if index is not None}
            assert torch.bool not in dtypes, f"{name} with a boolean mask synchronises"
        if name == "repeat_interleave":
            assert "output_size" in (kwargs or {}), "repeat_interleave synchronises"
        return func(*args, **(kwargs or {}))


def test_the_check_itself_catches_synchronisation() -> None:
    tensor = torch.ones(3)
    for operation in (
        lambda: tensor[0].item(),
        lambda: tensor.nonzero(),
        lambda: tensor[tensor > 0],
        lambda: bool((tensor > 0).all()),
    ):
        with NoSynchronisation(), pytest.raises(AssertionError, match="synchronises"):
            operation()


def run_everything(policy: Policy, device: str, workspace_bytes: int) -> None:
    """Statistics to page tables of one prompt, on tensors of ``device``."""
    images, num_tokens = LAYOUTS["several"]
    prompt = make_prompt("several")
    prompt = Prompt(
        num_tokens=num_tokens,
        num_candidates=prompt.num_candidates,
        is_vision=prompt.is_vision.to(device),
        rows=prompt.rows.to(device),
        sinks=2,
        images=tuple(ImageSpan(start, length, (1, length)) for start, length in images),
    )
    num_old, k, pairs = prompt.num_candidates // BLOCK_SIZE, 2, LAYERS * HEADS
    queries = torch.randn(prompt.rows.shape[0], HEADS, GROUP, HEAD_SIZE, device=device)
    pages = torch.randn(num_old + 1, HEADS, BLOCK_SIZE, HEAD_SIZE, device=device)
    cache = torch.zeros(2, (num_old + k) * pairs, BLOCK_SIZE, HEAD_SIZE, device=device)
    blocks = torch.randperm(num_old + k).int().to(device)
    row = torch.zeros(1, num_old + 1, dtype=torch.int32, device=device)
    seq_lens = torch.full((1,), num_tokens, dtype=torch.int32, device=device)
    regions = (torch.full_like(seq_lens, k), torch.full_like(seq_lens, num_old))
    tables = torch.empty(LAYERS, 1, HEADS, num_old + 1, dtype=torch.int32, device=device)
    ids = torch.arange(num_old + 1, device=device)
    with NoSynchronisation():
        layers = [
            observe(queries, pages, ids, prompt.rows, num_tokens, SCALE, workspace_bytes)
            for _ in range(LAYERS)
        ]
        counts, positions = decide(policy, layers, prompt, k)
        offsets = page_offsets(counts)
        old, new = blocks[:num_old], blocks[num_old:]
        copy_kept(*cache, positions, offsets, old, new, LAYERS, HEADS, workspace_bytes)
        write_page_tables(row, seq_lens, *regions, offsets[None], BLOCK_SIZE, tables)
        write_lengths(seq_lens, *regions, offsets[None], BLOCK_SIZE, tables[..., 0])


# Tensors of the device `meta` have no data: whatever looks at it fails, `tolist` included, which
# the dispatch mode cannot see.
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("granularity", ["layer", "head"])
@pytest.mark.parametrize("pooling", [Pooling(), Pooling("sequence"), Pooling("grid")])
@pytest.mark.parametrize("workspace_bytes", [0, 1 << 20])
def test_nothing_synchronises(
    device: str, granularity: Any, pooling: Pooling, workspace_bytes: int
) -> None:
    policy = build_policy("tgv", granularity=granularity, pooling=pooling)
    run_everything(policy, device, workspace_bytes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("granularity", ["layer", "head"])
@pytest.mark.parametrize("pooling", [Pooling(), Pooling("sequence"), Pooling("grid")])
def test_nothing_synchronises_on_cuda(granularity: Any, pooling: Pooling) -> None:
    policy = build_policy("tgv", granularity=granularity, pooling=pooling)
    run_everything(policy, "cuda", 1 << 20)  # whatever is set up on first use
    previous = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_everything(policy, "cuda", 1 << 20)
    finally:
        torch.cuda.set_sync_debug_mode(previous)
