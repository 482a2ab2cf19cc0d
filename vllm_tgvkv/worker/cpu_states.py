# SPDX-License-Identifier: Apache-2.0
"""States of gated delta nets under drafts, where vLLM's CPU code is wrong or has none.

A layer holds the inputs of its convolution before each token that may be the next one, and a
recurrent state after each. The next step begins where the last accepted token left them.
"""

from __future__ import annotations

from collections.abc import Set
from ctypes import c_int32, memmove
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from vllm import _custom_ops as ops
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.triton_utils.dispatcher import register_kernels

if TYPE_CHECKING:
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

_spec_forward = gdn_attention._spec_forward
_KERNELS = "vllm.v1.worker.mamba_utils."


@cache
def repair_states() -> None:
    """Repair what vLLM does with states under drafts in this process, for good."""
    gdn_attention._spec_forward = spec_forward
    register_kernels(
        {
            f"{_KERNELS}precopy_mamba_align_fused_kernel": copy_before_step,
            f"{_KERNELS}postprocess_mamba_fused_kernel": copy_after_step,
        }
    )


def spec_forward(
    layer: Any,
    attn_metadata_i: GDNAttentionMetadata,
    mixed_qkv_spec: torch.Tensor,
    b_spec: torch.Tensor,
    a_spec: torch.Tensor,
    conv_buf: torch.Tensor,
    ssm_state: torch.Tensor,
    width: int,
    state_len: int,
) -> torch.Tensor:
    """Return the outputs of rows with drafts; some may have fewer than the server drafts, or none.

    vLLM's own function puts the inputs of such a row where its next step does not look for them.

    Args:
        mixed_qkv_spec: the convolution's inputs, one for each token of these rows.
        conv_buf: inputs before each row's tokens, [blocks, channels, state_len].
        width: inputs that a convolution takes.
        state_len: width - 1, and one for each token that the server drafts.
    """
    metadata, num_rows = attn_metadata_i, attn_metadata_i.num_spec_decodes
    starts = metadata.spec_query_start_loc[: num_rows + 1].to(torch.int32).contiguous()
    if bool((starts.diff() == state_len - width + 2).all()):  # all have all drafts
        return _spec_forward(
            *(layer, metadata, mixed_qkv_spec, b_spec, a_spec, conv_buf, ssm_state),
            *(width, state_len),
        )
    blocks = metadata.spec_state_indices_tensor[:num_rows].to(torch.int32).contiguous()
    accepted = metadata.num_accepted_tokens[:num_rows].to(torch.int32).contiguous()
    weight, bias = gdn_attention._unpacked_conv_weight(layer).unsqueeze(1), layer.conv1d.bias
    mixed = torch.empty_like(mixed_qkv_spec)
    for row, (block, number) in enumerate(
        zip(blocks[:, 0].tolist(), accepted.tolist(), strict=True)
    ):
        tokens = slice(int(starts[row]), int(starts[row + 1]))
        before = conv_buf[block, :, number - 1 : number + width - 2]
        inputs = torch.cat([before, mixed_qkv_spec[tokens].t().to(before.dtype)], dim=-1)
        outputs = F.conv1d(inputs[None], weight, bias, groups=len(inputs))[0]
        outputs = F.silu(outputs) if layer.activation == "silu" else outputs
        mixed[tokens] = outputs.t().to(mixed.dtype)
        conv_buf[block, :, : inputs.shape[-1] - 1] = inputs[:, 1:]
    query, key, value = (part.squeeze(0) for part in layer.rearrange_mixed_qkv(mixed))
    return ops.fused_sigmoid_gating_delta_rule_update_spec_cpu(
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        q=query,
        k=key,
        v=value,
        a=a_spec,
        b=b_spec,
        initial_state_source=ssm_state,
        spec_state_indices=blocks,
        num_accepted_tokens=accepted,
        cu_seqlens=starts,
        use_qk_l2norm_in_kernel=True,
    )


def copy_before_step(
    state_idx: torch.Tensor,
    src_col: torch.Tensor,
    token_bias: torch.Tensor,
    *states_and_rows: Any,
    CONV_STATE_DIM_FIRST: bool,
    **_: Any,
) -> None:
    """Copy the state after the last accepted token to the block that a row's step writes to.

    Args:
        state_idx: this block's column in the block table, of each row.
        src_col: the column of the block that the last step wrote to; -1 for none.
        token_bias: accepted drafts.
        states_and_rows: where states are, see `_copy_state`; two more, the last the number of rows.
    """
    *states, _mapping, num_rows = states_and_rows
    columns = (each[:num_rows].tolist() for each in (src_col, state_idx, token_bias))
    for row, (source, target, bias) in enumerate(zip(*columns, strict=True)):
        if 0 <= source != target:
            _copy_state(row, source, target, bias, CONV_STATE_DIM_FIRST, *states)


def copy_after_step(
    num_accepted: torch.Tensor,
    state_idx: torch.Tensor,
    num_scheduled: torch.Tensor,
    num_computed: torch.Tensor,
    num_drafts: torch.Tensor,
    *states_and_rows: Any,
    block_size: int,
    CONV_STATE_DIM_FIRST: bool,
    **_: Any,
) -> None:
    """Copy the state at the end of a block, if the accepted tokens reach it, to that block.

    Args:
        num_accepted: tokens of each row's last step that count, its first one included.
        state_idx: column of the block that the step wrote to.
        states_and_rows: where states are, see `_copy_state`; three more, the first the accepted
            tokens that the next step is told, the last the number of rows.
    """
    *states, told, _mapping, num_rows = states_and_rows
    first = num_computed + num_scheduled - num_drafts  # tokens up to a step's first one
    ends = (first + num_accepted - 1) // block_size * block_size
    for row in range(num_rows):
        source, target = int(state_idx[row]), int(ends[row]) // block_size - 1
        if (bias := int(ends[row] - first[row])) < 0:
            continue
        if source == target:
            told[row] = 1
        if source != target or bias:
            _copy_state(row, source, target, bias, CONV_STATE_DIM_FIRST, *states)


def _copy_state(
    row: int,
    source: int,
    target: int,
    bias: int,
    channels_first: bool,
    tables: torch.Tensor,
    table_stride: int,
    *states: torch.Tensor,
) -> None:
    """Copy a row's states behind `bias` drafts from one column of the block table to another.

    Args:
        tables: addresses of the block tables, int32, of each group of states.
        table_stride: columns of a row in them.
        states: of each tensor of states its address; the bytes between blocks and of a number;
            the numbers of a token's inputs, or of a recurrent state; the inputs of a block, 0 for
            recurrent states; its group; channels and the bytes between them, if they come first.
    """
    for address, stride, size, inner, width, group, channels, step in zip(
        *(each.tolist() for each in states), strict=True
    ):

        def block(column: int) -> int:
            entry = int(tables[group]) + 4 * (row * table_stride + column)  # noqa: B023
            return int(address + stride * c_int32.from_address(entry).value)  # noqa: B023

        if width == 0:
            memmove(block(target), block(source + bias), inner * size)
            continue
        of_token = size if channels_first else inner * size
        for channel in range(channels if channels_first else 1):
            start = block(source) + channel * step + bias * of_token
            memmove(block(target) + channel * step, start, (width - bias) * of_token)


class AcceptedTokens:
    """The accepted tokens of requests that are left out of a step, which vLLM forgets."""

    def __init__(self, batch: InputBatch) -> None:
        self._numbers: dict[str, int] = {}
        self._anew: Set[str] = frozenset()
        """Requests that have ended, or begin again."""
        add, remove = batch.add_request, batch.remove_request

        def add_request(state: CachedRequestState) -> int:
            row = add(state)
            batch.num_accepted_tokens_cpu[row] = self._numbers.pop(state.req_id, 1)
            return row

        def remove_request(request_id: str) -> int | None:
            row = remove(request_id)
            if row is not None and request_id not in self._anew:
                self._numbers[request_id] = int(batch.num_accepted_tokens_cpu[row])
            return row

        batch.add_request, batch.remove_request = add_request, remove_request

    def begin_step(self, output: SchedulerOutput) -> None:
        """Forget requests that have ended, or were preempted."""
        self._anew = output.finished_req_ids | (output.preempted_req_ids or set())
        self._anew |= output.scheduled_cached_reqs.resumed_req_ids
        for name in self._anew:
            self._numbers.pop(name, None)
