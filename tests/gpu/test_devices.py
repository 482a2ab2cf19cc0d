# SPDX-License-Identifier: Apache-2.0
"""Eviction on two and on four GPUs: ranks, stages and both, on both model runners.

As in `test_engine.py`, in bfloat16 against the oracle. Without as many GPUs a test is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oracle.emulation import Oracle
from tests.engine.running import assert_close
from tests.engine.test_engine import tgv
from tests.engine.test_parallel import ParallelEngine, workers
from tests.gpu.test_engine import IMAGES, OPTIONS, requests
from vllm_tgvkv.config.server import config_of

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize("granularity", ["layer", "head"])
@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (1, 2), (2, 2)])
def test_tokens_and_kept_positions(
    tiny_model: Callable[..., Path], runner: str, ranks: int, stages: int, granularity: str
) -> None:
    """Equal shares, so that neither ranks nor stages change what is kept."""
    num_devices = ranks * stages
    if torch.cuda.device_count() < num_devices:
        pytest.skip(f"{num_devices} GPUs are needed, found {torch.cuda.device_count()}")
    folder = tiny_model("llava", image_size=112, head_size=64)
    settings = tgv(granularity) | {"policy": "snapkv"}
    split = {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages}
    with workers(folder, settings, Joined, **split, **OPTIONS) as running:
        running.num_stages = stages
        assert_close(running, Oracle(folder), requests(IMAGES["llava"]))
        running.assert_forgotten()


class Joined(ParallelEngine):
    """Joins what the workers kept, rank by rank and stage by stage."""

    num_stages = 1

    @property
    def evictor(self) -> Any:
        """Settings and block size: each worker has an evictor of its own."""
        shape = SimpleNamespace(block_size=self.scheduler.tokens_per_block)
        config = config_of(self.llm.llm_engine.vllm_config)
        return SimpleNamespace(config=config, shape=shape)

    def kept(self, request_id: str, num_tokens: int) -> torch.Tensor | None:
        if not all(self.cuts_on_workers(request_id)):
            return None
        parts = self.kept_on_workers(request_id, num_tokens)
        num_ranks = len(parts) // self.num_stages
        stages = [parts[i : i + num_ranks] for i in range(0, len(parts), num_ranks)]
        return torch.cat([torch.cat(list(ranks), dim=1) for ranks in stages])
