# SPDX-License-Identifier: Apache-2.0
"""Summaries merged into attention: Triton and PyTorch against the definition in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.gpu import pytorch_on_cpu
from vllm_tgvkv.kernels.summaries import Summary, load, merge_rows, num_rows, store

NAN = float("nan")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NUM_BLOCKS = 40


@dataclass
class Scene:
    """Rows with some numbers of summaries; whatever must not be read is NaN, or out of bounds.

    None stands for a padded row of a graph: it has no tokens, and its blocks are no blocks.
    """

    summaries: Sequence[int | None]
    head_size: int = 64
    group: int = 4
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    slots_first: bool = True
    num_layers: int = 2
    num_heads: int = 3
    layer: int = 1

    def __post_init__(self) -> None:
        pairs, size, dim = self.num_layers * self.num_heads, self.block_size, self.head_size
        pages = torch.full((NUM_BLOCKS * pairs, size, 2 * dim), NAN, dtype=self.dtype)
        if not self.slots_first:
            pages = pages.transpose(1, 2).contiguous().transpose(1, 2)
        self.pages, self.pairs = pages, pairs
        self.rows = num_rows(size, dim)
        batch = len(self.summaries)
        self.num_token_blocks = torch.randint(1, 5, (NUM_BLOCKS,)).int()
        self.num_summaries = torch.zeros(NUM_BLOCKS, dtype=torch.int32)
        self.block_table = torch.randint(-(2**31), 2**31, (batch, 9)).int()
        self.seq_lens = torch.randint(1, 100, (batch,)).int()
        ids = (torch.randperm(NUM_BLOCKS - 1) + 1).int()
        heads = self.layer * self.num_heads + torch.arange(self.num_heads)
        self.read: list[list[Summary]] = []
        """Of each row, what its summaries hold of the layer."""
        for row, number in enumerate(self.summaries):
            self.read.append([])
            if number is None:
                self.seq_lens[row] = 0
                continue
            first, ids = ids[0], ids[1:]
            self.block_table[row, 0] = first
            self.num_summaries[first] = number
            for i in range(number):
                block, ids = ids[0], ids[1:]
                self.block_table[row, self.num_token_blocks[first] + i] = block
                self.read[-1].append(self._store(block.long() * pairs + heads))
        sequences = batch * self.num_heads
        # As wide as vLLM's fused projections, of which queries and outputs may be parts.
        wide = torch.randn(2, sequences, self.group + 2, dim).to(self.dtype)
        self.queries, self.outputs = wide[:, :, : self.group]
        self.log_sums = torch.randn(sequences, self.group).mul(3).T
        self.scale = 1.3 / math.sqrt(dim)

    def _store(self, pages: Tensor) -> Summary:
        """Store random rows, some of them without mass."""
        shape = (len(pages), self.rows, self.head_size)
        keys, values = torch.randn(2, *shape).to(self.dtype).float()
        masses = torch.randn(shape[:2]).mul(2).exp() * (torch.rand(shape[:2]) < 0.8)
        store(Summary(keys, values, masses), *self.pages.chunk(2, dim=2), pages)
        return Summary(keys, values, masses)

    def run(self, device: str) -> Tensor:
        """Return the merged outputs."""
        keys, values = self.pages.to(device).chunk(2, dim=2)
        outputs = self.outputs.to(device).clone(memory_format=torch.preserve_format)
        state = (self.block_table, self.seq_lens, self.num_token_blocks, self.num_summaries)
        log_sums, queries, *of_rows = (x.to(device) for x in (self.log_sums, self.queries, *state))
        whole = (outputs, log_sums, queries, keys, values, *of_rows)
        merge_rows(*whole, self.pairs, self.layer, self.scale)
        return outputs.cpu()

    def expected(self, row: int, head: int, member: int) -> Tensor:
        """Return one query's attention over its keys and summaries, float64."""
        sequence = row * self.num_heads + head
        query = self.queries[sequence, member].double()
        logits, values = (
            [self.log_sums[member, sequence].double()[None]],
            [self.outputs[sequence, member].double()[None]],
        )
        for summary in self.read[row]:
            exists = summary.masses[head] > 0
            of_keys = summary.keys[head, exists].double() @ query * self.scale
            logits.append(of_keys + summary.masses[head, exists].double().log())
            values.append(summary.values[head, exists].double())
        return torch.cat(logits).softmax(0) @ torch.cat(values)

    def check(self, outputs: Tensor) -> None:
        by_row = outputs.unflatten(0, (-1, self.num_heads))
        before = self.outputs.unflatten(0, (-1, self.num_heads))
        tolerance = TOLERANCE[self.dtype]
        for row, number in enumerate(self.summaries):
            if not number:
                assert torch.equal(by_row[row], before[row])
                continue
            for head in range(self.num_heads):
                for member in range(self.group):
                    found = by_row[row, head, member].double()
                    wanted = self.expected(row, head, member)
                    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("head_size", "group", "block_size", "dtype"),
    [
        (64, 4, 16, torch.float32),
        (128, 7, 16, torch.bfloat16),
        (80, 3, 32, torch.float16),
        (16, 1, 128, torch.float32),
        (64, 17, 32, torch.bfloat16),
    ],
    ids=str,
)
def test_summaries_and_keys_are_one_softmax(
    device: str, head_size: int, group: int, block_size: int, dtype: torch.dtype
) -> None:
    """Rows without summaries keep their bits, padded ones as well."""
    slots_first = bool(torch.rand(()) < 0.5)
    scene = Scene([2, 0, None, 1, 3, 0], head_size, group, block_size, dtype, slots_first)
    scene.check(scene.run(device))
    with pytorch_on_cpu():
        scene.check(scene.run("cpu"))


def test_the_comparison_itself(device: str) -> None:
    """Another mass, key or value of one row is noticed, and another row's summaries are."""
    for name in ("masses", "keys", "values"):
        scene = Scene([1, 2])
        scene.check(scene.run(device))
        of_row = getattr(scene.read[1][1], name)[2]
        of_row[scene.read[1][1].masses[2] > 0] += 3
        with pytest.raises(AssertionError):
            scene.check(scene.run(device))
    scene = Scene([1, 1])
    scene.block_table = scene.block_table.flip(0)
    with pytest.raises(AssertionError):
        scene.check(scene.run(device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_masses_no_bit_changes(device: str, dtype: torch.dtype) -> None:
    scene = Scene([2, 1], dtype=dtype)
    keys, values = scene.pages.chunk(2, dim=2)
    pages = (~keys[:, 0, 0].isnan()).nonzero().squeeze(1)
    assert len(pages) == 3 * scene.num_heads
    found = load(keys, values, pages, scene.rows)
    store(Summary(found.keys, found.values, torch.zeros_like(found.masses)), keys, values, pages)
    assert torch.equal(scene.run(device), scene.outputs)


def test_arguments_that_do_not_fit_are_refused(device: str) -> None:
    for name, change in (
        ("log_sum_exp", {"log_sums": torch.zeros(6, 4)}),
        ("queries", {"queries": torch.zeros(6, 4, 32)}),
        ("seq_lens", {"seq_lens": torch.zeros(3, dtype=torch.int32)}),
        ("num_summaries", {"num_summaries": torch.zeros(NUM_BLOCKS, dtype=torch.int64)}),
        ("key_pages", {"pages": torch.zeros(4, 16, 64)}),
    ):
        scene = Scene([1, 0])
        scene.__dict__.update(change)
        with pytest.raises(ValueError, match=name):
            scene.run(device)


@pytest.mark.gpu
def test_a_graph_follows_its_inputs() -> None:
    """A captured launch, replayed after rows got summaries and lost them, merges theirs."""
    scenes = [Scene(numbers, dtype=torch.bfloat16) for numbers in ([0, 0, 0], [2, 0, 3], [0, 1, 0])]
    names = ("pages", "outputs", "log_sums", "queries")
    names += ("block_table", "seq_lens", "num_token_blocks", "num_summaries")
    held = {name: getattr(scenes[0], name).to("cuda") for name in names}

    def launch() -> None:
        of_rows = [held[name] for name in names[4:]]
        keys, values = held["pages"].chunk(2, dim=2)
        merged = (held["outputs"], held["log_sums"], held["queries"], keys, values)
        merge_rows(*merged, *of_rows, scenes[0].pairs, 1, scenes[0].scale)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for scene in scenes[1:]:
        for name, tensor in held.items():
            tensor.copy_(getattr(scene, name))
        graph.replay()
        scene.check(held["outputs"].cpu())
