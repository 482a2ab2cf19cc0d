# SPDX-License-Identifier: Apache-2.0
"""Ragged decode attention: Triton and PyTorch against the definition in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle import kernels as reference
from tests.gpu import pytorch_on_cpu
from tests.inputs import random_sinks
from tests.unit.test_page_tables import NUM_BLOCKS, Row, make_batch, rows_of
from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.kernels.decode import DecodePlan, decode, plan_decode
from vllm_tgvkv.kernels.page_tables import write_lengths

tl = pytest.importorskip("triton.language", reason="Triton is not installed")
triton_decode = pytest.importorskip("vllm_tgvkv.kernels.gpu.decode")

NAN = float("nan")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Scene:
    """A batch over a pool in which all slots that must not be read are NaN."""

    num_layers: int
    num_heads: int
    rows: Sequence[Row]
    group_size: int = 2
    head_size: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    slots_first: bool = True
    """Whether a slot's value follows its key, as in CUDA's pages."""
    has_sinks: bool = False
    num_queries: Sequence[int] | None = None
    """Query tokens of every row, at most its keys; None for one each."""

    def __post_init__(self) -> None:
        size = self.block_size
        batch = make_batch(self.num_layers, self.num_heads, size, self.rows)
        content = (NUM_BLOCKS * self.num_layers * self.num_heads, size, 2 * self.head_size)
        pool = torch.full(content, NAN, dtype=self.dtype)
        if not self.slots_first:
            pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
        table, self.seq_lens, *regions = batch.pooled
        self.pages, lengths = reference.page_tables(
            *batch.gathered, size, self.num_layers, self.num_heads
        )
        for pages, sizes in zip(self.pages, lengths, strict=True):
            for row_pages, row_sizes in zip(pages, sizes, strict=True):
                for head_pages, length in zip(row_pages, row_sizes, strict=True):
                    for i, page in enumerate(head_pages):
                        used = min(size, length - i * size)
                        pool[page, :used] = torch.randn(used, content[2]).to(self.dtype)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.state = (table, *regions)
        self.pool = pool
        num_tokens = sum(self.num_queries or [1] * len(self.rows))
        shape = (num_tokens, self.num_heads * self.group_size, self.head_size)
        self.query = torch.randn(shape).to(self.dtype)
        self.scale = 1.3 / math.sqrt(self.head_size)
        self.out_dtype, self.descales = self.dtype, None
        if self.dtype.itemsize == 1:
            self.out_dtype = torch.bfloat16
            self.descales = torch.rand(3).add(0.5).unbind()
        self.sinks = random_sinks(shape[1]).to(self.out_dtype) if self.has_sinks else None

    @property
    def most_queries(self) -> int:
        return max(self.num_queries or [1])

    @property
    def queries(self) -> list[tuple[int, int, int]]:
        """Row of every query token, the token, and how many keys of the row it does not see."""
        numbers = self.num_queries or [1] * len(self.rows)
        found = [(b, num - 1 - i) for b, num in enumerate(numbers) for i in range(num)]
        return [(b, token, hidden) for token, (b, hidden) in enumerate(found)]

    def expected(self, layer: int) -> Tensor:
        """Return attention by its definition, float64."""
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        of_query, of_keys, of_values = map(float, self.descales or (1, 1, 1))
        for b, token, hidden in self.queries:
            for j in range(out.shape[1]):
                head = j // self.group_size
                length = int(self.lengths[layer, b, head]) - hidden
                if length > 0:
                    pages = self.pool[self.pages[layer][b][head]].double()
                    slots = pages.flatten(0, 1)[:length]
                    k, v = slots.chunk(2, dim=1)
                    query = self.query[token, j].double() * of_query
                    logits = k * of_keys @ query * self.scale
                    if self.sinks is not None:
                        logits = torch.cat((logits, self.sinks[j : j + 1].double()))
                    out[token, j] = logits.softmax(0)[:length] @ v * of_values
        return out

    def plan(self, num_programs: int, chunk: int, device: str = "cpu") -> DecodePlan:
        """Return a plan with poisoned buffers."""
        sizes = (self.num_layers, len(self.rows), self.num_heads, self.group_size, self.head_size)
        plan = DecodePlan.allocate(*sizes, chunk, num_programs, device, self.most_queries)
        for ints in (plan.ends, plan.first):
            ints.fill_(-1)
        plan.partials.fill_(NAN)
        return plan

    def run(self, device: str, num_programs: int, chunk: int) -> list[Tensor]:
        """Return the outputs of all layers."""
        # Move the pool as a whole, so that keys and values stay parts of one buffer.
        pool = self.pool.to(device)
        keys, values = pool.chunk(2, dim=2)
        table, retained, replaced, offsets = (tensor.to(device) for tensor in self.state)
        lengths = torch.full(self.lengths.shape, -1, dtype=torch.int32, device=device)
        regions = (retained, replaced, offsets)
        write_lengths(table, self.seq_lens.to(device), *regions, self.block_size, lengths)
        assert torch.equal(lengths.cpu(), self.lengths)
        plan = self.plan(num_programs, chunk, device)
        plan_decode(lengths, plan)
        outs = []
        for layer in range(self.num_layers):
            out = torch.full(self.query.shape, NAN, dtype=self.out_dtype, device=device)
            # vLLM's queries may be a slice of a fused projection.
            query = torch.cat((self.query, self.query), dim=1).to(device)[:, : len(out[0])]
            sinks = None if self.sinks is None else self.sinks.to(device)
            descales = self.descales and tuple(x.to(device) for x in self.descales)
            rest = [layer, self.scale, plan, out, sinks, descales]
            if self.num_queries is not None:
                starts = torch.tensor([0, *self.num_queries]).cumsum(0).int().to(device)
                rest += [starts, self.most_queries]
            decode(query, keys, values, table, lengths, *regions, *rest)
            outs.append(out.cpu())
        return outs

    def check(self, outs: Sequence[Tensor], tolerance: float | None = None) -> None:
        tolerance = tolerance or TOLERANCE[self.out_dtype]
        for layer, out in enumerate(outs):
            expected = self.expected(layer)
            torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
            empty = [token for b, token, _ in self.queries if not self.seq_lens[b]]
            assert not out[empty].any()


@st.composite
def scenes(draw: st.DrawFn) -> Callable[[], Scene]:
    """Strategy for functions that make a scene, whose numbers are drawn at the call."""
    layers, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    size = draw(st.sampled_from([4, 6, 16]))
    rows, has_sinks = draw(rows_of(layers * heads, size)), draw(st.booleans())
    sizes = {"group_size": 1, "head_size": 8, "block_size": size}
    # The keys of the last tokens are in the tail of every head.
    tails = [row.seq_len - row.replaced * size for row in rows]
    numbers = [draw(st.integers(0, min(tail, 5)) if tail else st.integers(0, 2)) for tail in tails]
    queries = draw(st.sampled_from([None, numbers])) if any(numbers) else None
    return lambda: Scene(layers, heads, rows, **sizes, has_sinks=has_sinks, num_queries=queries)


def test_the_fixture_chooses_the_kernels(device: str) -> None:
    """Triton's, compiled or interpreted; without it tests would compare PyTorch with itself."""
    assert gpu.runs(torch.zeros(1, device=device))
    with pytorch_on_cpu():
        assert not gpu.runs(torch.zeros(1))


@settings(max_examples=15)
@given(scenes(), st.integers(1, 7), st.sampled_from([16, 32]))
def test_the_kernels_equal_the_definition(
    device: str, make_scene: Callable[[], Scene], num_programs: int, chunk: int
) -> None:
    scene = make_scene()
    scene.check(scene.run(device, num_programs, chunk))


@settings(max_examples=40)
@given(scenes())
def test_the_reference_equals_the_definition(make_scene: Callable[[], Scene]) -> None:
    scene = make_scene()
    with pytorch_on_cpu():
        scene.check(scene.run("cpu", 3, 16))


@settings(max_examples=20)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.sampled_from([0, 0, 1, 15, 16, 17, 33, 500]), min_size=1, max_size=9),
    st.integers(1, 140),
)
def test_the_work_is_divided_like_the_reference(
    device: str, layers: int, heads: int, lengths: list[int], num_programs: int
) -> None:
    rows = torch.tensor(lengths, dtype=torch.int32)
    table = torch.stack([rows.roll(i) for i in range(layers * heads)])
    table = table.view(layers, heads, -1).transpose(1, 2).contiguous()
    size = (layers, len(lengths), heads, 1, 8, 16, num_programs)
    plan, expected = (DecodePlan.allocate(*size, where) for where in (device, "cpu"))
    plan_decode(table.to(device), plan)
    with pytorch_on_cpu():
        plan_decode(table, expected)
    assert torch.equal(plan.ends.cpu(), expected.ends)
    assert torch.equal(plan.first.cpu(), expected.first)
    total = -(-table // 16)
    assert plan.ends[:, -1].tolist() == total.flatten(1).sum(1).tolist()
    for layer in range(layers):
        for program in range(num_programs):
            begin = program * int(plan.ends[layer, -1]) // num_programs
            if begin < (program + 1) * int(plan.ends[layer, -1]) // num_programs:
                first = int(plan.first[layer, program])
                assert int(plan.ends[layer, first]) <= begin < int(plan.ends[layer, first + 1])


RAGGED = [
    Row(70),
    Row(0),
    # Numbers of pages, pair by pair.
    Row(127, 2, 6, (6, 0, 1, 2, 3, 0)),
    Row(64, 1, 3, (0, 3, 0, 0, 1, 2)),
    Row(1),
    Row(0),
]


@pytest.mark.parametrize(
    ("num_programs", "chunk"), [(1, 64), (2, 16), (5, 32), (13, 16), (31, 16), (90, 32)]
)
def test_any_number_of_programs_shares_the_work(device: str, num_programs: int, chunk: int) -> None:
    scene = Scene(2, 3, RAGGED, has_sinks=chunk == 16)
    scene.check(scene.run(device, num_programs, chunk))


@pytest.mark.parametrize(("num_programs", "chunk"), [(1, 64), (5, 32), (31, 16), (90, 32)])
@pytest.mark.parametrize("numbers", [(4, 4, 4, 4, 1, 4), (3, 0, 4, 1, 1, 2)])
def test_a_row_may_have_drafts(
    device: str, num_programs: int, chunk: int, numbers: tuple[int, ...]
) -> None:
    """As many in all rows, as in a graph, or not; a chunk may hold the last ones alone."""
    scene = Scene(2, 3, RAGGED, has_sinks=chunk == 16, num_queries=numbers)
    scene.check(scene.run(device, num_programs, chunk))


def test_the_same_call_gives_the_same_bits(device: str) -> None:
    """Of a sequence, too, with more parts than one tile of the second launch."""
    scene = Scene(1, 1, [Row(803), Row(3)])
    outs, again = (scene.run(device, 47, 16) for _ in range(2))
    scene.check(outs)
    assert all(torch.equal(*pair) for pair in zip(outs, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("group_size", "head_size", "block_size"),
    [(4, 128, 16), (7, 80, 48), (1, 64, 32), (16, 96, 16)],
)
def test_formats(
    device: str, dtype: torch.dtype, group_size: int, head_size: int, block_size: int
) -> None:
    rows = [Row(2 * block_size + 1), Row(5 * block_size, 1, 3, (2, 0)), Row(0)]
    scene = Scene(1, 2, rows, group_size, head_size, block_size, dtype, has_sinks=group_size > 1)
    for queries in (None, [3, 4, 1]):
        scene = replace(scene, num_queries=queries)
        scene.check(scene.run(device, 3, 64))
        with pytorch_on_cpu():
            scene.check(scene.run("cpu", 3, 64))


def test_transposed_pages_and_large_logits(device: str) -> None:
    """Logits that differ greatly neither overflow nor lose the largest."""
    scene = Scene(2, 3, RAGGED, slots_first=False, has_sinks=True)
    scene.check(scene.run(device, 4, 32))
    scene.query *= 200
    scene.sinks = scene.sinks * 100
    # A rounding error of a logit becomes a relative error of a weight.
    scene.check(scene.run(device, 5, 16), tolerance=1e-2)


def test_a_step_without_tokens_is_zero(device: str) -> None:
    (out,) = Scene(1, 2, [Row(0), Row(0)]).run(device, 3, 16)
    assert not out.any()


def test_buffers_serve_fewer_rows(device: str) -> None:
    scene = Scene(2, 3, RAGGED)
    larger = replace(scene, rows=[*RAGGED, Row(5), Row(9)])
    plan = larger.plan(4, 16).for_sequences(3 * len(RAGGED), scene.group_size)
    with pytorch_on_cpu():
        expected = scene.plan(4, 16)
        plan_decode(scene.lengths, expected)
    on_device = replace(plan, ends=plan.ends.to(device), first=plan.first.to(device))
    plan_decode(scene.lengths.to(device), on_device)
    assert torch.equal(on_device.ends.cpu(), expected.ends)
    assert torch.equal(on_device.first.cpu(), expected.first)


@pytest.mark.parametrize(
    ("name", "memory", "head_size", "element_size", "residents"),
    [
        ("H100, H200", 233472, 128, 2, (2, 3)),
        ("H100, H200", 233472, 64, 2, (2, 3)),
        ("H100, H200", 233472, 128, 4, (1, 3)),
        ("H100, H200", 233472, 128, 1, (2, 4)),
        ("A100", 167936, 256, 2, (2, 2)),
        ("L40", 102400, 80, 2, (1, 2)),
        ("too small", 65536, 128, 4, (1, 1)),
    ],
)
def test_programs_fill_the_shared_memory(
    name: str, memory: int, head_size: int, element_size: int, residents: tuple[int, int]
) -> None:
    size = triton_decode._chunk_bytes(triton_decode.chunk_size(head_size), head_size, element_size)
    assert triton_decode._residents(memory, size) == residents


def test_wrong_arguments_are_named() -> None:
    scene = Scene(2, 3, RAGGED)
    keys, values = scene.pool.chunk(2, dim=2)
    plan, out = scene.plan(3, 16), torch.empty_like(scene.query)
    names = ("block_table", "num_token_blocks", "replaced", "offsets")
    good = dict(zip(names, scene.state, strict=True))
    good |= {"query": scene.query, "keys": keys, "values": values, "lengths": scene.lengths}
    good |= {"layer": 1, "scale": 1.0, "plan": plan, "out": out}
    wrong = {
        "query": scene.query[:, :4],
        "keys": keys.bfloat16(),
        "values": values[:-1],
        "block_table": scene.state[0][1:],
        "offsets": scene.state[3][:, 1:],
        "replaced": scene.state[2].long(),
        "lengths": scene.lengths.long(),
        "layer": 2,
        "out": out[1:],
        "sinks": torch.zeros(5),
        "descales": (torch.ones(()), torch.ones(2), torch.ones(())),
        "starts": torch.zeros(len(RAGGED)).int(),
        "most_queries": 0,
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"^{name} "):
            decode(**{**good, name: value})
    for name in ("query", "out"):
        strided = good[name].transpose(1, 2).contiguous().transpose(1, 2)
        with pytest.raises(ValueError, match=f"^{name} must be contiguous"):
            decode(**{**good, name: strided})
    for field, value in {
        "chunk": 24,
        "ends": plan.ends[:, 1:],
        "first": plan.first[:1],
        "partials": plan.partials[..., 1:],
    }.items():
        with pytest.raises(ValueError, match=f"^plan.{field} "):
            decode(**{**good, "plan": replace(plan, **{field: value})})
    with pytest.raises(ValueError, match=r"^plan.partials "):
        decode(**{**good, "plan": replace(plan, partials=plan.partials[..., 1:].contiguous())})


@pytest.mark.gpu
def test_a_graph_follows_its_inputs() -> None:
    """A captured step, replayed with other lengths, gives the same as a new launch."""
    scene = Scene(1, 2, [Row(500), Row(300), Row(0)], 4, 128, 16, torch.bfloat16)
    keys, values = scene.pool.cuda().chunk(2, dim=2)
    table, *regions = (tensor.cuda() for tensor in scene.state)
    query, lengths = scene.query.cuda(), scene.lengths.cuda()
    plan, out = scene.plan(50, 64, "cuda"), torch.empty_like(scene.query, device="cuda")

    def step() -> None:
        plan_decode(lengths, plan)
        decode(query, keys, values, table, lengths, *regions, 0, scene.scale, plan, out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    lengths.sub_(37).clamp_(min=0)
    out.fill_(NAN)
    graph.replay()
    got = out.clone()
    step()
    assert torch.equal(got, out)
    scene.lengths = lengths.cpu()
    scene.check([got.cpu()])
