# SPDX-License-Identifier: Apache-2.0
"""FlashAttention over pages of one head, as `vllm_tgvkv/attention/cuda.py` calls it, in float64.

Each (row, KV head) is a sequence with one query of G heads. Keys and values are the halves of a
slot. Numbers of sequences lie on both sides of 992, above which FlashAttention 3 splits none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.inputs import product
from vllm_tgvkv.cache.pages import FP8
from vllm_tgvkv.kernels.checks import indexable

NAN = float("nan")
AUTO, UNSPLIT, IN_GRAPHS = 0, 1, 32
"""Values of `num_splits`: its own choice, none, vLLM's bound inside graphs."""
TOLERANCES = {
    torch.bfloat16: ({"rtol": 1e-2, "atol": 4e-3}, {"rtol": 1e-4, "atol": 1e-4}),
    FP8["fp8"]: ({"rtol": 0, "atol": 8e-2}, {"rtol": 1e-3, "atol": 1e-2}),
}
"""Of outputs and log sums. Weights are rounded to the dtype, an error of 2^-9 or 2^-4 each, before
they meet the values. Products of bfloat16 are exact in float32, and products of fp8 are summed with
fewer bits."""


@dataclass
class Scene:
    """S sequences of random lengths over a pool whose unused slots are NaN."""

    num_sequences: int
    block_size: int
    head_size: int
    group: int
    device: str
    dtype: torch.dtype = torch.bfloat16
    max_pages: int = 6

    def __post_init__(self) -> None:
        size = (self.num_sequences * self.max_pages + 1, self.block_size, 1, 2 * self.head_size)
        self.pages = torch.full(size, NAN, device=self.device).to(self.dtype)
        self.keys, self.values = self.pages.split(self.head_size, dim=-1)
        shape = (self.num_sequences, self.group, self.head_size)
        self.query = torch.randn(shape, device=self.device).to(self.dtype)
        self.out = torch.full(shape, NAN, dtype=torch.bfloat16, device=self.device)
        is_fp8 = self.dtype.itemsize == 1
        self.scales = torch.rand(3, device=self.device) + 0.5 if is_fp8 else torch.ones(3)
        """Of queries, keys and values."""
        self.log_sums = torch.empty(0)
        """Logarithms of the softmax denominators, float32 [G, S]."""
        self.table = torch.zeros(
            self.num_sequences, self.max_pages, dtype=torch.int32, device=self.device
        )
        self.lengths = torch.zeros(self.num_sequences, dtype=torch.int32, device=self.device)
        self.fill()

    def fill(self) -> None:
        """Give all sequences new lengths, pages and contents, in the same memory.

        A quarter of them are empty; the first is as long as possible.
        """
        limit = self.max_pages * self.block_size
        lengths = torch.randint(1, limit + 1, (self.num_sequences,), device=self.device)
        lengths[torch.rand(self.num_sequences, device=self.device) < 0.25] = 0
        lengths[0], lengths[-1] = limit, 0
        self.lengths.copy_(lengths)
        order = torch.randperm(len(self.pages) - 1, device=self.device).int() + 1
        self.table.copy_(order.view_as(self.table))
        slots = torch.arange(limit, device=self.device) < lengths[:, None]
        used = slots.view(self.num_sequences, self.max_pages, self.block_size)
        content = torch.randn(*used.shape, 1, 2 * self.head_size, device=self.device)
        # Skipped keys are masked, but their values are multiplied by zero: no NaN in a used page.
        content[~used] = 0
        stored = indexable(self.pages)
        stored.copy_(
            indexable(torch.full_like(self.pages, NAN, dtype=torch.float32).to(self.dtype))
        )
        touched = used.any(-1)
        stored[self.table[touched].long()] = indexable(content[touched].to(self.dtype))

    def call(self, attend: Callable[..., tuple[Tensor, Tensor]], num_splits: int) -> None:
        """Attend as `FlashKernel` does where rows may have summaries."""
        count = torch.arange(self.num_sequences + 1, dtype=torch.int32, device=self.device)
        of_fp8 = {}
        if self.dtype.itemsize == 1:
            names = ("q_descale", "k_descale", "v_descale")
            each = (scale.expand(self.num_sequences, 1) for scale in self.scales)
            of_fp8 = dict(zip(names, each, strict=True))
        _, self.log_sums = attend(
            q=self.query,
            k=self.keys,
            v=self.values,
            out=self.out,
            cu_seqlens_q=count,
            max_seqlen_q=1,
            seqused_k=self.lengths,
            # The host knows no better bound, and a graph has that of the longest sequence.
            max_seqlen_k=64 * self.max_pages * self.block_size,
            softmax_scale=self.head_size**-0.5,
            causal=True,
            block_table=self.table,
            num_splits=num_splits,
            return_softmax_lse=True,
            **of_fp8,
        )

    def check(self) -> None:
        """Compare with the definition, some hundred sequences at a time, and poison the result."""
        of_query, of_keys, of_values = self.scales.tolist()
        of_outputs, of_log_sums = TOLERANCES[self.dtype]
        for part in torch.arange(self.num_sequences, device=self.device).split(512):
            lengths = self.lengths[part].long()
            slots = indexable(self.pages)[self.table[part].long()].view(self.dtype)
            slots = slots.flatten(1, 3).double()
            slots = slots.view(len(part), -1, 2 * self.head_size)
            outside = torch.arange(slots.shape[1], device=self.device) >= lengths[:, None]
            keys, values = slots.masked_fill(outside[..., None], 0).chunk(2, dim=-1)
            query = self.query[part[0] : part[-1] + 1].double() * of_query * of_keys
            logits = query @ keys.transpose(1, 2) / math.sqrt(self.head_size)
            logits = logits.masked_fill(outside[:, None], float("-inf"))
            expected = logits.softmax(-1).nan_to_num(0) @ values * of_values  # zero without keys
            found = self.out[part].double()
            torch.testing.assert_close(found, expected, **of_outputs)
            has_keys = lengths > 0
            torch.testing.assert_close(
                self.log_sums[:, part].T[has_keys].double(),
                logits.logsumexp(-1)[has_keys],
                **of_log_sums,
            )
        self.out.fill_(NAN)


def flash_attention(head_size: int) -> partial[tuple[Tensor, Tensor]]:
    """Return vLLM's function, in the version that its backend would choose."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    version = get_flash_attn_version(head_size=head_size)
    assert version is not None, "vLLM finds no FlashAttention for this device"
    return partial(flash_attn_varlen_func, fa_version=version)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("block_size", "head_size", "group", "dtype"),
    product([16, 32, 128], [64, 80, 128, 256], [1, 4, 7], TOLERANCES),
)
def test_every_shape(block_size: int, head_size: int, group: int, dtype: torch.dtype) -> None:
    attend = flash_attention(head_size)
    if dtype.itemsize == 1 and attend.keywords["fa_version"] != 3:
        pytest.skip("of FlashAttention 3 only")
    scene = Scene(40, block_size, head_size, group, "cuda", dtype)
    for num_splits in (AUTO, UNSPLIT, IN_GRAPHS):
        scene.call(attend, num_splits)
        scene.check()


@pytest.mark.gpu
@pytest.mark.parametrize("num_sequences", [8, 992, 1000, 8192])
@pytest.mark.parametrize("num_splits", [AUTO, UNSPLIT, IN_GRAPHS])
def test_few_and_many_sequences(num_sequences: int, num_splits: int) -> None:
    scene = Scene(num_sequences, 16, 128, 4, "cuda")
    scene.call(flash_attention(128), num_splits)
    scene.check()


@pytest.mark.gpu
@pytest.mark.parametrize("num_sequences", [8, 992, 1000])
def test_a_graph_follows_its_inputs(num_sequences: int) -> None:
    """A captured call is replayed with other lengths, page tables, keys and values."""
    attend = flash_attention(128)
    scene = Scene(num_sequences, 16, 128, 4, "cuda")
    scene.call(attend, IN_GRAPHS)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scene.call(attend, IN_GRAPHS)
    for _ in range(3):
        scene.fill()
        scene.query.normal_()
        scene.out.fill_(NAN)
        graph.replay()
        scene.check()


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_comparison_itself(dtype: torch.dtype) -> None:
    """PyTorch stands in for FlashAttention; a wrong length of one sequence is noticed.

    It misses a key in bfloat16, and a page in fp8.
    """
    from tests.engine.flash_on_cpu import attend

    scene = Scene(9, 16, 64, 4, "cpu", dtype)
    scene.call(attend, AUTO)
    scene.check()
    scene.call(attend, AUTO)
    scene.lengths[0] -= 1 if dtype == torch.bfloat16 else scene.block_size
    with pytest.raises(AssertionError):
        scene.check()
