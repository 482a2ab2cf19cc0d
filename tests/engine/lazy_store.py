# SPDX-License-Identifier: Apache-2.0
"""A store for vLLM's `OffloadingConnector` that copies as late as it may.

vLLM's own copies with streams of a GPU. This one has the same scheduler's side and waits: a block
is copied when the connector demands it, or some steps later. What was written to it meanwhile is
what the store has.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

STEPS = 6
"""Steps that a copy waits."""


class LazyWorker(OffloadingWorker):
    """Copies whole blocks between the pool and memory of its own."""

    def __init__(self, caches: CanonicalKVCaches, num_chunks: int) -> None:
        self._pool = [each.tensor for each in caches.tensors]
        self._store = [
            torch.zeros(num_chunks, *each.shape[1:], dtype=each.dtype) for each in self._pool
        ]
        self._waiting: dict[int, list[Any]] = {}
        self._ended: list[int] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._waiting[job_id] = [STEPS, src_spec.block_ids, dst_spec.block_ids]
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for pool, store in zip(self._pool, self._store, strict=True):
            pool[torch.as_tensor(dst_spec.block_ids)] = store[torch.as_tensor(src_spec.block_ids)]
        self._ended.append(job_id)
        return True

    def get_finished(self) -> list[TransferResult]:
        for job_id, job in list(self._waiting.items()):
            job[0] -= 1
            if job[0] <= 0:
                self.wait({job_id})
        ended, self._ended = self._ended, []
        return [TransferResult(job_id, True) for job_id in ended]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self._waiting.keys():
            _, sources, targets = self._waiting.pop(job_id)
            for pool, store in zip(self._pool, self._store, strict=True):
                store[torch.as_tensor(targets)] = pool[torch.as_tensor(sources)]
            self._ended.append(job_id)


class LazySpec(CPUOffloadingSpec):
    """vLLM's store, with another worker."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return LazyWorker(kv_caches, self.num_chunks)
