# SPDX-License-Identifier: Apache-2.0
"""The settings of all workers that share a model, compared when they start.

Every node reads its own flags. A worker with other settings would keep other tokens than its peers,
and one without the plugin would read rows that the scheduler has compressed as if they were whole.
Neither raises an error, and answers would be wrong. So each evicting worker writes its settings to
the key-value store that torch.distributed connected the workers through, and reads all others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta

import torch.distributed
from torch.distributed import Store
from torch.distributed.distributed_c10d import _get_default_store

from vllm_tgvkv.shared.errors import SILENT_NODE, EvictionConfigError, differences

WAIT_SECONDS = 60.0
"""Time for all workers to write. They have just met, to build their process groups."""

LINGER_SECONDS = 5.0
"""Time that a worker with an error leaves the others to find it as well."""


def check_world(settings: Callable[[], Mapping[str, str]]) -> None:
    """Compare the settings of all workers of this one's world, if there are others.

    `settings` is called only then, since it may read large files.

    Raises:
        EvictionConfigError: see `check_peers`.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        check_peers(_get_default_store(), *world, settings())


def check_peers(
    store: Store, rank: int, size: int, settings: Mapping[str, str], seconds: float = WAIT_SECONDS
) -> None:
    """Write this worker's settings, and compare all workers' once they are written.

    Raises:
        EvictionConfigError: naming the ranks, settings and values that differ, or the ranks that
            have not written within `seconds`.
    """
    keys = [f"kv_eviction/settings/{peer}" for peer in range(size)]
    store.set(keys[rank], json.dumps(settings))
    with suppress(RuntimeError):  # the time is over: the message says who has not written
        store.wait(keys, timedelta(seconds=seconds))
    told = {peer: json.loads(store.get(key)) for peer, key in enumerate(keys) if store.check([key])}
    problem = _silence(told, size, seconds) or differences("rank", told)
    if problem is None:
        return
    # The first rank's process holds the store, and must not end before the others have read it.
    store.set(f"{keys[rank]}/read", "")
    with suppress(RuntimeError):
        store.wait([f"{keys[peer]}/read" for peer in told], timedelta(seconds=LINGER_SECONDS))
    raise EvictionConfigError(problem)


def _silence(told: Mapping[int, Mapping[str, str]], size: int, seconds: float) -> str | None:
    """Return the message about ranks that have not written; None if all have."""
    silent = [str(rank) for rank in range(size) if rank not in told]
    if not silent:
        return None
    ranks = f"rank{'s' if len(silent) > 1 else ''} {', '.join(silent)} of {size}"
    return (
        f"{ranks} did not say within {seconds:g} s how --kv-eviction is set: the node {SILENT_NODE}"
    )
