# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV connectors, with cut prompts among what they carry.

`--kv-transfer-config` names a connector of vLLM. It is loaded from this module instead, as a class
of the same name in front of vLLM's: the transport stays vLLM's, and what is asked of it is changed
in the four places where a cut prompt differs. Scheduler and worker each have an instance, and bind
their own part to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorTransferResults,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

MODULE = __name__
"""What `kv_connector_module_path` is set to."""

TRANSPORTS = ("NixlConnector", "NixlPullConnector")
"""Connectors that read the blocks of a request from another server."""

CONNECTORS = (*TRANSPORTS, "OffloadingConnector", "ExampleConnector")
"""Connectors that are known to work with eviction."""

LAYOUT = "BLHNC"
"""Of vLLM's cache, see `cache/pages.py`."""


class Scheduling(Protocol):
    """The scheduler's part, `scheduler/handovers.py`."""

    def limit(self, request: Request, num_local: int, num_found: int) -> int:
        """Return how many of the tokens that a connector has found are loaded."""

    def with_header(self, request: Request, blocks: KVCacheBlocks) -> KVCacheBlocks:
        """Return the blocks that a connector fills."""

    def blocks_to_send(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[list[int], ...]:
        """Return the blocks of a request that ended which another server may read."""

    def parameters(self, request: Request, parameters: dict[str, Any]) -> dict[str, Any]:
        """Return what the other server is told."""


class Receiving(Protocol):
    """The worker's part, `worker/arrivals.py`."""

    def check(self, results: KVConnectorTransferResults) -> None:
        """Let transfers fail whose blocks are not those that were sent."""


class EvictingConnector(KVConnectorBase_V1):
    """Mixin in front of a connector of vLLM."""

    scheduling: Scheduling | None = None
    receiving: Receiving | None = None

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        num_found, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if num_found and self.scheduling is not None:
            num_found = self.scheduling.limit(request, num_computed_tokens, num_found)
        return num_found, is_async and bool(num_found)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if num_external_tokens and self.scheduling is not None:
            blocks = self.scheduling.with_header(request, blocks)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self.scheduling is not None:
            block_ids = self.scheduling.blocks_to_send(request, block_ids)
        is_held, parameters = super().request_finished_all_groups(request, block_ids)
        if parameters is not None and self.scheduling is not None:
            parameters = self.scheduling.parameters(request, parameters)
        return is_held, parameters

    def stop_storing(self, request_id: str) -> None:
        """Store no more blocks of a request that is cut, of its answer or of its prompt.

        The keys of its answer depend on what was kept, also when a preempted request is cut again.
        And a copy that a full store refused would be tried again from blocks of others.
        """
        stored = getattr(getattr(self, "connector_scheduler", None), "_req_status", {})
        if (status := stored.get(request_id)) is not None:  # of OffloadingConnector
            status.max_offload_tokens = 0

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        if self.receiving is not None and results.finished_recving:
            self.receiving.check(results)
        return results

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the layout in which all heads of a block lie together."""
        return LAYOUT


def __getattr__(name: str) -> type[EvictingConnector]:
    """Return the connector of that name; vLLM looks it up here."""
    if name not in CONNECTORS:
        raise AttributeError(name)
    stock = KVConnectorFactory.get_connector_class_by_name(name)
    found = type(name, (EvictingConnector, stock), {"__module__": MODULE})
    globals()[name] = found
    return found
