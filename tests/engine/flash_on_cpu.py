# SPDX-License-Identifier: Apache-2.0
"""The CUDA attention backend in a real engine on a machine without a GPU.

Two things are pretended: FlashAttention and its cache writer are a few lines of PyTorch with the
same arguments, and vLLM's CPU worker and model runner V1 replace the GPU's. Backend, metadata, page
format, evictor and scheduler are real. So are the Triton kernels (interpreted) where a test asks
for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from vllm_tgvkv.attention.base import EvictingMetadata
from vllm_tgvkv.attention.cuda import (
    EvictingFlashBackend,
    EvictingFlashMetadataBuilder,
    RaggedTokens,
)
from vllm_tgvkv.engine import platforms
from vllm_tgvkv.worker.cpu import EvictionCPUWorker


class FlashOnCPUWorker(EvictionCPUWorker):
    """The CPU worker with the attention backend of the GPU."""

    evicting_backend = "vllm_tgvkv.attention.cuda.EvictingFlashBackend"


class ReplayingBuilder(EvictingFlashMetadataBuilder):
    """Treats decode steps like graphs, which are captured once for each size.

    A replayed graph runs on the tensors it was captured with, and ignores what `build` returns
    later. So do the layers here: every step gets the first metadata of its size. Drafting is no
    part of it.
    """

    num_replays = 0
    num_storing = 0
    """Replays that store queries of requests that wait."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_full_cuda_graph = True
        self.captured: dict[int, EvictingMetadata[RaggedTokens]] = {}

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> EvictingMetadata[RaggedTokens]:
        prefix, common = common_prefix_len, common_attn_metadata
        drafts = not self.evicts and not isinstance(self.kv_cache_spec, SlidingWindowSpec)
        observes = self._observer is not None and self._observer.has_work(may_be_graph=True)
        if drafts or observes or not self.may_be_graph(common):
            return super().build(prefix, common, fast_build)
        if common.num_reqs not in self.captured:
            longest = self.vllm_config.model_config.max_model_len
            captured = super().build(prefix, common.replace(max_seq_len=longest), fast_build)
            self.captured[common.num_reqs] = captured
        type(self).num_replays += 1
        type(self).num_storing += self._observer is not None and bool(
            self.observer.plan.observations
        )
        super().build(prefix, common, fast_build)
        return self.captured[common.num_reqs]


class ReplayingBackend(EvictingFlashBackend):
    """The CUDA backend over `ReplayingBuilder`."""

    builder_cls = ReplayingBuilder


class ReplayOnCPUWorker(EvictionCPUWorker):
    """The CPU worker over `ReplayingBackend`."""

    evicting_backend = f"{__name__}.ReplayingBackend"


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int,
    seqused_k: torch.Tensor,
    softmax_scale: float,
    block_table: torch.Tensor,
    out: torch.Tensor,
    causal: bool,
    return_softmax_lse: bool = False,
    window_size: Sequence[int] | None = None,
    s_aux: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    **ignored: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flash_attn_varlen_func` over a paged cache [pages, N, heads, D]; `s_aux` are sinks.

    Queries, keys and values in fp8 are multiplied by scales [rows, heads], see `flash_api.cpp`.
    What is returned for queries without keys is undefined.
    """
    assert causal
    log_sums = torch.full((q.shape[1], len(q)), float("nan"))
    before, after = window_size or (-1, -1)
    assert after in (-1, 0)
    group = q.shape[1] // k.shape[2]
    descales = (q_descale, k_descale, v_descale)
    is_fp8 = k.dtype.itemsize == 1
    if is_fp8:
        assert q.dtype == k.dtype == v.dtype == torch.float8_e4m3fn
        for descale in descales:
            assert descale is not None
            assert descale.dtype == torch.float32
            assert descale.shape == (len(seqused_k), k.shape[2])
    all_keys, all_queries = seqused_k.long(), cu_seqlens_q.diff().long()
    assert int(all_queries.max()) <= max_seqlen_q
    assert int(all_keys.max()) <= max_seqlen_k
    without = all_keys.repeat_interleave(all_queries) == 0
    out[: len(without)][without] = 0
    # Rows with equally many queries at once.
    for num_queries in all_queries[all_keys > 0].unique().tolist():
        if not num_queries:
            continue
        rows = ((all_queries == num_queries) & (all_keys > 0)).nonzero().flatten()
        num_keys = all_keys[rows, None]
        place = torch.arange(int(num_keys.max()))
        # The first key that a row sees. A GPU reads some before it, with a weight of 0.
        hidden = (num_keys - num_queries - before).clamp(min=0) if before >= 0 else 0
        is_read = (hidden <= place) & (place < num_keys)
        used = place[:: k.shape[1]] < num_keys
        pages = block_table[rows, : used.shape[1]].long().where(used, 0)
        keys, values = (
            pool[pages].flatten(1, 2)[:, : len(place)].float().where(is_read[..., None, None], 0)
            for pool in (k, v)
        )
        chosen = cu_seqlens_q[rows, None].long() + torch.arange(num_queries)
        queries = q[chosen].float()
        if is_fp8:
            of_query, of_keys, of_values = (
                x[rows, None, :, None] for x in descales if x is not None
            )
            keys, values = keys * of_keys, values * of_values
            queries = queries * of_query.repeat_interleave(group, 2)
        keys, values = (x.repeat_interleave(group, 2) for x in (keys, values))
        logits = torch.einsum("bqhd,bkhd->bhqk", queries, keys) * softmax_scale
        distance = (num_keys - num_queries + torch.arange(num_queries))[..., None] - place
        outside = (distance < 0) | (distance > before if before >= 0 else False)
        logits.masked_fill_(outside[:, None] | ~is_read[:, None, None], float("-inf"))
        weights = logits.softmax(-1)
        if s_aux is not None:
            sinks = s_aux.float()[None, :, None, None].expand(*logits.shape[:3], 1)
            weights = torch.cat((logits, sinks), dim=-1).softmax(-1)[..., :-1]
        out[chosen] = torch.einsum("bhqk,bkhd->bqhd", weights, values).to(out.dtype)
        log_sums[:, chosen] = logits.logsumexp(-1).transpose(0, 1)
    return (out, log_sums) if return_softmax_lse else out


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """`reshape_and_cache_flash` into a cache [blocks, N, heads, D]."""
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    blocks, places = slots // key_cache.shape[1], slots % key_cache.shape[1]
    for cache, tokens, scale in ((key_cache, key, k_scale), (value_cache, value, v_scale)):
        stored = tokens[: len(slot_mapping)][written]
        if kv_cache_dtype.startswith("fp8"):
            most = torch.finfo(torch.float8_e4m3fn).max
            stored = (stored.float() / scale).clamp(-most, most).to(torch.float8_e4m3fn)
            stored = stored.view(torch.uint8)
        cache[blocks, places] = stored


def pretend_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace FlashAttention's functions in this process."""
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", attend, raising=False)
    monkeypatch.setattr(flash_attn, "reshape_and_cache_flash", write_cache, raising=False)
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda *args, **kwargs: 3)
    monkeypatch.setattr(flash_attn, "flash_attn_supports_sinks", lambda: True, raising=False)
    monkeypatch.setattr(
        flash_attn, "flash_attn_supports_kv_cache_dtype", lambda *args, **kwargs: True
    )
    # It schedules stock attention's work, which `attend` does not need.
    monkeypatch.setattr(flash_attn, "get_scheduler_metadata", lambda **ignored: None, raising=False)


def pretend(
    monkeypatch: pytest.MonkeyPatch, worker_cls: type[EvictionCPUWorker] = FlashOnCPUWorker
) -> None:
    """Make engines with eviction that start later in this process use the CUDA backend."""
    pretend_kernels(monkeypatch)
    use_worker(monkeypatch, f"{worker_cls.__module__}.{worker_cls.__qualname__}")


def use_worker(monkeypatch: pytest.MonkeyPatch, worker_cls: str) -> None:
    """Make engines with eviction start this worker, with what the platform CUDA can do."""
    cuda = replace(platforms.CUDA, worker_cls=worker_cls, attention_backend="CPU_ATTN")
    host = {"skips_hidden_keys": True, "cache_is_on_host": True, "fp8_model_dtype": None}
    platform = replace(cuda, has_other_backends=False, **host)
    monkeypatch.setattr(platforms, "CPU", platform)


def schedule_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make engines schedule a step while the last one runs, as on a GPU but not on vLLM's CPU."""
    platform = type(current_platform)
    original = platform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(platform, "check_and_update_config", classmethod(check_and_update_config))
