# SPDX-License-Identifier: Apache-2.0
"""Options of scheduling, which must change no answer, and layers that cannot be evicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.engine.arg_utils import EngineArgs

from oracle.emulation import Oracle
from tests.engine.questions import SETTINGS, budget, question
from tests.engine.running import assert_agrees, engine
from vllm_tgvkv.attention.cpu import EvictingCPUImpl
from vllm_tgvkv.shared.errors import UnsupportedByEvictionError

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": 1024,
                "mm_processor_cache_gb": 0,
                "scheduler_reserve_full_isl": False,
                "watermark": 0.2,
                "skip_mm_profiling": True,
            },
            marks=pytest.mark.nightly,
        ),
        {
            "long_prefill_token_threshold": 48,
            "disable_chunked_mm_input": True,
            "max_num_active_seqs": 3,
            "max_num_batched_tokens": 128,
            "enable_prefix_caching": True,
            "prefix_caching_hash_algo": "sha256_cbor",
            "kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"},
        },
    ],
    ids=["whole prompts", "short chunks"],
)
def test_options_that_decide_how_prompts_are_scheduled(
    folder: Path, oracle: Oracle, options: dict[str, Any]
) -> None:
    """Tokens and kept positions stay the same; events report the prefix cache's content."""
    asks = [
        question(140 + i, 10 + 17 * i, 260 - 40 * i, xargs=budget(0.3), max_tokens=60, arrival=i)
        for i in range(5)
    ]
    asks.append(replace(asks[0], arrival=70))
    with engine(folder, SETTINGS, num_gpu_blocks_override=40, **options) as running:
        stored: set[Any] = set()

        def listen(batch: Any) -> None:
            for event in batch.events:
                if isinstance(event, BlockStored):
                    stored.update(event.block_hashes)
                elif isinstance(event, BlockRemoved):
                    stored.difference_update(event.block_hashes)

        running.scheduler.kv_event_publisher.publish = listen  # type: ignore[method-assign]
        outputs = assert_agrees(running, oracle, asks)
        assert running.counters["requests_evicted"] >= len(asks)
        if "kv_events_config" in options:
            assert outputs[-1].num_cached_tokens > 0
            cached = running.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
            assert len(stored) == len(cached)
            assert stored


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("alibi_slopes", [0.5] * 4, "ALiBi"),
        ("kv_sharing_target_layer_name", "layer", "layers that share a KV cache"),
        ("logits_soft_cap", 30.0, "soft-capped"),
        ("sliding_window", 64, "sliding-window"),
    ],
)
def test_layers_that_attend_otherwise_are_refused(
    folder: Path, field: str, value: Any, what: str
) -> None:
    """Properties that no flag or configuration shows are checked when the layer is built."""
    plain = {"num_heads": 4, "head_size": 32, "scale": 1.0, "num_kv_heads": 2}
    plain |= {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
    with set_current_vllm_config(EngineArgs(model=str(folder)).create_engine_config()):
        EvictingCPUImpl(**plain)
        with pytest.raises(UnsupportedByEvictionError, match=what):
            EvictingCPUImpl(**{**plain, field: value})
