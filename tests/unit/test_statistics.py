# SPDX-License-Identifier: Apache-2.0
"""Attention statistics against their definition in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.attention import attention_probabilities
from oracle.statistics import SharedSet, paged_sets, shared_sets
from tests.inputs import paged
from vllm_tgvkv.kernels.row_chunks import TorchAttention
from vllm_tgvkv.kernels.row_sums import RowSums
from vllm_tgvkv.kernels.statistics import (
    THRESHOLD,
    ObservedAttention,
    ObservedRows,
    Scratch,
    Statistic,
    observe,
    observe_layers,
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

HEADS, GROUP, HEAD_SIZE, BLOCK_SIZE = 2, 3, 8, 4
SCALE = HEAD_SIZE**-0.5


def make(
    num_keys: int, num_rows: int, dtype: torch.dtype = torch.float32, transposed: bool = True
) -> dict[str, Any]:
    keys = torch.randn(num_keys, HEADS, HEAD_SIZE).to(dtype)
    key_pages, block_ids = paged(keys, BLOCK_SIZE, transposed)
    return {
        "queries": torch.randn(num_rows, HEADS, GROUP, HEAD_SIZE).mul(2).to(dtype),
        "key_pages": key_pages,
        "block_ids": block_ids,
        "row_positions": torch.randperm(num_keys)[:num_rows].sort().values,
        "num_keys": num_keys,
        "scale": SCALE,
    }


ALL: frozenset[Statistic] = frozenset(
    {"row_averages", "share_below", "row_entropies", "column_maxima"}
)


def check(arguments: dict[str, Any], exact: torch.Tensor, **options: Any) -> None:
    """Compare every statistic, for heads and for the layer, from one pass or from several.

    ``exact`` is A of every query head, float64 ``[H, G, O, P]``.
    """
    num_visible = (arguments["row_positions"] + 1).tolist()
    for per_head in (True, False):
        sets = shared_sets(exact, num_visible, per_head)
        for statistics in (ALL, ALL - {"row_averages"}):
            attention = observe(**arguments, per_head=per_head, statistics=statistics, **options)
            check_sets(attention, sets)
            assert torch.equal(attention.row_positions, arguments["row_positions"])


def check_sets(
    attention: ObservedAttention,
    sets: Sequence[SharedSet],
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    """Compare every statistic of one observation, weighted sums first."""
    num_sets, num_keys, device = len(sets), attention.num_keys, attention.row_columns.device
    num_rows = len(sets[0].num_visible)

    def padded(values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([torch.cat((v, v.new_zeros(num_keys - len(v)))) for v in values])

    def agree(
        got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> None:
        assert got.dtype == dtype
        torch.testing.assert_close(got.double().cpu(), expected, rtol=rtol, atol=atol)

    def weighted(weights: torch.Tensor) -> torch.Tensor:
        rows = weights.expand(num_sets, -1).tolist()
        return padded([s.weighted_column_sums(w) for s, w in zip(sets, rows, strict=True)])

    # Weighted sums do not depend on an earlier pass.
    for size in {1, num_sets}:
        weights = torch.rand(size, num_rows)
        agree(attention.weighted_column_sums(weights.to(device)), weighted(weights))
    agree(attention.column_sums, padded([s.column_sums for s in sets]))
    agree(attention.column_maxima, padded([s.column_maxima for s in sets]))
    mixed = torch.rand(num_sets, 2, num_rows)
    expected = torch.stack([weighted(weights) for weights in mixed.unbind(1)], dim=1)
    agree(attention.mixed_column_sums(mixed.to(device)), expected)
    shares = torch.tensor([s.share_below(THRESHOLD) for s in sets], dtype=torch.float64)
    agree(attention.share_below, shares, torch.float64)
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
            agree(got, renormalised(sets, keys, weights, padded))


def renormalised(
    sets: Sequence[SharedSet], keys: torch.Tensor, weights: torch.Tensor, padded: Any
) -> torch.Tensor:
    subsets = keys.expand(len(sets), -1)
    rows = weights.expand(len(sets), -1).tolist()
    return padded(
        [
            shared.renormalised_column_sums(subset[: shared.attention.shape[2]], row)
            for shared, subset, row in zip(sets, subsets, rows, strict=True)
        ]
    )


@pytest.mark.parametrize("num_keys", [1, 3, 4, 5, 21, 22, 23, 24])
@pytest.mark.parametrize("transposed", [True, False])
def test_every_tail_length_and_layout(num_keys: int, transposed: bool) -> None:
    arguments = make(num_keys, min(num_keys, 7), transposed=transposed)
    check(arguments, attention_probabilities(**arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_not_rounded_again(dtype: torch.dtype) -> None:
    arguments = make(23, 9, dtype)
    check(arguments, attention_probabilities(**arguments))


@pytest.mark.parametrize("queries", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("workspace_bytes", [0, 1 << 20])
def test_quantised_keys_are_read_without_rounding(
    dtype: torch.dtype, queries: torch.dtype, workspace_bytes: int
) -> None:
    """Their scale, an arbitrary number, is part of the scale of the logits."""
    key_scale = 0.37
    arguments = make(23, 9)
    arguments["queries"] = arguments["queries"].to(queries)
    arguments["key_pages"] = (arguments["key_pages"] / key_scale).to(dtype)
    cached = {**arguments, "key_pages": arguments["key_pages"].double() * key_scale}
    exact = attention_probabilities(**cached)
    arguments["scale"] *= key_scale
    check(arguments, exact, workspace_bytes=workspace_bytes)


# Bytes of one row (2 * 4 * H * G * P) and of one block of keys (8 * H * N * D) at P = 37.
ROW, BLOCK = 8 * HEADS * GROUP * 37, 8 * HEADS * BLOCK_SIZE * HEAD_SIZE


@pytest.mark.parametrize("workspace_bytes", [0, BLOCK, ROW, 3 * ROW, 2 * ROW + BLOCK, 1 << 20])
@pytest.mark.parametrize("transposed", [True, False])
def test_any_workspace_gives_the_same(workspace_bytes: int, transposed: bool) -> None:
    arguments = make(37, 20, transposed=transposed)
    exact = attention_probabilities(**arguments)
    check(arguments, exact, workspace_bytes=workspace_bytes)
    attention = observe(**arguments, workspace_bytes=workspace_bytes)
    assert isinstance(attention, TorchAttention)
    for rows, probabilities in attention.row_chunks(layer=0):
        size = rows.stop - rows.start
        assert probabilities.shape == (HEADS, GROUP, size, 37)
        assert size == 1 or size * ROW <= workspace_bytes


def test_row_chunks_give_the_probabilities() -> None:
    arguments = make(37, 20)
    exact = attention_probabilities(**arguments)
    attention = observe(**arguments)
    assert isinstance(attention, TorchAttention)
    for rows, probabilities in attention.row_chunks(layer=0):
        torch.testing.assert_close(probabilities.double(), exact[:, :, rows], rtol=1e-5, atol=1e-6)


def test_log_sum_exp_of_the_attention_kernel_can_be_used() -> None:
    arguments = make(19, 6)
    exact = attention_probabilities(**arguments)
    keys = arguments["key_pages"][arguments["block_ids"]].transpose(1, 2).flatten(0, 1)[:19]
    logits = torch.einsum("ohgd,khd->ohgk", arguments["queries"], keys) * SCALE
    future = torch.arange(19) > arguments["row_positions"][:, None]
    logits = logits.masked_fill(future[:, None, None], float("-inf"))
    check(arguments, exact, log_sum_exp=logits.logsumexp(dim=-1))


def test_no_rows_give_zeros() -> None:
    attention = observe(**make(9, 0))
    assert attention.column_sums.tolist() == [[0.0] * 9] * HEADS
    assert attention.weighted_column_sums(torch.ones(1, 0)).tolist() == [[0.0] * 9] * HEADS


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"queries": torch.zeros(4, HEADS, GROUP)}, "queries"),
        ({"queries": torch.zeros(4, HEADS + 1, GROUP, HEAD_SIZE)}, "key_pages"),
        ({"num_keys": 0}, "num_keys"),
        ({"num_keys": 40}, "block_ids"),
        ({"row_positions": torch.zeros(3).long()}, "row_positions"),
        ({"log_sum_exp": torch.zeros(4, GROUP, HEADS)}, "log_sum_exp"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        observe(**{**make(20, 4), **change})


@pytest.mark.parametrize("per_head", [True, False])
def test_wrong_weights_are_named(per_head: bool) -> None:
    attention = observe(**make(20, 4), per_head=per_head)
    with pytest.raises(ValueError, match="weights"):
        attention.weighted_column_sums(torch.zeros(HEADS, 5))


def test_a_statistic_that_was_not_requested_is_named() -> None:
    attention = observe(**make(20, 4))
    with pytest.raises(ValueError, match="share_below was not computed"):
        _ = attention.share_below
    with pytest.raises(ValueError, match="row_entropies was not computed"):
        _ = attention.row_entropies
    with pytest.raises(ValueError, match="column_maxima was not computed"):
        _ = attention.column_maxima


@pytest.mark.parametrize("per_head", [True, False])
def test_sums_over_all_rows_of_several_chunks(per_head: bool) -> None:
    """Each chunk sees only the keys so far; NaN after them has no effect."""
    arguments = make(37, 37)
    exact = attention_probabilities(**arguments)
    by_set = exact.reshape(HEADS if per_head else 1, -1, 37, 37).mean(1)
    is_vision = torch.rand(37) < 0.5
    sums = RowSums(len(by_set), 37, torch.device("cpu"))
    for start, end in ((0, 1), (1, 20), (20, 37)):
        rows = slice(start, end)
        chunk = observe(
            queries=arguments["queries"][rows],
            key_pages=arguments["key_pages"],
            block_ids=arguments["block_ids"][: -(-end // BLOCK_SIZE)],
            row_positions=arguments["row_positions"][rows],
            num_keys=end,
            scale=SCALE,
            per_head=per_head,
        )
        sums.add(chunk, is_vision[rows])
    for got, rows_of in (
        (sums.text_column_sums, ~is_vision),
        (sums.vision_column_sums, is_vision),
        (sums.column_sums, torch.ones_like(is_vision)),
    ):
        torch.testing.assert_close(got.double(), by_set[:, rows_of].sum(1), rtol=1e-5, atol=1e-6)


# -- several layers over page tables ------------------------------------------------------


@dataclass
class Layers:
    """Rows over the keys of several layers, each head with its own pages and length."""

    arguments: dict[str, Any]
    """Of `observe_ragged`. Pages and slots without a key are NaN, unused table entries garbage."""
    lengths: list[int]
    num_hidden: list[int]
    scales: list[float]
    per_head: bool

    def sets(self) -> list[SharedSet]:
        """Return the exact attention."""
        queries, pool, tables = (
            self.arguments[name].cpu() for name in ("queries", "pool", "tables")
        )
        return paged_sets(
            queries, pool, tables, self.lengths, self.num_hidden, self.scales, self.per_head
        )

    @property
    def num_common_keys(self) -> int:
        """Number of first keys that all rows see in all pairs."""
        return max(0, min(self.lengths) - max(self.num_hidden))


def make_layers(
    lengths: Sequence[Sequence[int]],
    num_hidden: Sequence[int],
    per_head: bool,
    group: int = 2,
    head_size: int = 8,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    key_dtype: torch.dtype | None = None,
    is_transposed: bool = False,
    extra_width: int = 0,
    device: str = "cpu",
) -> Layers:
    """Return random rows and keys for heads of these lengths, ``[L][H]``."""
    layers, heads = len(lengths), len(lengths[0])
    flat = [length for layer in lengths for length in layer]
    scales = [head_size**-0.5 * (1 + layer / 4) for layer in range(layers)]
    counts = [math.ceil(length / block_size) for length in flat]
    pages = iter(torch.randperm(sum(counts) + 3).tolist())
    pool = torch.full((sum(counts) + 3, block_size, head_size), math.nan)
    tables = torch.randint(-(2**31), 2**31, (len(flat), max(counts) + extra_width)).int()
    for pair, (length, count) in enumerate(zip(flat, counts, strict=True)):
        tables[pair, :count] = torch.tensor([next(pages) for _ in range(count)])
        for j in range(length):
            pool[tables[pair, j // block_size], j % block_size] = torch.randn(head_size)
    if is_transposed:
        pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
    queries = torch.randn(layers, len(num_hidden), heads, group, head_size).mul(2)
    arguments = {
        "queries": queries.to(device, dtype),
        "pool": pool.to(device, key_dtype or dtype),
        "tables": tables.to(device),
        "lengths": torch.tensor(flat, dtype=torch.int32, device=device),
        "num_hidden": torch.tensor(num_hidden, dtype=torch.int32, device=device),
        "num_keys": max(flat),
        "scale": torch.tensor(scales, dtype=torch.float32, device=device),
        "per_head": per_head,
    }
    return Layers(arguments, flat, list(num_hidden), scales, per_head)


def observe_ragged(
    *,
    lengths: torch.Tensor,
    num_hidden: torch.Tensor,
    per_head: bool = True,
    statistics: frozenset[Statistic] = frozenset(),
    workspace_bytes: int = 64 << 20,
    scratch: Scratch | None = None,
    **fields: Any,
) -> ObservedAttention:
    """Observe rows that see all keys of each pair, int32 `[Q or 1]`, but some of the last."""
    rows = ObservedRows(num_visible=lengths[:, None] - num_hidden, **fields)
    return observe_layers(rows, per_head, statistics, workspace_bytes, scratch)


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
        dtype=draw(st.sampled_from(KEY_DTYPES[:2])),
        key_dtype=draw(st.sampled_from([None, *KEY_DTYPES])),
        is_transposed=draw(st.booleans()),
        extra_width=draw(st.integers(0, 3)),
        device=device,
    )


@settings(max_examples=100, deadline=None)
@given(
    layers=observed_layers(),
    workspace_bytes=st.sampled_from([0, 1 << 12, 1 << 16, 1 << 20]),
    knows_common=st.booleans(),
    stored=st.booleans(),
)
def test_heads_of_different_lengths(
    layers: Layers, workspace_bytes: int, knows_common: bool, stored: bool
) -> None:
    attention = observe_ragged(
        **layers.arguments,
        statistics=ALL if stored else ALL - {"row_averages"},
        workspace_bytes=workspace_bytes,
        num_common_keys=layers.num_common_keys if knows_common else 0,
    )
    check_sets(attention, layers.sets())


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("workspace_bytes", [0, 1 << 20])
def test_layers_at_once_give_the_bits_of_single_layers(
    per_head: bool, workspace_bytes: int
) -> None:
    """An uncompressed prompt in one buffer of all layers, as vLLM stores it."""
    layers, num_rows, num_keys = 3, 6, 37
    num_blocks = math.ceil(num_keys / BLOCK_SIZE)
    pool = torch.randn(num_blocks + 3, layers, HEADS, BLOCK_SIZE, HEAD_SIZE)
    ids = torch.randperm(num_blocks + 3)[:num_blocks].int()
    queries = torch.randn(layers, num_rows, HEADS, GROUP, HEAD_SIZE)
    positions = torch.randperm(num_keys)[:num_rows].sort().values
    pairs = torch.arange(layers * HEADS, dtype=torch.int32)
    options: dict[str, Any] = {
        "statistics": ALL,
        "per_head": per_head,
        "workspace_bytes": workspace_bytes,
    }
    together = observe_ragged(
        queries=queries,
        pool=pool.flatten(0, 2),
        tables=pairs[:, None] + ids * len(pairs),
        lengths=torch.tensor([num_keys], dtype=torch.int32),
        num_hidden=(num_keys - 1 - positions).int(),
        num_keys=num_keys,
        scale=SCALE,
        row_positions=positions,
        num_common_keys=int(positions[0]) + 1,
        **options,
    )
    assert torch.equal(together.row_positions, positions)
    assert torch.equal(together.row_columns, positions[None])
    num_sets = together.num_groups // layers
    weights = torch.rand(together.num_groups, num_rows)
    subsets = torch.rand(together.num_groups, num_keys) < 0.5
    for layer in range(layers):
        sets = slice(layer * num_sets, (layer + 1) * num_sets)
        alone = observe(queries[layer], pool[:, layer], ids, positions, num_keys, SCALE, **options)
        for name in ("column_sums", "column_maxima", "share_below", "row_entropies"):
            assert torch.equal(getattr(together, name)[sets], getattr(alone, name)), name
        got = together.weighted_column_sums(weights)[sets]
        assert torch.equal(got, alone.weighted_column_sums(weights[sets]))
        got = together.renormalised_column_sums(subsets, weights)[sets]
        assert torch.equal(got, alone.renormalised_column_sums(subsets[sets], weights[sets]))


def test_log_sum_exps_of_layers() -> None:
    """A head has the log-sum-exp of its own keys; a row that sees none has -inf."""
    layers = make_layers([[9, 3], [1, 14]], [13, 5, 0], per_head=True)
    log_sum_exp = exact_log_sum_exp(layers)
    assert log_sum_exp.isinf().any()
    attention = observe_ragged(**layers.arguments, statistics=ALL, log_sum_exp=log_sum_exp)
    check_sets(attention, layers.sets())


def exact_log_sum_exp(layers: Layers) -> torch.Tensor:
    """Return the log-sum-exp of every query head and row, float64 ``[L, O, H, G]``."""
    queries, pool, tables = (layers.arguments[name].cpu() for name in ("queries", "pool", "tables"))
    num_heads, block_size = queries.shape[2], pool.shape[1]
    result = torch.empty(queries.shape[:-1], dtype=torch.float64)
    for pair, length in enumerate(layers.lengths):
        layer, head = divmod(pair, num_heads)
        keys = pool[tables[pair, : math.ceil(length / block_size)].long()].flatten(0, 1)
        for row, hidden in enumerate(layers.num_hidden):
            seen = keys[: max(0, length - hidden)].double()
            logits = queries[layer, row, head].double() @ seen.T * layers.scales[layer]
            result[layer, row, head] = logits.logsumexp(dim=-1)
    return result


def test_evicted_keys_leave_no_positions() -> None:
    layers = make_layers([[9, 3]], [5, 0], per_head=True)
    with pytest.raises(ValueError, match="use row_columns"):
        _ = observe_ragged(**layers.arguments).row_positions


@pytest.mark.parametrize(
    ("change", "word"),
    [
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
        ({"log_sum_exp": torch.zeros(2, 2, 3, 2)}, "log_sum_exp"),
    ],
)
def test_wrong_arguments_of_layers_are_named(change: dict[str, object], word: str) -> None:
    layers = make_layers([[9, 3], [1, 14]], [13, 5, 0], per_head=True)
    with pytest.raises(ValueError, match=word):
        observe_ragged(**{**layers.arguments, **change})


METHODS = [
    *(Mix(name) for name in POLICY_NAMES if build_policy(Mix(name)).score.rows != "none"),
    *(Mix(name, granularity="head") for name in ("tgv", "vlcache", "aircache", "prefixkv")),
    *(Mix(allocation=part) for part in ("vv", "tt", "entropy")),
    Mix(score="vv_tt", granularity="head"),
    Mix("snapkv", reduce="max"),
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
    num_sets = HEADS if per_head else 1
    arguments = make_layers(
        [[num_keys] * HEADS] * num_layers, range(num_keys - 1, -1, -1), per_head, GROUP
    ).arguments
    values = torch.randn_like(arguments["pool"])

    def observed(kind: RowSet, layers: slice) -> ObservedAttention:
        pairs = slice(layers.start * HEADS, layers.stop * HEADS)
        rows = slice(0 if kind == "all" else 20, num_keys)
        some = {
            "queries": arguments["queries"][layers, rows],
            "num_hidden": arguments["num_hidden"][rows],
            "scale": arguments["scale"][layers],
            **{name: arguments[name][pairs] for name in ("tables", "lengths")},
        }
        return observe_ragged(
            **{**arguments, **some},
            statistics=policy.statistics(kind),
            row_positions=torch.arange(num_keys)[rows],
            values=values,
        )

    def attention(kind: RowSet, layers: slice) -> Attention:
        if kind == "none":
            return NO_ATTENTION
        if kind != "all":
            return observed(kind, layers)
        sums = RowSums((layers.stop - layers.start) * num_sets, num_keys, torch.device("cpu"))
        for i, layer in enumerate(range(layers.start, layers.stop)):
            sums.add(observed(kind, slice(layer, layer + 1)), is_vision, first_set=i * num_sets)
        return sums

    def scored(layers: slice) -> tuple[torch.Tensor, ...]:
        number = (layers.stop - layers.start) * num_sets
        view = LayerView(0, number, prompt, attention(policy.score.rows, layers))
        scores = policy.scores(view)
        view = LayerView(0, number, prompt, attention(policy.allocation.rows, layers))
        strengths = policy.allocation.strength(view, scores)
        return scores, policy.pooled(scores, prompt, num_keys), strengths

    together = scored(slice(0, num_layers))
    for layer in range(num_layers):
        sets = slice(layer * num_sets, (layer + 1) * num_sets)
        for of_all, alone in zip(together, scored(slice(layer, layer + 1)), strict=True):
            assert torch.equal(of_all[sets], alone)
