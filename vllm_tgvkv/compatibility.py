# SPDX-License-Identifier: Apache-2.0
"""What eviction does not run with, refused before a model loads.

Each refusal names the flag or the property of the model and the way out.
`docs/compatibility.md` gives the reasons.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_tgvkv.config import config_of
from vllm_tgvkv.errors import UnsupportedByEvictionError
from vllm_tgvkv.pages import FP8
from vllm_tgvkv.platforms import Platform, eviction_platform

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

_WAY_OUT = "or leave out --kv-eviction"

_PLAIN_CACHES = ("auto", "float16", "bfloat16")
"""Values of `--kv-cache-dtype` that quantise nothing."""


def check_engine_args(engine_args: EngineArgs) -> Platform:
    """Refuse what must be known before vLLM builds its configuration.

    Returns:
        What eviction brings for the platform.

    Raises:
        UnsupportedByEvictionError: with the first reason found.
    """
    platform = eviction_platform()
    if platform is None:
        from vllm.platforms import current_platform

        raise UnsupportedByEvictionError(
            f"--kv-eviction runs on vLLM's CPU and CUDA platforms, and this is "
            f"{current_platform.device_name or current_platform.device_type}: "
            f"use a CPU or CUDA build of vLLM {_WAY_OUT}"
        )
    if engine_args.scheduler_cls is not None:
        raise UnsupportedByEvictionError(
            f"--kv-eviction brings its own scheduler class: remove --scheduler-cls "
            f"{engine_args.scheduler_cls} {_WAY_OUT}"
        )
    if engine_args.worker_cls not in ("auto", platform.worker_cls):
        raise UnsupportedByEvictionError(
            f"--kv-eviction brings its own worker class: remove --worker-cls "
            f"{engine_args.worker_cls} {_WAY_OUT}"
        )
    return platform


def check_vllm_config(vllm_config: VllmConfig, platform: Platform) -> None:
    """Refuse every feature and kind of model that eviction is not right with.

    Raises:
        UnsupportedByEvictionError: with the first reason found.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    backend = vllm_config.attention_config.backend
    replicated = parallel.data_parallel_size > 1
    on_cpu = platform.worker_cls.startswith("vllm_tgvkv.worker_cpu.")
    decode_kernel = config_of(vllm_config).decode_kernel
    speculative = vllm_config.speculative_config
    drafts = f"speculative decoding by {speculative.method}" if speculative else ""
    for found, what, remedy in (
        *_model_checks(model),
        (
            speculative is not None and speculative.method != "ngram",
            drafts,
            "use the method ngram in --speculative-config, remove the flag",
        ),
        (
            speculative is not None and not on_cpu,
            f"{drafts} on this platform",
            "remove --speculative-config",
        ),
        (
            vllm_config.kv_transfer_config is not None,
            "KV connectors",
            "remove --kv-transfer-config or --kv-offloading-size",
        ),
        *_worker_checks(
            parallel, on_cpu, "tensor", parallel.tensor_parallel_size, "--tensor-parallel-size"
        ),
        *_worker_checks(
            parallel,
            on_cpu,
            "pipeline",
            parallel.pipeline_parallel_size,
            "--pipeline-parallel-size",
        ),
        (
            speculative is not None and parallel.pipeline_parallel_size > 1,
            f"{drafts} in pipeline stages (--pipeline-parallel-size "
            f"{parallel.pipeline_parallel_size})",
            "remove --speculative-config or use --pipeline-parallel-size 1",
        ),
        (
            replicated and model.is_moe,
            f"data parallelism of a mixture of experts "
            f"(--data-parallel-size {parallel.data_parallel_size})",
            "use --data-parallel-size 1 and one server per replica",
        ),
        (
            replicated and parallel.data_parallel_backend != "mp",
            f"--data-parallel-backend {parallel.data_parallel_backend}",
            "use --data-parallel-backend mp",
        ),
        (
            replicated and parallel.data_parallel_size_local != parallel.data_parallel_size,
            f"data parallelism over several nodes "
            f"(--data-parallel-size-local {parallel.data_parallel_size_local} of "
            f"{parallel.data_parallel_size})",
            "use one server per node with all of its replicas",
        ),
        (
            parallel.decode_context_parallel_size > 1,
            f"context parallelism (--decode-context-parallel-size "
            f"{parallel.decode_context_parallel_size})",
            "use --decode-context-parallel-size 1",
        ),
        (
            parallel.prefill_context_parallel_size > 1,
            f"context parallelism (--prefill-context-parallel-size "
            f"{parallel.prefill_context_parallel_size})",
            "use --prefill-context-parallel-size 1",
        ),
        *_cache_checks(vllm_config, on_cpu),
        (
            backend is not None and backend.name != platform.attention_backend,
            f"--attention-backend {backend and backend.name}",
            f"use {platform.attention_backend}, which is extended",
        ),
        (
            decode_kernel not in platform.decode_kernels,
            f"decode_kernel: {decode_kernel} on this platform",
            f"use one of: {', '.join(platform.decode_kernels)}",
        ),
        (
            parallel.use_ubatching,
            "microbatches (--enable-dbo, --ubatch-size)",
            "remove these flags",
        ),
        (
            model.enable_sleep_mode,
            "sleep mode (--enable-sleep-mode)",
            "remove the flag",
        ),
        (
            on_cpu and vllm_config.use_v2_model_runner,
            "vLLM's model runner V2 on CPU",
            "set VLLM_USE_V2_MODEL_RUNNER=0",
        ),
    ):
        if found:
            raise UnsupportedByEvictionError(
                f"--kv-eviction does not work with {what} yet: {remedy} {_WAY_OUT}"
            )


def _worker_checks(
    parallel: ParallelConfig, on_cpu: bool, kind: str, size: int, flag: str
) -> tuple[tuple[bool, str, str], ...]:
    """Engines of several workers: (found, what it is called, what to do)."""
    several, what = size > 1, f"{kind} parallelism"
    return (
        (several and not on_cpu, f"{what} ({flag} {size}) on this platform", f"use {flag} 1"),
        (
            several and parallel.distributed_executor_backend not in (None, "mp"),
            f"{what} and --distributed-executor-backend {parallel.distributed_executor_backend}",
            "use --distributed-executor-backend mp",
        ),
        (
            several and parallel.nnodes > 1,
            f"{what} over several nodes (--nnodes {parallel.nnodes})",
            "use --nnodes 1",
        ),
    )


def _cache_checks(vllm_config: VllmConfig, on_cpu: bool) -> tuple[tuple[bool, str, str], ...]:
    """Properties of a quantised cache: (found, what it is called, what to do)."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    dtype, block_size, head_size = cache.cache_dtype, cache.block_size, model.get_head_size()
    # vLLM finds that out when it builds the layers.
    if dtype == "auto" and getattr(vllm_config.quant_config, "kv_cache_scheme", None):
        dtype = "fp8"
    if dtype in _PLAIN_CACHES:
        return ()
    what = f"a quantised cache (--kv-cache-dtype {dtype})"
    # Of such a model `auto` is no way out.
    own = str(model.dtype).removeprefix("torch.")
    plain = own if own in _PLAIN_CACHES else "auto"
    return (
        (
            not on_cpu,
            f"{what} on this platform",
            f"use --kv-cache-dtype {plain}",
        ),
        (
            dtype not in FP8,
            what,
            f"use --kv-cache-dtype auto or one of {', '.join(FP8)}",
        ),
        (
            bool(cache.kv_cache_dtype_skip_layers),
            f"{what} and layers that have another "
            f"(--kv-cache-dtype-skip-layers {' '.join(cache.kv_cache_dtype_skip_layers)})",
            "remove --kv-cache-dtype-skip-layers",
        ),
        (
            block_size % 32 != 0,
            f"{what} in blocks of {block_size} tokens",
            "use a --block-size that is a multiple of 32",
        ),
        (
            head_size % 32 != 0,
            f"{what} of heads of {head_size} values",
            "use --kv-cache-dtype auto, or serve a model with a multiple of 32,",
        ),
    )


def _model_checks(model: ModelConfig) -> tuple[tuple[bool, str, str], ...]:
    """Properties of the model: (found, what it is called, what to do)."""
    other = "serve another model"
    text = model.hf_text_config
    return (
        (model.runner_type != "generate", f"--runner {model.runner_type}", other),
        (model.use_mla, "multi-head latent attention (MLA)", other),
        (model.is_encoder_decoder, "cross attention (an encoder-decoder model)", other),
        (
            model.is_hybrid or model.has_inner_state or model.is_attention_free,
            "hybrid or state-space models",
            other,
        ),
        (_has_sliding_window(text), "sliding-window attention", other),
        (
            getattr(text, "attention_chunk_size", None) is not None,
            "chunked local attention",
            other,
        ),
        (bool(_other_layers(text)), f"layers of kind {', '.join(_other_layers(text))}", other),
        (model.is_mm_prefix_lm, "bidirectional attention over image tokens (prefix LM)", other),
        (
            # Which tokens of a placeholder are a video's is then known in the worker only.
            model.multimodal_config is not None
            and model.multimodal_config.is_multimodal_pruning_enabled(),
            "pruned videos (--video-pruning-rate)",
            "remove the flag",
        ),
        (
            bool(getattr(text, "attn_logit_softcapping", None)),
            "soft-capped attention logits",
            other,
        ),
    )


def _other_layers(text_config: Any) -> list[str]:
    """Kinds of layers, as the model's configuration lists them, beside full attention."""
    kinds = (
        getattr(text_config, "layer_types", None)
        or getattr(text_config, "layers_block_type", None)
        or ()
    )
    return sorted({str(kind) for kind in kinds} - {"full_attention", "attention"})


def _has_sliding_window(text_config: Any) -> bool:
    """Whether some layer of the language model attends over a window only."""
    layer_types = getattr(text_config, "layer_types", None)
    if layer_types is not None:
        return any("sliding" in kind for kind in layer_types)
    window = getattr(text_config, "sliding_window", None)
    return bool(window) and getattr(text_config, "use_sliding_window", True)
