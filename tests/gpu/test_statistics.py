# SPDX-License-Identifier: Apache-2.0
"""Attention statistics on Triton against float64 and PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from oracle.attention import attention_probabilities
from oracle.statistics import shared_sets
from tests.gpu import pytorch_on_cpu
from tests.unit.test_statistics import (
    ALL,
    KEY_DTYPES,
    Layers,
    check_sets,
    exact_log_sum_exp,
    make_layers,
    observe_ragged,
    observed_layers,
)
from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.kernels.row_sums import RowSums
from vllm_tgvkv.kernels.statistics import Scratch, observe
from vllm_tgvkv.policies import LayerView, Mix, Prompt, build_policy

pytest.importorskip("triton", reason="Triton is not installed")

# The GPU's exponential is accurate to a few units in the last place of its argument.
TOLERANCE = {"rtol": 3e-5, "atol": 2e-6}


class Poisoned(Scratch):
    """Buffers that are filled with NaN every time they are taken."""

    def take(self, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
        return super().take(name, shape, device).fill_(math.nan)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poison new tensors, so that values a kernel leaves out show."""
    from vllm_tgvkv.kernels.gpu.paged_rows import PagedRows

    empty = PagedRows.empty

    def poisoned(self: PagedRows, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return empty(self, *shape, dtype=dtype).fill_(math.nan if dtype.is_floating_point else 9999)

    monkeypatch.setattr(PagedRows, "empty", poisoned)


def make(
    num_keys: int,
    num_rows: int,
    device: str,
    heads: int = 2,
    group: int = 2,
    head_size: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int32,
) -> dict[str, Any]:
    """Return arguments of ``observe``: CUDA's pages with K and V, NaN where nothing is cached."""
    num_blocks = math.ceil(num_keys / block_size)
    keys = torch.randn(num_keys, heads, head_size)
    pool = torch.full((num_blocks + 3, heads, block_size, 2 * head_size), math.nan)
    ids = torch.randperm(num_blocks + 3)[:num_blocks]
    for j in range(num_keys):
        pool[ids[j // block_size], :, j % block_size, :head_size] = keys[j]
    return {
        "queries": torch.randn(num_rows, heads, group, head_size).mul(2).to(device, dtype),
        "key_pages": pool.to(device, dtype)[..., :head_size],
        "block_ids": ids.to(device, index),
        "row_positions": torch.randperm(num_keys)[:num_rows].sort().values.to(device),
        "num_keys": num_keys,
        "scale": head_size**-0.5,
    }


def on_cpu(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: v.cpu() if isinstance(v, Tensor) else v for k, v in arguments.items()}


def exact(arguments: dict[str, Any]) -> Tensor:
    """Return A of every query head, float64 ``[H, G, O, P]``."""
    return attention_probabilities(**on_cpu(arguments))


def check(arguments: dict[str, Any], per_head: bool, stored: bool = True, **options: Any) -> None:
    """Compare every statistic with float64; weighted sums from stored averages or from keys."""
    statistics = ALL if stored else ALL - {"row_averages"}
    options = {"scratch": Poisoned(), "per_head": per_head, "statistics": statistics, **options}
    num_visible = (arguments["row_positions"] + 1).tolist()
    sets = shared_sets(exact(arguments), num_visible, per_head)
    check_sets(observe(**arguments, **options), sets, **TOLERANCE)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# Lengths around pages and tiles of 64 and 128 keys. Products of 16-bit values are exact, so results
# agree as closely as with float32.
@pytest.mark.parametrize(
    ("num_keys", "heads", "group", "head_size", "block_size", "dtype", "per_head", "stored"),
    [
        (1, 2, 4, 128, 16, BF16, True, True),
        (16, 2, 1, 64, 16, FP16, False, False),
        (17, 1, 16, 80, 32, BF16, False, True),
        (64, 3, 2, 96, 48, FP16, True, False),
        (65, 2, 7, 16, 32, FP32, False, True),
        (127, 1, 5, 256, 16, BF16, True, True),
        (128, 2, 3, 256, 32, FP32, False, False),
        (129, 2, 6, 128, 128, BF16, True, False),
        (257, 2, 4, 16, 16, FP32, False, True),
    ],
)
def test_every_shape(
    device: str,
    num_keys: int,
    heads: int,
    group: int,
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
    per_head: bool,
    stored: bool,
) -> None:
    rows = min(num_keys, 7)
    arguments = make(num_keys, rows, device, heads, group, head_size, block_size, dtype)
    check(arguments, per_head, stored)


@pytest.mark.parametrize(("per_head", "workspace_bytes"), [(True, 0), (False, 1 << 20)])
def test_more_rows_than_a_tile_has(device: str, per_head: bool, workspace_bytes: int) -> None:
    """Averages that do not fit are not kept; then all sums come from the keys."""
    check(make(75, 75, device, group=3), per_head, workspace_bytes=workspace_bytes)


@pytest.mark.parametrize("programs", [1, 1 << 20])
def test_any_number_of_splits(device: str, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_tgvkv.kernels.gpu import columns, softmax

    monkeypatch.setattr(softmax, "_PROGRAMS", programs)
    monkeypatch.setattr(columns, "_PROGRAMS", programs)
    check(make(140, 40, device, heads=1, group=4), per_head=True, stored=False)


def test_little_shared_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_tgvkv.kernels.gpu import paged_rows

    monkeypatch.setattr(paged_rows, "shared_bytes", lambda device: 99 << 10)
    check(make(70, 20, device, group=4, head_size=256, dtype=BF16), per_head=False)


@pytest.mark.parametrize(
    ("stored", "statistics"), [(True, frozenset()), (False, frozenset({"share_below"}))]
)
def test_log_sum_exp_of_the_attention_kernel(
    device: str, stored: bool, statistics: frozenset[Any]
) -> None:
    """It is used with and without a statistic that needs the maximum as well."""
    arguments = make(90, 6, device, group=3)
    at_hand = on_cpu(arguments)
    keys = at_hand["key_pages"][at_hand["block_ids"].long()].transpose(1, 2).flatten(0, 1)[:90]
    logits = torch.einsum("ohgd,khd->ohgk", at_hand["queries"], keys) * arguments["scale"]
    future = torch.arange(90) > at_hand["row_positions"][:, None]
    logits = logits.masked_fill(future[:, None, None], -math.inf)
    statistics |= {"row_entropies"} | ({"row_averages"} if stored else set())
    attention = observe(
        **arguments,
        statistics=statistics,
        log_sum_exp=logits.logsumexp(dim=-1).to(device),
        scratch=Poisoned(),
    )
    with pytorch_on_cpu():
        expected = observe(**at_hand, statistics=statistics)
    weights = torch.rand(2, 6)
    for got, wanted in (
        (attention.column_sums, expected.column_sums),
        (attention.row_entropies, expected.row_entropies),
        (
            attention.weighted_column_sums(weights.to(device)),
            expected.weighted_column_sums(weights),
        ),
    ):
        torch.testing.assert_close(got.cpu(), wanted, **TOLERANCE)
    if "share_below" in statistics:
        torch.testing.assert_close(attention.share_below.cpu(), expected.share_below)


@pytest.mark.parametrize("per_head", [True, False])
def test_huge_logits(device: str, per_head: bool) -> None:
    """Rows still sum to one, and by far the largest logit of a row gets everything."""
    arguments = make(140, 8, device)
    arguments["queries"] *= 1000
    attention = observe(**arguments, per_head=per_head, statistics=ALL, scratch=Poisoned())
    by_set = exact(arguments).flatten(0, 1).view(2 if per_head else 1, -1, 8, 140).mean(1)
    ones = torch.ones(1, 8, device=device)
    sums = attention.column_sums
    torch.testing.assert_close(sums, attention.weighted_column_sums(ones))
    torch.testing.assert_close(sums.cpu().double(), by_set.sum(1), rtol=2e-3, atol=2e-3)
    total = torch.full((by_set.shape[0],), 8.0)
    torch.testing.assert_close(sums.sum(1).cpu(), total, rtol=1e-3, atol=0)
    assert attention.share_below.gt(0.8).all()
    assert attention.row_entropies.isfinite().all()
    # A logit that a row must not see may exceed all others by more than an exponential can hold.
    hidden = torch.zeros(1, 140, dtype=torch.bool, device=device)
    hidden[:, arguments["row_positions"][:1]] = True
    one = attention.renormalised_column_sums(hidden, ones)
    assert one[hidden.expand_as(one)].tolist() == pytest.approx([8.0] * len(one), rel=1e-3)
    assert (one.masked_fill(hidden, 0) == 0).all()


def test_a_subset_that_is_never_seen_gets_nothing(device: str) -> None:
    arguments = make(40, 3, device)
    arguments["row_positions"] = torch.tensor([3, 5, 20], device=device)
    attention = observe(**arguments, scratch=Poisoned())
    keys = torch.arange(40, device=device)[None] > 20
    got = attention.renormalised_column_sums(keys, torch.ones(1, 3, device=device))
    assert (got == 0).all()
    keys = torch.arange(40, device=device)[None] > 19
    got = attention.renormalised_column_sums(keys, torch.ones(1, 3, device=device))
    assert got[:, 20].tolist() == [1.0, 1.0]
    assert got.sum() == 2


@pytest.mark.parametrize(("number", "stored"), [(3, True), (1, False), (2, False), (5, False)])
def test_any_number_of_mixed_sums(device: str, number: int, stored: bool) -> None:
    arguments = make(90, 12, device)
    weights = (torch.rand(2, number, 12) < 0.5)[:, :, ::2].repeat(1, 1, 2)
    options = {"statistics": frozenset({"row_averages"} if stored else ())}
    got = observe(**arguments, **options, scratch=Poisoned()).mixed_column_sums(weights.to(device))
    expected = weights.double() @ exact(arguments).mean(1)
    torch.testing.assert_close(got.cpu().double(), expected, **TOLERANCE)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_any_strides(device: str, index: torch.dtype) -> None:
    """Queries are part of a wider batch; keys are stored transposed."""
    arguments = make(60, 10, device, heads=3, index=index)
    pages, queries = arguments["key_pages"], arguments["queries"]
    arguments["key_pages"] = pages.transpose(2, 3).contiguous().transpose(2, 3)
    wide = torch.full((20, 3, 4, 24), math.nan, device=device)
    wide[5:15, :, 1:3, 2:18] = queries
    arguments["queries"] = wide[5:15, :, 1:3, 2:18]
    check(arguments, per_head=index == torch.int32)


def all_bits(arguments: dict[str, Any], per_head: bool, stored: bool) -> list[Tensor]:
    attention = observe(
        **arguments, per_head=per_head, statistics=ALL if stored else ALL - {"row_averages"}
    )
    num_rows, num_keys = len(arguments["row_positions"]), arguments["num_keys"]
    device = arguments["queries"].device
    weights = torch.linspace(0, 1, num_rows, device=device)[None]
    subset = torch.arange(num_keys, device=device)[None] % 3 > 0
    return [
        attention.column_sums,
        attention.share_below,
        attention.row_entropies,
        attention.weighted_column_sums(weights),
        attention.renormalised_column_sums(subset, weights),
    ]


@pytest.mark.parametrize(("per_head", "stored"), [(True, False), (False, True)])
def test_the_same_bits_wherever_the_pages_are(device: str, per_head: bool, stored: bool) -> None:
    arguments = make(140, 10, device, group=4, dtype=BF16)
    first = all_bits(arguments, per_head, stored)
    pages, ids = arguments["key_pages"], arguments["block_ids"].long()
    moved = torch.full((len(pages) + 7, *pages.shape[1:]), math.nan, device=device).to(pages.dtype)
    new_ids = torch.randperm(len(moved), device=device)[: len(ids)]
    moved[new_ids] = pages[ids]
    for again in (arguments, {**arguments, "key_pages": moved, "block_ids": new_ids.int()}):
        for a, b in zip(first, all_bits(again, per_head, stored), strict=True):
            assert torch.equal(a, b)


def test_no_rows_give_zeros(device: str) -> None:
    attention = observe(**make(9, 0, device), statistics=ALL, scratch=Poisoned())
    zeros = [[0.0] * 9] * 2
    assert attention.column_sums.tolist() == zeros
    assert attention.weighted_column_sums(torch.ones(1, 0, device=device)).tolist() == zeros
    attention = observe(**make(9, 0, device), scratch=Poisoned())
    assert attention.weighted_column_sums(torch.ones(1, 0, device=device)).tolist() == zeros


@pytest.mark.parametrize("per_head", [True, False])
def test_sums_over_all_rows_of_several_chunks(device: str, per_head: bool) -> None:
    """Each chunk sees only the keys so far; NaN after them has no effect."""
    arguments = make(90, 90, device)
    by_set = exact(arguments).reshape(2 if per_head else 1, -1, 90, 90).mean(1)
    is_vision = torch.rand(90) < 0.5
    sums = RowSums(len(by_set), 90, torch.device(device))
    scratch = Poisoned()
    pages, ids = arguments["key_pages"], arguments["block_ids"]
    for start, end in ((0, 1), (1, 70), (70, 90)):
        rows = slice(start, end)
        num_blocks = math.ceil(end / 16)
        unwritten = pages.clone()
        unwritten[ids[num_blocks - 1].long(), :, (end - 1) % 16 + 1 :] = math.nan
        chunk = observe(
            queries=arguments["queries"][rows],
            key_pages=unwritten,
            block_ids=ids[:num_blocks],
            row_positions=arguments["row_positions"][rows],
            num_keys=end,
            scale=arguments["scale"],
            per_head=per_head,
            scratch=scratch,
        )
        sums.add(chunk, is_vision[rows].to(device))
    for got, rows_of in (
        (sums.text_column_sums, ~is_vision),
        (sums.vision_column_sums, is_vision),
        (sums.column_sums, torch.ones_like(is_vision)),
    ):
        expected = by_set[:, rows_of].sum(1)
        torch.testing.assert_close(got.double().cpu(), expected, **TOLERANCE)


def watch_launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the name of each Triton kernel is added when it is launched."""
    from vllm_tgvkv.kernels.gpu import columns, softmax

    seen: list[str] = []

    class Watched:
        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
            def launch(*args: Any, **kwargs: Any) -> object:
                seen.append(self.name)
                # The interpreter's own operations are not launches.
                with _disable_current_modes():
                    return self.kernel[grid](*args, **kwargs)

            return launch

    for module, names in ((softmax, ("softmax", "combine")), (columns, ("columns", "weigh"))):
        for name in names:
            kernel = f"_{name}_kernel"
            monkeypatch.setattr(module, kernel, Watched(name, getattr(module, kernel)))
    return seen


@pytest.mark.parametrize(
    ("statistics", "launches"),
    [
        (frozenset(), ["softmax", "combine", "columns", "columns"]),
        (frozenset({"row_averages"}), ["softmax", "combine", "columns", "weigh"]),
    ],
)
def test_keys_are_read_twice_at_most(
    device: str,
    statistics: frozenset[Any],
    launches: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once for the log-sum-exp, if it is not given, and once for all other statistics."""
    seen = watch_launches(monkeypatch)
    arguments = make(40, 5, device)
    weights = torch.rand(2, 5, device=device)
    attention = observe(**arguments, statistics=statistics)
    assert not seen
    _ = attention.column_sums, attention.weighted_column_sums(weights), attention.column_sums
    assert seen == launches
    seen.clear()
    given = observe(
        **arguments, statistics=statistics, log_sum_exp=torch.zeros(5, 2, 2, device=device)
    )
    _ = given.column_sums, given.weighted_column_sums(weights)
    assert seen == launches[2:]


# -- several layers over page tables ------------------------------------------------------


def check_layers(layers: Layers, stored: bool = True, **options: Any) -> None:
    statistics = ALL if stored else ALL - {"row_averages"}
    options = {"scratch": Poisoned(), "statistics": statistics, **options}
    check_sets(observe_ragged(**layers.arguments, **options), layers.sets(), **TOLERANCE)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), stored=st.booleans())
def test_heads_of_different_lengths(device: str, data: st.DataObject, stored: bool) -> None:
    check_layers(data.draw(observed_layers(device, longest=70)), stored)


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("is_transposed", [True, False])
def test_layers_of_several_tiles(device: str, per_head: bool, is_transposed: bool) -> None:
    """Some heads end tiles before others, and some rows see nothing of the shortest."""
    lengths = [[300, 5], [1, 129]] if per_head else [[300, 300], [40, 40]]
    hidden = [140, *range(40, 0, -2), 0]
    layers = make_layers(
        lengths, hidden, per_head, 4, 32, 16, FP16, is_transposed=is_transposed, device=device
    )
    check_layers(layers)
    check_layers(layers, stored=False, workspace_bytes=0)


@pytest.mark.parametrize("dtype", [FP16, FP32, BF16])
@pytest.mark.parametrize("key_dtype", KEY_DTYPES)
def test_quantised_keys(device: str, dtype: torch.dtype, key_dtype: torch.dtype) -> None:
    check_layers(
        make_layers([[50, 21]], [9, 2, 0], True, 2, 16, 16, dtype, key_dtype, device=device)
    )


def test_log_sum_exps_of_layers(device: str) -> None:
    layers = make_layers([[40, 3], [1, 70]], [13, 5, 0], per_head=True, device=device)
    log_sum_exp = exact_log_sum_exp(layers)
    assert log_sum_exp.isinf().any()
    check_layers(layers, log_sum_exp=log_sum_exp.float().to(device))


class Operations(TorchDispatchMode):
    """Names of PyTorch operations that would launch a kernel: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        allocates = function.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.new_empty)
        if not function.is_view and not allocates:
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("per_head", [True, False])
def test_the_number_of_launches_does_not_grow_with_the_layers(
    device: str, per_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics, scores and strengths of TGV-KV, whose weights depend on the column sums."""
    triton_launches = watch_launches(monkeypatch)
    policy = build_policy(Mix("tgv", granularity="head" if per_head else "layer"))
    num_layers, heads, num_keys, num_rows = 36, 2, 20, 3
    prompt = Prompt(num_keys, 16, torch.arange(num_keys, device=device) < 10, 0)
    hidden = range(num_rows - 1, -1, -1)
    arguments = make_layers(
        [[num_keys] * heads] * num_layers, hidden, per_head, 2, 16, 16, device=device
    ).arguments

    def scored(layers: slice) -> tuple[list[Tensor], int]:
        """Return scores and strengths of some layers at once, and the number of launches."""
        pairs = slice(layers.start * heads, layers.stop * heads)
        some = arguments | {
            **{name: arguments[name][layers] for name in ("queries", "scale")},
            **{name: arguments[name][pairs] for name in ("tables", "lengths")},
        }
        triton_launches.clear()
        with Operations() as operations:
            attention = observe_ragged(
                **some,
                statistics=policy.statistics("text"),
                num_common_keys=num_keys - num_rows + 1,
                row_positions=torch.arange(num_keys - num_rows, num_keys, device=device),
            )
            view = LayerView(0, attention.num_groups, prompt, attention)
            scores = policy.score(view)
            strengths = policy.allocation.strength(view, scores)
        return [scores, strengths], len(triton_launches) + len(operations.names)

    together, launches = scored(slice(0, num_layers))
    assert triton_launches == ["softmax", "combine", "columns", "weigh"]
    num_sets = heads if per_head else 1
    for layer in (0, num_layers - 1):
        alone, launches_of_one = scored(slice(layer, layer + 1))
        assert triton_launches == ["softmax", "combine", "columns", "weigh"]
        sets = slice(layer * num_sets, (layer + 1) * num_sets)
        for of_all, of_layer in zip(together, alone, strict=True):
            torch.testing.assert_close(of_all[sets], of_layer)
    print(f"{launches} launches for {num_layers} layers, {launches_of_one} for one")
    assert launches <= launches_of_one <= 25


@pytest.mark.gpu
@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("num_keys", [8197, 40_000])
def test_a_large_prompt_without_waiting(num_keys: int, per_head: bool) -> None:
    """Qwen3-VL-8B's shape, against PyTorch on the same GPU."""
    num_rows, heads, group, head_size = 64, 8, 4, 128
    num_blocks = math.ceil(num_keys / 16)
    pool = torch.full((3 * num_blocks, heads, 16, 2 * head_size), math.nan, device="cuda").to(BF16)
    ids = torch.randperm(len(pool), device="cuda")[:num_blocks].int()
    pool[ids] = torch.randn(num_blocks, heads, 16, 2 * head_size, device="cuda").to(BF16)
    pool[ids[-1], :, num_keys % 16 or 16 :] = math.nan
    positions = torch.arange(num_keys - num_rows - 3, num_keys - 3, device="cuda")
    shape = (num_rows, heads, group, head_size)
    arguments: dict[str, Any] = {
        "queries": torch.randn(shape, device="cuda", dtype=BF16),
        "key_pages": pool[..., :head_size],
        "block_ids": ids,
        "row_positions": positions,
        "num_keys": num_keys,
        "scale": head_size**-0.5,
    }
    first = all_bits(arguments, per_head, stored=True)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = all_bits(arguments, per_head, stored=True)
        direct = all_bits(arguments, per_head, stored=False)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "runs", lambda tensor: False)
        expected = all_bits(arguments, per_head, stored=True)
    for got, same, other, wanted in zip(first, again, direct, expected, strict=True):
        assert torch.equal(got, same)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got, other, rtol=1e-4, atol=1e-5)
