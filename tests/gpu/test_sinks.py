# SPDX-License-Identifier: Apache-2.0
"""Sinks behind attention over keys alone, in PyTorch and on Triton, against float64."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tests.inputs import random_sinks
from vllm_tgvkv.kernels.sinks import apply_sinks

pytest.importorskip("triton", reason="Triton is not installed")

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("group", "head_size"), [(1, 8), (7, 80), (8, 64), (16, 24)])
def test_a_sink_is_one_more_key(
    kernels: str, dtype: torch.dtype, group: int, head_size: int
) -> None:
    """Rows have any number of keys; what surrounds the outputs stays."""
    rows, heads = random.randint(1, 5), random.randint(1, 3)
    sinks = random_sinks(heads * group).to(dtype)
    buffer = torch.full((rows * heads, group, head_size + 3), math.nan, dtype=dtype)
    log_sums = torch.empty(group, rows * heads, dtype=torch.float64)
    expected = torch.zeros(rows * heads, group, head_size, dtype=torch.float64)
    for sequence in range(rows * heads):
        for member in range(group):
            logits = torch.randn(random.randint(0, 9), dtype=torch.float64) * 3
            values = torch.randn(len(logits), head_size, dtype=torch.float64)
            sink = sinks[sequence % heads * group + member, None].double()
            buffer[sequence, member, :head_size] = logits.softmax(0) @ values
            log_sums[member, sequence] = logits.logsumexp(0)
            # What FlashAttention says of no keys differs by version.
            if not len(logits):
                log_sums[member, sequence] = random.choice((math.inf, -math.inf, math.nan))
            weights = torch.cat((logits, sink)).softmax(0)[:-1]
            expected[sequence, member] = weights @ values if len(logits) else 0
    whole = buffer.to(kernels)
    outputs = whole[..., :head_size]
    apply_sinks(outputs, log_sums.float().to(kernels), sinks.to(kernels))
    tolerance = ROUNDING[dtype]
    torch.testing.assert_close(
        outputs.double().cpu(), expected, rtol=2 * tolerance, atol=4 * tolerance
    )
    assert whole[..., head_size:].isnan().all()


def test_wrong_arguments_are_named() -> None:
    good = torch.zeros(6, 2, 8), torch.zeros(2, 6), torch.zeros(4)
    for place, name, value in (
        (0, "outputs", torch.zeros(6, 2)),
        (1, "log_sum_exp", torch.zeros(6, 2)),
        (1, "log_sum_exp", torch.zeros(2, 6).double()),
        (2, "sinks", torch.zeros(5)),
        (2, "sinks", torch.zeros(8)),
        (2, "sinks", torch.zeros(8)[::2]),
    ):
        arguments = [*good]
        arguments[place] = value
        with pytest.raises(ValueError, match=f"^{name} "):
            apply_sinks(*arguments)
