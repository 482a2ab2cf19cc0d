# SPDX-License-Identifier: Apache-2.0
"""The parts that all observations of a worker share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_tgvkv.cache.key_numbers import CarriedScores, KeyNumbers
from vllm_tgvkv.cache.pages import CacheShape, PagePool
from vllm_tgvkv.cache.queries import QueryPool
from vllm_tgvkv.cache.regions import Regions
from vllm_tgvkv.kernels.statistics import Scratch
from vllm_tgvkv.worker.ranks import Ranks
from vllm_tgvkv.worker.stages import Stages

WORKSPACE_BYTES = 64 << 20
"""Bound of each scratch buffer of the statistics, or the size of one layer's if that is more."""


@dataclass
class ObserverContext:
    """The layers and heads of this worker, and what is shared by all observations of them."""

    pool: PagePool
    queries: QueryPool
    regions: Regions
    ranks: Ranks
    stages: Stages
    gate_outputs: KeyNumbers | None = None
    """None without gates."""
    carried: CarriedScores | None = None
    """None if no method adds to the scores of the cut before."""
    workspace_bytes: int = WORKSPACE_BYTES
    scratch: Scratch = field(default_factory=Scratch)
    """Buffers of the statistics; the layers of a step share them."""
    sinks: Callable[[slice], torch.Tensor] | None = None
    """Returns the learned sinks of some layers, float32 [layers, H, G], see `ObservedRows`. None if
    no layer has sinks."""
    num_waiting_rows: int = 0
    """Rows of this step's batch whose queries wait until their layers are scored together."""

    @property
    def shape(self) -> CacheShape:
        return self.pool.shape

    @property
    def device(self) -> torch.device:
        return self.pool.raw.device

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """Copy to the device without waiting for it."""
        return async_tensor_h2d(array, self.device)
