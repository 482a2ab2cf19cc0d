# SPDX-License-Identifier: Apache-2.0
"""Attention statistics, in PyTorch and on Triton, against their definition in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from oracle.attention import attention_probabilities
from oracle.statistics import SharedSet, shared_sets
from tests.inputs import Launches, Layers, make_layers, observe_ragged, random_sinks
from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.kernels.row_chunks import TorchAttention, observe_logits
from vllm_tgvkv.kernels.row_sums import RowSums
from vllm_tgvkv.kernels.statistics import (
    THRESHOLD,
    ObservedAttention,
    Scratch,
    Statistic,
    observe,
)
from vllm_tgvkv.policies import (
    NO_ATTENTION,
    POLICY_NAMES,
    Attention,
    LayerView,
    Mix,
    Prompt,
    build_policy,
)
from vllm_tgvkv.shared.prompt import RowSet, VisionSpan

pytest.importorskip("triton", reason="Triton is not installed")

# The GPU's exponential is accurate to a few units in the last place of its argument.
TOLERANCE = {"rtol": 3e-5, "atol": 2e-6}


ALL: frozenset[Statistic] = frozenset(
    {"row_averages", "share_below", "row_entropies", "column_maxima"}
)


def check_sets(attention: ObservedAttention, sets: Sequence[SharedSet]) -> None:
    """Compare every statistic of one observation, weighted sums first."""
    num_sets, num_keys, device = len(sets), attention.num_keys, attention.row_columns.device
    num_rows = len(sets[0].num_visible)

    def padded(values: Sequence[Tensor]) -> Tensor:
        return torch.stack([torch.cat((v, v.new_zeros(num_keys - len(v)))) for v in values])

    def agree(got: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
        assert got.dtype == dtype
        torch.testing.assert_close(got.double().cpu(), expected, **TOLERANCE)

    def weighted(weights: Tensor) -> Tensor:
        rows = weights.expand(num_sets, -1).tolist()
        return padded([s.weighted_column_sums(w) for s, w in zip(sets, rows, strict=True)])

    # Weighted sums do not depend on an earlier pass.
    for size in {1, num_sets}:
        weights = torch.rand(size, num_rows)
        agree(attention.weighted_column_sums(weights.to(device)), weighted(weights))
    sums = padded([s.column_sums for s in sets])
    if attention.head_size:  # else of given logits
        agree(attention.mean_of_query_heads(lambda heads: heads.column_sums), sums)
    agree(attention.column_sums, sums)
    agree(attention.column_maxima, padded([s.column_maxima for s in sets]))
    mixed = torch.rand(num_sets, 2, num_rows)
    expected = torch.stack([weighted(weights) for weights in mixed.unbind(1)], dim=1)
    agree(attention.mixed_column_sums(mixed.to(device)), expected)
    # Rounding decides on entries at the threshold.
    shares = attention.share_below
    assert shares.dtype == torch.float64
    for share, s in zip(shares.tolist(), sets, strict=True):
        least, most = (s.share_below(THRESHOLD * (1 + near)) for near in (-1e-4, 1e-4))
        assert least - 1e-9 <= share <= most + 1e-9
    agree(attention.row_entropies, torch.stack([s.row_entropies for s in sets]))
    columns = torch.tensor([s.num_visible for s in sets]) - 1
    assert torch.equal(attention.row_columns.cpu().expand(num_sets, -1), columns)

    # A subset may be shared by all groups; early rows may see none of it.
    for size in {1, num_sets}:
        keys = torch.rand(size, num_keys) < 0.5
        weights = torch.rand(size, num_rows)
        for last_row_only in (False, True):
            if last_row_only:
                weights[:, :-1] = 0
            got = attention.renormalised_column_sums(
                keys.to(device), weights.to(device), last_row_only
            )
            subsets = zip(
                sets, keys.expand(num_sets, -1), weights.expand(num_sets, -1), strict=True
            )
            agree(
                got,
                padded(
                    [
                        s.renormalised_column_sums(subset[: s.attention.shape[2]], row.tolist())
                        for s, subset, row in subsets
                    ]
                ),
            )


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
    kernels: str,
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
        "queries": torch.randn(num_rows, heads, group, head_size).mul(2).to(kernels, dtype),
        "key_pages": pool.to(kernels, dtype)[..., :head_size],
        "block_ids": ids.to(kernels, index),
        "row_positions": torch.randperm(num_keys)[:num_rows].sort().values.to(kernels),
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
    check_sets(observe(**arguments, **options), sets)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# Lengths around pages and tiles of 64 and 128 keys, more rows than a tile has, and averages that do
# not fit the workspace. Products of 16-bit values are exact: results agree as with float32.
@pytest.mark.parametrize(
    ("keys", "rows", "heads", "group", "head_size", "block_size", "dtype", "per_head", "stored"),
    [
        *((number, 3, 2, 3, 8, 4, FP32, True, True) for number in (3, 4, 5)),
        (1, 1, 2, 4, 128, 16, BF16, True, True),
        (16, 7, 2, 1, 64, 16, FP16, False, False),
        (17, 7, 1, 16, 80, 32, BF16, False, True),
        (64, 7, 3, 2, 96, 48, FP16, True, False),
        (65, 7, 2, 7, 16, 32, FP32, False, True),
        (127, 7, 1, 5, 256, 16, BF16, True, True),
        (129, 7, 2, 6, 128, 128, BF16, False, False),
        (257, 7, 2, 4, 16, 16, FP32, False, True),
        (75, 75, 2, 3, 16, 16, FP32, True, 0),
        (75, 75, 2, 3, 16, 16, FP32, False, 1 << 20),
    ],
)
def test_every_shape(
    kernels: str,
    keys: int,
    rows: int,
    heads: int,
    group: int,
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
    per_head: bool,
    stored: int,
) -> None:
    """`stored`: whether averages are kept, or the workspace for them in bytes."""
    options = {} if isinstance(stored, bool) else {"workspace_bytes": stored}
    arguments = make(keys, rows, kernels, heads, group, head_size, block_size, dtype)
    check(arguments, per_head, stored is not False, **options)


@pytest.mark.parametrize("kernels", ["pytorch"], indirect=True)
@pytest.mark.parametrize("rows", [0, 2.5, 100])
def test_any_workspace_gives_the_same(kernels: str, rows: float) -> None:
    """As many rows at a time as fit, at least one."""
    arguments = make(37, 20, kernels, block_size=4)
    row = 8 * 2 * 2 * 37  # bytes of one, in two float32 buffers
    size = int(rows * row)
    for per_head in (True, False):
        check(arguments, per_head, workspace_bytes=size)
    attention = observe(**arguments, workspace_bytes=size)
    assert isinstance(attention, TorchAttention)
    wanted = exact(arguments)
    for part, probabilities in attention.row_chunks(layer=0):
        num_rows = part.stop - part.start
        assert num_rows == 1 or num_rows * row <= size
        torch.testing.assert_close(probabilities.double(), wanted[:, :, part], **TOLERANCE)


@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
@pytest.mark.parametrize("programs", [1, 1 << 20])
def test_any_number_of_splits_and_little_shared_memory(
    kernels: str, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_tgvkv.kernels.gpu import columns, paged_rows, softmax

    monkeypatch.setattr(softmax, "_PROGRAMS", programs)
    monkeypatch.setattr(columns, "_PROGRAMS", programs)
    check(make(140, 40, kernels, heads=1, group=4), per_head=True, stored=False)
    monkeypatch.setattr(paged_rows, "shared_bytes", lambda device: 99 << 10)
    check(make(70, 20, kernels, group=4, head_size=256, dtype=BF16), per_head=False)


@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
@pytest.mark.parametrize("per_head", [True, False])
def test_huge_logits(kernels: str, per_head: bool) -> None:
    """Rows still sum to one, and by far the largest logit of a row gets everything."""
    arguments = make(140, 8, kernels)
    arguments["queries"] *= 1000
    attention = observe(**arguments, per_head=per_head, statistics=ALL, scratch=Poisoned())
    by_set = exact(arguments).flatten(0, 1).view(2 if per_head else 1, -1, 8, 140).mean(1)
    ones = torch.ones(1, 8, device=kernels)
    sums = attention.column_sums
    torch.testing.assert_close(sums, attention.weighted_column_sums(ones))
    torch.testing.assert_close(sums.cpu().double(), by_set.sum(1), rtol=2e-3, atol=2e-3)
    total = torch.full((by_set.shape[0],), 8.0)
    torch.testing.assert_close(sums.sum(1).cpu(), total, rtol=1e-3, atol=0)
    assert attention.share_below.gt(0.8).all()
    assert attention.row_entropies.isfinite().all()
    # A logit that a row must not see may exceed all others by more than an exponential can hold.
    hidden = torch.zeros(1, 140, dtype=torch.bool, device=kernels)
    hidden[:, arguments["row_positions"][:1]] = True
    one = attention.renormalised_column_sums(hidden, ones)
    assert one[hidden.expand_as(one)].tolist() == pytest.approx([8.0] * len(one), rel=1e-3)
    assert (one.masked_fill(hidden, 0) == 0).all()


@pytest.mark.parametrize("size", [1e3, -1e3])
def test_sinks_far_above_and_below_all_logits(kernels: str, size: float) -> None:
    """They leave nothing or everything, and never a number that is not one."""
    arguments = make(70, 5, kernels)
    sinks = torch.full((2, 2), size, device=kernels)
    with_sinks, without = (
        observe(**arguments, sinks=x, statistics=ALL, scratch=Poisoned()) for x in (sinks, None)
    )
    for name in ("column_sums", "column_maxima", "row_entropies"):
        expected = getattr(without, name)
        expected = torch.zeros_like(expected) if size > 0 else expected
        torch.testing.assert_close(getattr(with_sinks, name), expected, **TOLERANCE)


def test_probabilities_of_given_logits_leave_room_for_sinks() -> None:
    """As recall gives them: one more column is the sinks'."""
    logits, sinks = torch.randn(3, 2, 4, 30) * 3, random_sinks(3, 2)
    positions = torch.arange(26, 30)
    future = torch.arange(30) > positions[:, None]
    masked = logits.double().masked_fill(future, -math.inf).exp()
    total = masked.sum(-1) + sinks.double().exp()[..., None]
    sets = shared_sets(masked / total[..., None], (positions + 1).tolist(), per_head=True)
    given = torch.cat((logits, torch.full((3, 2, 4, 1), math.nan)), dim=-1)
    check_sets(observe_logits(given, positions, ALL, 1 << 20, Poisoned(), sinks), sets)


def test_a_subset_that_is_never_seen_gets_nothing(kernels: str) -> None:
    arguments = make(40, 3, kernels)
    arguments["row_positions"] = torch.tensor([3, 5, 20], device=kernels)
    attention = observe(**arguments, scratch=Poisoned())
    keys, ones = torch.arange(40, device=kernels)[None], torch.ones(1, 3, device=kernels)
    assert not attention.renormalised_column_sums(keys > 20, ones).any()
    got = attention.renormalised_column_sums(keys > 19, ones)
    assert got[:, 20].tolist() == pytest.approx([1.0, 1.0])
    assert not got[:, torch.arange(40) != 20].any()


@pytest.mark.parametrize(("number", "stored"), [(3, True), (1, False), (5, False)])
def test_any_number_of_mixed_sums(kernels: str, number: int, stored: bool) -> None:
    arguments = make(90, 12, kernels)
    weights = (torch.rand(2, number, 12) < 0.5)[:, :, ::2].repeat(1, 1, 2)
    options = {"statistics": frozenset({"row_averages"} if stored else ())}
    got = observe(**arguments, **options, scratch=Poisoned()).mixed_column_sums(weights.to(kernels))
    expected = weights.double() @ exact(arguments).mean(1)
    torch.testing.assert_close(got.cpu().double(), expected, **TOLERANCE)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_any_strides(kernels: str, index: torch.dtype) -> None:
    """Queries are part of a wider batch; keys are stored transposed."""
    arguments = make(60, 10, kernels, heads=3, index=index)
    pages, queries = arguments["key_pages"], arguments["queries"]
    arguments["key_pages"] = pages.transpose(2, 3).contiguous().transpose(2, 3)
    wide = torch.full((20, 3, 4, 24), math.nan, device=kernels)
    wide[5:15, :, 1:3, 2:18] = queries
    arguments["queries"] = wide[5:15, :, 1:3, 2:18]
    check(arguments, per_head=index == torch.int32)


def all_bits(arguments: dict[str, Any], per_head: bool, stored: bool) -> list[Tensor]:
    attention = observe(
        **arguments, per_head=per_head, statistics=ALL if stored else ALL - {"row_averages"}
    )
    num_rows, num_keys = len(arguments["row_positions"]), arguments["num_keys"]
    kernels = arguments["queries"].device
    weights = torch.linspace(0, 1, num_rows, device=kernels)[None]
    subset = torch.arange(num_keys, device=kernels)[None] % 3 > 0
    return [
        attention.column_sums,
        attention.share_below,
        attention.row_entropies,
        attention.weighted_column_sums(weights),
        attention.renormalised_column_sums(subset, weights),
    ]


@pytest.mark.parametrize(("per_head", "stored"), [(True, False), (False, True)])
def test_the_same_bits_wherever_the_pages_are(kernels: str, per_head: bool, stored: bool) -> None:
    arguments = make(140, 10, kernels, group=4, dtype=BF16)
    first = all_bits(arguments, per_head, stored)
    pages, ids = arguments["key_pages"], arguments["block_ids"].long()
    moved = torch.full((len(pages) + 7, *pages.shape[1:]), math.nan, device=kernels).to(pages.dtype)
    new_ids = torch.randperm(len(moved), device=kernels)[: len(ids)]
    moved[new_ids] = pages[ids]
    for again in (arguments, {**arguments, "key_pages": moved, "block_ids": new_ids.int()}):
        for a, b in zip(first, all_bits(again, per_head, stored), strict=True):
            assert torch.equal(a, b)


def test_no_rows_give_zeros(kernels: str) -> None:
    for statistics in (ALL, frozenset()):
        attention = observe(**make(9, 0, kernels), statistics=statistics, scratch=Poisoned())
        assert attention.column_sums.tolist() == [[0.0] * 9] * 2
        weighted = attention.weighted_column_sums(torch.ones(1, 0, device=kernels))
        assert weighted.tolist() == [[0.0] * 9] * 2


@pytest.mark.parametrize(("per_head", "has_sinks"), [(True, True), (False, False)])
def test_sums_over_all_rows_of_several_chunks(
    kernels: str, per_head: bool, has_sinks: bool
) -> None:
    """Each chunk sees only the keys so far; NaN after them has no effect."""
    arguments = make(90, 90, kernels)
    arguments["sinks"] = random_sinks(2, 2).to(kernels) if has_sinks else None
    by_set = exact(arguments).reshape(2 if per_head else 1, -1, 90, 90).mean(1)
    is_vision = torch.rand(90) < 0.5
    sums = RowSums(len(by_set), 90, torch.device(kernels), by_modality=True)
    whole = RowSums(len(by_set), 90, torch.device(kernels))
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
            sinks=arguments["sinks"],
        )
        for each in (sums, whole):
            each.add(chunk, is_vision[rows].to(kernels))
    for got, rows_of in (
        (sums.text_column_sums, ~is_vision),
        (sums.vision_column_sums, is_vision),
        (sums.column_sums, torch.ones_like(is_vision)),
        (whole.column_sums, torch.ones_like(is_vision)),
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


@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
@pytest.mark.parametrize(
    ("statistics", "launches"),
    [
        (frozenset(), ["softmax", "combine", "columns", "columns"]),
        (frozenset({"row_averages"}), ["softmax", "combine", "columns", "weigh"]),
    ],
)
def test_keys_are_read_twice_at_most(
    kernels: str,
    statistics: frozenset[Any],
    launches: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once for the log-sum-exp, and once for all other statistics."""
    seen = watch_launches(monkeypatch)
    weights = torch.rand(2, 5, device=kernels)
    attention = observe(**make(40, 5, kernels), statistics=statistics)
    assert not seen
    _ = attention.column_sums, attention.weighted_column_sums(weights), attention.column_sums
    assert seen == launches


def test_wrong_weights_and_statistics_that_were_not_requested_are_named() -> None:
    attention = observe(**make(20, 4, "cpu"))
    with pytest.raises(ValueError, match="weights"):
        attention.weighted_column_sums(torch.zeros(2, 5))
    for name in ("share_below", "row_entropies", "column_maxima"):
        with pytest.raises(ValueError, match=f"{name} was not computed"):
            getattr(attention, name)


# -- several layers over page tables ------------------------------------------------------


def check_layers(layers: Layers, stored: bool = True, **options: Any) -> None:
    statistics = ALL if stored else ALL - {"row_averages"}
    options = {"scratch": Poisoned(), "statistics": statistics, **options}
    check_sets(observe_ragged(**layers.arguments, **options), layers.sets())


KEY_DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@st.composite
def observed_layers(draw: st.DrawFn, device: str = "cpu", longest: int = 40) -> Layers:
    layers, heads, per_head = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.booleans()),
    )
    length = st.integers(1, longest)
    if per_head:
        lengths = [[draw(length) for _ in range(heads)] for _ in range(layers)]
    else:
        lengths = [[draw(length)] * heads for _ in range(layers)]
    # Some rows may see no key of some heads, but the last one sees at least one of each.
    hidden = draw(st.lists(st.integers(0, longest), max_size=5))
    last = draw(st.integers(0, min(map(min, lengths)) - 1))
    num_hidden = [*sorted((max(h, last) for h in hidden), reverse=True), last]
    torch.manual_seed(draw(st.integers(0, 2**31)))
    return make_layers(
        lengths,
        num_hidden,
        per_head,
        group=draw(st.integers(1, 3)),
        head_size=draw(st.sampled_from([4, 8, 24])),
        block_size=draw(st.sampled_from([1, 4, 16])),
        dtype=draw(st.sampled_from(KEY_DTYPES[:3])),
        key_dtype=draw(st.sampled_from([None, *KEY_DTYPES])),
        is_transposed=draw(st.booleans()),
        extra_width=draw(st.integers(0, 3)),
        device=device,
        has_sinks=draw(st.booleans()),
    )


@settings(max_examples=12)
@given(data=st.data(), stored=st.booleans())
def test_heads_of_different_lengths(kernels: str, data: st.DataObject, stored: bool) -> None:
    layers = data.draw(observed_layers(kernels))
    check_layers(layers, stored, workspace_bytes=data.draw(st.sampled_from([0, 1 << 12, 1 << 20])))


@pytest.mark.parametrize(("per_head", "variant"), [(True, False), (False, True)])
def test_layers_of_several_tiles(kernels: str, per_head: bool, variant: bool) -> None:
    """Some heads end tiles before others, and some rows see nothing of the shortest.

    The variant has transposed pages and learned sinks.
    """
    lengths = [[300, 5], [1, 129]] if per_head else [[300, 300], [40, 40]]
    hidden = [140, *range(40, 0, -2), 0]
    more = {"is_transposed": variant, "has_sinks": variant, "device": kernels}
    layers = make_layers(lengths, hidden, per_head, 4, 32, 16, FP16, **more)
    check_layers(layers)
    check_layers(layers, stored=False, workspace_bytes=0)


@pytest.mark.parametrize(
    ("dtype", "key_dtype"),
    [*zip([FP16, FP32, BF16, FP16], KEY_DTYPES, strict=True), (KEY_DTYPES[2], KEY_DTYPES[2])],
)
def test_quantised_queries_and_keys(
    kernels: str, dtype: torch.dtype, key_dtype: torch.dtype
) -> None:
    check_layers(
        make_layers([[50, 21]], [9, 2, 0], True, 2, 16, 16, dtype, key_dtype, device=kernels)
    )


def test_evicted_keys_leave_no_positions() -> None:
    layers = make_layers([[9, 3]], [5, 0], per_head=True)
    with pytest.raises(ValueError, match="use row_columns"):
        _ = observe_ragged(**layers.arguments).row_positions


WRONG_OF_LAYERS: list[tuple[dict[str, Any], str]] = [
    ({"queries": torch.zeros(3, 2, 2, 8)}, "queries"),
    ({"queries": torch.zeros(2, 3, 2, 2, 8).int()}, "queries"),
    ({"pool": torch.zeros(30, 4, 9)}, "pool"),
    ({"tables": torch.zeros(3, 4).int()}, "tables"),
    ({"tables": torch.zeros(4, 3).int()}, "tables must have the 4 pages"),
    ({"tables": torch.zeros(4, 4)}, "tables"),
    ({"lengths": torch.zeros(2).int()}, "num_visible"),
    ({"lengths": torch.zeros(4).long()}, "num_visible"),
    ({"num_hidden": torch.zeros(2).int()}, "num_visible"),
    ({"num_keys": 0}, "num_keys"),
    ({"scale": torch.ones(3)}, "scale"),
    ({"row_positions": torch.zeros(2).long()}, "row_positions"),
    ({"sinks": torch.zeros(2, 2)}, "sinks"),
    ({"sinks": torch.zeros(2, 2, 2).bfloat16()}, "sinks"),
]
WRONG_OF_PROMPT: list[tuple[dict[str, Any], str]] = [
    ({"queries": torch.zeros(4, 2, 2)}, "queries"),
    ({"queries": torch.zeros(4, 3, 2, 16)}, "key_pages"),
    ({"num_keys": 0}, "num_keys"),
    ({"num_keys": 60}, "block_ids"),
    ({"row_positions": torch.zeros(3).long()}, "row_positions"),
]


def test_wrong_arguments_are_named() -> None:
    layers = make_layers([[9, 3], [1, 14]], [13, 5, 0], per_head=True)
    for change, word in WRONG_OF_LAYERS:
        with pytest.raises(ValueError, match=f"^{word}"):
            observe_ragged(**{**layers.arguments, **change})
    for change, word in WRONG_OF_PROMPT:
        with pytest.raises(ValueError, match=f"^{word}"):
            observe(**{**make(20, 4, "cpu"), **change})


@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
@pytest.mark.parametrize("per_head", [True, False])
def test_the_number_of_launches_does_not_grow_with_the_layers(
    kernels: str, per_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics, scores and strengths of TGV-KV, whose weights depend on the column sums."""
    triton_launches = watch_launches(monkeypatch)
    policy = build_policy(Mix("tgv", granularity="head" if per_head else "layer"))
    num_layers, heads, num_keys, num_rows = 36, 2, 20, 3
    prompt = Prompt(num_keys, 16, torch.arange(num_keys, device=kernels) < 10, 0)
    hidden = range(num_rows - 1, -1, -1)
    arguments = make_layers(
        [[num_keys] * heads] * num_layers, hidden, per_head, 2, 16, 16, device=kernels
    ).arguments

    def scored(layers: slice) -> tuple[list[Tensor], int]:
        """Return scores and strengths of some layers at once, and the number of launches."""
        triton_launches.clear()
        with Launches() as operations:
            attention = observe_ragged(
                **of_layers(arguments, layers, heads),
                statistics=policy.statistics("text"),
                row_positions=torch.arange(num_keys - num_rows, num_keys, device=kernels),
            )
            view = LayerView(0, attention.num_groups, prompt, attention)
            scores = policy.score(view)
            strengths = policy.allocation.strength(view, scores)
        assert triton_launches == ["softmax", "combine", "columns", "weigh"]
        return [scores, strengths], len(triton_launches) + len(operations.names)

    together, launches = scored(slice(0, num_layers))
    num_sets = heads if per_head else 1
    for layer in (0, num_layers - 1):
        alone, launches_of_one = scored(slice(layer, layer + 1))
        sets = slice(layer * num_sets, (layer + 1) * num_sets)
        for of_all, of_layer in zip(together, alone, strict=True):
            torch.testing.assert_close(of_all[sets], of_layer)
    assert launches <= launches_of_one <= 25


def of_layers(arguments: dict[str, Any], layers: slice, heads: int) -> dict[str, Any]:
    """Return the arguments of `observe_ragged` for some layers."""
    pairs = slice(layers.start * heads, layers.stop * heads)
    return arguments | {
        **{name: arguments[name][layers] for name in ("queries", "scale")},
        **{name: arguments[name][pairs] for name in ("tables", "lengths")},
    }


METHODS = [
    *(Mix(name) for name in POLICY_NAMES if build_policy(Mix(name)).score.rows != "none"),
    *(Mix(name, granularity="head") for name in ("tgv", "vlcache", "aircache", "prefixkv")),
    *(Mix(allocation=part) for part in ("vv", "tt", "entropy")),
    Mix(score="vv_tt", granularity="head"),
    Mix("snapkv", reduce="max"),
    *(Mix("aircache", "aircache_query_heads", granularity=kind) for kind in ("head", "layer")),
]


@pytest.mark.parametrize("mix", METHODS, ids=str)
def test_methods_score_layers_at_once_as_one_by_one(mix: Mix) -> None:
    """To a score or a strength, the token sets of several layers are like those of one."""
    policy = build_policy(mix)
    num_layers, num_keys = 3, 29
    images = (VisionSpan(6, 12, (3, 4)),)
    is_vision = (torch.arange(num_keys) >= 6) & (torch.arange(num_keys) < 18)
    prompt = Prompt(num_keys, 28, is_vision, sinks=2, images=images)
    per_head = policy.granularity == "head"
    num_sets = 2 if per_head else 1
    arguments = make_layers(
        [[num_keys] * 2] * num_layers, range(num_keys - 1, -1, -1), per_head, 3
    ).arguments
    values = torch.randn_like(arguments["pool"])

    def observed(kind: RowSet, layers: slice) -> ObservedAttention:
        rows = slice(0 if kind == "all" else 20, num_keys)
        some = of_layers(arguments, layers, 2)
        some["queries"], some["num_hidden"] = some["queries"][:, rows], some["num_hidden"][rows]
        positions = torch.arange(num_keys)[rows]
        statistics = policy.statistics(kind)
        return observe_ragged(**some, statistics=statistics, row_positions=positions, values=values)

    def attention(kind: RowSet, layers: slice) -> Attention:
        if kind == "none":
            return NO_ATTENTION
        if kind != "all":
            return observed(kind, layers)
        number = (layers.stop - layers.start) * num_sets
        sums = RowSums(number, num_keys, torch.device("cpu"), by_modality=True)
        for i, layer in enumerate(range(layers.start, layers.stop)):
            sums.add(observed(kind, slice(layer, layer + 1)), is_vision, first_set=i * num_sets)
        return sums

    def scored(layers: slice) -> tuple[Tensor, ...]:
        number = (layers.stop - layers.start) * num_sets
        view = LayerView(0, number, prompt, attention(policy.score.rows, layers))
        scores = policy.scores(view)
        view = LayerView(0, number, prompt, attention(policy.allocation.rows, layers))
        strengths = policy.allocation.strength(view, scores)
        return scores, policy.pooled(scores, prompt), strengths

    together = scored(slice(0, num_layers))
    for layer in range(num_layers):
        sets = slice(layer * num_sets, (layer + 1) * num_sets)
        for of_all, alone in zip(together, scored(slice(layer, layer + 1)), strict=True):
            assert torch.equal(of_all[sets], alone)


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
