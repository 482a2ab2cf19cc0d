# SPDX-License-Identifier: Apache-2.0
"""Prompts that another server has cut, on their way into this worker's blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_tgvkv.cache.header import Headers
from vllm_tgvkv.shared.plan import Arrival

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

logger = init_logger("vllm.tgvkv")


class Arrivals:
    """Checks what a connector has read, and makes regions of it once all ranks have it."""

    def __init__(self, headers: Headers) -> None:
        self._headers = headers
        self._coming: dict[str, Arrival] = {}

    def begin_step(
        self, arriving: Iterable[Arrival], arrived: Iterable[str], forgotten: Iterable[str]
    ) -> None:
        """Take the plan of a step, before its batch is built."""
        for request_id in arrived:
            arrival = self._coming.pop(request_id)
            self._headers.read(
                arrival.header.blocks, request_id, arrival.region_blocks, arrival.num_replaced
            )
        for request_id in forgotten:
            self._coming.pop(request_id, None)
        self._coming.update((arrival.request_id, arrival) for arrival in arriving)

    def check(self, results: KVConnectorTransferResults) -> None:
        """Let transfers fail whose blocks are not those that were sent.

        The other server may have given them to another request, if they were read too late.
        """
        for request_id in results.finished_recving or ():
            arrival = self._coming.get(request_id)
            if arrival is None or request_id in results.failed_recving:
                continue
            header, sizes = arrival.header, (len(arrival.region_blocks), arrival.num_replaced)
            if not self._headers.is_intact(header.blocks, header.nonce, *sizes):
                logger.warning("KV eviction: what arrived for %s is not its prompt", request_id)
                results.failed_recving.add(request_id)
