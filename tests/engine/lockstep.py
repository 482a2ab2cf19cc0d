# SPDX-License-Identifier: Apache-2.0
"""Two engines that share a mixture's experts and step together, each in a process of its own.

An engine without requests runs an idle step for each step of the other, because the tokens of both
go through the experts of both. vLLM's CPU build lacks what this needs, so two things are pretended:
its CPU communicator can gather and scatter parts of different sizes, and an idle step builds
attention metadata, as the steps of a GPU with graphs do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn import functional
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from tests.engine.running import Ask, SteppedEngine
from vllm_tgvkv.engine import patches


@dataclass(frozen=True)
class Served:
    """One request's tokens and kept positions in an engine."""

    tokens: list[int]
    kept: list[torch.Tensor]
    """After each cut, bool [L, H, n]."""


def gather(
    self: CpuCommunicator, parts: Any, dim: int = 0, sizes: Sequence[int] | None = None
) -> Any:
    """Return each tensor joined with the other engines', of these `sizes` by engine."""
    assert dim == 0
    assert sizes is not None
    if isinstance(parts, list):
        return [gather(self, part, dim, sizes) for part in parts]
    padded = functional.pad(parts, (0, 0) * (parts.dim() - 1) + (0, max(sizes) - len(parts)))
    found = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(found, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(found, sizes, strict=True)])


def scatter(
    self: CpuCommunicator, tensor: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Return this engine's part of the sum over all engines."""
    assert dim == 0
    assert sizes is not None
    distributed.all_reduce(tensor, group=self.device_group)
    return tensor.split(list(sizes))[self.rank_in_group].contiguous()


def serve(
    rank: int,
    port: int,
    folder: Path,
    eviction: Mapping[str, Any],
    asks: Sequence[Ask],
    num_steps: int,
    aborted: Sequence[int] = (),
    **options: Any,
) -> tuple[list[Served], int]:
    """Serve requests in one of two engines; return what it did, and its number of idle steps.

    Args:
        port: where the engines find each other.
        num_steps: steps of both engines together.
        aborted: requests that their clients leave right after the step that evicts them.
    """
    place = {"SIZE": 2, "RANK": rank, "RANK_LOCAL": rank, "MASTER_PORT": port}
    os.environ |= {f"VLLM_DP_{name}": str(value) for name, value in place.items()}
    os.environ["VLLM_DP_MASTER_IP"] = "127.0.0.1"
    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = gather, scatter
    patches.check_vllm_config = lambda *_: None  # refuses this on CPU
    running = SteppedEngine(folder, eviction, distributed_executor_backend="uni", **options)
    worker, engine = running.worker, running.engine
    runner = worker.model_runner
    runner._dummy_run = partial(runner._dummy_run, force_attention=True, is_graph_capturing=True)
    names: dict[int, str] = {}
    finished: dict[str, Any] = {}
    num_idle = 0
    for step in range(num_steps):
        for number, ask in enumerate(asks):
            if ask.arrival == step:
                names[number] = running.add(ask)
        if not engine.has_unfinished_requests():  # in either engine
            continue
        num_idle += engine.should_execute_dummy_batch
        finished |= {output.request_id: output for output in running.step() if output.finished}
        for number in set(aborted) & names.keys():
            if running.kept_after_cuts(names[number]) and names[number] not in finished:
                finished[names[number]] = None
                engine.abort_request([names[number]])
    served = [
        Served(
            [] if finished[name] is None else list(finished[name].outputs[0].token_ids),
            running.kept_after_cuts(name),
        )
        for _, name in sorted(names.items())
    ]
    return served, num_idle
